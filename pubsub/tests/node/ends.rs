//! The last publisher or subscriber of a topic leaves, or is killed.

use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pubsub::{ErrorKind, Event, PublisherEvent, Subscriber};

use crate::support::{ChildProcess, TIMEOUT, TestDir, number_of, publish, settings, until};

/// The events until the last publisher has gone.
#[track_caller]
fn events_until_the_end(subscriber: &mut Subscriber) -> Vec<Event> {
    let mut events = Vec::new();
    until("the end of the last publisher", || {
        events.extend(std::iter::from_fn(|| subscriber.poll_event()));
        events.contains(&Event::NoPublishers)
    });
    events
}

#[test]
fn killed_publisher_ends_its_subscriber_after_its_last_message() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    subscriber.end_without_publishers(true);
    let mut idle = topic.subscriber().unwrap();
    // It waits: there was no publisher yet.
    let error = subscriber.pull(Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    let mut child = ChildProcess::start("publishes-forever numbers", test_dir.path());
    let mut next = 0;
    scope(|scope| {
        let reading = scope.spawn(|| {
            for sample in subscriber.samples(TIMEOUT) {
                assert_eq!(number_of(&sample.unwrap()), next);
                next += 1;
            }
        });
        until("the publisher", || !topic.publishers().is_empty());
        let found = &topic.publishers()[0];
        assert_eq!((found.process, found.node), (Some(child.id()), None));
        assert_eq!((found.label.as_str(), found.is_alive), ("test", true));
        for _ in 0..100 {
            drop(idle.pull(TIMEOUT).unwrap());
        }
        child.kill();
        let since = Instant::now();
        while idle.pull(Duration::from_millis(500)).is_ok() {}
        reading.join().unwrap();
        assert!(since.elapsed() < TIMEOUT / 4, "{:?}", since.elapsed());
    });
    assert!(next >= 100);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::NoPublishers);
    assert!(topic.publishers().is_empty());
    // One event, also for a subscriber that does not end then.
    let events = events_until_the_end(&mut idle);
    assert!(matches!(events[..], [Event::PublisherLost { .. }, Event::NoPublishers]), "{events:?}");
    assert_eq!((idle.poll_event(), idle.try_pull().unwrap().is_none()), (None, true));
    // A later publisher is read, and ends in turn.
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 7..8);
    drop(publisher);
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 7);
    assert_eq!(subscriber.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::NoPublishers);
    assert_eq!(events_until_the_end(&mut idle), [Event::NoPublishers]);
}

#[test]
fn end_of_the_last_publisher_wakes_waits_and_pollers() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let publishers = [topic.publisher().unwrap(), topic.publisher().unwrap()];
    let [mut waiting, mut polled] = [topic.subscriber().unwrap(), topic.subscriber().unwrap()];
    waiting.end_without_publishers(true);
    assert!(polled.try_pull().unwrap().is_none());
    polled.descriptor().unwrap();
    assert!(polled.try_pull().unwrap().is_none());
    scope(|scope| {
        let pulled = scope.spawn(|| waiting.pull(TIMEOUT).unwrap_err());
        let [first, second] = publishers;
        drop(first);
        sleep(Duration::from_millis(50));
        assert!(!pulled.is_finished());
        assert_eq!(polled.poll_event(), None);
        let since = Instant::now();
        // Closed, or dropped: the same.
        second.close();
        assert_eq!(pulled.join().unwrap().kind(), ErrorKind::NoPublishers);
        assert!(since.elapsed() < TIMEOUT / 4);
        let mut entry = [PollFd::new(polled.descriptor().unwrap(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut entry, PollTimeout::from(10_000_u16)).unwrap(), 1);
    });
    assert!(polled.try_pull().unwrap().is_none());
    assert_eq!(polled.poll_event(), Some(Event::NoPublishers));
    assert_eq!(polled.poll_event(), None);
}

#[test]
fn subscriber_finds_publishers_that_came_and_went() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    drop(topic.publisher().unwrap());
    let mut subscriber = topic.subscriber().unwrap();
    subscriber.end_without_publishers(true);
    // One that had left before does not count.
    assert!(subscriber.try_pull().unwrap().is_none() && subscriber.poll_event().is_none());
    let other = test_dir.join_served();
    let publisher = other.topic("numbers", &settings()).unwrap().publisher().unwrap();
    publish(&publisher, 0..3);
    drop(publisher);
    let numbers = subscriber.samples(TIMEOUT).map(|sample| number_of(&sample.unwrap()));
    assert_eq!(numbers.collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(events_until_the_end(&mut subscriber), [Event::NoPublishers]);
}

#[test]
fn publisher_is_told_when_its_last_subscriber_is_killed() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    publisher.wait_for_no_subscribers(Duration::ZERO).unwrap();
    assert_eq!(publisher.poll_event(), None, "there was none");
    let mut child = ChildProcess::start("external subscribes numbers", test_dir.path());
    publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
    let other = topic.subscriber().unwrap();
    child.kill();
    let error = publisher.wait_for_no_subscribers(Duration::from_millis(200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(error.detail().contains("left after 200ms"), "{error}");
    assert_eq!(publisher.poll_event(), None);
    drop(other);
    publisher.wait_for_no_subscribers(TIMEOUT).unwrap();
    assert_eq!(publisher.poll_event(), Some(PublisherEvent::NoSubscribers));
    assert_eq!(publisher.poll_event(), None);
    // One that was there only for a message.
    let subscriber = topic.subscriber().unwrap();
    publish(&publisher, 0..1);
    drop(subscriber);
    assert_eq!(publisher.poll_event(), Some(PublisherEvent::NoSubscribers));
}
