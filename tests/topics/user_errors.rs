//! User errors: messages and exit codes.

use std::path::Path;

use crate::test_node::{TestNode, topic};

#[track_caller]
fn fails_with(test_node: &TestNode, arguments: &[&str], code: i32, why: &str) {
    let (found, output) = test_node.run_with(arguments, "some input", &[]);
    assert_eq!(found, Some(code), "{arguments:?}: {output}");
    assert!(output.contains(why), "{arguments:?}: {output}");
}

#[test]
fn invalid_options_are_usage_errors() {
    let test_node = TestNode::open();
    fails_with(&test_node, &["pub"], 2, "<TOPIC>");
    fails_with(&test_node, &["pub", "t", "--dephth", "3"], 2, "--depth");
    fails_with(&test_node, &["pub", "t", "--size", "64"], 2, "--pattern");
    fails_with(&test_node, &["pub", "t", "--lines", "--pattern"], 2, "cannot be used with");
    fails_with(&test_node, &["pub", "t", "--lines", "--count", "2"], 2, "cannot be used with");
    fails_with(&test_node, &["pub", "t", "--file", "f", "--size", "4K"], 2, "cannot be used with");
    fails_with(&test_node, &["pub", "t", "--pattern", "--size", "39"], 2, "at least 40 bytes");
    fails_with(&test_node, &["pub", "t", "--rate", "0"], 2, "messages a second");
    fails_with(&test_node, &["sub", "t", "--count", "0"], 2, "at least 1");
    // Not an unknown option.
    fails_with(&test_node, &["sub", "t", "--count", "-1"], 2, "invalid value '-1' for '--count");
    fails_with(&test_node, &["pub", "t", "--rate", "-0.5"], 2, "messages a second");
    fails_with(&test_node, &["pub", "t", "--depth", "-1"], 2, "option --depth is \"-1\"");
    fails_with(&test_node, &["sub", "t", "--file", "a", "--into", "b"], 2, "cannot be used with");
    for what in ["--check", "--stats", "--json"] {
        fails_with(&test_node, &["sub", "t", "--lines", what], 2, "--file");
    }
    fails_with(&test_node, &["paths", "--topics", "--timeout", "3"], 2, "cannot be used with");
    fails_with(
        &test_node,
        &["paths", "--topics", "--policy", "=cuda-ipc"],
        2,
        "cannot be used with",
    );
    fails_with(&test_node, &["node", "--log", "loud"], 2, "loud");
    fails_with(&test_node, &["node", "--depth", "3"], 2, "--depth");
    assert!(!test_node.node().exists(), "no process joined a node");
}

#[test]
fn invalid_settings_are_usage_errors() {
    let test_node = TestNode::open();
    fails_with(
        &test_node,
        &["pub", "t", "--depth", "0"],
        2,
        "option --depth is \"0\": use 1 to 65536",
    );
    fails_with(&test_node, &["node", "--peers", "nowhere"], 2, "not of the form host:port");
    for option in ["--budget-host", "--budget-device"] {
        let why = "at least 512 bytes, which the smallest topic reserves; a topic with default settings \
                   reserves 54525952 (52 messages of 1048576 bytes)";
        fails_with(&test_node, &["node", option, "0"], 2, why);
        fails_with(&test_node, &["pub", "t", option, "511"], 2, why);
    }
    let environment = [("FABRICAST_TOPIC_DEPTH", "many")];
    let (code, output) = test_node.run_with(&["sub", "t"], "", &environment);
    assert_eq!(code, Some(2));
    assert!(output.contains("environment FABRICAST_TOPIC_DEPTH is \"many\""), "{output}");
    let file = test_node.write("unknown.toml", "\nservice_timeuot = 3\n");
    let expected = "unknown.toml, line 2: unknown setting \"service_timeuot\"; the nearest is \"service_timeout\"";
    for command in [&["node"][..], &["pub", "t"], &["sub", "t"], &["topics"], &["config"]] {
        fails_with(&test_node, &[command, &["--config", &file]].concat(), 2, expected);
    }
    let (code, output) = test_node.run_with(&["config"], "", &[("FABRICAST_CONFIG", &file)]);
    assert_eq!(code, Some(2), "{output}");
    let log = |level| test_node.run_with(&["config"], "", &[("FABRICAST_LOG", level)]);
    assert_eq!((log("warn").0, log("loud").0), (Some(0), Some(2)));
    let file = test_node.write("broken.toml", "[topic\n");
    fails_with(&test_node, &["node", "--config", &file], 2, "broken.toml, line 1: ");
    fails_with(&test_node, &["node", "--config", "/nowhere/at/all"], 2, "/nowhere/at/all");
    assert!(!test_node.node().exists(), "no process joined a node");
}

