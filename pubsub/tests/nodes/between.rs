//! Messages between nodes, without failures.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use pubsub::{
    ErrorKind, MemoryLocation, NetworkOptions, Node, NodeOptions, ReportedSubscriber, Row,
    TopicSettings,
};

use crate::support::{TIMEOUT, TestDir, message, number_of, options, publish, settings, until};

pub use testkit::addresses::unused_listen_address as address;

/// Options of a node that listens and connects to peers.
pub fn network(listen: SocketAddr, peers: &[SocketAddr]) -> NetworkOptions {
    NetworkOptions {
        listen: Some(listen),
        peers: peers.iter().map(ToString::to_string).collect(),
        lost_after: Duration::from_secs(20),
        // Tests that kill processes cover lanes, too, on machines with several cores.
        lanes: 2,
        insecure: true,
        ..NetworkOptions::default()
    }
}

pub fn join(directory: &Path, network: NetworkOptions) -> Node {
    Node::join(NodeOptions { network: Some(network), ..options(directory) }).unwrap()
}

/// Waits until a number of other nodes subscribe to a topic.
#[track_caller]
pub fn until_subscribed(node: &Node, topic: &str, nodes: usize) {
    until("other nodes", || {
        let rows = node.report().unwrap();
        rows.iter()
            .filter(|row| matches!(row, Row::Sent { topic: sent, .. } if sent == topic))
            .count()
            >= nodes
    });
}

/// Does the service retain messages of the topic for other nodes?
pub fn is_replicated(node: &Node, topic: &str) -> bool {
    let rows = node.report().unwrap();
    rows.iter().any(|row| {
        matches!(row, Row::Subscriber { topic: of, participant, .. }
            if of == topic && *participant == ReportedSubscriber::Replication)
    })
}

#[track_caller]
pub fn until_replicated(node: &Node, topic: &str) {
    until("another node that subscribes", || is_replicated(node, topic));
}

#[test]
fn open_takes_the_settings_of_a_remote_topic() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    assert_eq!(second.open("numbers").unwrap_err().kind(), ErrorKind::NotFound);
    let wanted =
        TopicSettings { memory: MemoryLocation::Host, depth: 3, max_held: 3, ..settings() };
    let remote = first.topic("numbers", &wanted).unwrap();
    // The topic has no publisher and no subscriber yet: the node does not announce it.
    assert_eq!(second.open("numbers").unwrap_err().kind(), ErrorKind::NotFound);
    let publisher = remote.publisher().unwrap();
    until("the topic to be announced", || {
        let rows = second.report().unwrap();
        let is_announced = |row: &Row| matches!(row, Row::RemoteTopic { topic, depth: 3, publishes: true, .. } if topic == "numbers");
        rows.iter().any(is_announced)
    });
    let local = second.open("numbers").unwrap();
    assert_eq!(local.settings().unwrap(), wanted);
    let rows = second.report().unwrap();
    assert!(!rows.iter().any(|row| matches!(row, Row::RemoteTopic { .. })), "the topic is local");
    let mut subscriber = local.subscriber().unwrap();
    until_subscribed(&first, "numbers", 1);
    for number in 0..20 {
        publish(&publisher, number..number + 1);
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
    }
}

#[test]
fn messages_flow_both_ways_between_two_nodes() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let nodes = [first, second];
    let topics = nodes.each_ref().map(|node| node.topic("numbers", &settings()).unwrap());
    let mut subscribers = topics.each_ref().map(|topic| topic.subscriber().unwrap());
    nodes.iter().for_each(|node| until_replicated(node, "numbers"));
    let publishers = topics.each_ref().map(|topic| topic.publisher().unwrap());
    std::thread::scope(|scope| {
        for publisher in &publishers {
            scope.spawn(|| publish(publisher, 0..500));
        }
        for (subscriber, other) in subscribers.iter_mut().zip([&nodes[1], &nodes[0]]) {
            scope.spawn(move || {
                let mut next = [0, 0];
                for _ in 0..1000 {
                    let sample = subscriber.pull(TIMEOUT).unwrap();
                    let which = usize::from(sample.origin().is_some());
                    assert_eq!(number_of(&sample), next[which]);
                    next[which] += 1;
                    if let Some(origin) = sample.origin() {
                        let hex: String = origin.iter().map(|byte| format!("{byte:02x}")).collect();
                        assert_eq!(other.identity().replace('-', ""), hex);
                        assert!(sample.times().wire > 0 && sample.times().published > 0);
                    }
                }
                assert_eq!(next, [500, 500]);
                assert!(subscriber.try_pull().unwrap().is_none());
            });
        }
    });
    // Acknowledgements arrive after the messages were read.
    until("all acknowledgements", || {
        let rows = nodes[0].report().unwrap();
        rows.iter().any(|row| matches!(row, Row::Sent { messages: 500, .. }))
            && rows.iter().any(|row| matches!(row, Row::Received { messages: 500, .. }))
            && rows.iter().any(|row| matches!(row, Row::Peer { is_connected: true, .. }))
    });
}

