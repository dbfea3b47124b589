//! Messages between nodes whose processes live.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use pubsub::{ErrorKind, MemoryLocation, NetworkOptions, Node, NodeOptions, Row, TopicSettings};

use crate::support::{TIMEOUT, TestDir, message, number_of, options, publish, settings, until};

pub use testkit::addresses::unused_listen_address as address;

/// A node that listens, and knows of others.
pub fn network(listen: SocketAddr, peers: &[SocketAddr]) -> NetworkOptions {
    NetworkOptions {
        listen: Some(listen),
        peers: peers.iter().map(ToString::to_string).collect(),
        lost_after: Duration::from_secs(20),
        // Two, where there are as many cores: so lanes are among what is killed here.
        lanes: 2,
        insecure: true,
        ..NetworkOptions::default()
    }
}

pub fn join(directory: &Path, network: NetworkOptions) -> Node {
    Node::join(NodeOptions { network: Some(network), ..options(directory) }).unwrap()
}

/// Waits until so many other nodes want a topic.
#[track_caller]
pub fn until_wanted(node: &Node, topic: &str, nodes: usize) {
    until("other nodes", || {
        let rows = node.report().unwrap();
        rows.iter()
            .filter(|row| matches!(row, Row::Sent { topic: sent, .. } if sent == topic))
            .count()
            >= nodes
    });
}

/// Does the service keep a topic's messages for other nodes?
pub fn is_replicated(node: &Node, topic: &str) -> bool {
    let rows = node.report().unwrap();
    rows.iter().any(|row| {
        matches!(row, Row::Subscriber { topic: of, participant, .. }
            if of == topic && participant == "replication")
    })
}

/// Waits until it does.
#[track_caller]
pub fn until_carried(node: &Node, topic: &str) {
    until("another node that wants the topic", || is_replicated(node, topic));
}

#[test]
fn a_topic_is_opened_as_another_node_has_it() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    assert_eq!(second.open("numbers").unwrap_err().kind(), ErrorKind::NotFound);
    let wanted = TopicSettings { memory: MemoryLocation::Host, depth: 3, ..settings() };
    let remote = first.topic("numbers", &wanted).unwrap();
    // Nobody has anything to do with it yet.
    assert_eq!(second.open("numbers").unwrap_err().kind(), ErrorKind::NotFound);
    let publisher = remote.publisher().unwrap();
    until("it to be told of", || {
        let rows = second.report().unwrap();
        let is_so = |row: &Row| matches!(row, Row::RemoteTopic { topic, depth: 3, publishes: true, .. } if topic == "numbers");
        rows.iter().any(is_so)
    });
    let local = second.open("numbers").unwrap();
    assert_eq!(local.settings().unwrap(), wanted);
    let rows = second.report().unwrap();
    assert!(!rows.iter().any(|row| matches!(row, Row::RemoteTopic { .. })), "it is here, too");
    let mut subscriber = local.subscriber().unwrap();
    until_wanted(&first, "numbers", 1);
    for number in 0..20 {
        publish(&publisher, number..number + 1);
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), number);
    }
}

#[test]
fn messages_go_from_node_to_node_both_ways_at_once() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let first = join(test_dirs[0].path(), network(addresses[0], &[]));
    let second = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let nodes = [first, second];
    let topics = nodes.each_ref().map(|node| node.topic("numbers", &settings()).unwrap());
    let mut subscribers = topics.each_ref().map(|topic| topic.subscriber().unwrap());
    nodes.iter().for_each(|node| until_carried(node, "numbers"));
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
    // What was read there is known here when that was said.
    until("all is known to have arrived", || {
        let rows = nodes[0].report().unwrap();
        rows.iter().any(|row| matches!(row, Row::Sent { messages: 500, .. }))
            && rows.iter().any(|row| matches!(row, Row::Received { messages: 500, .. }))
            && rows.iter().any(|row| matches!(row, Row::Peer { is_connected: true, .. }))
    });
}

