//! A service ends or is killed, and another process takes over.

use std::time::{Duration, Instant};

use pubsub::{ErrorKind, Row, TopicSettings};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, number_of, options, publish, settings, until,
};

/// The ordinal of the running service.
fn service_number(test_dir: &TestDir) -> Option<u32> {
    match pubsub::report(test_dir.path()).ok()?.first()? {
        Row::Node { service, .. } => Some(*service),
        _ => None,
    }
}

#[test]
fn another_process_serves_after_the_service_leaves() {
    let test_dir = TestDir::new();
    let first = test_dir.join();
    let second = test_dir.join();
    let identity = first.identity();
    let publishing = first.topic("numbers", &settings()).unwrap();
    let reading = second.open("numbers").unwrap();
    let (publisher, mut subscriber) =
        (publishing.publisher().unwrap(), reading.subscriber().unwrap());
    publish(&publisher, 0..5);
    drop((publisher, publishing, first));
    for expected in 0..5 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    // The other member serves, and a third one joins.
    let third = test_dir.join();
    assert_eq!(third.identity(), identity);
    assert_eq!(service_number(&test_dir), Some(2));
    let topic = third.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 5..9);
    for expected in 5..9 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    drop((second, third, topic, publisher, subscriber, reading));
    // All members have left: the next process creates another node.
    assert_ne!(test_dir.join().identity(), identity);
}

/// Messages flow between two processes while the service is ended repeatedly.
fn numbers_flow_while_services(end: fn(&mut ChildProcess)) {
    const COUNT: u64 = 20_000;
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    let mut publisher = ChildProcess::start(&format!("publishes numbers {COUNT}"), test_dir.path());
    let mut next_end = COUNT / 8;
    for expected in 0..COUNT {
        if expected == next_end {
            next_end += COUNT / 8;
            end(&mut service);
            service = ChildProcess::start("serves", test_dir.path());
        }
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    publisher.finish();
    assert!(subscriber.try_pull().unwrap().is_none(), "a message was delivered twice");
    // The last service creates topics and admits members.
    let other = node.topic("others", &settings()).unwrap();
    let mut subscriber = other.subscriber().unwrap();
    let mut publisher = ChildProcess::start("publishes others 1", test_dir.path());
    assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
    publisher.finish();
}

#[test]
fn nothing_is_lost_when_services_are_killed() {
    numbers_flow_while_services(ChildProcess::kill);
}

#[test]
fn nothing_is_lost_when_services_end_in_order() {
    numbers_flow_while_services(ChildProcess::end);
}

#[test]
fn publisher_and_service_killed_together_are_reclaimed() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    for _ in 0..5 {
        let mut publisher = ChildProcess::start("publishes-forever numbers", test_dir.path());
        for expected in 0..100 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
        service.kill();
        publisher.kill();
        service = ChildProcess::start("serves", test_dir.path());
        // Messages published before the kill are delivered in order.
        let mut expected = 100;
        until("the publisher to be reclaimed", || {
            while let Some(sample) = subscriber.try_pull().unwrap() {
                assert_eq!(number_of(&sample), expected);
                expected += 1;
            }
            let rows = pubsub::report(test_dir.path()).unwrap_or_default();
            !rows.is_empty() && !rows.iter().any(|row| matches!(row, Row::Publisher { .. }))
        });
        while let Some(sample) = subscriber.try_pull().unwrap() {
            assert_eq!(number_of(&sample), expected);
            expected += 1;
        }
    }
    drop(subscriber);
    until("all memory to be free", || {
        let rows = node.report().unwrap();
        rows.iter().all(|row| !matches!(row, Row::Pool { blocks, .. } if *blocks > 0))
    });
}

#[test]
fn member_without_a_service_uses_existing_topics() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..1);
    service.kill();
    publish(&publisher, 1..5);
    for expected in 0..5 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    let _next = pubsub::Node::join(options(test_dir.path())).unwrap();
    until("the next service", || service_number(&test_dir) == Some(2));
    assert!(node.topic("more", &settings()).is_ok());
}

/// The release deadline is longer than a takeover takes.
#[test]
fn blocked_publisher_is_seen_by_the_next_service() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let deadline = Duration::from_millis(1500);
    let hasty = TopicSettings { release_deadline: deadline, ..settings() };
    let topic = node.topic("numbers", &hasty).unwrap();
    let (publisher, mut greedy) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..8);
    let held: Vec<_> = (0..8).map(|_| greedy.pull(TIMEOUT).unwrap()).collect();
    publish(&publisher, 8..16);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| publish(&publisher, 16..17));
        until("a blocked publisher", || {
            let rows = node.report().unwrap();
            rows.iter().any(|row| matches!(row, Row::Publisher { waits_microseconds, .. } if *waits_microseconds > 0))
        });
        // The service that was notified is dead.
        service.kill();
        service = ChildProcess::start("serves", test_dir.path());
        blocked.join().unwrap();
    });
    assert_eq!(greedy.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
    assert_eq!(held.iter().map(number_of).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert_eq!(service_number(&test_dir), Some(2));
}

/// The time that a subscriber has blocked a publisher counts across services.
#[test]
fn release_deadline_is_kept_over_a_takeover() {
    let test_dir = TestDir::new();
    let mut service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let deadline = Duration::from_secs(4);
    let hasty = TopicSettings { release_deadline: deadline, ..settings() };
    let topic = node.topic("numbers", &hasty).unwrap();
    let (publisher, mut idle) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publish(&publisher, 0..8);
    std::thread::scope(|scope| {
        let start = Instant::now();
        let blocked = scope.spawn(|| publish(&publisher, 8..9));
        std::thread::sleep(deadline * 3 / 4);
        service.kill();
        service = ChildProcess::start("serves", test_dir.path());
        blocked.join().unwrap();
        let took = start.elapsed();
        assert!(took >= deadline && took < deadline * 3 / 2, "blocked for {took:?}");
    });
    assert_eq!(idle.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
}

/// The child holds the listening socket and the connections of the service, and answers none.
#[test]
fn forked_child_of_a_dead_service_blocks_no_takeover() {
    for end in [ChildProcess::kill as fn(&mut ChildProcess), |other| other.end()] {
        let test_dir = TestDir::new();
        let mut service = ChildProcess::start("serves-and-forks numbers", test_dir.path());
        until("a service", || service_number(&test_dir) == Some(1));
        let node = pubsub::Node::join(options(test_dir.path())).unwrap();
        let topic = node.topic("numbers", &settings()).unwrap();
        let mut subscriber = topic.subscriber().unwrap();
        end(&mut service);
        let other = test_dir.join();
        assert_eq!(other.identity(), node.identity());
        publish(&other.open("numbers").unwrap().publisher().unwrap(), 0..3);
        until("the numbers", || number_of(&subscriber.pull(TIMEOUT).unwrap()) == 2);
        assert!(node.topic("more", &settings()).is_ok());
    }
}
