//! `fabricast node`: who serves, who succeeds, and what happens to messages meanwhile.

use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::test_node::{TIMEOUT, TestNode, parse, topic};

#[test]
fn nothing_is_lost_when_the_service_is_killed_under_load() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    let outside = ["--service", "external"];
    let sub = ["sub", "t", "--check", "--count", "3000", "--json"];
    let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "3000", "--rate", "1000"];
    let more = ["--wait-for", "1", "--json"];
    let mut sub = test_node.start(&[&sub[..], &outside].concat());
    let mut publisher = test_node.start(&[&publish[..], &more, &outside].concat());
    let is_under_way = |report: &serde_json::Value, from: u64| {
        topic(report, "t").is_some_and(|topic| topic["published"].as_u64() > Some(from))
    };
    let before = test_node.wait_until("messages", |report| is_under_way(report, 100));
    node.kill();
    // As a service manager does.
    let mut next = test_node.serve();
    let after = test_node.wait_until("a successor", |report| report["node"]["service"] == 2);
    assert_eq!(before["node"]["identity"], after["node"]["identity"]);
    let sent = parse(&publisher.succeed());
    assert_eq!((&sent["messages"], &sent["released"]), (&3000.into(), &true.into()), "{sent}");
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&3000.into(), &0.into()), "{read}");
    assert_eq!(read["altered"], 0, "{read}");
    next.signal(Signal::SIGTERM);
    next.succeed();
}

#[test]
fn who_serves_in_passing_hands_the_node_over_at_once_and_nothing_is_lost() {
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
    assert!(published < Some(3000), "it was handed over when all was over");
    // Another one that wants it hears who has it.
    let (code, said) = test_node.run(&["node"]);
    assert_eq!(code, Some(10), "{said}");
    assert!(said.contains(&format!("process {} does, and stays", node.id())), "{said}");
    let sent = parse(&publisher.succeed());
    assert_eq!((&sent["messages"], &sent["released"]), (&3000.into(), &true.into()), "{sent}");
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&3000.into(), &0.into()), "{read}");
    assert_eq!(read["altered"], 0, "{read}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn members_serve_their_node_themselves_when_the_service_is_gone() {
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
    // There is one of these; the next one is told who serves, and what to do.
    let (code, said) = test_node.run(&["node"]);
    assert_eq!(code, Some(10), "{said}");
    assert!(
        said.contains(&format!("process {} does, and stays. End that process", first.id())),
        "{said}"
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
    assert_eq!(test_node.run(&["topics"]).0, Some(6), "nobody is there any more");
}

#[test]
fn a_service_that_is_stopped_is_named() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    node.signal(Signal::SIGSTOP);
    let named = format!("process {} serves the node, and did", node.id());
    for command in [&["topics"][..], &["paths", "--topics"]] {
        let (code, said) = test_node.run(command);
        assert_eq!(code, Some(4), "{said}");
        assert!(said.contains(&named), "{said}");
    }
    let (code, said) = test_node.run(&["pub", "t", "--service-timeout", "0.2"]);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains(&format!("process {} serves the node, and does not", node.id())));
    node.signal(Signal::SIGCONT);
    test_node.wait_until("that it answers", |report| report["node"]["process"] == node.id());
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn programs_are_told_of_the_node_that_is_served() {
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
    node.wait_for("other nodes reach it at");
    // A line says so before the log does.
    let said = node.output();
    let last: serde_json::Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    let told = test_node.json(&["topics", "--json"]);
    assert_eq!(last["node"], told["node"], "{said}");
    assert_eq!(
        (&last["node"]["process"], &last["node"]["label"]),
        (&node.id().into(), &"it".into())
    );
    assert_eq!(last["directory"], test_node.node().display().to_string());
    assert!(last["not_carried"].is_null() && last["node"]["listens"].is_string(), "{said}");
    node.signal(Signal::SIGTERM);
    node.succeed();
    assert_eq!(node.output(), said, "nothing is said again that has not changed");
}

#[test]
fn the_service_manager_is_told() {
    let test_node = TestNode::open();
    let path = test_node.path("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    let hear = || {
        let mut bytes = [0; 1000];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    let mut node = test_node.start_with(&["node", "--log", "off"], "", &[("NOTIFY_SOCKET", &path)]);
    let said = hear();
    assert!(said.starts_with("READY=1\nSTATUS=serving node "), "{said}");
    node.signal(Signal::SIGTERM);
    assert_eq!(hear(), "STOPPING=1");
    node.succeed();
    assert_eq!(node.error(), "");
}

#[test]
fn a_file_of_settings_is_obeyed() {
    let test_node = TestNode::open();
    let file =
        test_node.write("node.toml", "label = 'from a file'\npatience = 5\nbudget_host = '64M'\n");
    // A variable that is set to nothing says nothing of what is logged.
    let mut node = test_node.start_with(&["node", "--config", &file], "", &[("FABRICAST_LOG", "")]);
    node.wait_for("serving node");
    let report = test_node.json(&["topics", "--json"]);
    assert_eq!(report["node"]["label"], "from a file");
    let (code, said) = test_node.run(&["pub", "t", "--pattern", "--count", "1", "--largest", "1G"]);
    assert_eq!(code, Some(7), "over the budget: {said}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn nodes_that_are_told_of_each_other_carry_topics() {
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
fn an_address_that_cannot_be_had_is_not_told_of_at_each_attempt() {
    let any = std::fs::read_to_string("/proc/sys/net/ipv4/ip_nonlocal_bind");
    if any.is_ok_and(|any| any.trim() == "1") {
        testkit::skip!("here one can listen at addresses that are nobody's (ip_nonlocal_bind)");
    }
    let test_node = TestNode::open();
    let start = Instant::now();
    // It is nobody's, and for documentation.
    let mut node = test_node.start(&["node", "--listen", "192.0.2.1:7000", "--insecure"]);
    node.wait_for("tried again and again");
    // It is, some four times.
    std::thread::sleep(Duration::from_secs(2));
    let said = node.error();
    let seconds = start.elapsed().as_secs();
    assert_eq!(said.matches("insecure: nodes are not authenticated").count(), 1, "{said}");
    // Once, unless this machine was slow.
    let most = [0, 5, 15, 35, 75].into_iter().filter(|after| *after <= seconds).count();
    let told = said.matches("tried again and again").count();
    assert!((1..=most).contains(&told), "{seconds} s: {said}");
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn that_a_node_listens_is_told_when_its_address_is_free() {
    let test_node = TestNode::open();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut node = test_node.start(&["node", "--insecure", "--listen", &address]);
    node.wait_for("tried again and again");
    node.wait_for("it does not listen for other nodes");
    drop(taken);
    node.wait_for("this node listens now");
    node.wait_for(&format!("other nodes reach it at {address}"));
    node.signal(Signal::SIGTERM);
    node.succeed();
}

#[test]
fn also_who_is_there_for_a_moment_is_in_the_log_of_a_node_that_tells_more() {
    let test_node = TestNode::open();
    let mut node = test_node.start(&["node", "--log", "debug"]);
    node.wait_for("serving node");
    test_node.succeed(&["pub", "t", "--pattern", "--count", "1", "--label", "short one"]);
    let line_of = |what: &str| {
        let said = node.error();
        said.lines().find(|line| line.contains(what) && line.contains("short one")).is_some()
    };
    assert!(line_of("a process joined"), "{}", node.error());
    // Whichever of the two is seen first.
    test_node.wait_until("that it has left", |_| {
        line_of("a process left") || line_of("a process exited")
    });
    node.signal(Signal::SIGTERM);
    node.succeed();
}
