//! What the other processes of a test do.

use std::net::SocketAddr;
use std::path::Path;

use pubsub::{Node, NodeOptions, ServiceMode};
use testkit::children::wait_for_end_of_input;

use crate::between::{join, network};
use crate::support::{TIMEOUT, number_of, options, publish, publish_and_hang, settings};

/// Reads numbers, all of them and in order.
fn read(node: &Node, topic: &str, count: u64) {
    let mut subscriber = node.topic(topic, &settings()).unwrap().subscriber().unwrap();
    for expected in 0..count {
        assert_eq!(number_of(&subscriber.pull(TIMEOUT).unwrap()), expected);
    }
}

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    crate::support::log();
    let [place, words @ ..] = words else { panic!("no place") };
    let place = Path::new(place);
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    let outside =
        || Node::join(NodeOptions { service: ServiceMode::External, ..options(place) }).unwrap();
    let count = |text: &str| text.parse::<u64>().unwrap();
    match *words {
        ["serves", listen, peer] => {
            let _node = join(place, network(address(listen), &[address(peer)]));
            wait_for_end_of_input();
        }
        ["publishes", topic, number] => {
            let topic = outside().topic(topic, &settings()).unwrap();
            let publisher = topic.publisher().unwrap();
            // Somebody is to hear the first one.
            while publisher.subscribers() == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            publisher.flush(TIMEOUT).unwrap();
        }
        ["exchanges", listen, peer, provider] => {
            crate::survivors::exchange(place, listen, peer, provider);
        }
        // Publishes to one who reads here, and to another node; serves if nobody does.
        ["comes-and-publishes", listen, peer, number] => {
            let node = join(place, network(address(listen), &[address(peer)]));
            let publisher = node.topic("numbers", &settings()).unwrap().publisher().unwrap();
            while publisher.subscribers() < 2 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            publisher.flush(TIMEOUT).unwrap();
        }
        ["comes-and-reads", listen, peer, number] => {
            let node = join(place, network(address(listen), &[address(peer)]));
            read(&node, "numbers", count(number));
        }
        ["publishes-and-waits", topic, number] => {
            let node = outside();
            let publisher = node.topic(topic, &settings()).unwrap().publisher().unwrap();
            while publisher.subscribers() == 0 {
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
            publish(&publisher, 0..count(number));
            wait_for_end_of_input();
        }
        ["publishes-and-hangs", topic] => publish_and_hang(&outside(), topic),
        ["reads", topic, number] => read(&outside(), topic, count(number)),
        _ => panic!("no role {words:?}"),
    }
}
