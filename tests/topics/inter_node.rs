//! Two nodes on this machine, as users connect them.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::test_node::{Process, TIMEOUT, TestNode, parse, topic};

/// Serves a node that listens for other nodes. Returns its address.
fn serve(test_node: &TestNode, more: &[&str]) -> (Process, String) {
    let mut node =
        test_node.start(&[&["node", "--insecure", "--listen", "127.0.0.1:0"][..], more].concat());
    node.wait_for("serving node");
    let report = test_node.wait_until("an address", |report| report["node"]["listens"].is_string());
    (node, report["node"]["listens"].as_str().unwrap().to_owned())
}

/// Waits until a node's report of paths meets a condition.
#[track_caller]
fn wait_for_paths(test_node: &TestNode, condition: impl Fn(&Value) -> bool) -> Value {
    let end = std::time::Instant::now() + TIMEOUT;
    loop {
        let mut process = test_node.start(&["paths", "--topics", "--json"]);
        if process.end().success() {
            let paths = parse(&process.output());
            if condition(&paths) {
                return paths;
            }
        }
        assert!(std::time::Instant::now() < end, "{} {}", process.output(), process.error());
    }
}

#[test]
fn node_with_a_new_service_is_still_connected() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let test_nodes = [TestNode::open(), TestNode::open()];
        let (_node, address) = serve(&test_nodes[0], &[]);
        let (mut node, before) = serve(&test_nodes[1], &["--peers", &address]);
        let mut sub = test_nodes[1].start(&[
            "sub",
            "t",
            "--check",
            "--count",
            "1500",
            "--json",
            "--largest",
            "1M",
        ]);
        let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "1500", "--json"];
        let more = ["--rate", "500", "--wait-for", "1", "--largest", "1M"];
        let mut publisher = test_nodes[0].start(&[&publish[..], &more].concat());
        test_nodes[1].wait_until("the topic", |report| topic(report, "t").is_some());
        test_nodes[1].wait_until("messages", |report| {
            topic(report, "t").is_some_and(|topic| topic["arrived"].as_u64() > Some(50))
        });
        node.signal(signal);
        node.end();
        // The subscriber serves meanwhile, and hands over.
        let mut next =
            test_nodes[1].start(&["node", "--insecure", "--listen", &before, "--peers", &address]);
        next.wait_for("(service 3)");
        let after =
            test_nodes[1].wait_until("an address", |report| report["node"]["listens"].is_string());
        assert_eq!(after["node"]["listens"], before.as_str());
        let sent = parse(&publisher.succeed());
        assert_eq!(
            (&sent["messages"], &sent["without_subscriber"]),
            (&1500.into(), &0.into()),
            "{sent}"
        );
        let read = parse(&sub.succeed());
        assert_eq!((&read["messages"], &read["missed"]), (&1500.into(), &0.into()), "{read}");
    }
}

/// An embedded service has no network here: the dedicated one has.
#[test]
fn topic_of_another_node_is_found_when_the_network_starts_later() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (_one, address) = serve(&test_nodes[0], &[]);
    let mut sub = test_nodes[1].start(&["sub", "t", "--check", "--count", "300", "--json"]);
    sub.wait_for("neither on this node nor on a connected peer");
    let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "300", "--wait-for", "1"];
    let settings = ["--largest", "64K", "--depth", "8"];
    let mut publisher = test_nodes[0].start(&[&publish[..], &settings].concat());
    let (mut two, _) = serve(&test_nodes[1], &["--peers", &address]);
    publisher.succeed();
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&300.into(), &0.into()), "{read}");
    assert_eq!(read["corrupted"], 0, "{read}");
    two.wait_for("a topic was created with the settings of another node");
}

