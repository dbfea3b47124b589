//! Takeovers by services without network options, or that take long.

use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, Row, Subscriber, Topic};

use crate::between::{address, join, network, until_replicated};
use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, options, publish, settings, until,
};

fn serves(node: &Node, number: u32) -> bool {
    let rows = node.report().unwrap_or_default();
    matches!(rows.first(), Some(Row::Node { service, .. }) if *service == number)
}

/// The address at which the node listens.
fn listen_address(node: &Node) -> Option<String> {
    match node.report().ok()?.first()? {
        Row::Node { listens, .. } => listens.clone(),
        _ => None,
    }
}

/// A writer whose service is a child process, and a subscriber on another node.
fn with_child_service(
    test_dirs: &[TestDir; 2],
    network_of_writer: Option<NetworkOptions>,
) -> (ChildProcess, Node, Topic, Subscriber) {
    let peer = address();
    // Any port: only this service can announce it to the other node.
    let service = ChildProcess::start(&format!("serves 127.0.0.1:0 {peer}"), test_dirs[0].path());
    until("the service", || pubsub::report(test_dirs[0].path()).is_ok());
    let reader = join(test_dirs[1].path(), network(peer, &[]));
    let subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let options = NodeOptions { network: network_of_writer, ..options(test_dirs[0].path()) };
    let writer = Node::join(options).unwrap();
    let topic = writer.topic("numbers", &settings()).unwrap();
    until_replicated(&writer, "numbers");
    (service, writer, topic, subscriber)
}

#[test]
fn takeover_without_network_options_uses_the_stored_ones() {
    for end in [ChildProcess::kill as fn(&mut ChildProcess), ChildProcess::end] {
        let test_dirs = [TestDir::new(), TestDir::new()];
        let (mut service, writer, topic, mut subscriber) = with_child_service(&test_dirs, None);
        let publisher = topic.publisher().unwrap();
        let before = listen_address(&writer).unwrap();
        const COUNT: u64 = 100;
        std::thread::scope(|scope| {
            scope.spawn(|| publish(&publisher, 0..COUNT));
            for expected in 0..COUNT {
                if expected == 4 {
                    end(&mut service);
                }
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        });
        assert!(serves(&writer, 2));
        assert_eq!(listen_address(&writer).unwrap(), before);
        // The third service, too, although it never met the first.
        let third = test_dirs[0].join();
        let next = third.open("numbers").unwrap();
        drop((publisher, topic, writer));
        until("the third service", || serves(&third, 3));
        assert_eq!(listen_address(&third).unwrap(), before);
        until_replicated(&third, "numbers");
        publish(&next.publisher().unwrap(), COUNT..COUNT + 6);
        for expected in COUNT..COUNT + 6 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    }
}

#[test]
fn takeover_listens_once_its_port_is_free() {
    let test_dirs = [TestDir::new(), TestDir::new()];
    let (mut service, writer, topic, mut subscriber) = with_child_service(&test_dirs, None);
    let publisher = topic.publisher().unwrap();
    let port = listen_address(&writer).unwrap();
    // This process or the next service takes the port.
    let listener = std::thread::scope(|scope| {
        let listener = scope.spawn(|| {
            let mut listener = None;
            until("the port", || {
                listener = std::net::TcpListener::bind(&*port).ok();
                listener.is_some() || serves(&writer, 2) && listen_address(&writer).is_some()
            });
            listener
        });
        service.kill();
        listener.join().unwrap()
    });
    until("the next service", || serves(&writer, 2));
    assert_eq!(listen_address(&writer).is_none(), listener.is_some());
    drop(listener);
    std::thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..20));
        for expected in 0..20 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    });
    until("the port", || listen_address(&writer).as_ref() == Some(&port));
}

#[test]
fn takeover_that_reaches_no_node_drops_retained_messages() {
    let test_dirs = [TestDir::new(), TestDir::new()];
    // The options of the writer name no peer.
    let alone = NetworkOptions::default();
    let (mut service, writer, topic, mut subscriber) = with_child_service(&test_dirs, Some(alone));
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 0..4);
    for expected in 0..4 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    service.kill();
    // More messages than the topic can retain.
    let mut local = topic.subscriber().unwrap();
    for number in 4..100 {
        publisher.push(&message(number), TIMEOUT).unwrap();
        assert_eq!(number_of(&local.pull(TIMEOUT).unwrap()), number);
    }
    assert!(serves(&writer, 2));
    assert_eq!(listen_address(&writer), None);
}

#[test]
fn takeover_that_waits_for_a_stopped_member_loses_nothing() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let role = format!("serves {} {}", addresses[1], addresses[0]);
    let mut service = ChildProcess::start(&role, test_dirs[1].path());
    // Shorter than a takeover waits for a member that does not rejoin.
    let lost_after = Duration::from_secs(3);
    let options = NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) };
    let writer = join(test_dirs[0].path(), options);
    let reader = test_dirs[1].join_served();
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let stopped = ChildProcess::start("reads others 1", test_dirs[1].path());
    until("the other subscriber", || {
        let rows = reader.report().unwrap_or_default();
        rows.iter().any(|row| matches!(row, Row::Subscriber { topic, .. } if topic == "others"))
    });
    let topic = writer.topic("numbers", &settings()).unwrap();
    until_replicated(&writer, "numbers");
    let publisher = topic.publisher().unwrap();
    const COUNT: u64 = 500;
    std::thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..COUNT));
        for expected in 0..COUNT {
            if expected == 100 {
                stopped.stop();
                service.kill();
                service = ChildProcess::start(&role, test_dirs[1].path());
            }
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    });
}
