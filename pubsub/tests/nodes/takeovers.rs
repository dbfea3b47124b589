//! Services that take over and know of no other nodes, or need long for it.

use std::time::Duration;

use pubsub::{NetworkOptions, Node, Row};

use crate::between::{address, join, network, until_carried};
use crate::ground::{Ground, Other, PATIENCE, message, number_of, publish, settings, until};

fn serves(node: &Node, number: u32) -> bool {
    let rows = node.report().unwrap_or_default();
    matches!(rows.first(), Some(Row::Node { service, .. }) if *service == number)
}

#[test]
fn a_service_that_reaches_nobody_lets_go_of_what_others_are_owed() {
    let (grounds, addresses) = ([Ground::new(), Ground::new()], [address(), address()]);
    let role = format!("serves {} {}", addresses[0], addresses[1]);
    let mut service = Other::start(&role, grounds[0].path());
    until("the service", || pubsub::report(grounds[0].path()).is_ok());
    let reader = join(grounds[1].path(), network(addresses[1], &[addresses[0]]));
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    // It serves when nobody else does, and knows nothing of other nodes.
    let writer = grounds[0].join();
    let topic = writer.topic("numbers", &settings()).unwrap();
    until_carried(&writer, "numbers");
    let publisher = topic.publisher().unwrap();
    publish(&publisher, 0..4);
    for expected in 0..4 {
        assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), expected);
    }
    service.kill();
    // More than wait anywhere: somebody has to let go of them.
    let mut own = topic.subscriber().unwrap();
    for number in 4..100 {
        publisher.push(&message(number), PATIENCE).unwrap();
        assert_eq!(number_of(&own.pull(PATIENCE).unwrap()), number);
    }
    assert!(serves(&writer, 2));
}

#[test]
fn nothing_is_lost_while_a_service_waits_for_one_that_is_stopped() {
    let (grounds, addresses) = ([Ground::new(), Ground::new()], [address(), address()]);
    let role = format!("serves {} {}", addresses[1], addresses[0]);
    let mut service = Other::start(&role, grounds[1].path());
    // Less than the other side needs to give up one who does not come back.
    let lost_after = Duration::from_secs(3);
    let options = NetworkOptions { lost_after, ..network(addresses[0], &[addresses[1]]) };
    let writer = join(grounds[0].path(), options);
    let reader = grounds[1].join_served();
    let mut subscriber = reader.topic("numbers", &settings()).unwrap().subscriber().unwrap();
    let stopped = Other::start("reads others 1", grounds[1].path());
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
                service = Other::start(&role, grounds[1].path());
            }
            assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), expected);
        }
    });
}
