//! How processes end: by a signal, evicted, or killed; and what they leave.

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
fn wait_for_subscribers_can_be_interrupted() {
    let test_node = TestNode::open();
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--wait-for", "1", "--json"]);
    publisher.wait_for("waiting for 1 subscriber");
    publisher.signal(Signal::SIGINT);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&0.into(), &false.into()), "{sent}");
}

#[test]
fn wait_for_space_can_be_interrupted() {
    let test_node = TestNode::open();
    // A stopped subscriber cannot serve.
    let _node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "600"];
    let mut sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--json"]);
    test_node.wait_until("a wait for space", |report| {
        let waits = topic(report, "t").map(|topic| &topic["publishers"][0]["waits_microseconds"]);
        waits.is_some_and(|waits| waits.as_u64() > Some(0))
    });
    let slow =
        format!("process {} (\"fabricast sub\") has 2 messages to read or release", sub.id());
    publisher.wait_for(&format!(
        "fabricast: waiting for space in topic \"t\": {slow} (node directory: "
    ));
    publisher.signal(Signal::SIGTERM);
    assert_eq!(publisher.end().code(), Some(130), "{}", publisher.error());
    assert_eq!(publisher.error().matches("waiting for space").count(), 1, "{}", publisher.error());
    let sent = parse(&publisher.output());
    assert_eq!((&sent["messages"], &sent["complete"]), (&2.into(), &false.into()), "{sent}");
    // With a timeout the wait ends.
    let (code, output) =
        test_node.run(&["pub", "t", "--pattern", "--count", "1", "--timeout", "0.2"]);
    assert_eq!(code, Some(4), "{output}");
    assert!(output.contains("no space in the topic within --timeout"), "{output}");
    // The published messages are complete, and the interrupt of a subscriber is no failure.
    sub.signal(Signal::SIGCONT);
    test_node.wait_until("that all was read", |report| {
        topic(report, "t").is_some_and(|topic| topic["subscribers"][0]["unread"] == 0)
    });
    sub.signal(Signal::SIGINT);
    assert!(sub.succeed().contains("2 messages"));
}

#[test]
fn publisher_names_the_stopped_subscriber_that_serves_the_node() {
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
        "waiting for space in topic \"t\": a subscriber has messages to read or release; process \
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
fn publisher_reports_its_wait_for_the_release_of_messages() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let mut sub =
        test_node.start(&["sub", "t", "--check", "--count", "1", "--release-deadline", "600"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let mut publisher = test_node.start(&["pub", "t", "--pattern", "--count", "1"]);
    let slow = format!("process {} (\"fabricast sub\") has 1 message to", sub.id());
    publisher.wait_for(&format!("waiting until all messages of topic \"t\" are released: {slow}"));
    sub.signal(Signal::SIGCONT);
    publisher.succeed();
    sub.succeed();
}

#[test]
fn process_ends_soon_when_the_service_is_stopped_and_says_so() {
    let test_node = TestNode::open();
    let node = test_node.serve();
    let mut sub = test_node.start(&["sub", "t", "--check", "--depth", "4"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    node.signal(Signal::SIGSTOP);
    let begin = std::time::Instant::now();
    sub.signal(Signal::SIGINT);
    sub.succeed();
    assert!(begin.elapsed() < Duration::from_secs(3), "took {:?}", begin.elapsed());
    let why =
        format!("left the node without an answer of its service: process {} is stopped", node.id());
    assert!(sub.error().contains(&why), "{}", sub.error());
    node.signal(Signal::SIGCONT);
    test_node.wait_until("that the subscriber has left", |report| topic(report, "t").is_none());
}

#[test]
fn wait_for_messages_can_be_interrupted() {
    let test_node = TestNode::open();
    // Before the topic exists, and after; with and without a number of messages to read.
    let mut early = test_node.start(&["sub", "never"]);
    early.wait_for("waiting for topic \"never\": it exists neither on this node");
    let mut counting = test_node.start(&["sub", "t", "--count", "3", "--depth", "4"]);
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    for process in [&early, &counting] {
        process.signal(Signal::SIGTERM);
    }
    early.succeed();
    assert_eq!(counting.end().code(), Some(130), "{}", counting.error());
}

#[test]
fn wait_for_the_other_end_of_a_pipe_can_be_interrupted() {
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
        process.wait_for("waiting for a reader");
    }
    for process in [&publisher, &sub, &counting] {
        process.signal(Signal::SIGTERM);
    }
    sub.succeed();
    for process in [&mut publisher, &mut counting] {
        assert_eq!(process.end().code(), Some(130), "{}", process.error());
        let output = parse(&process.output());
        assert_eq!(
            (&output["messages"], &output["complete"]),
            (&0.into(), &false.into()),
            "{output}"
        );
    }
}

#[test]
fn subscriber_with_full_output_can_be_interrupted() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let path = test_node.pipe("pipe");
    // Reads only the beginning, and does not wait for the writer.
    let mut reader = OpenOptions::new();
    reader.read(true).custom_flags(libc::O_NONBLOCK);
    let reader = reader.open(&path).unwrap();
    let settings = ["--largest", "1M", "--release-deadline", "600"];
    let sub = ["sub", "t", "--file", &path, "--json"];
    let mut sub = test_node.start(&[&sub[..], &settings].concat());
    let publish = ["pub", "t", "--pattern", "--size", "1M", "--count", "1", "--wait-for", "1"];
    let mut publisher = test_node.start(&[&publish[..], &settings].concat());
    test_node.wait_until("the first byte of a message", |_| {
        (&reader).read(&mut [0; 1]).is_ok_and(|length| length == 1)
    });
    sub.signal(Signal::SIGINT);
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["bytes"]), (&0.into(), &0.into()), "{read}");
    publisher.succeed();
}