#[test]
fn topics_of_other_nodes_are_shown() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (_one, address) = serve(&test_nodes[0], &["--node-name", "one"]);
    let (_two, _) = serve(&test_nodes[1], &["--peers", &address]);
    let mut publisher =
        test_nodes[0].start(&["pub", "t", "--pattern", "--wait-for", "1", "--depth", "8"]);
    let report =
        test_nodes[1].wait_until("the topic", |report| report["remote_topics"][0]["topic"] == "t");
    assert_eq!(report["remote_topics"][0]["depth"], 8, "{report}");
    let text = test_nodes[1].succeed(&["topics"]);
    let line = text.lines().find(|line| line.starts_with("t ")).unwrap_or_default();
    let cells: Vec<_> = line.split_whitespace().collect();
    assert_eq!(cells, ["t", "reliable", "8", "1MiB", "published", "one"], "{text}");
    publisher.interrupt();
}

#[test]
fn incompatible_topic_is_reported_to_waiting_processes() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (mut one, address) = serve(&test_nodes[0], &[]);
    let (mut two, _) = serve(&test_nodes[1], &["--peers", &address]);
    let mut sub = test_nodes[1].start(&["sub", "t", "--largest", "64K", "--count", "1"]);
    let publish = ["pub", "t", "--pattern", "--size", "64K", "--wait-for", "1", "--largest", "1M"];
    let mut publisher = test_nodes[0].start(&publish);
    for process in [&mut publisher, &mut sub] {
        process.wait_for("topic settings differ (largest)");
        process.wait_for("Set the same --largest on both, or omit all topic settings on one");
    }
    for node in [&mut one, &mut two] {
        node.wait_for("topic has other settings at another node");
        let output = node.error();
        assert!(output.contains("65536 bytes") && output.contains("1048576 bytes"), "{output}");
    }
    let paths =
        wait_for_paths(&test_nodes[0], |paths| paths["incompatible_topics"][0]["topic"] == "t");
    assert_eq!(paths["incompatible_topics"][0]["differs"][0], "largest", "{paths}");
    let text = test_nodes[1].succeed(&["paths", "--topics"]);
    assert!(text.contains("not from"), "{text}");
    publisher.interrupt();
    sub.interrupt();
}

/// Each provider works, but not with the other one: that is reported before messages are lost.
#[test]
fn different_providers_are_reported_to_waiting_processes() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let names = ["--node-name", "one", "--provider", "net"];
    let (mut one, address) = serve(&test_nodes[0], &names);
    let names = ["--node-name", "two", "--provider", "tcp;ofi_rxm"];
    let (mut two, _) = serve(&test_nodes[1], &[&["--peers", &address][..], &names].concat());
    for (node, other) in [(&mut one, "two"), (&mut two, "one")] {
        node.wait_for("provider mismatch");
        let output = node.error();
        let line = output.lines().find(|line| line.contains("provider mismatch")).unwrap();
        for words in
            ["WARN", "net (protocol", "tcp;ofi_rxm (protocol", &format!("label=\"{other}\"")]
        {
            assert!(line.contains(words), "{words}: {line}");
        }
    }
    let mut sub = test_nodes[1].start(&["sub", "t", "--count", "1", "--largest", "1M", "--json"]);
    test_nodes[0].wait_until("the topic", |report| report["remote_topics"][0]["topic"] == "t");
    // Without another subscriber; slowly, so that the node knows the topic before the end.
    let publish = ["pub", "t", "--pattern", "--count", "3"];
    let mut process = test_nodes[0].start(&[&publish[..], &["--rate", "3", "--json"]].concat());
    let sent = parse(&process.succeed());
    assert_eq!(
        (&sent["without_subscriber"], &sent["missed_by_nodes"]),
        (&3.into(), &0.into()),
        "{sent}"
    );
    let why = |direction: &str| {
        format!("{direction}: the two nodes use different providers; this node: ")
    };
    assert!(process.error().contains(&why("not to \"two\"")), "{}", process.error());
    let mut publisher = test_nodes[0].start(&[&publish[..], &["--wait-for", "1"]].concat());
    for (process, direction) in [(&mut publisher, "not to \"two\""), (&mut sub, "not from \"one\"")]
    {
        process.wait_for(&why(direction));
        process.wait_for("Start both nodes with the same --provider");
    }
    for (test_node, direction) in
        [(&test_nodes[0], "not to \"two\""), (&test_nodes[1], "not from \"one\"")]
    {
        let paths =
            wait_for_paths(test_node, |paths| paths["incompatible_topics"][0]["topic"] == "t");
        assert_eq!(
            paths["incompatible_topics"][0]["differs"],
            serde_json::json!(["provider"]),
            "{paths}"
        );
        assert_eq!(paths["peers"][0]["is_connected"], false, "{paths}");
        let text = test_node.succeed(&["paths", "--topics"]);
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(&why(direction)), "{text}");
        assert!(flat.contains(": not connected: no messages can be exchanged"), "{text}");
        assert!(!flat.contains(": connected"), "{text}");
    }
    publisher.interrupt();
    sub.interrupt();
    // Only the node with the other provider is restarted.
    two.signal(Signal::SIGTERM);
    two.succeed();
    let (_two, _) = serve(&test_nodes[1], &["--peers", &address, "--provider", "net"]);
    let mut sub = test_nodes[1].start(&["sub", "t", "--check", "--count", "3", "--largest", "1M"]);
    test_nodes[0].succeed(&[&publish[..], &["--wait-for", "1"]].concat());
    sub.succeed();
}

