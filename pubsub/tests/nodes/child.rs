//! The roles of child processes.

use std::net::SocketAddr;
use std::path::Path;

use pubsub::{Node, NodeOptions, ServiceMode};
use testkit::children::wait_for_end_of_input;

use crate::between::{join, network};
use crate::support::{TIMEOUT, number_of, options, publish, publish_and_hang, settings};

/// Reads all numbers in order.
fn read(node: &Node, topic: &str, count: u64) {
    let mut subscriber = node.topic(topic, &settings()).unwrap().subscriber().unwrap();
    for expected in 0..count {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
}

testkit::child_entry!(enter);

fn enter(args: &[&str]) {
    crate::support::log();
    let [directory, args @ ..] = args else { panic!("the node directory is missing") };
    let dir = Path::new(directory);
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let join_served =
        || Node::join(NodeOptions { service: ServiceMode::External, ..options(dir) }).unwrap();
    let count = |text: &str| text.parse::<u64>().unwrap();
    match *args {
        ["serves", listen, peer] => {
            let _node = join(dir, network(address(listen), &[address(peer)]));
            wait_for_end_of_input();
        }
        ["publishes", topic, number] => {
            let topic = join_served().topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            // The first message needs a subscriber.
            while publisher.subscribers() == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            publisher.flush(TIMEOUT).unwrap();
        }
        ["exchanges", listen, peer, provider] => {
            crate::survivors::exchange(dir, listen, peer, provider);
        }
        // Publishes to a local subscriber and to another node.
        ["joins-and-publishes", listen, peer, number] => {
            let node = join(dir, network(address(listen), &[address(peer)]));
            let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
            while publisher.subscribers() < 2 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            publisher.flush(TIMEOUT).unwrap();
        }
        ["joins-and-reads", listen, peer, number] => {
            let node = join(dir, network(address(listen), &[address(peer)]));
            read(&node, "numbers", count(number));
        }
        ["publishes-and-waits", topic, number] => {
            let node = join_served();
            let publisher = node.topic(topic, &settings()).unwrap().publisher().unwrap();
            while publisher.subscribers() == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            wait_for_end_of_input();
        }
        // Leaves while messages are on their way.
        ["publishes-and-leaves", topic, number] => {
            let node = join_served();
            let publisher = node.topic(topic, &settings()).unwrap().publisher().unwrap();
            publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
            publish(&publisher, 0..count(number));
        }
        ["joins-publishes-and-waits", listen, peer, number] => {
            let node = join(dir, network(address(listen), &[address(peer)]));
            let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
            publisher.wait_for_subscribers(1, TIMEOUT).unwrap();
            publish(&publisher, 0..count(number));
            wait_for_end_of_input();
        }
        ["waits-to-serve"] => {
            let node = Node::join(options(dir)).unwrap();
            testkit::children::say("joined");
            wait_for_end_of_input();
            drop(node);
        }
        ["publishes-without-subscribers", topic, number] => {
            let node = join_served();
            let publisher = node.topic(topic, &settings()).unwrap().publisher().unwrap();
            publish(&publisher, 0..count(number));
            wait_for_end_of_input();
        }
        ["publishes-and-hangs", topic] => publish_and_hang(&join_served(), topic),
        ["reads", topic, number] => read(&join_served(), topic, count(number)),
        _ => panic!("unknown role {args:?}"),
    }
}