#[test]
fn both_nodes_report_an_incompatible_topic() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let other = TopicSettings { largest: 8192, ..settings() };
    let publisher = first.topic("numbers", &settings()).unwrap().publisher().unwrap();
    let subscriber = second.topic("numbers", &other).unwrap().subscriber().unwrap();
    let incompatible_topic = |node: &Node| {
        let rows = node.report().unwrap();
        rows.into_iter().find(|row| matches!(row, Row::IncompatibleTopic { .. }))
    };
    for (node, is_publisher) in [(&first, true), (&second, false)] {
        until("the incompatible topic", || incompatible_topic(node).is_some());
        let Some(Row::IncompatibleTopic {
            topic,
            is_wanted_remotely,
            is_wanted_locally,
            differs,
            local,
            remote,
            ..
        }) = incompatible_topic(node)
        else {
            unreachable!("the row disappeared")
        };
        assert_eq!((topic.as_str(), is_wanted_remotely), ("numbers", is_publisher));
        assert_eq!((is_wanted_locally, &*differs), (!is_publisher, &["largest".to_owned()][..]));
        let sizes = [local, remote].map(|side| side.contains("up to 4096 bytes"));
        assert_eq!(sizes, [is_publisher, !is_publisher]);
    }
    // Both nodes report the listen address of their peer, and since when it is connected.
    for (node, peer) in [(&first, addresses[1]), (&second, addresses[0])] {
        let rows = node.report().unwrap();
        let is_peer = |row: &Row| {
            matches!(row, Row::Peer { address, is_connected: true, detail, label, .. }
                if *address == peer.to_string() && detail.starts_with("for ") && label == "test")
        };
        assert!(rows.iter().any(is_peer), "{rows:?}");
    }
    drop(subscriber);
    until("the incompatible topic to disappear", || incompatible_topic(&first).is_none());
    drop(publisher);
}

/// Steps by which two nodes begin to exchange messages.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    WriterJoins,
    ReaderJoins,
    Publishes,
    Subscribes,
}

#[test]
fn writer_and_reader_of_two_nodes_start_in_every_order() {
    use Step::*;
    let all = [WriterJoins, ReaderJoins, Publishes, Subscribes];
    let mut orders = Vec::new();
    for a in all {
        for b in all {
            for c in all {
                for d in all {
                    let order = [a, b, c, d];
                    let at = |step| order.iter().position(|it| *it == step);
                    let (Some(writer), Some(publishes), Some(reader), Some(subscribes)) =
                        (at(WriterJoins), at(Publishes), at(ReaderJoins), at(Subscribes))
                    else {
                        continue;
                    };
                    if writer < publishes && reader < subscribes {
                        orders.push(order);
                    }
                }
            }
        }
    }
    assert_eq!(orders.len(), 6);
    for order in orders {
        let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
        let (mut nodes, mut publisher, mut subscriber) = ([None, None], None, None);
        for step in order {
            match step {
                WriterJoins => {
                    nodes[0] =
                        Some(join(test_dirs[0].path(), network(addresses[0], &[addresses[1]])));
                }
                ReaderJoins => {
                    nodes[1] =
                        Some(join(test_dirs[1].path(), network(addresses[1], &[addresses[0]])));
                }
                Publishes => {
                    let topic = nodes[0].as_ref().unwrap().topic("numbers", &settings()).unwrap();
                    publisher = Some(topic.publisher().unwrap());
                }
                Subscribes => {
                    let topic = nodes[1].as_ref().unwrap().topic("numbers", &settings()).unwrap();
                    subscriber = Some(topic.subscriber().unwrap());
                }
            }
        }
        let (publisher, mut subscriber) = (publisher.unwrap(), subscriber.unwrap());
        until_replicated(nodes[0].as_ref().unwrap(), "numbers");
        publish(&publisher, 0..8);
        for expected in 0..8 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected, "{order:?}");
        }
    }
}