/// Also if everything starts at once: one node still opens its provider while the other publishes.
#[test]
fn no_message_is_kept_for_a_node_with_another_provider() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (_one, address) = serve(&test_nodes[0], &["--provider", "net"]);
    let publish = ["pub", "t", "--pattern", "--count", "3", "--wait-for", "1", "--timeout", "4"];
    let mut publisher = test_nodes[0].start(&[&publish[..], &["--json"]].concat());
    publisher.wait_for("waiting for 1 subscriber");
    let _two = test_nodes[1].start(&[
        "node",
        "--insecure",
        "--provider",
        "tcp;ofi_rxm",
        "--peers",
        &address,
    ]);
    let mut sub = test_nodes[1].start(&["sub", "t", "--largest", "1M"]);
    let code = publisher.end().code();
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["missed_by_nodes"]), (&0.into(), &0.into()), "{sent}");
    assert_eq!(code, Some(4), "{}", publisher.error());
    sub.interrupt();
}

#[test]
fn unknown_provider_ends_the_dedicated_service() {
    let test_node = TestNode::open();
    for network in
        [&["--insecure", "--listen", "127.0.0.1:0"][..], &["--insecure", "--peers", "127.0.0.1:9"]]
    {
        let (code, output) =
            test_node.run(&[&["node", "--provider", "carrier-pigeon"][..], network].concat());
        assert_eq!(code, Some(3), "{output}");
        assert!(output.contains("no provider is named \"carrier-pigeon\"; "), "{output}");
    }
    assert!(!test_node.node().exists(), "no process joined a node");
}

/// An embedded service continues without other nodes, and reports why.
#[test]
fn provider_that_does_not_exist_is_an_error() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (_one, address) = serve(&test_nodes[0], &[]);
    let paths = test_nodes[0].json(&["paths", "--topics", "--json"]);
    assert!(paths["replication_error"].is_null(), "{paths}");
    let sub = ["sub", "t", "--largest", "1M", "--insecure", "--peers", &address];
    let (code, output) = test_nodes[1].run(&[&sub[..], &["--provider", "carrier-pigeon"]].concat());
    assert_ne!(code, Some(0), "{output}");
    let cause = "no provider is named \"carrier-pigeon\"; the providers are ";
    assert!(output.contains(cause), "{output}");
    assert!(!test_nodes[1].node().exists(), "no process joined a node");
}

