//! Services that take over and were told of no other nodes, or need long for it.

use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, Row, Subscriber, Topic};

use crate::between::{address, join, network, until_carried};
use crate::support::{
    ChildProcess, TIMEOUT, TestDir, message, number_of, options, publish, settings, until,
};

fn serves(node: &Node, number: u32) -> bool {
    let rows = node.report().unwrap_or_default();
    matches!(rows.first(), Some(Row::Node { service, .. }) if *service == number)
}

/// Where other nodes reach this one.
fn listens(node: &Node) -> Option<String> {
    match node.report().ok()?.first()? {
        Row::Node { listens, .. } => listens.clone(),
        _ => None,
    }
}

/// A writer whose service is another process, and what reads at another node.
fn with_a_service(
    test_dirs: &[TestDir; 2],
    network_of_writer: Option<NetworkOptions>,
) -> (ChildProcess, Node, Topic, Subscriber) {
    let reads = address();
    // At any port: the other node knows which one only from this service.
    let service = ChildProcess::start(&format!("serves 127.0.0.1:0 {reads}"), test_dirs[0].path());
    until("the service", || pubsub::report(test_dirs[0].path()).is_ok());
    let reader = join(test_dirs[1].path(), network(reads, &[]));
    let subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let own = NodeOptions { network: network_of_writer, ..options(test_dirs[0].path()) };
    let writer = Node::join(own).unwrap();
    let topic = writer.topic("numbers", &settings()).unwrap();
    until_carried(&writer, "numbers");
    (service, writer, topic, subscriber)
}

#[test]
fn a_service_that_was_told_nothing_of_other_nodes_goes_on_as_the_last_one() {
    for ends in [ChildProcess::kill as fn(&mut ChildProcess), ChildProcess::end] {
        let test_dirs = [TestDir::new(), TestDir::new()];
        let (mut service, writer, topic, mut subscriber) = with_a_service(&test_dirs, None);
        let publisher = topic.publisher().unwrap();
        let before = listens(&writer).unwrap();
        const COUNT: u64 = 100;
        std::thread::scope(|scope| {
            scope.spawn(|| publish(&publisher, 0..COUNT));
            for expected in 0..COUNT {
                if expected == 4 {
                    ends(&mut service);
                }
                assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
            }
        });
        assert!(serves(&writer, 2));
        assert_eq!(listens(&writer).unwrap(), before);
        // And so does the one after it, though it never met the first.
        let third = test_dirs[0].join();
        let next = third.open("numbers").unwrap();
        drop((publisher, topic, writer));
        until("the third service", || serves(&third, 3));
        assert_eq!(listens(&third).unwrap(), before);
        until_carried(&third, "numbers");
        publish(&next.publisher().unwrap(), COUNT..COUNT + 6);
        for expected in COUNT..COUNT + 6 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    }
}

#[test]
fn a_service_that_finds_its_port_taken_goes_on_when_it_is_free() {
    let test_dirs = [TestDir::new(), TestDir::new()];
    let (mut service, writer, topic, mut subscriber) = with_a_service(&test_dirs, None);
    let publisher = topic.publisher().unwrap();
    let port = listens(&writer).unwrap();
    // Whoever comes first has it.
    let taken = std::thread::scope(|scope| {
        let taken = scope.spawn(|| {
            let mut taken = None;
            until("the port", || {
                taken = std::net::TcpListener::bind(&*port).ok();
                taken.is_some() || serves(&writer, 2) && listens(&writer).is_some()
            });
            taken
        });
        service.kill();
        taken.join().unwrap()
    });
    until("the next service", || serves(&writer, 2));
    assert_eq!(listens(&writer).is_none(), taken.is_some());
    drop(taken);
    std::thread::scope(|scope| {
        scope.spawn(|| publish(&publisher, 0..20));
        for expected in 0..20 {
            assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
        }
    });
    until("the port", || listens(&writer).as_ref() == Some(&port));
}

#[test]
fn a_service_that_reaches_nobody_lets_go_of_what_others_are_owed() {
    let test_dirs = [TestDir::new(), TestDir::new()];
    // It has options of its own, by which nobody is ever reached.
    let vain =
        NetworkOptions { listen: Some("0.0.0.0:0".parse().unwrap()), ..NetworkOptions::default() };
    let (mut service, writer, topic, mut subscriber) = with_a_service(&test_dirs, Some(vain));
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 0..4);
    for expected in 0..4 {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
    service.kill();
    // More than wait anywhere: somebody has to let go of them.
    let mut own = topic.subscriber().unwrap();
    for number in 4..100 {
        publisher.push(&message(number), TIMEOUT).unwrap();
        assert_eq!(number_of(&own.pull(TIMEOUT).unwrap()), number);
    }
    assert!(serves(&writer, 2));
    assert_eq!(listens(&writer), None);
}

#[test]
fn nothing_is_lost_while_a_service_waits_for_one_that_is_stopped() {
    let (test_dirs, addresses) = ([TestDir::new(), TestDir::new()], [address(), address()]);
    let role = format!("serves {} {}", addresses[1], addresses[0]);
    let mut service = ChildProcess::start(&role, test_dirs[1].path());
    // Less than the other side needs to give up one who does not come back.
    let lost_after = Duration::from_secs(3);
    let options = NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) };
    let writer = join(test_dirs[0].path(), options);
    let reader = test_dirs[1].join_served();
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let stopped = ChildProcess::start("reads others 1", test_dirs[1].path());
    until("all to be there", || {
        let rows = reader.report().unwrap_or_default();
        rows.iter().any(|row| matches!(row, Row::Subscriber { topic, .. } if topic == "others"))
    });
    let topic = writer.topic("numbers", &settings()).unwrap();
    until_carried(&writer, "numbers");
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
