//! Who finds whom, and who is missed, while no messages go.
//!
//! All five nodes are in one process, each in a network of its own.

use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, Publisher, Row, TopicSettings};

use crate::network::{NODES, Network, address, cut, make_hub, mend, run_inside};
use crate::support::{TestDir, options, until};

/// A node that publishes in a topic of its own.
struct Member {
    number: u8,
    node: Node,
    _publisher: Publisher,
    _ground: TestDir,
}

impl Member {
    /// Starts a node in a network of its own.
    fn start(number: u8) -> Self {
        let test_dir = TestDir::new();
        let network = NetworkOptions {
            listen: Some(address(number)),
            rendezvous: Some(address(1).to_string()),
            insecure: true,
            name: format!("node {number}"),
            // Other builds may keep both processors busy.
            lost_after: Duration::from_secs(6),
            ..NetworkOptions::default()
        };
        let options = NodeOptions { network: Some(network), ..options(test_dir.path()) };
        // Its threads are in the network of the one that starts them.
        let node = Network::new(number).within(|| Node::join(options).unwrap());
        let topic = node.topic(&format!("topic {number}"), &TopicSettings::default()).unwrap();
        Self { number, node, _publisher: topic.publisher().unwrap(), _ground: test_dir }
    }

    fn rows(&self) -> Vec<Row> {
        self.node.report().unwrap_or_default()
    }

    /// How it stands with another node: whether there is a connection, and since when or why not.
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

    /// Is it connected to all of these, and told what they publish?
    fn has_all_of(&self, others: impl IntoIterator<Item = u8>) -> bool {
        let rows = self.rows();
        others.into_iter().filter(|other| *other != self.number).all(|other| {
            let name = format!("topic {other}");
            let is_told = |row: &Row| {
                matches!(row, Row::RemoteTopic { topic, publishes: true, .. } if *topic == name)
            };
            self.is_connected_to(other) && rows.iter().any(is_told)
        })
    }
}

/// What happens in the namespaces.
pub fn inside() {
    make_hub();
    // The one that all ask is not the first to be there.
    let mut members: Vec<_> = [4, 2, 1, 5, 3].map(Member::start).into_iter().collect();
    for member in &members {
        until("all others", || member.has_all_of(1..=NODES));
    }

    let last = NODES;
    cut(last);
    for member in &members {
        if member.number == last {
            until("nobody any more", || (1..last).all(|other| !member.is_connected_to(other)));
        } else {
            until("one less", || !member.is_connected_to(last));
            // What the others have with each other goes on.
            assert!(member.has_all_of(1..last), "{:#?}", member.rows());
        }
    }
    mend(last);
    for member in &members {
        until("all others again", || member.has_all_of(1..=NODES));
    }

    // One that leaves in order is not waited for.
    let left = members.remove(0);
    let number = left.number;
    drop(left);
    for member in &members {
        until("one that left", || !member.is_connected_to(number));
        let why = member.session_with(number).map(|(_, why)| why);
        // It may be forgotten already, or be tried again.
        assert_ne!(why.as_deref(), Some("no message from it within the timeout"));
    }
}

#[test]
fn five_nodes_find_each_other_and_one_is_cut_off_for_a_while() {
    run_inside("peers");
}
