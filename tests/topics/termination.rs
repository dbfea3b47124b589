//! How processes end: asked to, too slow, killed; and what they leave.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::test_node::{TIMEOUT, TestNode, parse, topic};

/// Is there a subscriber?
fn has_subscriber(report: &serde_json::Value, name: &str) -> bool {
    topic(report, name).is_some_and(|topic| !topic["subscribers"][0].is_null())
}

#[test]
fn one_that_waits_for_subscribers_can_be_interrupted() {
    let test_node = TestNode::open();
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--wait-for", "1", "--json"]);
    publisher.wait_for("waiting for 1 subscriber");
    publisher.signal(Signal::SIGINT);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&0.into(), &false.into()), "{sent}");
}

#[test]
fn one_that_waits_for_room_can_be_interrupted() {
    let test_node = TestNode::open();
    // One that is stopped cannot serve.
    let _node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "600"];
    let mut sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--json"]);
    test_node.wait_until("a wait for room", |report| {
        let waits = topic(report, "t").map(|topic| &topic["publishers"][0]["waits_microseconds"]);
        waits.is_some_and(|waits| waits.as_u64() > Some(0))
    });
    let slow = format!(
        "process {} (\"fabricast sub\") has 2 messages still to read or to release",
        sub.id()
    );
    publisher
        .wait_for(&format!("fabricast: waiting for room in topic \"t\": {slow} (node directory: "));
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    assert_eq!(publisher.error().matches("waiting for room").count(), 1, "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&2.into(), &false.into()), "{sent}");
    // There is an end to that, if one is asked for.
    let (code, said) =
        test_node.run(&["pub", "t", "--pattern", "--count", "1", "--timeout", "0.2"]);
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains("there was no room for one more message in time (--timeout)"), "{said}");
    // What was published is there, and the usual end of one who reads is no failure.
    sub.signal(Signal::SIGCONT);
    test_node.wait_until("that all was read", |report| {
        topic(report, "t").is_some_and(|topic| topic["subscribers"][0]["behind"] == 0)
    });
    sub.signal(Signal::SIGINT);
    assert!(sub.succeed().contains("2 messages"));
}

#[test]
fn a_publisher_names_the_stopped_subscriber_that_serves_the_node() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "t", "--check", "--depth", "2"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--count", "9", "--rate", "2"]);
    test_node.wait_until("a publisher", |report| {
        topic(report, "t").is_some_and(|topic| !topic["publishers"][0].is_null())
    });
    sub.signal(Signal::SIGSTOP);
    let number = sub.id();
    publisher.wait_for(&format!(
        "waiting for room in topic \"t\": a subscriber has messages still to read or to release; process \
         {number} serves the node, which evicts subscribers that hold messages for too long, and does \
         not answer: it is stopped. Resume it (kill -CONT {number}) or kill it (kill -KILL {number}) (node \
         directory: "
    ));
    sub.signal(Signal::SIGCONT);
    publisher.succeed();
    sub.signal(Signal::SIGINT);
    assert!(sub.succeed().contains("9 messages"));
}

