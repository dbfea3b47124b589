//! Processes join a node and its topics, in any order.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use pubsub::TopicSettings;
use pubsub::{
    Budgets, ErrorKind, MemoryLocation, Node, NodeOptions, Reliability, Row, ServiceMode,
};

use crate::support::{
    ChildProcess, TIMEOUT, TestDir, device_topic, message, number_of, options, orders, publish,
    settings, until,
};

#[test]
fn reader_and_writer_start_in_either_order() {
    // The first process is the service.
    for reader_first in [true, false] {
        let test_dir = TestDir::new();
        let node = test_dir.join();
        let topic = node.topic("numbers", &settings()).unwrap();
        let mut other;
        if reader_first {
            other = ChildProcess::start("reads numbers 100", test_dir.path());
            until("a reader", || has_subscriber(&node));
            publish(&topic.publisher().unwrap(), 0..100);
        } else {
            let mut subscriber = topic.subscriber().unwrap();
            other = ChildProcess::start("publishes numbers 100", test_dir.path());
            for expected in 0..100 {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        }
        other.finish();
    }
}

fn has_subscriber(node: &Node) -> bool {
    node.report().unwrap().iter().any(|row| matches!(row, Row::Subscriber { .. }))
}

#[test]
fn processes_of_one_node_start_in_every_order() {
    // The first process serves, or the external members wait for the one with role 0.
    let roles = ["serves", "publishes-to 2 numbers 20", "reads numbers 20", "reads numbers 20"];
    for mode in ["", "external "] {
        // The two readers are alike: half of the orders suffice.
        let position = |order: &[usize; 4], role| order.iter().position(|it| *it == role);
        let is_distinct = |order: &[usize; 4]| position(order, 2) < position(order, 3);
        for order in orders::<4>().into_iter().filter(is_distinct) {
            let test_dir = TestDir::new();
            let mut others = [const { None }; 4];
            for role in order {
                let mode = if role == 0 { "" } else { mode };
                others[role] =
                    Some(ChildProcess::start(&format!("{mode}{}", roles[role]), test_dir.path()));
                // Once publisher and both readers have joined, they may have finished already.
                let is_served = || mode.is_empty() || others[0].is_some();
                if others[1..].iter().any(Option::is_none) && is_served() {
                    let readers = others[2..].iter().flatten().count();
                    let is_publisher = |row: &Row| matches!(row, Row::Publisher { .. });
                    let is_reader = |row: &Row| matches!(row, Row::Subscriber { .. });
                    until("all started processes", || {
                        let rows = pubsub::report(test_dir.path()).unwrap_or_default();
                        let publishers = rows.iter().filter(|row| is_publisher(row)).count();
                        let has_publisher = publishers == usize::from(others[1].is_some());
                        let has_readers = rows.iter().filter(|row| is_reader(row)).count();
                        !rows.is_empty() && has_publisher && has_readers == readers
                    });
                }
            }
            let [serves, rest @ ..] = &mut others;
            rest.iter_mut().flatten().for_each(ChildProcess::finish);
            serves.as_mut().unwrap().end();
        }
    }
}

#[test]
fn many_processes_join_at_once_without_a_service() {
    let test_dir = TestDir::new();
    let mut readers: Vec<_> =
        (0..6).map(|_| ChildProcess::start("reads numbers 50", test_dir.path())).collect();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    until("six readers", || {
        let rows = node.report().unwrap();
        rows.iter().filter(|row| matches!(row, Row::Subscriber { .. })).count() == 6
    });
    publish(&topic.publisher().unwrap(), 0..50);
    readers.iter_mut().for_each(ChildProcess::finish);
}

#[test]
fn endless_timeouts_are_accepted() {
    const MAX: Duration = Duration::MAX;
    let test_dir = TestDir::new();
    let join =
        || Node::join(NodeOptions { service_timeout: MAX, ..options(test_dir.path()) }).unwrap();
    let (serving, node) = (join(), join());
    let settings = TopicSettings { release_deadline: MAX, ..settings() };
    let topic = node.topic("numbers", &settings).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publisher.push(&message(0), MAX).unwrap();
    publisher.loan(8, MAX).unwrap().publish(MAX).unwrap();
    let mut loan = publisher.loan(8, MAX).unwrap();
    loan.write(0, &[0; 8]).unwrap();
    assert!(matches!(loan.publish_within(MAX).unwrap(), pubsub::Attempt::Sent(_)));
    let (_, device) = device_topic();
    let memory = device.allocate(64).unwrap();
    publisher.push_slice(&memory.slice(0, 64).unwrap(), MAX).unwrap();
    for length in [message(0).len() as u64, 8, 8, 64] {
        assert_eq!(subscriber.pull(MAX).unwrap().length(), length);
    }
    publisher.flush(MAX).unwrap();
    // The topic is full: the next push blocks.
    publish(&publisher, 0..8);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| publisher.push(&message(8), MAX).unwrap());
        for expected in 0..9 {
            assert_eq!(number_of(&subscriber.pull(MAX).unwrap()), expected);
        }
        blocked.join().unwrap();
    });
    // The other member takes over.
    drop(serving);
    assert!(node.topic("others", &settings).is_ok());
}