#[test]
fn too_long_message_is_an_error() {
    let test_node = TestNode::open();
    fails_with(&test_node, &["pub", "t", "--largest", "4"], 7, "more than 4 bytes");
    fails_with(&test_node, &["pub", "t", "--largest", "4", "--lines"], 7, "more than 4 bytes");
    let pattern = ["pub", "t", "--pattern", "--count", "1"];
    fails_with(
        &test_node,
        &[&pattern[..], &["--size", "2K", "--largest", "1K"]].concat(),
        7,
        "has 2048 bytes",
    );
    // The existing topic decides.
    let sub = test_node.start(&["sub", "small", "--check", "--largest", "1K"]);
    test_node.wait_until("the topic", |report| topic(report, "small").is_some());
    let file = test_node.write("file", [0; 1025]);
    fails_with(&test_node, &["pub", "small", "--file", &file], 7, "1024");
    // Repeating the command does not help.
    let why = "allows 1024. Use another topic name with a larger --largest, or stop the";
    let (code, output) = test_node.run_with(&["pub", "small"], &"x".repeat(1025), &[]);
    assert!(code == Some(7) && output.contains(why), "{output}");
    let (code, output) = test_node.run_with(&["pub", "small"], &"x".repeat(1025), &[]);
    assert_eq!(code, Some(7), "{output}");
    assert!(output.contains("more than 1024 bytes"), "{output}");
    drop(sub);
}

#[test]
fn existing_topic_with_other_settings_is_an_error() {
    let test_node = TestNode::open();
    let sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    fails_with(&test_node, &["pub", "t", "--depth", "8"], 2, "settings differ");
    for command in ["pub", "sub"] {
        let (code, output) = test_node.run(&[command, "t", "--largest", "2M"]);
        assert_eq!(code, Some(2), "{output}");
        for words in [
            "open topic \"t\" failed: settings differ: depth is 4, requested was 16 (default); largest is 1MiB, requested \
             was 2MiB (option --largest). Omit all",
            "or set --depth 4 --largest 1MiB,",
        ] {
            assert!(output.contains(words), "{words}: {output}");
        }
    }
    fails_with(&test_node, &["pub", "", "--lines"], 2, "1 to 200 bytes");
    for command in ["pub", "sub"] {
        fails_with(
            &test_node,
            &[command, &"x".repeat(300)],
            2,
            "1 to 200 bytes and no control characters",
        );
    }
    fails_with(&test_node, &["pub", "other", "--memory", "emulated:99"], 3, "emulated:99");
    drop(sub);
}

/// All differences are named at once, and the advised options open the topic.
#[test]
fn advised_options_open_the_existing_topic() {
    let test_node = TestNode::open();
    let settings = ["--loans", "2", "--release-deadline", "1.5", "--reliability", "drop-oldest"];
    let sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    for requested in [&["--loans", "3"][..], &["--depth", "8", "--largest", "2M"]] {
        let publish =
            [&["pub", "t", "--pattern", "--count", "1", "--size", "64"][..], requested].concat();
        let (code, output) = test_node.run(&publish);
        assert_eq!(code, Some(2), "{output}");
        for words in [
            "loans is 2, requested ",
            "release_deadline is 1.5, requested ",
            "reliability is drop-oldest, requested ",
        ] {
            assert!(output.contains(words), "{words}: {output}");
        }
        let advised =
            output.split("or set ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
        let advised: Vec<_> = advised.split(' ').collect();
        test_node.succeed(&[&publish[..7], &advised].concat());
    }
    // Equal settings are not named.
    let (_, output) = test_node.run(&["pub", "t", "--loans", "1", "--release-deadline", "1.5"]);
    assert!(output.contains("or set --reliability drop-oldest --loans 2, or"), "{output}");
    drop(sub);
}

#[test]
fn timeout_has_a_remedy() {
    let test_node = TestNode::open();
    fails_with(&test_node, &["sub", "t", "--timeout", "0.2"], 4, "or create it: --largest 1MiB");
    fails_with(&test_node, &["topics"], 6, "not found: no process serves the node");
}

#[test]
fn failure_before_publishing_prints_no_summary() {
    let test_node = TestNode::open();
    let (code, output) = test_node.run(&["pub", "t", "--file", "/nowhere/at/all"]);
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("/nowhere/at/all") && !output.contains("0 messages"), "{output}");
}

