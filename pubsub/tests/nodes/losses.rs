//! Services of both nodes are killed while messages flow.

use std::time::Duration;

use pubsub::{Event, NetworkOptions, Publisher, Reliability, Row, Subscriber, TopicSettings};

use crate::between::{address, join, network, until_replicated};
use crate::support::{ChildProcess, TIMEOUT, TestDir, number_of, publish, settings, until};

/// Messages flow between two nodes whose services end in turn.
fn messages_flow_while_services(end: fn(&mut ChildProcess)) {
    const COUNT: u64 = 6000;
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let role = |which: usize| format!("serves {} {}", addresses[which], addresses[1 - which]);
    let start = |which: usize| ChildProcess::start(&role(which), test_dirs[which].path());
    let mut services = [start(0), start(1)];
    let nodes = test_dirs.each_ref().map(TestDir::join_served);
    let reading = nodes[1].topic("numbers", &settings()).unwrap();
    let mut subscriber = reading.subscriber().unwrap();
    let topic = nodes[0].topic("numbers", &settings()).unwrap();
    until_replicated(&nodes[0], "numbers");
    let publisher = topic.publisher().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            publish(&publisher, 0..COUNT);
            publisher.flush(TIMEOUT).unwrap();
        });
        let mut rounds = 0;
        for expected in 0..COUNT {
            if expected % (COUNT / 8) == COUNT / 16 {
                let which = rounds % 2;
                end(&mut services[which]);
                services[which] = start(which);
                rounds += 1;
            }
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    });
    assert!(subscriber.try_pull().unwrap().is_none(), "a message was delivered twice");
}

#[test]
fn nothing_is_lost_when_services_of_both_sides_are_killed() {
    messages_flow_while_services(ChildProcess::kill);
}

#[test]
fn nothing_is_lost_when_services_of_both_sides_end_in_order() {
    messages_flow_while_services(ChildProcess::end);
}

/// Reads `count` messages locally and waits until the other nodes have them.
fn flush(publisher: &Publisher, local: &mut Subscriber, count: u64) {
    for _ in 0..count {
        drop(local.pull(TIMEOUT).unwrap());
    }
    publisher.flush(TIMEOUT).unwrap();
}

#[test]
fn messages_missed_by_a_given_up_node_are_counted() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let lost_after = Duration::from_secs(2);
    let node = join(
        test_dirs[0].path(),
        NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) },
    );
    let topic = node.topic("numbers", &settings()).unwrap();
    let (publisher, other) = (topic.publisher().unwrap(), topic.publisher().unwrap());
    let mut local = topic.subscriber().unwrap();
    // The reader gets the first messages, and ends only after more.
    let role = format!("joins-and-reads {} {} 1000", addresses[1], addresses[0]);
    let mut reader = ChildProcess::start(&role, test_dirs[1].path());
    until_replicated(&node, "numbers");
    publish(&publisher, 0..4);
    flush(&publisher, &mut local, 4);
    assert_eq!(publisher.counters().missed_by_nodes, 0);
    reader.kill();
    publish(&publisher, 4..9);
    flush(&publisher, &mut local, 5);
    assert_eq!(publisher.counters().missed_by_nodes, 5);
    assert_eq!(other.counters().missed_by_nodes, 0, "the other publisher published nothing");
    let is_counted = |row: &Row| matches!(row, Row::Missed { topic, nodes: 1, messages: 5 } if topic == "numbers");
    assert!(node.report().unwrap().iter().any(is_counted));
    // A node that joins later is no destination of earlier messages.
    let role = format!("joins-and-reads {} {} 0", addresses[1], addresses[0]);
    ChildProcess::start(&role, test_dirs[1].path()).finish();
    publish(&publisher, 9..10);
    flush(&publisher, &mut local, 1);
    until("no remote subscriber", || publisher.subscribers() == 1);
    assert_eq!(publisher.counters().missed_by_nodes, 5);
}

#[test]
fn remote_subscriber_is_notified_of_a_killed_publisher() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let mut subscriber = second.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let mut victim = ChildProcess::start("publishes-and-waits numbers 3", test_dirs[0].path());
    for expected in 0..3 {
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!(number_of(&sample), expected);
        if expected == 2 {
            victim.kill();
            let expected = Event::RemotePublisherLost {
                node: sample.origin().unwrap(),
                publisher: sample.publisher(),
            };
            let mut event = None;
            until("the event", || {
                event = event.or_else(|| subscriber.poll_event());
                event.is_some()
            });
            assert_eq!(event, Some(expected));
        }
    }
    let no_publishers = |subscriber: &mut Subscriber| {
        until("the end of the last publisher", || match subscriber.poll_event() {
            Some(event) => {
                assert_eq!(event, Event::NoPublishers);
                true
            }
            None => false,
        });
    };
    no_publishers(&mut subscriber);
    assert_eq!((subscriber.poll_event(), subscriber.missed()), (None, 0));
    // A publisher that leaves in order is no loss.
    let mut other = ChildProcess::start("publishes-and-waits numbers 2", test_dirs[0].path());
    (0..2).for_each(|expected| assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected));
    other.end();
    until("the publisher to leave", || {
        let rows = first.report().unwrap();
        !rows.iter().any(|row| matches!(row, Row::Publisher { .. }))
    });
    no_publishers(&mut subscriber);
    assert_eq!(subscriber.poll_event(), None);
}

