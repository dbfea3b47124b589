//! Processes with a low limit of descriptors or of the file size: an operation that exceeds it
//! fails at once, and the error names the limit.

use std::time::{Duration, Instant};

use pubsub::{ErrorKind, Node, NodeOptions};

use crate::support::{ChildProcess, TestDir, options, settings};

/// Raises a limit step by step: the lowest is refused, the highest suffices.
fn sweep(test_dir: &TestDir, role: &str, limits: impl Iterator<Item = u64>) {
    let outcomes: Vec<_> = limits
        .map(|limit| {
            let mut other = ChildProcess::start_piped(&format!("{role} {limit}"), test_dir.path());
            let outcome = other.line();
            other.finish();
            (limit, outcome.expect("the child reports an outcome"))
        })
        .collect();
    let is_enough = |(_, outcome): &&(u64, String)| outcome == "delivered";
    assert!(!outcomes.first().iter().any(is_enough), "{outcomes:?}");
    assert!(outcomes.last().iter().all(is_enough), "{outcomes:?}");
}

/// Numbers of descriptors, from far too few to enough. The driver of a GPU opens many.
fn descriptors() -> impl Iterator<Item = u64> {
    match settings().memory.to_string().starts_with("cuda") {
        true => (8..600).step_by(16),
        false => (6..120).step_by(2),
    }
}

#[test]
fn few_descriptors_fail_with_the_name_of_the_limit() {
    sweep(&TestDir::new(), "has-few-descriptors", descriptors());
}

#[test]
fn member_with_few_descriptors_joins_or_names_the_limit() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    sweep(&test_dir, "external has-few-descriptors", descriptors());
    drop(node);
}

#[test]
fn file_size_limit_is_an_error_and_not_a_signal() {
    let limits = (0..33).map(|bits| (1_u64 << bits) - 1);
    sweep(&TestDir::new(), "has-short-files", limits);
}

#[test]
fn service_out_of_descriptors_refuses_new_members() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start_piped("serves-with-few-descriptors 80", test_dir.path());
    assert_eq!(service.line().as_deref(), Some("serves"));
    let mut nodes = Vec::new();
    let since = Instant::now();
    let error = loop {
        match Node::join(NodeOptions { label: "one more".into(), ..options(test_dir.path()) }) {
            Ok(node) if nodes.len() < 64 => nodes.push(node),
            Ok(_) => panic!("64 members joined, more than the service has descriptors for"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TooMany);
    let text = error.to_string();
    for part in [&format!("process {}", service.id()), "of 80 descriptors are open", "ulimit -n"] {
        assert!(text.contains(part), "{text}");
    }
    assert!(since.elapsed() < Duration::from_secs(20), "after {:?}", since.elapsed());
    // Existing members are still served.
    nodes[0].report().unwrap();
    drop(nodes);
    service.end();
}

#[test]
fn directory_too_long_for_a_socket_is_not_created() {
    let test_dir = TestDir::new();
    let directory = test_dir.path().join("d".repeat(135));
    let error = Node::join(options(&directory)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("1 to 107 bytes"), "{error}");
    assert!(!test_dir.path().exists(), "the directory was created");
}

#[test]
fn file_in_place_of_the_socket_is_reported() {
    let test_dir = TestDir::new();
    drop(test_dir.join());
    std::fs::write(test_dir.path().join("node.sock"), "a file").unwrap();
    for error in [
        Node::join(options(test_dir.path())).unwrap_err(),
        pubsub::report(test_dir.path()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(
            error.to_string().contains("is a regular file, not a socket. Remove it"),
            "{error}"
        );
    }
}