#[test]
fn address_in_use_is_reported_until_it_is_free() {
    let test_node = TestNode::open();
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let mut node = test_node.start(&["node", "--insecure", "--listen", &address]);
    node.wait_for("not listening for other nodes");
    let paths = wait_for_paths(&test_node, |paths| paths["replication_error"].is_string());
    let why = paths["replication_error"].as_str().unwrap();
    assert!(why.contains("in use") && why.ends_with("; retrying"), "{paths}");
    let text = test_node.succeed(&["paths", "--topics"]);
    let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        flat.contains(&format!(
            "listen for other nodes at address {address} failed: cannot listen there: "
        )),
        "{text}"
    );
    assert!(flat.contains("Choose another address: --listen"), "{text}");
    drop(other);
    test_node
        .wait_until("where it listens", |report| report["node"]["listens"] == address.as_str());
    wait_for_paths(&test_node, |paths| paths["replication_error"].is_null());
}

#[test]
fn disconnected_peers_have_no_empty_names() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (mut one, address) = serve(&test_nodes[0], &["--node-name", "one"]);
    // And an address without a node.
    let peers = format!("{address},127.0.0.1:9");
    let (_two, _) = serve(&test_nodes[1], &["--peers", &peers]);
    wait_for_paths(&test_nodes[1], |paths| {
        let mut peers = paths["peers"].as_array().unwrap().iter();
        peers.any(|peer| peer["label"] == "one" && peer["is_connected"] == true)
    });
    one.kill();
    wait_for_paths(&test_nodes[1], |paths| {
        paths["peers"].as_array().unwrap().iter().all(|peer| peer["is_connected"] == false)
    });
    let text = test_nodes[1].succeed(&["paths", "--topics"]);
    assert!(text.contains(&format!("node \"one\" at {address}: not connected: ")), "{text}");
    assert!(text.contains("node at 127.0.0.1:9: not connected: "), "{text}");
}

/// Killed or stopped.
#[test]
fn lost_peer_is_reported_by_its_name() {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let test_nodes = [TestNode::open(), TestNode::open()];
        let lost = ["--lost-after", "2", "--node-name"];
        let (_near, address) = serve(&test_nodes[0], &[&lost[..], &["near"]].concat());
        let peers = [&["--peers", &address][..], &lost, &["far"]].concat();
        let (far, at) = serve(&test_nodes[1], &peers);
        let mut reader = test_nodes[1].start(&["sub", "t", "--check", "--largest", "1M"]);
        let publish =
            ["pub", "t", "--pattern", "--wait-for", "1", "--rate", "100", "--count", "1M"];
        let mut publisher = test_nodes[0].start(&publish);
        wait_for_paths(&test_nodes[0], |paths| paths["sent"][0]["messages"].as_u64() > Some(0));
        // Together, since neither process may report the other.
        [&far, &reader].iter().for_each(|process| process.signal(Signal::SIGSTOP));
        [&far, &reader].iter().for_each(|process| process.signal(signal));
        let paths =
            wait_for_paths(&test_nodes[0], |paths| paths["peers"][0]["is_connected"] == false);
        assert_eq!(paths["peers"][0]["label"], "far", "{paths}");
        let text = test_nodes[0].succeed(&["paths", "--topics"]);
        assert!(text.contains(&format!("node \"far\" at {at}: not connected: ")), "{text}");
        assert!(!text.contains(": connected"), "{text}");
        // Messages for it are retained meanwhile.
        assert!(text.contains("to \"far\" by ") || text.contains("(\"far\")"), "{text}");
        let identity = paths["peers"][0]["node"].as_str().unwrap();
        assert!(!text.contains(&identity[..8]), "{text}");
        publisher.interrupt();
        if signal == Signal::SIGSTOP {
            // It is connected again, and listed once.
            [&far, &reader].iter().for_each(|process| process.signal(Signal::SIGCONT));
            wait_for_paths(&test_nodes[0], |paths| {
                let peers = paths["peers"].as_array().unwrap();
                peers.len() == 1 && peers[0]["is_connected"] == true
            });
            reader.interrupt();
        }
    }
}