/// The service of the reader is stopped until the other node gives it up and retains nothing for it.
#[test]
fn reader_on_a_given_up_node_counts_missed_messages() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let lost_after = Duration::from_secs(1);
    let network = NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) };
    let node = join(test_dirs[0].path(), network);
    let role = format!("serves {} {}", addresses[1], addresses[0]);
    let service = ChildProcess::start(&role, test_dirs[1].path());
    let reading = test_dirs[1].join_served();
    let mut reader = reading.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let topic = node.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    until_replicated(&node, "numbers");
    publish(&publisher, 0..4);
    for expected in 0..4 {
        assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), expected);
    }
    service.stop();
    // Blocks until the node is given up.
    publish(&publisher, 4..200);
    until("the node to be given up", || publisher.subscribers() == 0);
    service.resume();
    let read = 4 + read_or_miss(&mut reader, 196);
    assert_eq!(reader.poll_event(), Some(Event::Gap { missed: reader.missed() }));
    until_replicated(&node, "numbers");
    publish(&publisher, 200..201);
    assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), 200);
    assert_eq!((read + 1 + reader.missed(), publisher.counters().messages), (201, 201));
    assert_eq!(reader.poll_event(), None);
}

/// Publishers start, end and are killed, and the topic is removed and created again, while the other
/// node cannot be reached; it subscribed before.
#[test]
fn messages_of_publishers_that_come_and_go_in_an_outage_are_counted() {
    for has_topic_before in [false, true] {
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let lost_after = Duration::from_secs(1);
        let network = NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) };
        let node = join(test_dirs[0].path(), network);
        let role = format!("serves {} {}", addresses[1], addresses[0]);
        let service = ChildProcess::start(&role, test_dirs[1].path());
        let reading = test_dirs[1].join_served();
        let mut reader = reading.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        let has = |expected: fn(&Row) -> bool| node.report().unwrap().iter().any(expected);
        until("the subscription to be known", || {
            has(|row| matches!(row, Row::RemoteTopic { subscribes: true, .. }))
        });
        if has_topic_before {
            let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
            until_replicated(&node, "numbers");
            publish(&publisher, 0..3);
            (0..3).for_each(|number| assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), number));
        }
        service.stop();
        until("the node to be lost", || {
            has(|row| matches!(row, Row::Peer { is_connected: false, .. }))
        });
        let topic = node.topic("numbers", &settings()).unwrap();
        publish(&topic.publisher().unwrap(), 0..100);
        drop(topic);
        until("the topic to be removed", || !has(|row| matches!(row, Row::Topic { .. })));
        let role = "publishes-without-subscribers numbers 50";
        let mut killed = ChildProcess::start(role, test_dirs[0].path());
        until("50 messages", || has(|row| matches!(row, Row::Publisher { messages: 50, .. })));
        killed.kill();
        until("the topic to be removed", || !has(|row| matches!(row, Row::Topic { .. })));
        service.resume();
        // Its end is told, though nothing follows.
        let missed = read_or_miss(&mut reader, 150);
        assert_eq!((missed, reader.missed()), (0, 150));
        let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
        until_replicated(&node, "numbers");
        publish(&publisher, 0..10);
        (0..10).for_each(|number| assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), number));
        assert_eq!(reader.missed(), 150);
    }
}

/// Reads until `count` messages are read or missed, and returns the number of those read.
fn read_or_miss(reader: &mut Subscriber, count: u64) -> u64 {
    let mut read = 0;
    until("all messages to be read or missed", || {
        while reader.try_pull().unwrap().is_some() {
            read += 1;
        }
        read + reader.missed() >= count
    });
    assert_eq!(read + reader.missed(), count);
    read
}

/// The publisher leaves, or stays and publishes nothing more.
#[test]
fn reader_counts_messages_missed_after_the_last_remote_one() {
    const COUNT: u64 = 400;
    for reliability in [Reliability::DropNewest, Reliability::DropOldest] {
        let settings = TopicSettings { reliability, depth: 4, ..settings() };
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let first = join(test_dirs[0].path(), network(addresses[0], &[]));
        let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
        let remote = second.topic("numbers", &settings).unwrap();
        let mut reader = remote.subscriber().unwrap();
        let topic = first.topic("numbers", &settings).unwrap();
        until_replicated(&first, "numbers");
        for leaves in [false, true] {
            let (publisher, before) = (topic.publisher().unwrap(), reader.missed());
            publish(&publisher, 0..COUNT);
            let _stays = (!leaves).then_some(publisher);
            let read = read_or_miss(&mut reader, before + COUNT);
            assert!(read > 0 && reader.missed() > 0, "{reliability:?}: {read} were read");
            assert!(matches!(reader.poll_event(), Some(Event::Gap { .. })));
            // The publisher may have left.
            assert!(matches!(reader.poll_event(), None | Some(Event::NoPublishers)));
        }
        // The next message does not count the missed ones again.
        let (missed, publisher) = (reader.missed(), topic.publisher().unwrap());
        publish(&publisher, 0..1);
        assert_eq!(number_of(&reader.pull(TIMEOUT).unwrap()), 0);
        assert_eq!(reader.missed(), missed);
    }
}