#[test]
fn a_publisher_says_that_it_waits_for_its_messages_to_be_released() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let mut sub =
        test_node.start(&["sub", "t", "--check", "--count", "1", "--release-deadline", "600"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--count", "1"]);
    let slow = format!("process {} (\"fabricast sub\") has 1 message still to", sub.id());
    publisher.wait_for(&format!("waiting until all messages of topic \"t\" are released: {slow}"));
    sub.signal(Signal::SIGCONT);
    publisher.succeed();
    sub.succeed();
}

#[test]
fn a_process_leaves_a_stopped_service_soon_and_says_why_it_was_not_answered() {
    let test_node = TestNode::open();
    let node = test_node.serve();
    let mut sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    node.signal(Signal::SIGSTOP);
    let begin = std::time::Instant::now();
    sub.signal(Signal::SIGINT);
    sub.succeed();
    assert!(begin.elapsed() < Duration::from_secs(3), "it took {:?}", begin.elapsed());
    let why =
        format!("left the node without an answer of its service: process {} is stopped", node.id());
    assert!(sub.error().contains(&why), "{}", sub.error());
    node.signal(Signal::SIGCONT);
    test_node.wait_until("that it is gone", |report| topic(report, "t").is_none());
}

#[test]
fn one_that_waits_for_messages_can_be_interrupted() {
    let test_node = TestNode::open();
    // Before anybody has made the topic, and after; while it has still to read some, and not.
    let mut early = test_node.start(&["sub", "never"]);
    early.wait_for("waiting for topic \"never\": it does not exist yet");
    let mut counting = test_node.start(&["sub", "t", "--count", "3", "--depth", "4"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    for process in [&early, &counting] {
        process.signal(Signal::SIGTERM);
    }
    early.succeed();
    assert_eq!(counting.end().code(), Some(130), "{}", counting.error());
}

#[test]
fn pipes_that_nobody_is_at_can_be_interrupted() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let (from, to) = (test_node.pipe("from"), test_node.pipe("to"));
    let mut publisher = test_node.start(&["pub", "t", "--file", &from, "--json"]);
    let mut sub = test_node.start(&["sub", "t", "--file", &to]);
    let mut counting = test_node.start(&["sub", "t", "--file", &to, "--count", "1", "--json"]);
    test_node.wait_until("a publisher", |report| {
        topic(report, "t").is_some_and(|topic| !topic["publishers"][0].is_null())
    });
    for process in [&mut sub, &mut counting] {
        process.wait_for("waiting until somebody reads");
    }
    for process in [&publisher, &sub, &counting] {
        process.signal(Signal::SIGTERM);
    }
    sub.succeed();
    for process in [&mut publisher, &mut counting] {
        assert_eq!(process.end().code(), Some(130), "{}", process.error());
        let said = parse(&process.output());
        assert_eq!((&said["messages"], &said["complete"]), (&0.into(), &false.into()), "{said}");
    }
}

#[test]
fn one_whose_output_is_not_read_can_be_interrupted_within_a_message() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let path = test_node.pipe("pipe");
    // Reads nothing but the beginning, and does not wait for who writes.
    let mut reader = OpenOptions::new();
    reader.read(true).custom_flags(libc::O_NONBLOCK);
    let reader = reader.open(&path).unwrap();
    let settings = ["--largest", "1M", "--release-deadline", "600"];
    let sub = ["sub", "t", "--file", &path, "--json"];
    let mut sub = test_node.start(&[&sub[..], &settings].concat());
    let publish = ["pub", "t", "--pattern", "--size", "1M", "--count", "1", "--wait-for", "1"];
    let mut publisher = test_node.start(&[&publish[..], &settings].concat());
    test_node.wait_until("a message on its way", |_| {
        (&reader).read(&mut [0; 1]).is_ok_and(|length| length == 1)
    });
    sub.signal(Signal::SIGINT);
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["bytes"]), (&0.into(), &0.into()), "{read}");
    publisher.succeed();
}

#[test]
fn one_whose_last_line_is_not_read_can_be_interrupted() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let capacity = nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    full.write_all(&vec![0; capacity as usize]).unwrap();
    let publish = ["pub", "t", "--pattern", "--count", "1", "--wait-for", "1", "--json"];
    let mut publisher = test_node.start_to(&publish, full);
    publisher.wait_for("waiting for 1 subscriber");
    test_node.succeed(&["sub", "t", "--check", "--count", "1"]);
    test_node.wait_until("that it has left", |report| topic(report, "t").is_none());
    let status = publisher.interrupt();
    assert_eq!(status.signal(), Some(Signal::SIGINT as i32), "{status:?} {}", publisher.error());
}

#[test]
fn one_whose_reader_is_gone_ends_quietly_with_a_code_of_its_own() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut sub = test_node.start_to(&["sub", "t", "--lines", "--depth", "4"], writer);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    drop(reader);
    test_node.run_with(&["pub", "t", "--lines"], "one\n", &[]);
    assert_eq!(sub.end().code(), Some(141), "{}", sub.error());
    assert!(!sub.error().contains("fabricast: "), "{}", sub.error());
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut topics = test_node.start_to(&["topics"], writer);
    assert_eq!((topics.end().code(), topics.error()), (Some(141), String::new()));
}

