//! `fabricast node`: the service of a node, its successors, and messages meanwhile.

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::test_node::{TIMEOUT, TestNode, parse, topic};

#[test]
fn no_message_is_lost_when_the_service_is_killed_under_load() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    let external = ["--service", "external"];
    let sub = ["sub", "t", "--check", "--count", "3000", "--json"];
    let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "3000", "--rate", "1000"];
    let more = ["--wait-for", "1", "--json"];
    let mut sub = test_node.start(&[&sub[..], &external].concat());
    let mut publisher = test_node.start(&[&publish[..], &more, &external].concat());
    let is_under_way = |report: &serde_json::Value, from: u64| {
        topic(report, "t").is_some_and(|topic| topic["published"].as_u64() > Some(from))
    };
    let before = test_node.wait_until("messages", |report| is_under_way(report, 100));
    node.kill();
    // As a service manager restarts it.
    let mut next = test_node.serve();
    let after = test_node.wait_until("a successor", |report| report["node"]["service"] == 2);
    assert_eq!(before["node"]["identity"], after["node"]["identity"]);
    let sent = parse(&publisher.succeed());
    assert_eq!((&sent["messages"], &sent["released"]), (&3000.into(), &true.into()), "{sent}");
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&3000.into(), &0.into()), "{read}");
    assert_eq!(read["corrupted"], 0, "{read}");
    next.signal(Signal::SIGTERM);
    next.succeed();
}

#[test]
fn embedded_service_hands_over_at_once_without_loss() {
    let test_node = TestNode::open();
    let sub = ["sub", "t", "--check", "--count", "3000", "--json"];
    let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "3000", "--rate", "1000"];
    let mut publisher = test_node
        .start(&[&publish[..], &["--wait-for", "1", "--json", "--label", "first"]].concat());
    test_node.wait_until("a service", |report| report["node"]["label"] == "first");
    let mut sub = test_node.start(&sub);
    let before = test_node.wait_until("messages", |report| {
        topic(report, "t").is_some_and(|topic| topic["published"].as_u64() > Some(100))
    });
    let mut node = test_node.start(&["node", "--insecure", "--listen", "127.0.0.1:0"]);
    node.wait_for("serving node");
    let after = test_node.json(&["topics", "--json"]);
    assert_eq!(before["node"]["identity"], after["node"]["identity"]);
    assert_eq!(after["node"]["process"], node.id());
    assert!(after["node"]["listens"].is_string(), "{after}");
    let published = topic(&after, "t").unwrap()["published"].as_u64();
    assert!(published < Some(3000), "the handover was too late");
    // A second dedicated service fails and names the first.
    let (code, output) = test_node.run(&["node"]);
    assert_eq!(code, Some(10), "{output}");
    assert!(output.contains(&format!("process {} already serves the node", node.id())), "{output}");
    let sent = parse(&publisher.succeed());
    assert_eq!((&sent["messages"], &sent["released"]), (&3000.into(), &true.into()), "{sent}");
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&3000.into(), &0.into()), "{read}");
    assert_eq!(read["corrupted"], 0, "{read}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn members_serve_the_node_when_the_service_is_killed() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    let mut sub = test_node.start(&["sub", "t", "--check", "--count", "500"]);
    let publish = ["pub", "t", "--pattern", "--count", "500", "--rate", "250", "--wait-for", "1"];
    let mut publisher = test_node.start(&publish);
    test_node.wait_until("messages", |report| {
        topic(report, "t").is_some_and(|topic| topic["published"].as_u64() > Some(10))
    });
    node.kill();
    publisher.succeed();
    sub.succeed();
}

#[test]
fn service_ends_in_order_and_a_client_takes_over() {
    let test_node = TestNode::open();
    let mut first = test_node.start(&["node", "--label", "first"]);
    first.wait_for("serving node");
    let identity = test_node.json(&["topics", "--json"])["node"]["identity"].clone();
    let mut second = test_node.start(&["sub", "t", "--label", "second"]);
    first.wait_for("label=\"second\"");
    // A second dedicated service fails with a remedy.
    let (code, output) = test_node.run(&["node"]);
    assert_eq!(code, Some(10), "{output}");
    assert!(
        output.contains(&format!(
            "process {} already serves the node. Stop that process",
            first.id()
        )),
        "{output}"
    );
    first.signal(Signal::SIGHUP);
    first.wait_for("SIGHUP is ignored");
    first.signal(Signal::SIGTERM);
    first.succeed();
    let report =
        test_node.wait_until("its successor", |report| report["node"]["label"] == "second");
    assert_eq!(report["node"]["identity"], identity);
    second.signal(Signal::SIGINT);
    second.succeed();
    assert_eq!(test_node.run(&["topics"]).0, Some(6), "no process serves the node any more");
}

