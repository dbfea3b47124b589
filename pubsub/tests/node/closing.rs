//! Nodes and topics that a process closes while it still has objects of them.

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use pubsub::{ErrorKind, Row, TopicSettings};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, publish, settings, until,
};

#[test]
fn closed_node_does_not_block_publishers_of_other_processes() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    // An eviction would take longer than the test may.
    let settings = TopicSettings { release_deadline: 4 * TIMEOUT, ..settings() };
    let publisher = node.topic("numbers", &settings).unwrap().publisher().unwrap();
    let mut child = ChildProcess::start_piped("external closes-its-node numbers", test_dir.path());
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    // The subscriber holds one message, and has not read eight.
    publish(&publisher, 0..9);
    assert!(publisher.try_push(&message(9)).unwrap().is_none());
    let since = Instant::now();
    scope(|scope| {
        let blocked = scope.spawn(|| publisher.push(&message(9), TIMEOUT));
        sleep(Duration::from_millis(50));
        child.say("close");
        blocked.join().unwrap().unwrap();
    });
    assert!(since.elapsed() < TIMEOUT / 4, "{:?}", since.elapsed());
    assert_eq!(child.line().as_deref(), Some("closed"));
    // It exists, and is a member: it holds one sample.
    publish(&publisher, 10..16);
    assert_eq!(publisher.subscribers(), 0);
    until("the service knows that it does not subscribe", || {
        let is_subscriber = |row: &Row| matches!(row, Row::Subscriber { .. });
        !node.report().unwrap().iter().any(is_subscriber)
    });
    child.end();
}

/// The child: subscribes, holds one sample, and closes its node.
pub fn close_node(node: &pubsub::Node, topic: &str) {
    let topic = node.open(topic).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let publisher = topic.publisher().unwrap();
    let held = subscriber.pull(TIMEOUT).unwrap();
    assert_eq!(testkit::children::next_line().as_deref(), Some("close"));
    node.close();
    let expected = format!("the node {} was closed", node.directory().display());
    let closed = |error: pubsub::Error| {
        assert_eq!((error.kind(), error.detail()), (ErrorKind::Closed, expected.as_str()));
    };
    closed(subscriber.pull(TIMEOUT).unwrap_err());
    closed(subscriber.try_pull().unwrap_err());
    closed(publisher.push(&message(0), TIMEOUT).unwrap_err());
    closed(publisher.loan(1, TIMEOUT).unwrap_err());
    closed(publisher.flush(TIMEOUT).unwrap_err());
    closed(topic.publisher().unwrap_err());
    closed(topic.subscriber().unwrap_err());
    closed(node.open(topic.name()).unwrap_err());
    closed(node.wait_for_topic("another", TIMEOUT).unwrap_err());
    closed(node.report().unwrap_err());
    closed(node.check().unwrap_err());
    assert_eq!(number_of(&held), 0);
    testkit::children::say("closed");
    testkit::children::wait_for_end_of_input();
    assert_eq!(number_of(&held), 0);
    assert!(held.is_valid());
}

#[test]
fn closed_node_ends_waits_for_its_service() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let other = test_dir.join_served();
    scope(|scope| {
        let waiting = scope.spawn(|| other.wait_for_topic("missing", TIMEOUT).map(drop));
        sleep(Duration::from_millis(50));
        other.close();
        assert_eq!(waiting.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    // The other membership of this process stays.
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..1);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
}

#[test]
fn process_that_closed_the_node_it_serves_serves_others() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let kept = node.topic("kept", &settings()).unwrap();
    node.close();
    let other = test_dir.join_served();
    let topic = other.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..1);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
    drop((kept, node));
}