#[test]
fn network_without_insecure_is_an_error() {
    let test_node = TestNode::open();
    for address in ["0.0.0.0:0", "127.0.0.1:0"] {
        let (code, output) = test_node.run(&["node", "--listen", address]);
        assert_eq!(code, Some(2), "{output}");
        assert!(output.contains("not authenticated") && output.contains("insecure"), "{output}");
        assert!(!test_node.node().exists(), "no process joined a node");
    }
    // Nor does a publisher that would serve the node.
    let publish = ["pub", "t", "--pattern", "--count", "1", "--listen", "0.0.0.0:0"];
    let (code, output) = test_node.run(&publish);
    assert_eq!(code, Some(2), "{output}");
    assert!(output.contains("not authenticated") && output.contains("insecure"), "{output}");
}

#[test]
fn publisher_reports_messages_missed_by_a_node_given_up() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let lost = ["--lost-after", "4", "--node-name"];
    let (mut node, address) = serve(&test_nodes[0], &[&lost[..], &["near"]].concat());
    let (mut far, at) =
        serve(&test_nodes[1], &[&["--peers", &address][..], &lost, &["far"]].concat());
    let _near = test_nodes[0].start(&["sub", "t", "--check", "--largest", "1M"]);
    let mut reader = test_nodes[1].start(&["sub", "t", "--check", "--largest", "1M"]);
    test_nodes[0].wait_until("both subscribers", |report| {
        let subscribers = topic(report, "t").map(|topic| topic["subscribers"].clone());
        subscribers.is_some_and(|all| all.as_array().is_some_and(|all| all.len() == 2))
    });
    // Together, since neither process may report the other.
    [&far, &reader].iter().for_each(|process| process.signal(Signal::SIGSTOP));
    far.kill();
    reader.kill();
    let publish = ["pub", "t", "--pattern", "--count", "16", "--wait-for", "2", "--json"];
    let mut publisher = test_nodes[0].start(&publish);
    assert_eq!(publisher.end().code(), Some(8), "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["missed_by_nodes"]), (&16.into(), &16.into()), "{sent}");
    assert_eq!((&sent["released"], &sent["complete"]), (&false.into(), &false.into()), "{sent}");
    let why = "16 messages not delivered to a subscribed node (\"far\"), which was given up";
    assert!(publisher.error().contains(why), "{}", publisher.error());
    // The log of the node names the lost node.
    node.wait_for("destination given up");
    let output = node.error();
    let line = output.lines().find(|line| line.contains("destination given up")).unwrap();
    for words in ["WARN", "topic=\"t\"", "node=", "label=\"far\"", "messages=16"] {
        assert!(line.contains(words), "{words}: {line}");
    }
    let paths = wait_for_paths(&test_nodes[0], |paths| paths["missed"][0].is_object());
    assert_eq!(paths["missed"][0]["messages"], 16, "{paths}");
    assert_eq!(paths["missed"][0]["names"], serde_json::json!(["far"]), "{paths}");
    let text = test_nodes[0].succeed(&["paths", "--topics"]);
    let line = "given up: other nodes (\"far\"), 1 time; they missed 16 messages";
    assert!(text.contains(line), "{text}");
    // The peer connected by itself and is not dialed; it is listed as disconnected all the same.
    assert!(text.contains(&format!("node \"far\" at {at}: not connected: ")), "{text}");
    // Later messages are not missed.
    test_nodes[0].succeed(&["pub", "t", "--pattern", "--count", "3", "--wait-for", "1"]);
}

