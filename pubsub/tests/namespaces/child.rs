//! The roles of child processes.

use std::path::Path;
use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, ServiceMode};
use testkit::children::wait_for_end_of_input;

use crate::network::address;
use crate::support::{TIMEOUT, options};

/// Short, since the test waits for it twice, but enough for a service to start on a busy machine.
const LOST_AFTER: Duration = Duration::from_secs(8);

testkit::child_entry!(enter);

fn enter(args: &[&str]) {
    crate::support::log();
    if let ["inside", test] = args {
        return match *test {
            "peers" => crate::peers::run(),
            "recovery" => crate::recovery::run(),
            "topics" => crate::topics::run(),
            _ => panic!("unknown test {test}"),
        };
    }
    let [directory, args @ ..] = args else { panic!("the node directory is missing") };
    let directory = Path::new(directory);
    match *args {
        ["serves", number] => {
            let network = NetworkOptions {
                listen: Some(address(number.parse().unwrap())),
                rendezvous: Some(address(1).to_string()),
                insecure: true,
                name: format!("node {number}"),
                lost_after: LOST_AFTER,
                ..NetworkOptions::default()
            };
            let network = Some(network);
            let _node = Node::join(NodeOptions { network, ..options(directory) }).unwrap();
            wait_for_end_of_input();
        }
        ["serves-and-reads", number] => {
            crate::recovery::read_forever(directory, number.parse().unwrap());
        }
        ["reads-forever", topic] => {
            let service = ServiceMode::External;
            let node = Node::join(NodeOptions { service, ..options(directory) }).unwrap();
            let mut subscriber = node.open(topic).unwrap().subscriber().unwrap();
            loop {
                drop(subscriber.pull(TIMEOUT).unwrap());
            }
        }
        _ => panic!("unknown role {args:?}"),
    }
}