#[test]
fn stopped_service_is_named() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    node.signal(Signal::SIGSTOP);
    let named = format!("process {} serves the node, and did", node.id());
    for command in [&["topics"][..], &["paths", "--topics"]] {
        let (code, output) = test_node.run(command);
        assert_eq!(code, Some(4), "{output}");
        assert!(output.contains(&named), "{output}");
    }
    let (code, output) = test_node.run(&["pub", "t", "--service-timeout", "0.2"]);
    assert_eq!(code, Some(4), "{output}");
    assert!(output.contains(&format!("process {} serves the node, and does not", node.id())));
    node.signal(Signal::SIGCONT);
    test_node.wait_until("that it answers", |report| report["node"]["process"] == node.id());
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn json_has_the_node_that_is_served() {
    let test_node = TestNode::open();
    let mut node = test_node.start(&[
        "node",
        "--json",
        "--insecure",
        "--listen",
        "127.0.0.1:0",
        "--label",
        "it",
    ]);
    node.wait_for("listening for other nodes at");
    // The line is printed before the log message.
    let output = node.output();
    let last: serde_json::Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
    let report = test_node.json(&["topics", "--json"]);
    assert_eq!(last["node"], report["node"], "{output}");
    assert_eq!(
        (&last["node"]["process"], &last["node"]["label"]),
        (&node.id().into(), &"it".into())
    );
    assert_eq!(last["directory"], test_node.node().display().to_string());
    assert!(last["replication_error"].is_null() && last["node"]["listens"].is_string(), "{output}");
    node.signal(Signal::SIGTERM);
    node.succeed();
    assert_eq!(node.output(), output, "an unchanged node is not printed again");
}

#[test]
fn service_manager_is_notified() {
    let test_node = TestNode::open();
    let path = test_node.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let receive = || {
        let mut bytes = [0; 1000];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let mut node = test_node.start_with(&["node", "--log", "off"], "", &[("NOTIFY_SOCKET", &path)]);
    let output = receive();
    assert!(output.starts_with("READY=1\nSTATUS=serving node "), "{output}");
    node.signal(Signal::SIGTERM);
    assert_eq!(receive(), "STOPPING=1");
    node.succeed();
    assert_eq!(node.error(), "");
}

#[test]
fn settings_of_a_file_are_used() {
    let test_node = TestNode::open();
    let file = test_node
        .write("node.toml", "label = 'from a file'\nservice_timeout = 5\nbudget_host = '64M'\n");
    // An empty variable does not change the log level.
    let mut node = test_node.start_with(&["node", "--config", &file], "", &[("FABRICAST_LOG", "")]);
    node.wait_for("serving node");
    let report = test_node.json(&["topics", "--json"]);
    assert_eq!(report["node"]["label"], "from a file");
    let (code, output) =
        test_node.run(&["pub", "t", "--pattern", "--count", "1", "--largest", "1G"]);
    assert_eq!(code, Some(7), "over the budget: {output}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn topics_are_replicated_between_configured_peers() {
    let (near, far) = (TestNode::open(), TestNode::open());
    let mut first =
        near.start(&["node", "--insecure", "--listen", "127.0.0.1:0", "--node-name", "near"]);
    first.wait_for("serving node");
    let report =
        near.wait_until("where it listens", |report| report["node"]["listens"].is_string());
    let address = report["node"]["listens"].as_str().unwrap();
    let mut second = far.start(&["node", "--insecure", "--peers", address, "--node-name", "far"]);
    second.wait_for("serving node");
    let mut sub = near.start(&["sub", "t", "--check", "--count", "50", "--depth", "16"]);
    let publish = ["pub", "t", "--pattern", "--count", "50", "--wait-for", "1", "--depth", "16"];
    far.succeed(&publish);
    sub.succeed();
    first.wait_for("label=\"far\"");
    let paths = near.json(&["paths", "--topics", "--json"]);
    assert_eq!(paths["peers"][0]["label"], "far", "{paths}");
}

#[test]
fn unusable_listen_address_is_not_logged_at_each_attempt() {
    let any = std::fs::read_to_string("/proc/sys/net/ipv4/ip_nonlocal_bind");
    if any.is_ok_and(|any| any.trim() == "1") {
        testkit::skip!("addresses of other machines can be bound here (ip_nonlocal_bind)");
    }
    let test_node = TestNode::open();
    let start = Instant::now();
    // Reserved for documentation.
    let mut node = test_node.start(&["node", "--listen", "192.0.2.1:7000", "--insecure"]);
    node.wait_for("cannot start; retrying");
    // Some four attempts.
    std::thread::sleep(Duration::from_secs(2));
    let output = node.error();
    let seconds = start.elapsed().as_secs();
    assert_eq!(output.matches("insecure: nodes are not authenticated").count(), 1, "{output}");
    // Once, unless this machine was slow.
    let most = [0, 5, 15, 35, 75].into_iter().filter(|after| *after <= seconds).count();
    let count = output.matches("cannot start; retrying").count();
    assert!((1..=most).contains(&count), "{seconds} s: {output}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn node_reports_that_it_listens_when_its_address_is_free() {
    let test_node = TestNode::open();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut node = test_node.start(&["node", "--insecure", "--listen", &address]);
    node.wait_for("cannot start; retrying");
    node.wait_for("not listening for other nodes");
    drop(listener);
    node.wait_for("the node listens");
    node.wait_for(&format!("listening for other nodes at {address}"));
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn debug_log_of_a_node_has_short_lived_processes() {
    let test_node = TestNode::open();
    let mut node = test_node.start(&["node", "--log", "debug"]);
    node.wait_for("serving node");
    test_node.succeed(&["pub", "t", "--pattern", "--count", "1", "--label", "short"]);
    let line_of = |what: &str| {
        let output = node.error();
        output.lines().find(|line| line.contains(what) && line.contains("short")).is_some()
    };
    assert!(line_of("a process joined"), "{}", node.error());
    // Either may be noticed first.
    test_node.wait_until("that the process has left", |_| {
        line_of("a process left") || line_of("a process exited")
    });
    node.signal(Signal::SIGTERM);
    node.succeed();
}
