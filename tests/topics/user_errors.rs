//! What is wrong is said, with an exit code that tells what kind of mistake it is.

use std::path::Path;

use crate::test_node::{TestNode, topic};

#[track_caller]
fn fails_with(test_node: &TestNode, arguments: &[&str], code: i32, why: &str) {
    let (found, said) = test_node.run_with(arguments, "some input", &[]);
    assert_eq!(found, Some(code), "{arguments:?}: {said}");
    assert!(said.contains(why), "{arguments:?}: {said}");
}

#[test]
fn options_that_are_none_are_refused() {
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
    // Not as if it were an option.
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
    assert!(!test_node.node().exists(), "nobody joined anything");
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let test_node = TestNode::open();
    fails_with(&test_node, &["pub", "t", "--depth", "0"], 2, "option --depth is \"0\": 1 to 65536");
    fails_with(&test_node, &["node", "--peers", "nowhere"], 2, "not like host:port");
    for option in ["--budget-host", "--budget-device"] {
        let why = "at least 512 bytes, which the smallest topic reserves; a topic with default settings reserves \
                   20971520 (20 messages of 1048576 bytes)";
        fails_with(&test_node, &["node", option, "0"], 2, why);
        fails_with(&test_node, &["pub", "t", option, "511"], 2, why);
    }
    let environment = [("FABRICAST_TOPIC_DEPTH", "many")];
    let (code, said) = test_node.run_with(&["sub", "t"], "", &environment);
    assert_eq!(code, Some(2));
    assert!(said.contains("environment FABRICAST_TOPIC_DEPTH is \"many\""), "{said}");
    let file = test_node.write("unknown.toml", "\npatiense = 3\n");
    let expected =
        "unknown.toml, line 2: unknown setting \"service_timeuot\"; the nearest is \"service_timeout\"";
    for command in [&["node"][..], &["pub", "t"], &["sub", "t"], &["topics"], &["config"]] {
        fails_with(&test_node, &[command, &["--config", &file]].concat(), 2, expected);
    }
    let (code, said) = test_node.run_with(&["config"], "", &[("FABRICAST_CONFIG", &file)]);
    assert_eq!(code, Some(2), "{said}");
    let log = |level| test_node.run_with(&["config"], "", &[("FABRICAST_LOG", level)]);
    assert_eq!((log("warn").0, log("loud").0), (Some(0), Some(2)));
    let file = test_node.write("broken.toml", "[topic\n");
    fails_with(&test_node, &["node", "--config", &file], 2, "broken.toml, line 1: ");
    fails_with(&test_node, &["node", "--config", "/nowhere/at/all"], 2, "/nowhere/at/all");
    assert!(!test_node.node().exists(), "nobody joined anything");
}

#[test]
fn a_message_that_is_too_long_is_refused() {
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
    // The topic that is there counts, not what it could have been.
    let sub = test_node.start(&["sub", "small", "--check", "--largest", "1K"]);
    test_node.wait_until("the topic", |report| topic(report, "small").is_some());
    let file = test_node.write("file", [0; 1025]);
    fails_with(&test_node, &["pub", "small", "--file", &file], 7, "1024");
    // That cannot be changed by saying it again.
    let why =
        "takes 1024 at most. Publish it under another name with a larger --largest, or end the";
    let (code, said) = test_node.run_with(&["pub", "small"], &"x".repeat(1025), &[]);
    assert!(code == Some(7) && said.contains(why), "{said}");
    let (code, said) = test_node.run_with(&["pub", "small"], &"x".repeat(1025), &[]);
    assert_eq!(code, Some(7), "{said}");
    assert!(said.contains("more than 1024 bytes"), "{said}");
    drop(sub);
}

