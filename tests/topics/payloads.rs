//! Content of messages between processes.

use std::io::Write;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::test_node::{TestNode, parse, topic};

#[test]
fn pattern_arrives_complete() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "camera", "--check", "--count", "300", "--json"]);
    let mut other = test_node.start(&["sub", "camera", "--check", "--stats", "--count", "300"]);
    let mut publisher = test_node.start(&[
        "pub",
        "camera",
        "--pattern",
        "--size",
        "100K",
        "--count",
        "300",
        "--wait-for",
        "2",
        "--json",
    ]);
    let sent = parse(&publisher.succeed());
    assert_eq!((&sent["messages"], &sent["released"]), (&300.into(), &true.into()), "{sent}");
    assert_eq!(sent["bytes"], 300 * 100 * 1024);
    assert_eq!((&sent["subscribers"], &sent["complete"]), (&2.into(), &true.into()), "{sent}");
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["missed"]), (&300.into(), &0.into()), "{read}");
    assert_eq!((&read["corrupted"], &read["node"]), (&0.into(), &sent["node"]), "{read}");
    let stages: Vec<_> = read["stages"].as_array().unwrap().iter().map(|l| &l["stage"]).collect();
    assert_eq!(stages, ["total", "fill", "queue", "wakeup"]);
    let output = other.succeed();
    assert!(output.contains("300 messages") && output.contains("p99"), "{output}");
    assert!(output.contains("0 corrupted"), "{output}");
}

#[test]
fn publisher_without_catch_up_does_not_make_up_for_waits() {
    let test_node = TestNode::open();
    let rate = ["--rate", "10", "--no-catch-up", "--count", "12", "--json", "--interval", "0.01"];
    let mut publisher = test_node.start(&[&["pub", "t", "--pattern"][..], &rate].concat());
    while publisher.output().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    publisher.signal(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(1));
    publisher.signal(Signal::SIGCONT);
    let output = publisher.succeed();
    let sent = parse(output.lines().last().unwrap());
    // Eleven waits, one of which may have been within the stop.
    assert!(sent["seconds"].as_f64() > Some(1.9), "{sent}");
}

#[test]
fn publisher_reports_that_it_reads_from_a_terminal() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "t", "--count", "3", "--largest", "1K", "--lines"]);
    test_node.wait_until("the topic", |report| topic(report, "t").is_some());
    for (options, hint, input, count) in [
        (
            &["--lines"][..],
            "fabricast: reading messages from the terminal, one a line; end with Ctrl-D\n",
            "one\ntwo\n\x04",
            2,
        ),
        (
            &[],
            "fabricast: reading one message from the terminal; end it with Ctrl-D (with --lines, each line is a \
             message)\n",
            "three\n\x04",
            1,
        ),
    ] {
        let pair = nix::pty::openpty(None, None).unwrap();
        let publish = [&["pub", "t", "--wait-for", "1"][..], options].concat();
        let mut publisher = test_node.start_from(&publish, pair.slave);
        publisher.wait_for(hint);
        std::fs::File::from(pair.master.try_clone().unwrap()).write_all(input.as_bytes()).unwrap();
        let summary = publisher.succeed();
        assert!(summary.starts_with(&format!("t: {count} message")), "{summary}");
    }
    sub.succeed();
    assert_eq!(sub.output(), "one\ntwo\nthree\n\n");
    // Without a terminal there is no hint.
    let mut publisher = test_node.start_with(&["pub", "t", "--lines"], "line\n", &[]);
    publisher.succeed();
    assert!(!publisher.error().contains("terminal"), "{}", publisher.error());
}

#[test]
fn lines_and_whole_input_arrive_unchanged() {
    let test_node = TestNode::open();
    let text = "one\n\nthree\nno end";
    let mut sub = test_node.start(&["sub", "lines", "--lines", "--count", "4"]);
    let publish = ["pub", "lines", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, text, &[]).0, Some(0));
    assert_eq!(sub.succeed(), format!("{text}\n"));
    assert!(sub.error().contains("4 messages"), "{}", sub.error());

    let mut sub = test_node.start(&["sub", "whole", "--count", "1"]);
    let publish = ["pub", "whole", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, text, &[]).0, Some(0));
    assert_eq!(sub.succeed(), text);
    // One message has no rate.
    let output = sub.error();
    assert!(output.contains("whole: 1 message, ") && !output.contains("/s"), "{output}");
}

/// The run-time linker finds a file that is not a library.
#[test]
fn machine_without_libfabric_has_local_topics() {
    let test_node = TestNode::open();
    test_node.write("libfabric.so.1", "");
    let directory = test_node.directory.display().to_string();
    let environment = [("LD_LIBRARY_PATH", directory.as_str())];
    let mut sub = test_node.start_with(&["sub", "t", "--count", "1"], "", &environment);
    let publish = ["pub", "t", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "hello", &environment).0, Some(0));
    assert_eq!(sub.succeed(), "hello");
    assert_eq!(test_node.run_with(&["--help"], "", &environment).0, Some(0));
    for arguments in [&["info"][..], &["node", "--insecure", "--listen", "127.0.0.1:0"]] {
        let (code, output) = test_node.run_with(arguments, "", &environment);
        assert_eq!(code, Some(3), "{output}");
        for words in ["libfabric cannot be loaded (", "apt install --reinstall libfabric1"] {
            assert!(output.contains(words), "{words}: {output}");
        }
    }
}