#[test]
fn publisher_with_full_output_ends_by_the_signal() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let capacity = nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    full.write_all(&vec![0; capacity as usize]).unwrap();
    let publish = ["pub", "t", "--pattern", "--count", "1", "--wait-for", "1", "--json"];
    let mut publisher = test_node.start_to(&publish, full);
    publisher.wait_for("waiting for 1 subscriber");
    test_node.succeed(&["sub", "t", "--check", "--count", "1"]);
    test_node.wait_until("that the subscriber has left", |report| topic(report, "t").is_none());
    let status = publisher.interrupt();
    assert_eq!(status.signal(), Some(Signal::SIGINT as i32), "{status:?} {}", publisher.error());
}

#[test]
fn closed_output_ends_the_command_silently_with_141() {
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

/// Libraries of libfabric install handlers when they are loaded.
#[test]
fn info_ends_by_the_signal_itself() {
    let test_node = TestNode::open();
    let (_reader, mut full) = std::io::pipe().unwrap();
    let capacity = nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_GETPIPE_SZ).unwrap();
    full.write_all(&vec![0; capacity as usize]).unwrap();
    let mut info = test_node.start_to(&["info"], full);
    // It writes by then, or still queries providers.
    let status = format!("/proc/{}/status", info.id());
    let end = std::time::Instant::now() + TIMEOUT;
    let contains_sigterm = |mask: &str| {
        let all = std::fs::read_to_string(&status).unwrap();
        let found = all.lines().find_map(|line| line.strip_prefix(mask)).unwrap();
        u64::from_str_radix(found.trim(), 16).unwrap() & (1 << (Signal::SIGTERM as u32 - 1)) != 0
    };
    std::thread::sleep(Duration::from_millis(500));
    // Neither caught nor blocked.
    while contains_sigterm("SigCgt:") || contains_sigterm("SigBlk:") {
        assert!(std::time::Instant::now() < end, "SIGTERM is still caught or blocked");
        std::thread::sleep(Duration::from_millis(10));
    }
    info.signal(Signal::SIGTERM);
    let status = info.end();
    assert_eq!(status.signal(), Some(Signal::SIGTERM as i32), "{status:?} {}", info.error());
}

#[test]
fn wait_for_a_stopped_service_can_be_interrupted() {
    let test_node = TestNode::open();
    let node = test_node.serve();
    let mut sub =
        test_node.start(&["sub", "never", "--service", "external", "--service-timeout", "600"]);
    sub.wait_for("waiting for topic \"never\": it exists neither on this node");
    node.signal(Signal::SIGSTOP);
    let service = format!("waiting for the node's service in {}", test_node.node().display());
    sub.wait_for(&format!("{service} (process {}) to answer; it is stopped", node.id()));
    assert_eq!(sub.error().matches(&service).count(), 1, "{}", sub.error());
    sub.signal(Signal::SIGINT);
    sub.succeed();
    node.signal(Signal::SIGCONT);
}

#[test]
fn json_is_printed_also_without_a_node() {
    let test_node = TestNode::open();
    let external = ["--service", "external", "--service-timeout", "0.1", "--json"];
    let mut all = vec![(test_node.start(&["sub", "never", "--timeout", "0.1", "--json"]), true)];
    for arguments in [&["sub", "t"][..], &["pub", "t", "--pattern"]] {
        let other_node = ["--directory", &test_node.path("other")];
        all.push((test_node.start(&[arguments, &external, &other_node].concat()), false));
    }
    for (process, has_joined) in &mut all {
        assert_eq!(process.end().code(), Some(4), "{}", process.error());
        let output = parse(&process.output());
        assert_eq!(
            (&output["messages"], &output["complete"]),
            (&0.into(), &false.into()),
            "{output}"
        );
        assert_eq!(output["node"].is_string(), *has_joined, "{output}");
    }
}