#[test]
fn all_messages_dropped_between_nodes_are_counted() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let (_node, address) = serve(&test_nodes[0], &[]);
    let (_far, _) = serve(&test_nodes[1], &["--peers", &address]);
    let settings = ["--reliability", "drop-oldest", "--depth", "4", "--largest", "1K", "--json"];
    for which in ["first", "second"] {
        let file = test_nodes[1].path(which);
        let sub = ["sub", "t", "--file", &file];
        let mut reader = test_nodes[1].start(&[&sub[..], &settings].concat());
        let publish = ["pub", "t", "--pattern", "--size", "1K", "--count", "300"];
        let more = ["--wait-for", "1"];
        let sent = test_nodes[0].json(&[&publish[..], &more, &settings].concat());
        assert_eq!(
            (&sent["messages"], &sent["without_subscriber"]),
            (&300.into(), &0.into()),
            "{sent}"
        );
        // The newest message is not dropped; its third word is its number.
        test_nodes[1].wait_until("that the last message is read", |_| {
            let read = std::fs::read(&file).unwrap_or_default();
            let last = read.chunks_exact(1024).last();
            last.is_some_and(|last| last[16..24] == 299_u64.to_le_bytes())
        });
        reader.signal(Signal::SIGINT);
        let read = parse(&reader.succeed());
        let [messages, missed] = ["messages", "missed"].map(|it| read[it].as_u64().unwrap());
        assert!(messages > 0 && messages + missed == 300, "{read}");
        test_nodes[0]
            .wait_until("that the subscriber has left", |report| topic(report, "t").is_none());
    }
}

/// One refuses connections, the other accepts and sends nothing.
#[test]
fn unreachable_peers_are_reported_soon() {
    let test_node = TestNode::open();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = silent.local_addr().map(|address| (silent, address.to_string())).unwrap();
    let peers = format!("127.0.0.1:9,{}", silent.1);
    let begin = std::time::Instant::now();
    let mut node = test_node.start(&["node", "--insecure", "--peers", &peers]);
    let lines = [
        "cannot reach 127.0.0.1:9: Connection refused (os error 111); retrying".to_owned(),
        format!("cannot reach {}: connected, handshake not complete; retrying", silent.1),
    ];
    for line in &lines {
        node.wait_for(line);
    }
    let elapsed = begin.elapsed();
    assert!(elapsed < TIMEOUT / 2, "{elapsed:?}");
    // Each reason once.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(node.error().matches(&lines[0]).count(), 1, "{}", node.error());
}

#[test]
fn sub_reports_that_a_peer_disconnects_and_returns() {
    let test_nodes = [TestNode::open(), TestNode::open()];
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let quiet = [("FABRICAST_LOG", "error")];
    let subscribe = ["sub", "t", "--largest", "1M", "--json", "--insecure", "--peers", &address];
    let mut sub = test_nodes[1].start_with(&subscribe, "", &quiet);
    let name = format!("node \"left\" ({address})");
    let arguments = ["node", "--insecure", "--listen", &address, "--node-name", "left"];
    let directory = test_nodes[1].node().display().to_string();
    // In any order.
    let first = [
        format!("fabricast: cannot reach {address}: Connection refused (os error 111); retrying\n"),
        format!("fabricast: waiting for messages of topic \"t\" (node directory: {directory})\n"),
    ];
    first.iter().for_each(|line| sub.wait_for(line));
    let mut output = sub.error();
    assert_eq!(output.len(), first.concat().len(), "{output}");
    for _ in 0..2 {
        let mut node = test_nodes[0].start(&arguments);
        output += &format!("fabricast: {name} is connected\n");
        sub.wait_for(&output);
        node.signal(Signal::SIGTERM);
        node.end();
        output += &format!("fabricast: {name} is disconnected: ");
        sub.wait_for(&output);
        // The connection may have been retried by then.
        output = with_reason(
            &sub,
            output,
            ["it closed the session", "Connection refused (os error 111)"],
        );
    }
    sub.signal(Signal::SIGINT);
    sub.succeed();
    assert_eq!(sub.error(), output);
}

/// The expected output, followed by one of these reasons.
#[track_caller]
fn with_reason(process: &Process, output: String, reasons: [&str; 2]) -> String {
    let all = process.error();
    let with = reasons.map(|reason| format!("{output}{reason}; retrying\n"));
    let found = with.into_iter().find(|with| all.starts_with(with.as_str()));
    found.unwrap_or_else(|| panic!("{all}"))
}
