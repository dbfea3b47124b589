//! Connections between five nodes, without messages.
//!
//! All five nodes are in one process, each in its own network namespace.

use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, Publisher, Row, TopicSettings};

use crate::network::{NODES, Network, address, create_hub, cut_link, restore_link, run_inside};
use crate::support::{TestDir, options, until};

/// A node that publishes in a topic of its own.
struct Member {
    number: u8,
    node: Node,
    _publisher: Publisher,
    _test_dir: TestDir,
}

impl Member {
    /// Starts a node in a network namespace of its own.
    fn start(number: u8) -> Self {
        let test_dir = TestDir::new();
        let network = NetworkOptions {
            listen: Some(address(number)),
            rendezvous: Some(address(1).to_string()),
            insecure: true,
            name: format!("node {number}"),
            // Enough for a busy machine.
            lost_after: Duration::from_secs(6),
            ..NetworkOptions::default()
        };
        let options = NodeOptions { network: Some(network), ..options(test_dir.path()) };
        // Threads of the node inherit the namespace of the thread that starts them.
        let node = Network::new(number).within(|| Node::join(options).unwrap());
        let topic = node.topic(&format!("topic {number}"), &TopicSettings::default()).unwrap();
        Self { number, node, _publisher: topic.publisher().unwrap(), _test_dir: test_dir }
    }

    fn rows(&self) -> Vec<Row> {
        self.node.report().unwrap_or_default()
    }

    /// Returns true if a node is connected, and since when or why not.
    fn session_with(&self, other: u8) -> Option<(bool, String)> {
        let name = format!("node {other}");
        self.rows().into_iter().find_map(|row| match row {
            Row::Peer { label, is_connected, detail, .. } if label == name => {
                Some((is_connected, detail))
            }
            _ => None,
        })
    }

    fn is_connected_to(&self, other: u8) -> bool {
        self.session_with(other).is_some_and(|(is_connected, _)| is_connected)
    }

    /// Are all of these nodes connected, with their topics announced?
    fn has_all_of(&self, others: impl IntoIterator<Item = u8>) -> bool {
        let rows = self.rows();
        others.into_iter().filter(|other| *other != self.number).all(|other| {
            let name = format!("topic {other}");
            let is_announced = |row: &Row| {
                matches!(row, Row::RemoteTopic { topic, publishes: true, .. } if *topic == name)
            };
            self.is_connected_to(other) && rows.iter().any(is_announced)
        })
    }
}

/// Runs in the namespaces.
pub fn run() {
    create_hub();
    // The rendezvous node is not the first to start.
    let mut members: Vec<_> = [4, 2, 1, 5, 3].map(Member::start).into_iter().collect();
    for member in &members {
        until("all others", || member.has_all_of(1..=NODES));
    }

    let last = NODES;
    cut_link(last);
    for member in &members {
        if member.number == last {
            until("no connection", || (1..last).all(|other| !member.is_connected_to(other)));
        } else {
            until("one disconnected node", || !member.is_connected_to(last));
            // The other nodes stay connected to each other.
            assert!(member.has_all_of(1..last), "{:#?}", member.rows());
        }
    }
    restore_link(last);
    for member in &members {
        until("all others again", || member.has_all_of(1..=NODES));
    }

    // A node that leaves in order is disconnected without a timeout.
    let left = members.remove(0);
    let number = left.number;
    drop(left);
    for member in &members {
        until("the node to leave", || !member.is_connected_to(number));
        let reason = member.session_with(number).map(|(_, reason)| reason);
        // The session may be removed already, or dialled again.
        assert_ne!(reason.as_deref(), Some("no message from it within the timeout"));
    }
}

#[test]
fn five_nodes_connect_and_one_reconnects_after_an_outage() {
    run_inside("peers");
}
