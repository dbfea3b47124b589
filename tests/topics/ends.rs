//! How processes end: asked to, too slow, killed; and what they leave.

use nix::sys::signal::Signal;

use crate::house::{House, parse, topic};

/// Is there a subscriber?
fn has_subscriber(report: &serde_json::Value, name: &str) -> bool {
    topic(report, name).is_some_and(|topic| !topic["subscribers"][0].is_null())
}

#[test]
fn one_that_waits_for_subscribers_can_be_interrupted() {
    let house = House::open();
    let mut publisher = house.start(&["pub", "t", "--pattern", "--wait-for", "1", "--json"]);
    publisher.wait_for("waiting for 1 subscribers");
    publisher.signal(Signal::SIGINT);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&0.into(), &false.into()), "{sent}");
}

#[test]
fn one_that_waits_for_room_can_be_interrupted() {
    let house = House::open();
    // One that is stopped cannot serve.
    let _node = house.serve();
    let settings = ["--depth", "2", "--release-deadline", "600"];
    let mut sub = house.start(&[&["sub", "t", "--check"][..], &settings].concat());
    house.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let mut publisher = house.start(&["pub", "t", "--pattern", "--json"]);
    house.wait_until("a wait for room", |report| {
        let waits = topic(report, "t").map(|topic| &topic["publishers"][0]["waits_microseconds"]);
        waits.is_some_and(|waits| waits.as_u64() > Some(0))
    });
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&2.into(), &false.into()), "{sent}");
    // What was published is there, and the usual end of one who reads is no failure.
    sub.signal(Signal::SIGCONT);
    house.wait_until("that all was read", |report| {
        topic(report, "t").is_some_and(|topic| topic["subscribers"][0]["behind"] == 0)
    });
    sub.signal(Signal::SIGINT);
    assert!(sub.succeed().contains("2 messages"));
}

#[test]
fn one_that_waits_for_messages_can_be_interrupted() {
    let house = House::open();
    // Before anybody has made the topic, and after; while it has still to read some, and not.
    let mut early = house.start(&["sub", "never"]);
    early.wait_for("waiting until somebody makes the topic");
    let mut counting = house.start(&["sub", "t", "--count", "3", "--depth", "4"]);
    house.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    for process in [&early, &counting] {
        process.signal(Signal::SIGTERM);
    }
    early.succeed();
    assert_eq!(counting.end().code(), Some(130), "{}", counting.error());
}

#[test]
fn waits_have_the_end_that_was_asked_for() {
    let house = House::open();
    let wait = ["--timeout", "0.1"];
    for arguments in [
        &["sub", "nobody-makes-it"][..],
        &["sub", "nobody-publishes", "--depth", "2"],
        &["pub", "nobody-reads", "--pattern", "--wait-for", "1"],
        &["sub", "nobody-serves", "--service", "outside", "--patience", "0.1"],
    ] {
        let (code, said) = house.run(&[arguments, &wait].concat());
        assert_eq!(code, Some(4), "{arguments:?}: {said}");
    }
}

#[test]
fn one_that_is_too_slow_is_removed_and_says_so() {
    let house = House::open();
    // One that is stopped cannot serve.
    let _node = house.serve();
    let settings = ["--depth", "2", "--release-deadline", "0.2"];
    let mut sub = house.start(&[&["sub", "t", "--check"][..], &settings].concat());
    house.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    house.succeed(&["pub", "t", "--pattern", "--count", "10"]);
    sub.signal(Signal::SIGCONT);
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    assert!(sub.error().contains("evicted"), "{}", sub.error());
}

#[test]
fn what_is_no_pattern_is_found() {
    let house = House::open();
    let mut sub = house.start(&["sub", "t", "--check", "--count", "2", "--json"]);
    let publish = ["pub", "t", "--lines", "--wait-for", "1"];
    assert_eq!(house.run_with(&publish, "a line that is no pattern\nshort\n", &[]).0, Some(0));
    assert_eq!(sub.end().code(), Some(5), "{}", sub.error());
    assert_eq!(parse(&sub.output())["altered"], 2);
    assert!(sub.error().contains("message 1: is none of a pattern"), "{}", sub.error());
}

#[test]
fn what_a_killed_node_left_is_removed_and_nothing_of_those_that_live() {
    let house = House::open();
    let mut node = house.serve();
    let socket = house.node().join("node.sock");
    let said = house.succeed(&["clean"]);
    assert!(said.contains("kept") && said.contains("a process serves the node"), "{said}");
    node.kill();
    assert!(socket.exists());
    let rehearsal = house.json(&["clean", "--dry-run", "--json"]);
    assert_eq!(rehearsal["removed"][0]["path"], socket.display().to_string(), "{rehearsal}");
    assert!(socket.exists(), "a rehearsal removes nothing");
    let said = house.succeed(&["clean", &house.node().display().to_string()]);
    assert!(said.starts_with("removed ") && said.contains("node.sock"), "{said}");
    assert!(!socket.exists());
    assert!(house.succeed(&["clean"]).contains("nothing is there"));
    assert_eq!(house.run(&["clean", "/nowhere/at/all"]).0, Some(6));
    // The next one finds all as it has to be.
    let mut node = house.serve();
    node.signal(Signal::SIGTERM);
    node.succeed();
    assert!(!socket.exists());
}
