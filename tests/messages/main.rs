//! Messages about the most likely user errors: all of standard error, and the exit code.
#![allow(missing_docs)]

mod run;
mod settings;
mod topics;
mod usage;

use run::TestNode;

/// With `--json` every failure is one line of JSON, besides the text.
#[test]
fn failure_with_json_is_one_line() {
    let test_node = TestNode::new();
    for (arguments, code) in [
        (&["fly", "--json"][..], 2),
        (&["pub", "t", "--dephth", "3", "--json"], 2),
        (&["pub", "t", "--pattern", "--size", "2K", "--largest", "1K", "--json"], 7),
        (&["pub", "t", "--depth", "0", "--json"], 2),
        (&["pub", "t", "--wait-for", "1", "--timeout", "0.1", "--json"], 4),
        (&["sub", "t", "--timeout", "0.1", "--json"], 4),
        (&["sub", "t", "--largest", "1K", "--timeout", "0.1", "--json"], 4),
        (&["topics", "--json"], 6),
        (&["paths", "--topics", "--json"], 6),
        (&["paths", "--explain", "/nowhere/at/all", "--json"], 6),
        (&["config", "--depth", "0", "--json"], 2),
        (&["clean", "/nowhere/at/all", "--json"], 6),
        (&["info", "--policy", "=carrier-pigeon", "--json"], 3),
        (&["info", "--provider", "carrier-pigeon", "--json"], 3),
        (&["demo", "--time", "0.5", "--json"], 2),
        (&["node", "--budget-host", "0", "--json"], 2),
    ] {
        let ended = test_node.run(arguments);
        assert_eq!(ended.code, Some(code), "{arguments:?}: {ended:?}");
        assert_eq!(ended.output.lines().count(), 1, "{arguments:?}: {ended:?}");
        let line: serde_json::Value = serde_json::from_str(&ended.output).unwrap();
        assert_eq!(line["exit_code"], code, "{arguments:?}: {line}");
        let error = line["error"].as_str().unwrap();
        let flat = ended.error.split_whitespace().collect::<Vec<_>>().join(" ");
        // The text of usage errors has its parts in paragraphs.
        let has_all = error.split("; ").all(|part| flat.contains(part));
        assert!(!error.is_empty() && has_all, "{arguments:?}: {line} {flat}");
    }
    let ended = test_node.run(&["pub", "t", "--dephth", "3", "--json"]);
    let line: serde_json::Value = serde_json::from_str(&ended.output).unwrap();
    let error = "unexpected argument '--dephth' found; tip: a similar argument exists: '--depth'";
    assert_eq!(line["error"], error);
    // The line also has what was done before the failure.
    let ended = test_node.run(&["sub", "t", "--largest", "1K", "--timeout", "0.1", "--json"]);
    let line: serde_json::Value = serde_json::from_str(&ended.output).unwrap();
    assert_eq!((&line["topic"], &line["messages"]), (&"t".into(), &0.into()), "{line}");
    // Without a failure there is no exit code.
    let ended = test_node.run(&["config", "--json"]);
    assert!(ended.code == Some(0) && !ended.output.contains("exit_code"), "{ended:?}");
}