#[test]
fn exit_code_does_not_depend_on_writable_stderr() {
    let test_node = TestNode::open();
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (arguments, code) in [(&["clean", "/nowhere/at/all"][..], 6), (&["config"], 0)] {
        let mut command = test_node.command(arguments);
        command.env("FABRICAST_UNKNOWN", "1").stderr(full());
        assert_eq!(command.output().unwrap().status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn help_that_cannot_be_written_is_an_error() {
    let test_node = TestNode::open();
    for arguments in [&["--help"][..], &["sub", "--help"], &["--version"], &["bench", "--help"]] {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = test_node.command(arguments).stdout(full).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
        assert!(error.starts_with("fabricast: write standard output failed: "), "{error}");
    }
}

#[test]
fn waits_end_after_the_timeout() {
    let test_node = TestNode::open();
    let wait = ["--timeout", "0.1"];
    for arguments in [
        &["sub", "never-created"][..],
        &["sub", "no-publisher", "--depth", "2"],
        &["pub", "no-subscriber", "--pattern", "--wait-for", "1"],
        &["sub", "no-service", "--service", "external", "--service-timeout", "0.1"],
    ] {
        let (code, output) = test_node.run(&[arguments, &wait].concat());
        assert_eq!(code, Some(4), "{arguments:?}: {output}");
    }
}

#[test]
fn evicted_subscriber_reports_what_it_missed() {
    let test_node = TestNode::open();
    // A stopped subscriber cannot serve.
    let mut node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "0.2", "--label", "slow"];
    let mut sub = test_node.start(&[&["sub", "t", "--check"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let output = test_node.succeed(&["pub", "t", "--pattern", "--count", "10"]);
    assert!(output.contains("; 1 subscriber evicted as too slow"), "{output}");
    sub.signal(Signal::SIGCONT);
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let output = sub.error();
    assert!(output.contains("evicted from the topic") && !output.contains("removed"), "{output}");
    assert!(output.contains("held_for") && !output.contains("Some("), "{output}");
    let expected = "t: 0 messages, 0 B; 10 missed; evicted as too slow; 0 corrupted\n";
    assert_eq!(sub.output(), expected);
    assert!(output.contains("fabricast: 10 messages were missed; "), "{output}");
    // The log of the node names the process.
    node.wait_for("it blocked publishers past the release deadline");
    let output = node.error();
    let line = output.lines().find(|line| line.contains("past the release deadline")).unwrap();
    let process = format!("process={}", sub.id());
    for words in ["topic=\"t\"", "label=\"slow\"", &process, "position=", "held_for="] {
        assert!(line.contains(words), "{words}: {line}");
    }
}

#[test]
fn json_has_the_messages_an_evicted_subscriber_missed() {
    let test_node = TestNode::open();
    let _node = test_node.serve();
    let settings = ["--depth", "2", "--release-deadline", "0.2"];
    let mut sub = test_node.start(&[&["sub", "t", "--json"][..], &settings].concat());
    test_node.wait_until("a subscriber", |report| has_subscriber(report, "t"));
    sub.signal(Signal::SIGSTOP);
    let sent = test_node.json(&["pub", "t", "--pattern", "--count", "10", "--json"]);
    assert_eq!(
        (&sent["evicted_subscribers"], &sent["subscribers"]),
        (&1.into(), &0.into()),
        "{sent}"
    );
    sub.signal(Signal::SIGCONT);
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let read = parse(&sub.output());
    assert_eq!((&read["messages"], &read["missed"]), (&0.into(), &10.into()), "{read}");
    assert_eq!((&read["evicted"], &read["complete"]), (&true.into(), &false.into()), "{read}");
}

/// A subscriber holds the message that it reads, also once it is evicted.
#[test]
fn message_that_is_read_during_an_eviction_is_received() {
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
    assert_eq!((&sent["messages"], &sent["evicted_subscribers"]), (&5.into(), &1.into()), "{sent}");
    // The publisher continues with the message.
    let mut bytes = vec![0; 1 << 20];
    let end = std::time::Instant::now() + TIMEOUT;
    while !sub.has_ended() {
        assert!(std::time::Instant::now() < end, "the subscriber does not end");
        let _ = reader.read(&mut bytes);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(sub.end().code(), Some(8), "{}", sub.error());
    let read = parse(&sub.output());
    assert_eq!((&read["messages"], &read["missed"]), (&1.into(), &4.into()), "{read}");
    assert_eq!(read["evicted"], true, "{read}");
}

#[test]
fn message_without_pattern_is_reported_as_corrupted() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "t", "--check", "--count", "2", "--json"]);
    let publish = ["pub", "t", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "a line without pattern\nshort\n", &[]).0, Some(0));
    assert_eq!(sub.end().code(), Some(5), "{}", sub.error());
    assert_eq!(parse(&sub.output())["corrupted"], 2);
    assert!(sub.error().contains("message 1: is not a pattern message"), "{}", sub.error());
    // The interrupt is reported, too, but corrupted data decides the exit code.
    let mut sub = test_node.start(&["sub", "u", "--check", "--count", "2"]);
    let publish = ["pub", "u", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "a line\n", &[]).0, Some(0));
    sub.wait_for("message 1: is not a pattern message");
    sub.signal(Signal::SIGINT);
    assert_eq!(sub.end().code(), Some(5), "{}", sub.error());
    assert!(sub.error().contains("; interrupted"), "{}", sub.error());
}

#[test]
fn clean_removes_files_of_a_killed_node_only() {
    let test_node = TestNode::open();
    let mut node = test_node.serve();
    let socket = test_node.node().join("node.sock");
    let output = test_node.succeed(&["clean"]);
    assert!(output.contains("kept") && output.contains("a process serves the node"), "{output}");
    node.kill();
    assert!(socket.exists());
    let dry_run = test_node.json(&["clean", "--dry-run", "--json"]);
    let removed: Vec<_> = dry_run["removed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["path"].as_str().unwrap())
        .collect();
    let services = [test_node.node().join("copy-service"), socket.clone()];
    assert_eq!(removed, services.each_ref().map(|it| it.to_str().unwrap()), "{dry_run}");
    assert!(services.iter().all(|it| it.exists()), "a dry run removes nothing");
    let both = ["clean", "/nowhere/at/all", &test_node.node().display().to_string()];
    let (code, output) = test_node.run(&both);
    assert_eq!(code, Some(6), "{output}");
    assert!(output.starts_with("removed ") && output.contains("node.sock"), "{output}");
    assert!(services.iter().all(|it| !it.exists()));
    assert!(test_node.succeed(&["clean"]).contains("nothing to remove"));
    assert_eq!(test_node.run(&["clean", "/nowhere/at/all"]).0, Some(6));
    // The next service starts as usual.
    let mut node = test_node.serve();
    node.signal(Signal::SIGTERM);
    node.succeed();
    assert!(!socket.exists());
}

#[test]
fn interrupt_at_any_time_after_the_start_ends_the_process() {
    let test_node = TestNode::open();
    for pause in [0, 1, 2, 5, 20, 50, 100, 150] {
        let mut sub = test_node.start(&["sub", "t"]);
        std::thread::sleep(Duration::from_millis(pause));
        sub.signal(Signal::SIGINT);
        let status = sub.end();
        let is_interrupted =
            status.signal() == Some(Signal::SIGINT as i32) || status.code() == Some(130);
        // A waiting subscriber ends in order.
        let has_begun = status.success() && sub.error().contains("waiting for topic");
        assert!(is_interrupted || has_begun, "after {pause} ms: {status:?} {}", sub.error());
    }
}

/// A shell starts background jobs of a script so.
#[test]
fn ignored_signal_stays_ignored() {
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
    // The subscriber requests the name of the process soon after the first message.
    std::thread::sleep(Duration::from_secs(4));
    publisher.kill();
    let lost = format!(
        "fabricast: topic \"cam\": a publisher exited unexpectedly (process {} \"fabricast pub\"); its last messages may be \
         missing\n",
        publisher.id()
    );
    sub.wait_for("may be missing\n");
    sub.signal(Signal::SIGINT);
    sub.end();
    let output = sub.error();
    assert!(output.ends_with(&lost), "{output}");
    assert!(!output.contains("WARN"), "{output}");
}

#[test]
fn publisher_reports_each_loss_of_its_last_subscriber() {
    let test_node = TestNode::open();
    let publish = ["pub", "cam", "--pattern", "--size", "1K", "--rate", "100", "--wait-for", "1"];
    let mut publisher = test_node.start(&publish);
    let lost =
        "fabricast: topic \"cam\": the last subscriber has left; messages now have no subscriber\n";
    let directory = test_node.node().display().to_string();
    let mut output = format!(
        "fabricast: waiting for 1 subscriber of topic \"cam\" (node directory: {directory})\n"
    );
    publisher.wait_for(&output);
    for _ in 0..2 {
        test_node.succeed(&["sub", "cam", "--check", "--count", "5"]);
        output += lost;
        publisher.wait_for(&output);
    }
    publisher.signal(Signal::SIGINT);
    publisher.end();
    assert!(publisher.error().starts_with(&output), "{}", publisher.error());
    assert_eq!(publisher.error().matches(lost).count(), 2, "{}", publisher.error());
}
