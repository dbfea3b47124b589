//! Which faults are one node's, and which are the endpoint's.
//!
//! A node causes a fault whenever it wants to: it vanishes and comes back, or says that it wrote what
//! never came. The others must not pay for that. So the fault of one node begins the rings to and
//! from that node anew, and nothing else. The connections of all nodes begin anew, by another
//! endpoint, in these cases:
//!
//! - several nodes have a fault within [`TOGETHER`];
//! - one node has, and no other node is connected;
//! - the rings of one node were begun anew in vain, or keep much memory. That happens once within
//!   [`SHARE`] for each node at most.
//!
//! A provider such as `net` has one connection for each pair of endpoints, which it closes with one
//! of the endpoints only, and not when an address is removed. An endpoint at one side is enough: so a
//! node that has another endpoint has no fault any more.

use std::collections::{BTreeMap, HashMap};

use super::renewal::{LINK_IS_BACK, MUCH_MEMORY};
use crate::bridge::NodeIdentity;

const SECOND: u64 = 1_000_000_000;
/// Faults of several nodes within so long have one cause.
const TOGETHER: u64 = 3 * SECOND;
/// A connection that moves nothing so soon after the last fault was begun anew in vain.
const IN_VAIN: u64 = 30 * SECOND;
/// One endpoint is opened because of one node within so long, while others are connected.
pub(super) const SHARE: u64 = 30 * SECOND;
/// Nodes of which something is known.
const MOST_NODES: usize = 4096;

/// What a fault demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Remedy {
    /// The rings to and from the node.
    Rings,
    /// Another endpoint, because of this node, which has a share of these.
    ForTheNode,
    /// Another endpoint: the cause is not in one node.
    Endpoint,
}

/// The faults of the nodes that an endpoint was connected to.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Where the endpoint of each node is.
    addresses: HashMap<NodeIdentity, Vec<u8>>,
    /// When a node had its last fault.
    seen: HashMap<NodeIdentity, u64>,
    /// For which nodes there is to be another endpoint, and why.
    wanted: BTreeMap<NodeIdentity, &'static str>,
    /// When another endpoint was opened because of a node while others were connected.
    served: HashMap<NodeIdentity, u64>,
}

impl Faults {
    /// A node writes or reads by this endpoint of its own. If it is another one, nothing that went
    /// wrong with the last one matters any more.
    pub(super) fn note_address(&mut self, node: NodeIdentity, address: &[u8]) {
        let Some(known) = self.addresses.get_mut(&node) else {
            if self.addresses.len() < MOST_NODES {
                self.addresses.insert(node, address.to_vec());
            }
            return;
        };
        if known != address {
            address.clone_into(known);
            self.seen.remove(&node);
            self.forget_wish(node);
        }
    }

    /// May the provider have a connection with a node?
    pub(super) fn is_known(&self, node: NodeIdentity) -> bool {
        self.addresses.contains_key(&node)
    }

    /// A node has a fault. Is it the only one that is connected, and does nothing move at its rings?
    pub(super) fn record(
        &mut self,
        node: NodeIdentity,
        now: u64,
        is_alone: bool,
        moves_nothing: bool,
    ) -> Remedy {
        self.seen.retain(|_, seen| now.saturating_sub(*seen) < IN_VAIN);
        let is_recent = |(other, seen): (&NodeIdentity, &u64)| {
            *other != node && now.saturating_sub(*seen) < TOGETHER
        };
        let has_others = self.seen.iter().any(is_recent);
        let before = match self.seen.len() < MOST_NODES {
            true => self.seen.insert(node, now),
            false => None,
        };
        if has_others {
            return Remedy::Endpoint;
        }
        let is_in_vain = moves_nothing && before.is_some();
        if is_alone || is_in_vain { Remedy::ForTheNode } else { Remedy::Rings }
    }

    /// There is to be another endpoint because of a node, as soon as that may be.
    pub(super) fn want(&mut self, node: NodeIdentity, why: &'static str) {
        let wanted = self.wanted.entry(node).or_insert(why);
        // Another endpoint may follow sooner where a node is back.
        if why == LINK_IS_BACK && *wanted != MUCH_MEMORY {
            *wanted = why;
        }
    }

    /// A node is gone: nothing of it has to move any more.
    pub(super) fn forget_wish(&mut self, node: NodeIdentity) {
        // What its rings keep they keep.
        if self.wanted.get(&node).is_some_and(|why| *why != MUCH_MEMORY) {
            self.wanted.remove(&node);
        }
    }