#[test]
fn topics_are_what_they_are() {
    let test_node = TestNode::open();
    let sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    fails_with(&test_node, &["pub", "t", "--depth", "8"], 2, "settings differ");
    for command in ["pub", "sub"] {
        let (code, said) = test_node.run(&[command, "t", "--largest", "2M"]);
        assert_eq!(code, Some(2), "{said}");
        for words in [
            "the topic \"t\": its settings differ: depth is 4, and would be 16 where nothing is said of it; \
             largest is 1MiB, and 2MiB was asked for (option --largest). Say nothing",
            "or say --depth 4 --largest 1MiB;",
        ] {
            assert!(said.contains(words), "{words}: {said}");
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

/// Whatever differs is named at once, and who says what is advised gets the topic.
#[test]
fn what_is_advised_about_another_topic_works() {
    let test_node = TestNode::open();
    let settings = ["--loans", "2", "--release-deadline", "1.5", "--reliability", "drop-oldest"];
    let sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    for asked in [&["--loans", "3"][..], &["--depth", "8", "--largest", "2M"]] {
        let publish =
            [&["pub", "t", "--pattern", "--count", "1", "--size", "64"][..], asked].concat();
        let (code, said) = test_node.run(&publish);
        assert_eq!(code, Some(2), "{said}");
        for words in [
            "loans is 2, and ",
            "release_deadline is 1.5, and ",
            "reliability is drop-oldest, and ",
        ] {
            assert!(said.contains(words), "{words}: {said}");
        }
        let advised = said.split("or say ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
        let advised: Vec<_> = advised.split(' ').collect();
        test_node.succeed(&[&publish[..7], &advised].concat());
    }
    // Of what is no other one nothing is said.
    let (_, said) = test_node.run(&["pub", "t", "--loans", "1", "--release-deadline", "1.5"]);
    assert!(said.contains("or say --reliability drop-oldest --loans 2; or"), "{said}");
    drop(sub);
}

#[test]
fn who_waits_in_vain_is_told_what_to_do() {
    let test_node = TestNode::open();
    fails_with(&test_node, &["sub", "t", "--timeout", "0.2"], 4, "or create it: --largest 1MiB");
    fails_with(&test_node, &["topics"], 6, "not found: no service listens there");
}

#[test]
fn nothing_is_told_of_what_was_not_done() {
    let test_node = TestNode::open();
    let (code, said) = test_node.run(&["pub", "t", "--file", "/nowhere/at/all"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/nowhere/at/all") && !said.contains("0 messages"), "{said}");
}

#[test]
fn a_budget_is_said_alike_wherever_it_is_said() {
    let test_node = TestNode::open();
    let budget = [("FABRICAST_BUDGET_HOST", "64M")];
    let mut sub = test_node.start_with(&["sub", "t", "--stats", "--depth", "4"], "", &budget);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    fails_with(&test_node, &["pub", "large", "--largest", "1G"], 7, "a budget of 67108864 bytes");
    let cells = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let said = test_node.succeed(&["topics"]);
    let figures = "topics reserve 8.00 MiB of 64.00 MiB (67108864 bytes)";
    assert!(cells(&said).contains(figures), "{said}");
    let said = test_node.succeed(&["topics", "--verbose"]);
    assert!(said.lines().any(|line| cells(line) == "t bytes 5 s 8 8388608 0"), "{said}");
    let topics = test_node.json(&["topics", "--json"]);
    assert_eq!(topics["topics"][0]["reserves"]["messages"], 8, "{topics}");
    assert_eq!(test_node.json(&["topics", "--json"])["pools"][0]["budget"], 64 << 20);
    sub.signal(nix::sys::signal::Signal::SIGINT);
    sub.succeed();
}

#[test]
fn directories_of_others_are_not_used() {
    let test_node = TestNode::open();
    let open = test_node.path("open");
    std::fs::create_dir(&open).unwrap();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(&open, everybody).unwrap();
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
    // An agent may be in such a one.
    test_node.succeed(&["clean", &open]);
    fails_with(&test_node, &["topics", "--directory", &test_node.path("none")], 6, "no service");
    fails_with(
        &test_node,
        &["paths", "--topics", "--directory", &test_node.path("none")],
        6,
        "no service",
    );
}

#[test]
fn what_is_told_to_programs_is_json() {
    let test_node = TestNode::open();
    let sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    let paths = test_node.json(&["paths", "--topics", "--json"]);
    assert_eq!((&paths["topics"][0], &paths["sent"]), (&"t".into(), &serde_json::json!([])));
    let said = test_node.succeed(&["paths", "--topics"]);
    assert!(said.contains("Topic \"t\"") && said.contains("1 subscriber,"), "{said}");
    let said = test_node.succeed(&["topics"]);
    assert!(said.lines().any(|line| line.starts_with("t ")), "{said}");
    assert!(said.lines().all(|line| line.chars().count() <= 120), "{said}");
    let config = test_node.json(&["config", "--depth", "3", "--json"]);
    assert_eq!(config["topic.depth"]["value"], 3);
    assert_eq!(config["topic.depth"]["origin"], "option --depth");
    let origin = config["directory"]["origin"].as_str().unwrap();
    assert_eq!(origin, "environment FABRICAST_DIRECTORY");
    drop(sub);
}

#[test]
fn the_page_of_documentation_has_the_exit_codes_as_they_are() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operating.md");
    let page = std::fs::read_to_string(page).unwrap();
    let test_node = TestNode::open();
    let help = test_node.succeed(&["--help"]);
    let codes = help.split("Exit codes:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    for line in codes.lines() {
        let (code, meaning) = line.trim().split_once("  ").unwrap();
        let row = format!("| {code} | {} |", meaning.trim());
        assert!(page.contains(&row), "docs/operating.md is to contain {row}");
    }
}