#[test]
fn wait_for_topic_times_out_while_the_service_is_stopped() {
    let test_dir = TestDir::new();
    let service = ChildProcess::start("serves", test_dir.path());
    let node = test_dir.join_served();
    let timeout = Duration::from_millis(300);
    let wait_fails = |expected| {
        let since = std::time::Instant::now();
        assert_eq!(node.wait_for_topic("numbers", timeout).unwrap_err().kind(), expected);
        assert!(since.elapsed() < TIMEOUT / 2, "{:?}", since.elapsed());
    };
    wait_fails(ErrorKind::NotFound);
    service.stop();
    wait_fails(ErrorKind::DeadlineExceeded);
    service.resume();
    let topic = node.topic("numbers", &settings()).unwrap();
    assert!(node.wait_for_topic("numbers", timeout).is_ok());
    drop(topic);
}

#[test]
fn topic_keeps_the_settings_of_its_creator() {
    let test_dir = TestDir::new();
    let (node, other) = (test_dir.join(), test_dir.join());
    assert_eq!(node.open("numbers").unwrap_err().kind(), ErrorKind::NotFound);
    let topic = node.topic("numbers", &settings()).unwrap();
    assert_eq!(other.open("numbers").unwrap().settings().unwrap(), settings());
    let deeper = TopicSettings { depth: 9, ..settings() };
    let error = other.topic("numbers", &deeper).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SettingsDiffer);
    let text = error.to_string();
    assert!(text.contains("8 messages") && text.contains("9 messages"), "{text}");
    drop(topic);
    // No process uses the topic: it can be created again with other settings.
    until("the topic to be removed", || other.open("numbers").is_err());
    assert_eq!(other.topic("numbers", &deeper).unwrap().settings().unwrap(), deeper);
}

#[test]
fn invalid_settings_and_budgets_are_refused() {
    let test_dir = TestDir::new();
    let too_small = Budgets { host: Some(Budgets::MIN - 1), device: None };
    let refused = Node::join(NodeOptions { budgets: too_small, ..options(test_dir.path()) });
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.detail().contains("511 bytes of the host's"), "{error}");
    let budgets = Budgets { host: Some(1 << 20), device: Some(1 << 20) };
    let node = Node::join(NodeOptions { budgets, ..options(test_dir.path()) }).unwrap();
    let kind =
        |name: &str, settings: TopicSettings| node.topic(name, &settings).unwrap_err().kind();
    let good = settings();
    assert_eq!(kind("", good), ErrorKind::InvalidArgument);
    assert_eq!(kind(&"x".repeat(300), good), ErrorKind::InvalidArgument);
    assert_eq!(kind("a\nb", good), ErrorKind::InvalidArgument);
    assert_eq!(kind("x", TopicSettings { depth: 0, ..good }), ErrorKind::InvalidArgument);
    assert_eq!(kind("x", TopicSettings { largest: 0, ..good }), ErrorKind::InvalidArgument);
    let hasty = TopicSettings { release_deadline: Duration::ZERO, ..good };
    assert_eq!(kind("x", hasty), ErrorKind::InvalidArgument);
    let large = TopicSettings { largest: 1 << 20, ..good };
    let error = node.topic("x", &large).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverBudget);
    assert!(error.to_string().contains("1048576"), "{error}");
    let memory = MemoryLocation::Device("cuda:99".parse().unwrap());
    assert_eq!(kind("x", TopicSettings { memory, ..good }), ErrorKind::NoDevice);
    // As many topics as the budget holds.
    let topics: Vec<_> =
        (0..200).map_while(|index| node.topic(&format!("t{index}"), &good).ok()).collect();
    assert!((2..200).contains(&topics.len()));
    assert_eq!(kind("one more", good), ErrorKind::OverBudget);
    drop(topics);
    until("room in the budget", || node.topic("one more", &good).is_ok());
}