#[test]
fn budget_is_reported_equally_everywhere() {
    let test_node = TestNode::open();
    let budget = [("FABRICAST_BUDGET_HOST", "64M")];
    let mut sub = test_node.start_with(&["sub", "t", "--stats", "--depth", "4"], "", &budget);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    fails_with(&test_node, &["pub", "large", "--largest", "1G"], 7, "a budget of 67108864 bytes");
    let cells = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let output = test_node.succeed(&["topics"]);
    let figures = "topics reserve 16.00 MiB of 64.00 MiB (67108864 bytes)";
    assert!(cells(&output).contains(figures), "{output}");
    let output = test_node.succeed(&["topics", "--verbose"]);
    assert!(output.lines().any(|line| cells(line) == "t bytes 5 s 4 16 16777216 0"), "{output}");
    let topics = test_node.json(&["topics", "--json"]);
    assert_eq!(topics["topics"][0]["reserves"]["messages"], 16, "{topics}");
    assert_eq!(test_node.json(&["topics", "--json"])["pools"][0]["budget"], 64 << 20);
    sub.signal(nix::sys::signal::Signal::SIGINT);
    sub.succeed();
}

#[test]
fn directory_writable_by_others_is_not_used() {
    let test_node = TestNode::open();
    let open = test_node.path("open");
    std::fs::create_dir(&open).unwrap();
    let world_writable = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&open, world_writable).unwrap();
    for command in [
        &["pub", "t"][..],
        &["sub", "t"],
        &["node"],
        &["topics"],
        &["paths", "--topics"],
        &["clean"],
    ] {
        let why = "it is writable for other users (mode 777). chmod go-w it";
        fails_with(&test_node, &[command, &["--directory", &open]].concat(), 9, why);
    }
    assert_eq!(std::fs::read_dir(&open).unwrap().count(), 0);
    // An agent may use such a directory.
    test_node.succeed(&["clean", &open]);
    fails_with(
        &test_node,
        &["topics", "--directory", &test_node.path("none")],
        6,
        "no process serves",
    );
    fails_with(
        &test_node,
        &["paths", "--topics", "--directory", &test_node.path("none")],
        6,
        "no process serves",
    );
}

#[test]
fn reports_with_json_are_json() {
    let test_node = TestNode::open();
    let sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    let paths = test_node.json(&["paths", "--topics", "--json"]);
    assert_eq!((&paths["topics"][0], &paths["sent"]), (&"t".into(), &serde_json::json!([])));
    let output = test_node.succeed(&["paths", "--topics"]);
    assert!(output.contains("Topic \"t\"") && output.contains("1 subscriber,"), "{output}");
    let output = test_node.succeed(&["topics"]);
    assert!(output.lines().any(|line| line.starts_with("t ")), "{output}");
    assert!(output.lines().all(|line| line.chars().count() <= 120), "{output}");
    let config = test_node.json(&["config", "--depth", "3", "--json"]);
    assert_eq!(config["topic.depth"]["value"], 3);
    assert_eq!(config["topic.depth"]["origin"], "option --depth");
    let origin = config["directory"]["origin"].as_str().unwrap();
    assert_eq!(origin, "environment FABRICAST_DIRECTORY");
    drop(sub);
}

#[test]
fn documentation_lists_the_exit_codes() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/reference/exit-codes.md");
    let page = std::fs::read_to_string(page).unwrap();
    let test_node = TestNode::open();
    let help = test_node.succeed(&["--help"]);
    let codes = help.split("Exit codes:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    for line in codes.lines() {
        let (code, meaning) = line.trim().split_once("  ").unwrap();
        let row = format!("| {code} | {} |", meaning.trim());
        assert!(page.contains(&row), "docs/reference/exit-codes.md is to contain {row}");
    }
}
