//! The last publisher or subscriber of a topic is on another node, and leaves or is killed.

use std::time::{Duration, Instant};

use pubsub::{ErrorKind, Event, NetworkOptions, Node, PublisherEvent, Subscriber};

use crate::between::{address, join, network};
use crate::support::{ChildProcess, TIMEOUT, TestDir, number_of, publish, settings, until};

const LOST_AFTER: Duration = Duration::from_secs(3);

struct World {
    writing: TestDir,
    writer: [std::net::SocketAddr; 2],
    reader: Node,
    _reading: TestDir,
}

impl World {
    fn new() -> Self {
        let (writing, reading) = (TestDir::new(), TestDir::new());
        let writer = [address(), address()];
        let options = NetworkOptions { lost_after: LOST_AFTER, ..network(writer[1], &[writer[0]]) };
        let reader = join(reading.path(), options);
        Self { writing, writer, reader, _reading: reading }
    }

    /// The service of the publishing node, in a process of its own.
    fn start_service(&self) -> ChildProcess {
        let role = format!("serves {} {}", self.writer[0], self.writer[1]);
        let service = ChildProcess::start(&role, self.writing.path());
        until("the service", || self.reader.report().is_ok());
        service
    }

    /// A subscriber that ends without publishers.
    fn subscriber(&self) -> Subscriber {
        let topic = self.reader.topic("numbers", &settings()).unwrap();
        let mut subscriber = topic.subscriber().unwrap();
        subscriber.end_without_publishers(true);
        subscriber
    }
}

/// Reads all messages in order until the end. Returns their number.
#[track_caller]
fn read_until_the_end(subscriber: &mut Subscriber) -> u64 {
    let mut next = 0;
    for sample in subscriber.samples(TIMEOUT) {
        assert_eq!(number_of(&sample.unwrap()), next);
        next += 1;
    }
    next
}

#[test]
fn end_of_a_remote_publisher_follows_its_last_message() {
    let world = World::new();
    // Without it the other node would hear of each subscription.
    let mut watching = world.subscriber();
    let _service = world.start_service();
    for _ in 0..3 {
        let mut subscriber = world.subscriber();
        let role = "publishes-and-leaves numbers 200";
        let mut child = ChildProcess::start(role, world.writing.path());
        assert_eq!(read_until_the_end(&mut subscriber), 200);
        assert_eq!(subscriber.missed(), 0);
        assert_eq!(subscriber.poll_event(), Some(Event::NoPublishers));
        assert_eq!(subscriber.poll_event(), None);
        assert!(subscriber.publishers().is_empty());
        child.finish();
        while watching.try_pull().is_ok() {}
        assert_eq!(watching.poll_event(), Some(Event::NoPublishers));
    }
}

#[test]
fn end_of_a_killed_remote_publisher_is_reported() {
    let world = World::new();
    let mut subscriber = world.subscriber();
    let _service = world.start_service();
    let mut child = ChildProcess::start("publishes-and-waits numbers 5", world.writing.path());
    assert_eq!(subscriber.wait_for_publishers(1, TIMEOUT).unwrap(), 1);
    let found = &subscriber.publishers()[0];
    assert!(found.node.is_some() && found.publisher.is_none() && found.process.is_none());
    assert_eq!((found.label.as_str(), found.is_alive), ("test", true));
    for expected in 0..5 {
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!((number_of(&sample), sample.origin()), (expected, found.node));
    }
    child.kill();
    let error = subscriber.pull(TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoPublishers);
}

#[test]
fn node_with_the_last_publisher_counts_until_it_is_given_up() {
    let world = World::new();
    let mut subscriber = world.subscriber();
    let role = format!("joins-publishes-and-waits {} {} 5", world.writer[0], world.writer[1]);
    let mut child = ChildProcess::start(&role, world.writing.path());
    for expected in 0..5 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    child.kill();
    let since = Instant::now();
    until("the loss of the node", || subscriber.publishers().iter().any(|it| !it.is_alive));
    assert!(subscriber.try_pull().unwrap().is_none(), "it may return");
    assert_eq!(subscriber.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::NoPublishers);
    // The service may have detected the loss a little earlier.
    let expected = LOST_AFTER / 2..TIMEOUT / 4;
    assert!(expected.contains(&since.elapsed()), "{:?}", since.elapsed());
    assert!(subscriber.publishers().is_empty());
}

#[test]
fn publisher_outlives_a_takeover_on_either_node() {
    let world = World::new();
    let mut subscriber = world.subscriber();
    let service = world.start_service();
    let publisher_node = world.writing.join_served();
    let publisher = publisher_node.topic("numbers", &settings()).unwrap().publisher().unwrap();
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    publish(&publisher, 0..1);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
    // A member serves the publishing node after it.
    let mut successor = ChildProcess::start_piped("waits-to-serve", world.writing.path());
    assert_eq!(successor.line().as_deref(), Some("joined"));
    drop(service);
    let error = subscriber.pull(2 * LOST_AFTER + Duration::from_secs(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(subscriber.poll_event().is_none());
    publish(&publisher, 1..2);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 1);
    drop(publisher);
    assert_eq!(subscriber.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::NoPublishers);
}

#[test]
fn publisher_is_told_when_the_last_remote_subscriber_has_gone() {
    let world = World::new();
    let topic = world.reader.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    let role = |name: &str| format!("{name} {} {} 1", world.writer[0], world.writer[1]);
    // It reads one message, and leaves.
    let mut child = ChildProcess::start(&role("joins-and-reads"), world.writing.path());
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    publish(&publisher, 0..1);
    publisher.wait_for_no_subscribers(TIMEOUT).unwrap();
    assert_eq!(publisher.poll_event(), Some(PublisherEvent::NoSubscribers));
    child.finish();
    // The node is killed.
    let mut child = ChildProcess::start(&role("joins-and-reads"), world.writing.path());
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    child.kill();
    let since = Instant::now();
    publisher.wait_for_no_subscribers(TIMEOUT).unwrap();
    let expected = LOST_AFTER / 2..TIMEOUT / 4;
    assert!(expected.contains(&since.elapsed()), "{:?}", since.elapsed());
    assert_eq!(publisher.poll_event(), Some(PublisherEvent::NoSubscribers));
}