/// Libraries that libfabric is linked with catch it when they are loaded.
#[test]
fn one_that_looks_for_providers_ends_by_the_signal_itself() {
    let test_node = TestNode::open();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let capacity = nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    full.write_all(&vec![0; capacity as usize]).unwrap();
    let mut info = test_node.start_to(&["info"], full);
    // It is about to write by then, or still looks.
    let status = format!("/proc/{}/status", info.id());
    let end = std::time::Instant::now() + TIMEOUT;
    let is_among = |these: &str| {
        let all = std::fs::read_to_string(&status).unwrap();
        let found = all.lines().find_map(|line| line.strip_prefix(these)).unwrap();
        u64::from_str_radix(found.trim(), 16).unwrap() & (1 << (Signal::SIGTERM as u32 - 1)) != 0
    };
    std::thread::sleep(Duration::from_millis(500));
    // Nor is it held back any more.
    while is_among("SigCgt:") || is_among("SigBlk:") {
        assert!(std::time::Instant::now() < end, "it catches what is to end it");
        std::thread::sleep(Duration::from_millis(10));
    }
    info.signal(Signal::SIGTERM);
    let status = info.end();
    assert_eq!(status.signal(), Some(Signal::SIGTERM as i32), "{status:?} {}", info.error());
}

#[test]
fn one_that_opens_a_topic_can_be_interrupted() {
    let test_node = TestNode::open();
    let node = test_node.serve();
    let mut sub =
        test_node.start(&["sub", "never", "--service", "external", "--service-timeout", "600"]);
    sub.wait_for("waiting for topic \"never\": it does not exist yet");
    // It asks again and again.
    node.signal(Signal::SIGSTOP);
    let service = format!("waiting for the node's service in {}", test_node.node().display());
    sub.wait_for(&format!("{service} (process {}) to answer; it is stopped", node.id()));
    assert_eq!(sub.error().matches(&service).count(), 1, "{}", sub.error());
    sub.signal(Signal::SIGINT);
    sub.succeed();
    node.signal(Signal::SIGCONT);
}

#[test]
fn programs_are_told_also_of_what_did_not_begin() {
    let test_node = TestNode::open();
    let outside = ["--service", "external", "--service-timeout", "0.1", "--json"];
    let mut all = vec![(test_node.start(&["sub", "never", "--timeout", "0.1", "--json"]), true)];
    for arguments in [&["sub", "t"][..], &["pub", "t", "--pattern"]] {
        let elsewhere = ["--directory", &test_node.path("elsewhere")];
        all.push((test_node.start(&[arguments, &outside, &elsewhere].concat()), false));
    }
    for (process, has_joined) in &mut all {
        assert_eq!(process.end().code(), Some(4), "{}", process.error());
        let said = parse(&process.output());
        assert_eq!((&said["messages"], &said["complete"]), (&0.into(), &false.into()), "{said}");
        assert_eq!(said["node"].is_string(), *has_joined, "{said}");
    }
}

