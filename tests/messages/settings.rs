//! Invalid settings of options, variables and files.

use crate::run::TestNode;

#[test]
fn depth_of_zero() {
    let why = "fabricast: option --depth is \"0\": use 1 to 65536\n";
    TestNode::new().fails(&["pub", "t", "--depth", "0"], 2, why);
}

#[test]
fn budget_that_is_too_small_for_any_topic() {
    let why = "fabricast: option --budget-host is \"0\": at least 512 bytes, which the smallest topic reserves; a \
               topic with default settings reserves 54525952 (52 messages of 1048576 bytes)\n";
    TestNode::new().fails(&["node", "--budget-host", "0"], 2, why);
}

#[test]
fn peer_without_a_port() {
    let why =
        "fabricast: option --peers is \"nowhere\": \"nowhere\" is not of the form host:port\n";
    TestNode::new().fails(&["node", "--peers", "nowhere"], 2, why);
}

#[test]
fn options_of_a_network_without_one() {
    for (option, value) in [("--provider", "net"), ("--source", "127.0.0.1")] {
        let why = format!(
            "fabricast: {option} has no effect without --listen, --peers or --rendezvous\n"
        );
        TestNode::new().fails(&["pub", "t", option, value], 2, &why);
    }
}

#[test]
fn variable_with_a_wrong_value() {
    let environment = [("FABRICAST_TOPIC_DEPTH", "many")];
    let why = "fabricast: environment FABRICAST_TOPIC_DEPTH is \"many\": use 1 to 65536\n";
    TestNode::new().fails_with(&["sub", "t"], ("", &environment, &[]), 2, why);
}

/// Every command with settings names the nearest setting.
#[test]
fn misspelt_variables() {
    let test_node = TestNode::new();
    for (name, near) in [
        ("FABRICAST_DEPTH", "FABRICAST_TOPIC_DEPTH"),
        ("FABRICAST_TOPIC_DEPHT", "FABRICAST_TOPIC_DEPTH"),
        ("FABRICAST_TOPIC_DEPT", "FABRICAST_TOPIC_DEPTH"),
        ("FABRICAST_SERVICE_TIMEUOT", "FABRICAST_SERVICE_TIMEOUT"),
    ] {
        let warning = format!(
            "fabricast: warning: environment variable {name} is ignored: unknown setting. The nearest setting is {near}\n"
        );
        let environment = [(name, "8")];
        test_node.fails_with(&["config"], ("", &environment, &[]), 0, &warning);
        let why = warning + "fabricast: option --depth is \"0\": use 1 to 65536\n";
        test_node.fails_with(&["sub", "t", "--depth", "0"], ("", &environment, &[]), 2, &why);
    }
}

#[test]
fn invalid_log_level() {
    let environment = [("FABRICAST_LOG", "loud")];
    let why = "fabricast: environment FABRICAST_LOG is \"loud\". Use one of off, error, warn, info, debug or trace\n";
    TestNode::new().fails_with(&["topics"], ("", &environment, &[]), 2, why);
}

#[test]
fn missing_settings_file() {
    let why = "fabricast: read settings of /nowhere/at/all failed: No such file or directory (os error 2)\n";
    TestNode::new().fails(&["node", "--config", "/nowhere/at/all"], 2, why);
}

#[test]
fn file_with_an_unknown_setting() {
    let test_node = TestNode::new();
    let file = test_node.write("node.toml", "\nservice_timeuot = 3\n");
    let why = "fabricast: {directory}/node.toml, line 2: unknown setting \"service_timeuot\"; the nearest is \"service_timeout\"\n";
    test_node.fails(&["node", "--config", file.to_str().unwrap()], 2, why);
}

#[test]
fn directory_that_is_a_file() {
    let test_node = TestNode::new();
    let file = test_node.write("file", "");
    let file = file.to_str().unwrap();
    let why = "fabricast: option --directory is \"{directory}/file\": it is a file, not a directory. Choose \
               another one: --directory\n";
    let node = ["node", "--log", "error"];
    for command in [&["pub", "t"][..], &["sub", "t"], &node, &["topics"], &["clean"]] {
        test_node.fails(&[command, &["--directory", file]].concat(), 2, why);
    }
    let below = format!("{file}/node");
    let why = "fabricast: option --directory is \"{directory}/file/node\": {directory}/file is a file, not a directory\n";
    test_node.fails(&["pub", "t", "--directory", &below], 2, why);
}

/// Only the last component of the path is created.
#[test]
fn directory_without_its_parent() {
    let test_node = TestNode::new();
    let absent = test_node.path("absent/node");
    let absent = absent.to_str().unwrap();
    let why = "{directory}/absent does not exist, and only the last part of the path is created. Create it first, or \
               correct the path\n";
    let option = format!("fabricast: option --directory is \"{{directory}}/absent/node\": {why}");
    for command in [&["pub", "t"][..], &["sub", "t"], &["node", "--log", "error"]] {
        test_node.fails(&[command, &["--directory", absent]].concat(), 2, &option);
    }
    let variable = format!(
        "fabricast: environment FABRICAST_DIRECTORY is \"{{directory}}/absent/node\": {why}"
    );
    let environment = [("FABRICAST_DIRECTORY", absent)];
    test_node.fails_with(&["pub", "t"], ("", &environment, &[]), 2, &variable);
    assert!(!test_node.path("absent").exists());
    // The default directory is created with its parents. A runtime directory that does not exist here
    // is not used: batch systems pass the variable on to other machines.
    let (runtime, temporary) = (test_node.path("run/user"), test_node.path("tmp/user"));
    let environment = [
        ("FABRICAST_DIRECTORY", ""),
        ("XDG_RUNTIME_DIR", runtime.to_str().unwrap()),
        ("TMPDIR", temporary.to_str().unwrap()),
    ];
    test_node.fails_with(&["pub", "t"], ("", &environment, &[]), 0, "");
    assert_eq!(std::fs::read_dir(&temporary).unwrap().count(), 1);
    assert!(!runtime.exists());
    std::fs::create_dir_all(&runtime).unwrap();
    test_node.fails_with(&["pub", "t"], ("", &environment, &[]), 0, "");
    assert!(runtime.join("fabricast").is_dir());
}

#[test]
fn other_nodes_without_consent() {
    let why = "fabricast: connect to nodes at 0.0.0.0:0 failed: peers are not authenticated and traffic is not encrypted: \
               on loopback each user of the machine can connect. Add --insecure to accept this\n";
    TestNode::new().fails(&["node", "--listen", "0.0.0.0:0", "--log", "error"], 2, why);
}

#[test]
fn unknown_provider() {
    let test_node = TestNode::new();
    let info: serde_json::Value =
        serde_json::from_str(&test_node.run(&["info", "--json"]).output).unwrap();
    let mut available: Vec<&str> = Vec::new();
    for provider in info["providers"].as_array().unwrap() {
        let name = provider["provider"].as_str().unwrap();
        if !available.contains(&name) {
            available.push(name);
        }
    }
    let available = available.join(", ");
    let why = format!(
        "fabricast: find provider \"carrier-pigeon\" failed: not available here. Available: {available}\n"
    );
    test_node.fails(&["info", "--provider", "carrier-pigeon"], 3, &why);
}
