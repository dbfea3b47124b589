//! The control plane alone: who finds whom, and who is missed.
//!
//! All five nodes are in one process, each in a network of its own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pubsub::TopicSettings;
use pubsub::peers::{Event, Interest, NodeIdentity, Peers, PeersOptions, Reason, SessionNumber};

use crate::cables::{NODES, Network, address, cut, ip_of, make_hub, mend, run_inside};
use crate::ground::PATIENCE;

/// Starts a node in a network of its own.
fn start(number: u8) -> Peers {
    Network::new(number).within(|| {
        let mut options = PeersOptions::new(NodeIdentity([number; 16]), format!("node {number}"));
        options.listen = Some(address(number));
        options.rendezvous = Some(address(1).to_string());
        options.insecure = true;
        // Other builds may keep both processors busy.
        options.lost_after = Duration::from_secs(6);
        // Its thread is in the network of the one that starts it.
        Peers::start(options).unwrap()
    })
}

/// A node, and what is known there by its events.
struct Node {
    number: u8,
    peers: Peers,
    sessions: BTreeMap<u8, (SessionNumber, Vec<String>)>,
    vanished: Vec<(u8, Reason)>,
}

impl Node {
    fn new(number: u8, peers: Peers) -> Self {
        let topic = format!("topic {number}");
        let interest = Interest::new(topic, true, false, &TopicSettings::default()).unwrap();
        peers.set_interests([interest]).unwrap();
        Self { number, peers, sessions: BTreeMap::new(), vanished: Vec::new() }
    }

    /// Reads events until it is so.
    fn wait(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_so(self) {
            let Some(event) = self.peers.next_event() else {
                let left = end.saturating_duration_since(Instant::now());
                let (number, reports) = (self.number, self.peers.reports());
                assert!(!left.is_zero(), "node {number} never had {what}: {reports:#?}");
                let mut entries = [PollFd::new(self.peers.descriptor(), PollFlags::POLLIN)];
                poll(&mut entries, PollTimeout::try_from(left).unwrap()).unwrap();
                continue;
            };
            match event {
                Event::Appeared { node, session, ours, theirs, .. } => {
                    assert_eq!(ours.ip(), ip_of(self.number));
                    assert_eq!(theirs.ip(), ip_of(node.0[0]));
                    let before = self.sessions.insert(node.0[0], (session, Vec::new()));
                    assert_eq!(before, None);
                }
                Event::Interests { node, session, changes } => {
                    let known = self.sessions.get_mut(&node.0[0]).unwrap();
                    assert_eq!(known.0, session);
                    for change in changes {
                        match change {
                            pubsub::peers::Change::Set(set) => known.1.push(set.topic),
                            other => panic!("{other:?}"),
                        }
                    }
                }
                Event::Letter { .. } => panic!("nobody wrote"),
                Event::Vanished { node, session, reason } => {
                    let known = self.sessions.remove(&node.0[0]).unwrap();
                    assert_eq!(known.0, session);
                    self.vanished.push((node.0[0], reason));
                }
            }
        }
    }

    fn has_all_of(&self, others: impl IntoIterator<Item = u8>) -> bool {
        others.into_iter().filter(|other| *other != self.number).all(|other| {
            self.sessions
                .get(&other)
                .is_some_and(|(_, topics)| *topics == [format!("topic {other}")])
        })
    }
}

/// What happens in the namespaces.
pub fn inside() {
    make_hub();
    // The one that all ask is not the first to be there.
    let mut nodes: Vec<_> =
        [4, 2, 1, 5, 3].map(|number| Node::new(number, start(number))).into_iter().collect();
    for node in &mut nodes {
        node.wait("all others", |node| node.has_all_of(1..=NODES));
        assert_eq!(node.vanished, []);
    }

    let last = NODES;
    cut(last);
    for node in &mut nodes {
        if node.number == last {
            node.wait("nobody any more", |node| node.sessions.is_empty());
        } else {
            node.wait("one less", |node| !node.sessions.contains_key(&last));
            // What the others have with each other goes on.
            assert!(node.has_all_of(1..last));
            assert_eq!(node.vanished.len(), 1, "{:?}", node.vanished);
        }
    }
    mend(last);
    for node in &mut nodes {
        node.wait("all others again", |node| node.has_all_of(1..=NODES));
        if node.number != last {
            assert_eq!(node.vanished.len(), 1, "{:?}", node.vanished);
        }
    }
    // Both ends of each call their session the same.
    for one in &nodes {
        for two in nodes.iter().filter(|two| two.number != one.number) {
            assert_eq!(one.sessions[&two.number].0, two.sessions[&one.number].0);
        }
    }

    // One that leaves in order is not waited for.
    let left = nodes.remove(0);
    let number = left.number;
    drop(left);
    for node in &mut nodes {
        node.wait("one that left", |node| !node.sessions.contains_key(&number));
        assert!(node.vanished.contains(&(number, Reason::Left)), "{:?}", node.vanished);
    }
}

#[test]
fn five_nodes_find_each_other_and_one_is_cut_off_for_a_while() {
    run_inside("peers");
}