#[test]
fn directory_writable_by_others_is_refused() {
    let test_dir = TestDir::new();
    std::fs::create_dir_all(test_dir.path()).unwrap();
    std::fs::set_permissions(test_dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    assert_eq!(Node::join(options(test_dir.path())).unwrap_err().kind(), ErrorKind::Denied);
    let long = "l".repeat(65);
    let error = Node::join(NodeOptions { label: long, ..options(test_dir.path()) }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn external_member_without_a_service_times_out() {
    let test_dir = TestDir::new();
    let options = NodeOptions {
        service: ServiceMode::External,
        service_timeout: Duration::from_millis(50),
        ..options(test_dir.path())
    };
    assert_eq!(Node::join(options).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(pubsub::report(test_dir.path()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn memory_of_killed_publishers_is_reused() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscriber = topic.subscriber().unwrap();
    for _ in 0..3 {
        let mut other = ChildProcess::start("loans numbers 4", test_dir.path());
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), 0);
        let blocks = |node: &Node| -> u64 {
            let rows = node.report().unwrap();
            rows.iter()
                .map(|row| if let Row::Pool { blocks, .. } = row { *blocks } else { 0 })
                .sum()
        };
        assert_eq!(blocks(&node), 4);
        other.kill();
        until("free loans", || blocks(&node) == 0);
    }
}

#[test]
fn subscriber_that_holds_all_samples_is_evicted() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let hasty = TopicSettings { release_deadline: Duration::from_millis(300), ..settings() };
    let topic = node.topic("numbers", &hasty).unwrap();
    let calm = node.topic("calm", &settings()).unwrap();
    let mut other = calm.subscriber().unwrap();
    let (publisher, mut good, mut greedy) =
        (topic.publisher().unwrap(), topic.subscriber().unwrap(), topic.subscriber().unwrap());
    let held = {
        publish(&publisher, 0..8);
        let held: Vec<_> = (0..8).map(|_| greedy.pull(TIMEOUT).unwrap()).collect();
        for expected in 0..8 {
            assert_eq!(number_of(&good.pull(TIMEOUT).unwrap()), expected);
        }
        held
    };
    // Another topic is not blocked.
    publish(&calm.publisher().unwrap(), 0..3);
    assert_eq!(number_of(&other.pull(TIMEOUT).unwrap()), 0);
    for number in 8..20 {
        publish(&publisher, number..number + 1);
        assert_eq!(number_of(&good.pull(TIMEOUT).unwrap()), number);
    }
    assert_eq!(greedy.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
    drop(held);
    assert_eq!(
        publisher.push(&message(1)[..8].repeat(1000), TIMEOUT).unwrap_err().kind(),
        ErrorKind::TooLong
    );
    assert_eq!(topic.settings().unwrap().reliability, Reliability::Reliable);
}

/// The child leaves service, socket, locks and handles of its parent alone.
#[test]
fn forked_child_drops_its_node_and_the_parent_keeps_it() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("t", &settings()).unwrap();
    let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
    publisher.push(b"one", TIMEOUT).unwrap();
    let sample = subscriber.pull(TIMEOUT).unwrap();
    let mut handles = Some((node, topic, publisher, subscriber, sample));
    let child = testkit::children::ForkedChild::new(|| drop(handles.take()));
    assert!(child.wait().success());
    let (node, topic, publisher, mut subscriber, sample) = handles.take().unwrap();
    assert_eq!(sample.to_vec().unwrap(), b"one");
    publisher.push(b"two", TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TIMEOUT).unwrap().to_vec().unwrap(), b"two");
    // A new member finds the same service and topic.
    let other = test_dir.join_served();
    assert_eq!(other.identity(), node.identity());
    let mut late = other.open("t").unwrap().subscriber().unwrap();
    publisher.push(b"three", TIMEOUT).unwrap();
    assert_eq!(late.pull(TIMEOUT).unwrap().to_vec().unwrap(), b"three");
    drop((topic, sample));
}

/// New processes would find another node in its place.
#[test]
fn node_ends_when_its_directory_is_removed() {
    for is_replaced in [false, true] {
        let test_dir = TestDir::new();
        let (serving, other) = (test_dir.join(), test_dir.join());
        let topic = other.topic("numbers", &settings()).unwrap();
        let (publisher, mut subscriber) = (topic.publisher().unwrap(), topic.subscriber().unwrap());
        std::fs::remove_dir_all(test_dir.path()).unwrap();
        if is_replaced {
            std::fs::create_dir(test_dir.path()).unwrap();
        }
        // Its members are told, and readers do not wait for ever.
        let error = subscriber.pull(TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let error = publisher.push(b"x", TIMEOUT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        drop((publisher, subscriber, topic, other, serving));
        let next = test_dir.join();
        assert!(next.topic("numbers", &settings()).is_ok());
    }
}
