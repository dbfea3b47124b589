//! What the other processes of a test do.

use std::path::Path;
use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, ServiceMode};
use testkit::children::wait_for_end_of_input;

use crate::network::address;
use crate::support::{TIMEOUT, options};

/// How long a node is waited for that is not heard, and then again. Short, since the test waits
/// for it, and long enough for a service that is started while both processors are busy.
const LOST_AFTER: Duration = Duration::from_secs(8);

testkit::child_entry!(enter);

fn enter(words: &[&str]) {
    crate::support::log();
    if let ["inside", what] = words {
        return match *what {
            "peers" => crate::peers::inside(),
            "recovery" => crate::recovery::inside(),
            "topics" => crate::topics::inside(),
            _ => panic!("no role {what}"),
        };
    }
    let [place, words @ ..] = words else { panic!("no place") };
    let place = Path::new(place);
    match *words {
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
            let _node = Node::join(NodeOptions { network, ..options(place) }).unwrap();
            wait_for_end_of_input();
        }
        ["reads-in-its-service", number] => {
            crate::recovery::read_for_ever(place, number.parse().unwrap());
        }
        ["reads-for-ever", topic] => {
            let service = ServiceMode::External;
            let node = Node::join(NodeOptions { service, ..options(place) }).unwrap();
            let mut subscriber = node.open(topic).unwrap().subscriber().unwrap();
            loop {
                drop(subscriber.pull(TIMEOUT).unwrap());
            }
        }
        _ => panic!("no role {words:?}"),
    }
}