#[test]
fn both_nodes_say_that_a_topic_is_another_one_at_the_other() {
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
    for (node, wanted_there) in [(&first, true), (&second, false)] {
        until("the misfit", || incompatible_topic(node).is_some());
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
            unreachable!("a misfit")
        };
        assert_eq!((topic.as_str(), is_wanted_remotely), ("numbers", wanted_there));
        assert_eq!((is_wanted_locally, &*differs), (!wanted_there, &["largest".to_owned()][..]));
        let sizes = [local, remote].map(|side| side.contains("up to 4096 bytes"));
        assert_eq!(sizes, [wanted_there, !wanted_there]);
    }
    // Who listens is named by where it does, by either side, and for how long it has been there.
    for (node, at) in [(&first, addresses[1]), (&second, addresses[0])] {
        let rows = node.report().unwrap();
        let is_so = |row: &Row| {
            matches!(row, Row::Peer { address, is_connected: true, detail, label, .. }
                if *address == at.to_string() && detail.starts_with("for ") && label == "test")
        };
        assert!(rows.iter().any(is_so), "{rows:?}");
    }
    drop(subscriber);
    until("the misfit to be over", || incompatible_topic(&first).is_none());
    drop(publisher);
}

/// What happens when two nodes come together, in any order.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Happens {
    WriterJoins,
    ReaderJoins,
    Publishes,
    Subscribes,
}

#[test]
fn the_order_of_coming_does_not_matter() {
    use Happens::*;
    let all = [WriterJoins, ReaderJoins, Publishes, Subscribes];
    let mut orders = Vec::new();
    for a in all {
        for b in all {
            for c in all {
                for d in all {
                    let order = [a, b, c, d];
                    let at = |what| order.iter().position(|it| *it == what);
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
        for happens in order {
            match happens {
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
        until_carried(nodes[0].as_ref().unwrap(), "numbers");
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
    until_carried(&writer, "large");
    let publisher = topic.publisher().unwrap();
    for length in [0, 1, 4097, 3 << 20, largest - 1, largest] {
        let bytes: Vec<u8> = (0..length).map(|at| (at * 7 + length) as u8).collect();
        let mut loan = publisher.loan(length, TIMEOUT).unwrap();
        loan.write(0, &bytes).unwrap();
        loan.set_metadata(&length.to_le_bytes()).unwrap();
        loan.publish(TIMEOUT).unwrap();
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!((sample.length(), &*sample.metadata()), (length, &length.to_le_bytes()[..]));
        assert!(sample.to_vec().unwrap() == bytes, "other bytes, {length} of them");
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let by = if cores > 1 { "ring of 2 lanes over " } else { "ring over " };
    for node in [writer, reader] {
        let is_told = |row: &Row| match row {
            Row::Sent { path, .. } | Row::Received { path, .. } => path.starts_with(by),
            _ => false,
        };
        let rows = node.report().unwrap();
        assert!(rows.iter().any(is_told), "{by}: {rows:?}");
    }
}

#[test]
fn one_writer_and_several_nodes_that_come_and_go() {
    let test_dirs: Vec<_> = (0..4).map(|_| TestDir::new()).collect();
    let home = address();
    let writer = join(test_dirs[0].path(), network(home, &[]));
    let topic = writer.topic("numbers", &settings()).unwrap();
    let publisher = topic.publisher().unwrap();
    let mut readers = Vec::new();
    for test_dir in &test_dirs[1..] {
        let node = join(test_dir.path(), network(address(), &[home]));
        let subscriber = node.topic("numbers", &settings()).unwrap().subscriber().unwrap();
        readers.push((node, subscriber));
    }
    until_wanted(&writer, "numbers", 3);
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
    // Nobody is waited for who said goodbye.
    publish(&publisher, next..next + 50);
}

#[test]
fn a_topic_that_is_made_anew_begins_anew() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let writer = join(test_dirs[0].path(), network(addresses[0], &[]));
    let reader = join(test_dirs[1].path(), network(addresses[1], &[addresses[0]]));
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    for round in [10, 3, 5] {
        let topic = writer.topic("numbers", &settings()).unwrap();
        until_carried(&writer, "numbers");
        let publisher = topic.publisher().unwrap();
        publish(&publisher, 0..round);
        drop((publisher, topic));
        for expected in 0..round {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
        until("the topic to go", || {
            let rows = writer.report().unwrap();
            !rows.iter().any(|row| matches!(row, Row::Topic { .. }))
        });
    }
}

#[test]
fn one_who_holds_too_long_at_another_node_is_removed_there() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let writer = join(test_dirs[0].path(), network(addresses[0], &[addresses[1]]));
    let reader = join(test_dirs[1].path(), network(addresses[1], &[]));
    let hasty = TopicSettings { release_deadline: Duration::from_millis(300), ..settings() };
    let reading = reader.topic("numbers", &hasty).unwrap();
    let (mut greedy, mut good) = (reading.subscriber().unwrap(), reading.subscriber().unwrap());
    let topic = writer.topic("numbers", &hasty).unwrap();
    until_carried(&writer, "numbers");
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