#[test]
fn large_messages_arrive_whole() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let writer = join(test_dirs[0].path(), network(addresses[0], &[addresses[1]]));
    let reader = join(test_dirs[1].path(), network(addresses[1], &[]));
    let largest = 24 << 20;
    let settings = TopicSettings { largest, depth: 2, ..settings() };
    let reading = reader.topic("large", &settings).unwrap();
    let mut subscriber = reading.subscriber().unwrap();
    let topic = writer.topic("large", &settings).unwrap();
    until_replicated(&writer, "large");
    let publisher = topic.publisher().unwrap();
    for length in [0, 1, 4097, 3 << 20, largest - 1, largest] {
        let bytes = testkit::bytes::pattern(length as usize, length);
        let mut loan = publisher.loan(length, TIMEOUT).unwrap();
        loan.write(0, &bytes).unwrap();
        loan.set_metadata(&length.to_le_bytes()).unwrap();
        loan.publish(TIMEOUT).unwrap();
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!((sample.length(), &*sample.metadata()), (length, &length.to_le_bytes()[..]));
        assert!(sample.to_vec().unwrap() == bytes, "a message of {length} bytes differs");
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let prefix = if cores > 1 { "ring of 2 lanes over " } else { "ring over " };
    for node in [writer, reader] {
        let has_path = |row: &Row| match row {
            Row::Sent { path, .. } | Row::Received { path, .. } => {
                path.to_string().starts_with(prefix)
            }
            _ => false,
        };
        let rows = node.report().unwrap();
        assert!(rows.iter().any(has_path), "{prefix}: {rows:?}");
    }
}

#[test]
fn writer_with_several_nodes_that_join_and_leave() {
    let test_dirs: Vec<_> = (0..4).map(|_| TestDir::new()).collect();
    let listen = address();
    let writer = join(test_dirs[0].path(), network(listen, &[]));
    let topic = writer.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    let mut readers = Vec::new();
    for test_dir in &test_dirs[1..] {
        let node = join(test_dir.path(), network(address(), &[listen]));
        let subscriber = node.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        readers.push((node, subscriber));
    }
    until_subscribed(&writer, "numbers", 3);
    let mut next = 0;
    while !readers.is_empty() {
        for number in next..next + 50 {
            publish(&publisher, number..number + 1);
            for (_, subscriber) in &mut readers {
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
            }
        }
        next += 50;
        readers.pop();
    }
    // Nodes that left in order block no publisher.
    publish(&publisher, next..next + 50);
}

#[test]
fn recreated_topic_is_replicated_again() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let writer = join(test_dirs[0].path(), network(addresses[0], &[]));
    let reader = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    for round in [10, 3, 5] {
        let topic = writer.topic("numbers", &settings()).unwrap();
        until_replicated(&writer, "numbers");
        let publisher = topic.publisher().unwrap();
        publish(&publisher, 0..round);
        drop((publisher, topic));
        for expected in 0..round {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
        until("the topic to be removed", || {
            let rows = writer.report().unwrap();
            !rows.iter().any(|row| matches!(row, Row::Topic { .. }))
        });
    }
}

#[test]
fn remote_subscriber_that_holds_samples_is_evicted() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let writer = join(test_dirs[0].path(), network(addresses[0], &[addresses[1]]));
    let reader = join(test_dirs[1].path(), network(addresses[1], &[]));
    let hasty = TopicSettings { release_deadline: Duration::from_millis(300), ..settings() };
    let reading = reader.topic("numbers", &hasty).unwrap();
    let (mut greedy, mut good) = (reading.subscriber().unwrap(), reading.subscriber().unwrap());
    let topic = writer.topic("numbers", &hasty).unwrap();
    until_replicated(&writer, "numbers");
    let publisher = topic.publisher().unwrap();
    let mut held = Vec::new();
    for number in 0..60 {
        publisher.push(&message(number), TIMEOUT).unwrap();
        assert_eq!(number_of(&good.pull(TIMEOUT).unwrap()), number);
        if let Ok(Some(sample)) = greedy.try_pull() {
            held.push(sample);
        }
    }
    assert!(held.len() <= 8);
    assert_eq!(greedy.pull(TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
}
