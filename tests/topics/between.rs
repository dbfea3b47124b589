//! Two nodes on this machine, as users connect them.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::house::{House, PATIENCE, Process, parse, topic};

/// Serves a node that others reach. Gives where.
fn serve(house: &House, more: &[&str]) -> (Process, String) {
    let mut node = house.start(&[&["node", "--listen", "127.0.0.1:0"][..], more].concat());
    node.wait_for("serves node");
    let report = house.wait_until("an address", |report| report["node"]["listens"].is_string());
    (node, report["node"]["listens"].as_str().unwrap().to_owned())
}

/// Waits until a node tells something of what goes between nodes.
#[track_caller]
fn wait_for_paths(house: &House, is_so: impl Fn(&Value) -> bool) -> Value {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        let mut process = house.start(&["paths", "--topics", "--json"]);
        if process.end().success() {
            let paths = parse(&process.output());
            if is_so(&paths) {
                return paths;
            }
        }
        assert!(std::time::Instant::now() < end, "{} {}", process.output(), process.error());
    }
}

#[test]
fn a_node_that_is_served_anew_is_still_connected() {
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let houses = [House::open(), House::open()];
        let (_node, address) = serve(&houses[0], &[]);
        let (mut node, before) = serve(&houses[1], &["--peers", &address]);
        let mut sub = houses[1].start(&[
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
        let mut publisher = houses[0].start(&[&publish[..], &more].concat());
        houses[1].wait_until("the topic", |report| topic(report, "t").is_some());
        houses[1].wait_until("messages", |report| {
            topic(report, "t").is_some_and(|topic| topic["arrived"].as_u64() > Some(50))
        });
        node.signal(signal);
        node.end();
        // The same again, while the one who reads serves already, and hands it over.
        let mut next = houses[1].start(&["node", "--listen", &before, "--peers", &address]);
        next.wait_for("its service number 3");
        let after =
            houses[1].wait_until("an address", |report| report["node"]["listens"].is_string());
        assert_eq!(after["node"]["listens"], before.as_str());
        let sent = parse(&publisher.succeed());
        assert_eq!((&sent["messages"], &sent["unwanted"]), (&1500.into(), &0.into()), "{sent}");
        let read = parse(&sub.succeed());
        assert_eq!((&read["messages"], &read["missed"]), (&1500.into(), &0.into()), "{read}");
    }
}

/// A process that serves in passing is at no network: one that is there to serve brings it.
#[test]
fn a_topic_of_another_node_is_found_when_the_network_comes_later() {
    let houses = [House::open(), House::open()];
    let (_one, address) = serve(&houses[0], &[]);
    let mut sub = houses[1].start(&["sub", "t", "--check", "--count", "300", "--json"]);
    sub.wait_for("at this node or at one that it is connected to");
    let publish = ["pub", "t", "--pattern", "--size", "10K", "--count", "300", "--wait-for", "1"];
    let settings = ["--largest", "64K", "--depth", "8"];
    let mut publisher = houses[0].start(&[&publish[..], &settings].concat());
    let (mut two, _) = serve(&houses[1], &["--peers", &address]);
    publisher.succeed();
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&300.into(), &0.into()), "{read}");
    assert_eq!(read["altered"], 0, "{read}");
    two.wait_for("a topic is made as another node has it");
}

#[test]
fn topics_of_other_nodes_are_shown() {
    let houses = [House::open(), House::open()];
    let (_one, address) = serve(&houses[0], &["--node-name", "one"]);
    let (_two, _) = serve(&houses[1], &["--peers", &address]);
    let mut publisher =
        houses[0].start(&["pub", "t", "--pattern", "--wait-for", "1", "--depth", "8"]);
    let report = houses[1].wait_until("the topic", |report| report["elsewhere"][0]["topic"] == "t");
    assert_eq!(report["elsewhere"][0]["depth"], 8, "{report}");
    let text = houses[1].succeed(&["topics"]);
    let line = text.lines().find(|line| line.starts_with("t ")).unwrap_or_default();
    let cells: Vec<_> = line.split_whitespace().collect();
    assert_eq!(cells, ["t", "reliable", "8", "1M", "published", "one"], "{text}");
    publisher.interrupt();
}

#[test]
fn a_topic_that_is_another_one_elsewhere_is_told_to_all_who_wait() {
    let houses = [House::open(), House::open()];
    let (mut one, address) = serve(&houses[0], &[]);
    let (mut two, _) = serve(&houses[1], &["--peers", &address]);
    let mut sub = houses[1].start(&["sub", "t", "--largest", "64K", "--count", "1"]);
    let publish = ["pub", "t", "--pattern", "--size", "64K", "--wait-for", "1", "--largest", "1M"];
    let mut publisher = houses[0].start(&publish);
    for process in [&mut publisher, &mut sub] {
        process.wait_for("the settings of the topic differ (largest)");
    }
    for node in [&mut one, &mut two] {
        node.wait_for("a topic is another one at another node");
        let said = node.error();
        assert!(said.contains("65536 bytes") && said.contains("1048576 bytes"), "{said}");
    }
    let paths = wait_for_paths(&houses[0], |paths| paths["misfits"][0]["topic"] == "t");
    assert_eq!(paths["misfits"][0]["differs"][0], "largest", "{paths}");
    let text = houses[1].succeed(&["paths", "--topics"]);
    assert!(text.contains("not from"), "{text}");
    publisher.interrupt();
    sub.interrupt();
}

#[test]
fn a_service_of_its_own_that_may_not_reach_others_is_refused() {
    let house = House::open();
    let (code, said) = house.run(&["node", "--listen", "0.0.0.0:0"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("beyond loopback") && said.contains("insecure"), "{said}");
    assert!(!house.node().exists(), "nobody joined anything");
    // Who serves in passing does what it came for.
    let publish = ["pub", "t", "--pattern", "--count", "1", "--listen", "0.0.0.0:0"];
    let (code, said) = house.run(&publish);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("cannot reach others"), "{said}");
}