#[test]
fn an_error_that_nobody_can_be_told_of_is_one_all_the_same() {
    let test_node = TestNode::open();
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (arguments, code) in [(&["clean", "/nowhere/at/all"][..], 6), (&["config"], 0)] {
        let mut command = test_node.command(arguments);
        command.env("FABRICAST_STRANGE", "1").stderr(full());
        assert_eq!(command.output().unwrap().status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn waits_have_the_end_that_was_asked_for() {
    let test_node = TestNode::open();
    let wait = ["--timeout", "0.1"];
    for arguments in [
        &["sub", "nobody-makes-it"][..],
        &["sub", "nobody-publishes", "--depth", "2"],
        &["pub", "nobody-reads", "--pattern", "--wait-for", "1"],
        &["sub", "nobody-serves", "--service", "external", "--service-timeout", "0.1"],
    ] {
        let (code, said) = test_node.run(&[arguments, &wait].concat());
        assert_eq!(code, Some(4), "{arguments:?}: {said}");
    }
}

#[test]
fn one_that_is_too_slow_is_evicted_and_says_what_it_missed() {
    let test_node = TestNode::open();
    // One that is stopped cannot serve.
    let mut node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "0.2", "--label", "slow one"];
    let mut sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let said = test_node.succeed(&["pub", "t", "--pattern", "--count", "10"]);
    assert!(said.contains("; 1 subscriber evicted for being too slow"), "{said}");
    sub.signal(Signal::SIGCONT);
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let said = sub.error();
    assert!(said.contains("evicted from the topic") && !said.contains("removed"), "{said}");
    assert!(said.contains("held_for") && !said.contains("Some("), "{said}");
    let expected =
        "t: 0 messages, 0 B; 10 missed; evicted for being too slow; 0 not what they should be\n";
    assert_eq!(sub.output(), expected);
    assert!(said.contains("fabricast: 10 messages are missing; "), "{said}");
    // Whoever runs the node finds the process.
    node.wait_for("it held a message for too long");
    let said = node.error();
    let line = said.lines().find(|line| line.contains("for too long")).unwrap();
    let process = format!("process={}", sub.id());
    for words in ["topic=\"t\"", "label=\"slow one\"", &process, "position=", "held_for="] {
        assert!(line.contains(words), "{words}: {line}");
    }
}

#[test]
fn programs_are_told_how_many_messages_an_evicted_subscriber_missed() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "0.2"];
    let mut sub = test_node.start(&[&["sub", "t", "--json"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let sent = test_node.json(&["pub", "t", "--pattern", "--count", "10", "--json"]);
    assert_eq!((&sent["evicted"], &sent["readers"]), (&1.into(), &0.into()), "{sent}");
    sub.signal(Signal::SIGCONT);
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let read = parse(&sub.output());
    assert_eq!((&read["messages"], &read["missed"]), (&0.into(), &10.into()), "{read}");
    assert_eq!((&read["evicted"], &read["complete"]), (&true.into(), &false.into()), "{read}");
}

/// Of a message that it was reading when it was evicted it cannot say that it had it.
#[test]
fn message_that_is_read_during_an_eviction_counts_as_missed() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let path = test_node.pipe("pipe");
    let mut reader = OpenOptions::new();
    reader.read(true).custom_flags(libc::O_NONBLOCK);
    let mut reader = reader.open(&path).unwrap();
    let settings = ["--largest", "4M", "--depth", "2", "--release-deadline", "0.2"];
    let mut sub =
        test_node.start(&[&["sub", "t", "--file", &path, "--json"][..], &settings].concat());
    let publish = ["pub", "t", "--pattern", "--size", "4M", "--count", "5", "--wait-for", "1"];
    let sent = test_node.json(&[&publish[..], &["--json"], &settings].concat());
    assert_eq!((&sent["messages"], &sent["evicted"]), (&5.into(), &1.into()), "{sent}");
    // It goes on with the message, of which it holds nothing any more.
    let mut bytes = vec![0; 1 << 20];
    let end = std::time::Instant::now() + TIMEOUT;
    while !sub.is_over() {
        assert!(std::time::Instant::now() < end, "it does not end");
        let _ = reader.read(&mut bytes);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let read = parse(&sub.output());
    assert_eq!((&read["messages"], &read["missed"]), (&0.into(), &5.into()), "{read}");
    assert_eq!(read["evicted"], true, "{read}");
}

#[test]
fn what_is_no_pattern_is_found() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "t", "--check", "--count", "2", "--json"]);
    let publish = ["pub", "t", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "a line that is no pattern\nshort\n", &[]).0, Some(0));
    assert_eq!(sub.end().code(), Some(5), "{}", sub.error());
    assert_eq!(parse(&sub.output())["altered"], 2);
    assert!(sub.error().contains("message 1: is none of a pattern"), "{}", sub.error());
    // That it was interrupted is said, too, but what came is worse.
    let mut sub = test_node.start(&["sub", "u", "--check", "--count", "2"]);
    let publish = ["pub", "u", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "a line\n", &[]).0, Some(0));
    sub.wait_for("message 1: is none of a pattern");
    sub.signal(Signal::SIGINT);
    assert_eq!(sub.end().code(), Some(5), "{}", sub.error());
    assert!(sub.error().contains("; interrupted"), "{}", sub.error());
}

