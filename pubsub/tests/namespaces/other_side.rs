//! What the other processes of a test do: this program again, told by its environment.

use std::io::Read;
use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, ServiceMode};

use crate::cables::address;
use crate::ground::{PATIENCE, options, role};

/// How long a node is waited for that is not heard, and then again. Short, since the test waits
/// for it, and long enough for a service that is started while both processors are busy.
const LOST_AFTER: Duration = Duration::from_secs(8);

#[test]
fn the_other_side() {
    let Some((role, place)) = role() else { return };
    let words: Vec<&str> = role.iter().map(String::as_str).collect();
    match words[..] {
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
            let _node = Node::join(NodeOptions { network, ..options(&place) }).unwrap();
            let _ = std::io::stdin().read(&mut [0]);
        }
        ["reads-for-ever", topic] => {
            let service = ServiceMode::Outside;
            let node = Node::join(NodeOptions { service, ..options(&place) }).unwrap();
            let mut subscriber = node.open(topic).unwrap().subscriber().unwrap();
            loop {
                drop(subscriber.pull(PATIENCE).unwrap());
            }
        }
        _ => panic!("no role {role:?}"),
    }
}
