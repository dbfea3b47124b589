//! Services of nodes that are killed, on both sides, while messages flow.

use crate::between::{address, until_carried};
use crate::ground::{Ground, Other, PATIENCE, number_of, publish, settings};

/// Numbers flow between two nodes, of which one service after the other ends.
fn numbers_flow_while(end: fn(&mut Other)) {
    const COUNT: u64 = 6000;
    let (grounds, addresses) = ([Ground::new(), Ground::new()], [address(), address()]);
    let role = |which: usize| format!("serves {} {}", addresses[which], addresses[1 - which]);
    let start = |which: usize| Other::start(&role(which), grounds[which].path());
    let mut services = [start(0), start(1)];
    let nodes = grounds.each_ref().map(Ground::join_served);
    let reading = nodes[1].topic("numbers", &settings()).unwrap();
    let mut subscriber = reading.subscriber().unwrap();
    let topic = nodes[0].topic("numbers", &settings()).unwrap();
    until_carried(&nodes[0], "numbers");
    let publisher = topic.publisher().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            publish(&publisher, 0..COUNT);
            publisher.flush(PATIENCE).unwrap();
        });
        let mut ends = 0;
        for expected in 0..COUNT {
            if expected % (COUNT / 8) == COUNT / 16 {
                let which = ends % 2;
                end(&mut services[which]);
                services[which] = start(which);
                ends += 1;
            }
            assert_eq!(number_of(&subscriber.pull(PATIENCE).unwrap()), expected);
        }
    });
    assert!(subscriber.try_pull().unwrap().is_none(), "one came twice");
}

#[test]
fn nothing_is_lost_when_services_of_both_sides_are_killed() {
    numbers_flow_while(Other::kill);
}

#[test]
fn nothing_is_lost_when_services_of_both_sides_end_in_order() {
    numbers_flow_while(Other::end);
}