    /// The nodes because of which there may be another endpoint now.
    pub(super) fn due(
        &self,
        now: u64,
        is_alone: impl Fn(NodeIdentity) -> bool,
    ) -> impl Iterator<Item = (NodeIdentity, &'static str)> {
        self.wanted.iter().map(|(node, why)| (*node, *why)).filter(move |(node, _)| {
            let served = self.served.get(node);
            served.is_none_or(|served| now >= served + SHARE) || is_alone(*node)
        })
    }

    /// There is another endpoint: because of this node, if of one alone, and whether no other node was
    /// connected.
    pub(super) fn clear(&mut self, now: u64, for_node: Option<(NodeIdentity, bool)>) {
        self.served.retain(|_, served| now < *served + SHARE);
        if let Some((node, false)) = for_node {
            self.served.insert(node, now);
        }
        self.addresses.clear();
        self.seen.clear();
        self.wanted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeIdentity = NodeIdentity([1; 16]);
    const TWO: NodeIdentity = NodeIdentity([2; 16]);

    /// How often one node that always has a fault has the endpoint opened anew within ten minutes.
    fn opened(is_alone: bool, moves_nothing: bool) -> u64 {
        let (mut faults, mut opened) = (Faults::default(), 0);
        for now in (0..600).map(|second| second * SECOND) {
            faults.note_address(ONE, b"one");
            match faults.record(ONE, now, is_alone, moves_nothing) {
                Remedy::Endpoint => panic!("of one node alone"),
                Remedy::ForTheNode => faults.want(ONE, "it moves nothing"),
                Remedy::Rings => {}
            }
            let due = faults.due(now, |_| is_alone).next();
            if let Some((node, _)) = due {
                opened += 1;
                faults.clear(now, Some((node, is_alone)));
            }
        }
        opened
    }

    #[test]
    fn one_node_has_the_endpoint_of_others_opened_anew_twice_a_minute_at_most() {
        // One that comes back repeatedly, and one whose rings move nothing.
        assert_eq!(opened(false, false), 0);
        assert!((19..=20).contains(&opened(false, true)), "{}", opened(false, true));
        // No other node is disturbed.
        assert_eq!(opened(true, false), 600);
    }

    #[test]
    fn faults_of_several_nodes_at_a_time_are_the_endpoints() {
        let mut faults = Faults::default();
        assert_eq!(faults.record(ONE, SECOND, false, true), Remedy::Rings);
        assert_eq!(faults.record(TWO, 2 * SECOND, false, true), Remedy::Endpoint);
        faults.clear(2 * SECOND, None);
        // Not at the same time.
        assert_eq!(faults.record(ONE, 3 * SECOND, false, true), Remedy::Rings);
        assert_eq!(faults.record(TWO, 3 * SECOND + TOGETHER, false, true), Remedy::Rings);
        // A second time within half a minute, and later.
        assert_eq!(faults.record(TWO, 9 * SECOND, false, true), Remedy::ForTheNode);
        assert_eq!(faults.record(TWO, 9 * SECOND + IN_VAIN, false, true), Remedy::Rings);
    }

    #[test]
    fn node_with_another_endpoint_has_no_fault_any_more() {
        let mut faults = Faults::default();
        assert!(!faults.is_known(ONE));
        faults.note_address(ONE, b"one");
        assert!(faults.is_known(ONE) && !faults.is_known(TWO));
        faults.record(ONE, 0, false, true);
        faults.want(ONE, "it moves nothing");
        faults.want(TWO, MUCH_MEMORY);
        faults.note_address(ONE, b"one");
        assert_eq!(faults.due(0, |_| false).count(), 2);
        faults.note_address(ONE, b"another");
        faults.forget_wish(TWO);
        assert_eq!(faults.due(0, |_| false).collect::<Vec<_>>(), [(TWO, MUCH_MEMORY)]);
        assert_eq!(faults.record(ONE, SECOND, false, true), Remedy::Rings);
        faults.clear(SECOND, Some((TWO, false)));
        assert!(!faults.is_known(ONE));
        faults.want(TWO, MUCH_MEMORY);
        let due = |now, is_alone| faults.due(now, |_| is_alone).count();
        assert_eq!((due(2 * SECOND, false), due(2 * SECOND, true)), (0, 1));
        assert_eq!(due(SECOND + SHARE, false), 1);
    }
}