#[test]
fn files_are_published_and_messages_written_to_files() {
    let test_node = TestNode::open();
    // Longer than one copy, and than the default largest message.
    let long: Vec<u8> = (0..3_000_001_u32).map(|at| (at * 7 % 251) as u8).collect();
    let (one, other) = (test_node.write("one", &long), test_node.write("other", "short"));
    let (into, end) = (test_node.path("into"), test_node.write("end", "begun "));
    let mut each = test_node.start(&["sub", "files", "--into", &into, "--count", "2"]);
    let mut all = test_node.start(&["sub", "files", "--file", &end, "--count", "2"]);
    let publish = ["pub", "files", "--file", &one, "--file", &other, "--wait-for", "2"];
    test_node.succeed(&publish);
    each.succeed();
    all.succeed();
    let read = |name: &str| std::fs::read(test_node.directory.join(name)).unwrap();
    assert!(read("into/00000001") == long && read("into/00000002") == b"short");
    assert_eq!(std::fs::read_dir(&into).unwrap().count(), 2, "no partial file");
    assert!(read("end") == [b"begun ", &long[..], b"short"].concat());
    // Existing files are not overwritten: numbers continue.
    let mut again = test_node.start(&["sub", "again", "--into", &into, "--count", "2"]);
    let publish = ["pub", "again", "--lines", "--wait-for", "1"];
    assert_eq!(test_node.run_with(&publish, "x\ny\n", &[]).0, Some(0));
    again.succeed();
    assert!(read("into/00000001") == long && read("into/00000002") == b"short");
    assert!(read("into/00000003") == b"x" && read("into/00000004") == b"y");
    // An unwritable directory is reported before the wait for messages.
    let file = test_node.write("a file", "");
    let (code, output) = test_node.run(&["sub", "again", "--into", &file, "--count", "1"]);
    assert!(code == Some(1) && output.contains("a file"), "{output}");
}

#[test]
fn empty_input_is_a_message() {
    let test_node = TestNode::open();
    let mut sub = test_node.start(&["sub", "t", "--check", "--count", "2", "--json"]);
    // Empty input has no lines.
    let lines = test_node.json(&["pub", "t", "--lines", "--wait-for", "1", "--json"]);
    assert_eq!(lines["messages"], 0, "{lines}");
    let whole = test_node.json(&["pub", "t", "--wait-for", "1", "--json"]);
    assert_eq!((&whole["messages"], &whole["bytes"]), (&1.into(), &0.into()), "{whole}");
    let file = test_node.write("empty", "");
    test_node.succeed(&["pub", "t", "--file", &file, "--wait-for", "1"]);
    sub.end();
    let read = parse(&sub.output());
    assert_eq!((&read["messages"], &read["bytes"]), (&2.into(), &0.into()), "{read}");
}

#[test]
fn messages_are_stored_on_a_requested_device() {
    let test_node = TestNode::open();
    let settings = ["--memory", "emulated:0", "--largest", "1M", "--depth", "4"];
    let sub = ["sub", "device", "--check", "--count", "20"];
    let mut sub = test_node.start(&[&sub[..], &settings].concat());
    let publish = ["pub", "device", "--pattern", "--count", "20", "--wait-for", "1"];
    test_node.succeed(&[&publish[..], &settings].concat());
    sub.succeed();
}

#[test]
fn dropped_messages_are_counted_without_failure() {
    let test_node = TestNode::open();
    // A stopped subscriber cannot serve.
    let _node = test_node.serve();
    let settings = ["--reliability", "drop-newest", "--depth", "2"];
    let sub = ["sub", "live", "--check", "--json"];
    let mut sub = test_node.start(&[&sub[..], &settings].concat());
    let report = test_node.wait_until("a subscriber", |report| {
        topic(report, "live").is_some_and(|topic| !topic["subscribers"][0].is_null())
    });
    assert_eq!(report["topics"][0]["reliability"], "drop-newest");
    sub.signal(Signal::SIGSTOP);
    let publish = ["pub", "live", "--pattern", "--size", "64", "--count", "100", "--json"];
    let sent = test_node.json(&publish);
    assert_eq!((&sent["messages"], &sent["dropped"]), (&100.into(), &98.into()), "{sent}");
    sub.signal(Signal::SIGCONT);
    let wait_until_read = || {
        test_node.wait_until("that all was read", |report| {
            let topic = topic(report, "live");
            topic.is_some_and(|topic| topic["subscribers"][0]["unread"] == 0)
        })
    };
    wait_until_read();
    test_node.succeed(&["pub", "live", "--pattern", "--size", "64", "--count", "1"]);
    wait_until_read();
    sub.signal(Signal::SIGINT);
    let read = parse(&sub.succeed());
    assert_eq!((&read["messages"], &read["corrupted"]), (&3.into(), &0.into()), "{read}");
}