#[test]
fn what_a_killed_node_left_is_removed_and_nothing_of_those_that_live() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    let socket = test_node.node().join("node.sock");
    let said = test_node.succeed(&["clean"]);
    assert!(said.contains("kept") && said.contains("a process serves the node"), "{said}");
    node.kill();
    assert!(socket.exists());
    let rehearsal = test_node.json(&["clean", "--dry-run", "--json"]);
    assert_eq!(rehearsal["removed"][0]["path"], socket.display().to_string(), "{rehearsal}");
    assert!(socket.exists(), "a rehearsal removes nothing");
    let both = ["clean", "/nowhere/at/all", &test_node.node().display().to_string()];
    let (code, said) = test_node.run(&both);
    assert_eq!(code, Some(6), "{said}");
    assert!(said.starts_with("removed ") && said.contains("node.sock"), "{said}");
    assert!(!socket.exists());
    assert!(test_node.succeed(&["clean"]).contains("nothing is there"));
    assert_eq!(test_node.run(&["clean", "/nowhere/at/all"]).0, Some(6));
    // The next one finds all as it has to be.
    let mut node = test_node.serve();
    node.signal(Signal::SIGTERM);
    node.succeed();
    assert!(!socket.exists());
}

#[test]
fn one_that_has_hardly_begun_ends_by_the_signal_itself() {
    let test_node = TestNode::open();
    for pause in [0, 1, 2, 5, 20, 50, 100, 150] {
        let mut sub = test_node.start(&["sub", "t"]);
        std::thread::sleep(Duration::from_millis(pause));
        sub.signal(Signal::SIGINT);
        let status = sub.end();
        let is_interrupted =
            status.signal() == Some(Signal::SIGINT as i32) || status.code() == Some(130);
        // One that waits already ends in order.
        let has_begun = status.success() && sub.error().contains("waiting for topic");
        assert!(is_interrupted || has_begun, "after {pause} ms: {status:?} {}", sub.error());
    }
}

/// As a shell starts what runs in the background of a script.
#[test]
fn one_that_was_told_not_to_care_for_it_does_not() {
    let test_node = TestNode::open();
    let program = env!("CARGO_BIN_EXE_fabricast");
    let script =
        format!("trap '' INT; {program} info >{} & kill -INT $!; wait $!", test_node.path("info"));
    let status = std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
    assert!(status.success(), "{status:?}");
}

#[test]
fn killed_publisher_is_named_by_its_process() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "cam", "--check", "--largest", "1M"]);
    test_node.wait_until("a subscriber", |report| topic(report, "cam").is_some());
    let publish = ["pub", "cam", "--pattern", "--size", "1K", "--rate", "20"];
    let mut publisher = test_node.start(&publish);
    // The subscriber asks the node for the process soon after the first message.
    std::thread::sleep(Duration::from_secs(4));
    publisher.kill();
    let lost = format!(
        "fabricast: topic \"cam\": a publisher ended without leaving (process {} \"fabricast pub\"); its last messages may \
         be missing\n",
        publisher.id()
    );
    sub.wait_for("may be missing\n");
    sub.signal(Signal::SIGINT);
    sub.end();
    let said = sub.error();
    assert!(said.ends_with(&lost), "{said}");
    assert!(!said.contains("WARN"), "{said}");
}

#[test]
fn publisher_says_each_time_that_the_last_subscriber_has_gone() {
    let test_node = TestNode::open();
    let publish = ["pub", "cam", "--pattern", "--size", "1K", "--rate", "100", "--wait-for", "1"];
    let mut publisher = test_node.start(&publish);
    let gone = "fabricast: topic \"cam\": the last subscriber has gone; messages are published to no subscriber\n";
    let place = test_node.node().display().to_string();
    let mut said =
        format!("fabricast: waiting for 1 subscriber of topic \"cam\" (node directory: {place})\n");
    publisher.wait_for(&said);
    for _ in 0..2 {
        test_node.succeed(&["sub", "cam", "--check", "--count", "5"]);
        said += gone;
        publisher.wait_for(&said);
    }
    publisher.signal(Signal::SIGINT);
    publisher.end();
    assert!(publisher.error().starts_with(&said), "{}", publisher.error());
    assert_eq!(publisher.error().matches(gone).count(), 2, "{}", publisher.error());
}
