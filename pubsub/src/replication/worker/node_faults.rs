//! Which faults are one node's, and which are the endpoint's.
//!
//! A node causes a fault whenever it wants to: it vanishes and comes back, or says that it wrote what
//! never came. The others must not pay for that. So the fault of one node begins the rings to and
//! from that node anew, and nothing else. The connections of all nodes begin anew, by another
//! endpoint, in these cases:
//!
//! - several nodes have a fault within [`SAME_CAUSE_WINDOW`];
//! - one node has, and no other node is connected;
//! - the rings of one node were begun anew in vain, or keep much memory. That happens once within
//!   [`RENEWAL_INTERVAL_PER_NODE`] for each node at most.
//!
//! A provider such as `net` has one connection for each pair of endpoints, which it closes with one
//! of the endpoints only, and not when an address is removed. An endpoint at one side is enough: so a
//! node that has another endpoint has no fault any more.

use std::collections::{BTreeMap, HashMap};

use super::renewal::{NODE_RETURNED, RETAINED_MEMORY_LIMIT};
use crate::replication::NodeId;

const SECOND: u64 = 1_000_000_000;
/// Faults of several nodes within so long have one cause.
const SAME_CAUSE_WINDOW: u64 = 3 * SECOND;
/// A connection that moves nothing so soon after the last fault was begun anew in vain.
const REPEAT_WINDOW: u64 = 30 * SECOND;
/// One endpoint is opened because of one node within so long, while others are connected.
pub(super) const RENEWAL_INTERVAL_PER_NODE: u64 = 30 * SECOND;
/// Nodes of which something is known.
const MAX_NODES: usize = 4096;

/// What a fault demands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultRemedy {
    /// The rings to and from the node.
    RestartRings,
    /// Another endpoint, because of this node, which has a share of these.
    RenewForNode,
    /// Another endpoint: the cause is not in one node.
    RenewEndpoint,
}

/// The faults of the nodes that an endpoint was connected to.
#[derive(Debug, Default)]
pub(super) struct NodeFaults {
    /// Where the endpoint of each node is.
    addresses: HashMap<NodeId, Vec<u8>>,
    /// When a node had its last fault.
    last_fault: HashMap<NodeId, u64>,
    /// For which nodes there is to be another endpoint, and why.
    renewal_wanted: BTreeMap<NodeId, &'static str>,
    /// When another endpoint was opened because of a node while others were connected.
    last_renewal: HashMap<NodeId, u64>,
}

impl NodeFaults {
    /// A node writes or reads by this endpoint of its own. If it is another one, nothing that went
    /// wrong with the last one matters any more.
    pub(super) fn note_address(&mut self, node: NodeId, address: &[u8]) {
        let Some(known) = self.addresses.get_mut(&node) else {
            if self.addresses.len() < MAX_NODES {
                self.addresses.insert(node, address.to_vec());
            }
            return;
        };
        if known != address {
            address.clone_into(known);
            self.last_fault.remove(&node);
            self.cancel_renewal(node);
        }
    }

    /// May the provider have a connection with a node?
    pub(super) fn is_known(&self, node: NodeId) -> bool {
        self.addresses.contains_key(&node)
    }

    /// A node has a fault. Is it the only one that is connected, and does nothing move at its rings?
    pub(super) fn record(
        &mut self,
        node: NodeId,
        now: u64,
        is_only_node: bool,
        moves_nothing: bool,
    ) -> FaultRemedy {
        self.last_fault.retain(|_, last_fault| now.saturating_sub(*last_fault) < REPEAT_WINDOW);
        let is_recent = |(other, last_fault): (&NodeId, &u64)| {
            *other != node && now.saturating_sub(*last_fault) < SAME_CAUSE_WINDOW
        };
        let has_others = self.last_fault.iter().any(is_recent);
        let before = match self.last_fault.len() < MAX_NODES {
            true => self.last_fault.insert(node, now),
            false => None,
        };
        if has_others {
            return FaultRemedy::RenewEndpoint;
        }
        let is_in_vain = moves_nothing && before.is_some();
        if is_only_node || is_in_vain {
            FaultRemedy::RenewForNode
        } else {
            FaultRemedy::RestartRings
        }
    }

    /// There is to be another endpoint because of a node, as soon as that may be.
    pub(super) fn request_renewal(&mut self, node: NodeId, why: &'static str) {
        let renewal_wanted = self.renewal_wanted.entry(node).or_insert(why);
        // Another endpoint may follow sooner where a node is back.
        if why == NODE_RETURNED && *renewal_wanted != RETAINED_MEMORY_LIMIT {
            *renewal_wanted = why;
        }
    }

    /// A node is gone: nothing of it has to move any more.
    pub(super) fn cancel_renewal(&mut self, node: NodeId) {
        // What its rings keep they keep.
        if self.renewal_wanted.get(&node).is_some_and(|why| *why != RETAINED_MEMORY_LIMIT) {
            self.renewal_wanted.remove(&node);
        }
    }

    /// The nodes because of which there may be another endpoint now.
    pub(super) fn due(
        &self,
        now: u64,
        is_only_node: impl Fn(NodeId) -> bool,
    ) -> impl Iterator<Item = (NodeId, &'static str)> {
        self.renewal_wanted.iter().map(|(node, why)| (*node, *why)).filter(move |(node, _)| {
            let last_renewal = self.last_renewal.get(node);
            last_renewal.is_none_or(|last_renewal| now >= last_renewal + RENEWAL_INTERVAL_PER_NODE)
                || is_only_node(*node)
        })
    }

    /// There is another endpoint: because of this node, if of one alone, and whether no other node was
    /// connected.
    pub(super) fn clear(&mut self, now: u64, for_node: Option<(NodeId, bool)>) {
        self.last_renewal.retain(|_, last_renewal| now < *last_renewal + RENEWAL_INTERVAL_PER_NODE);
        if let Some((node, false)) = for_node {
            self.last_renewal.insert(node, now);
        }
        self.addresses.clear();
        self.last_fault.clear();
        self.renewal_wanted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId([1; 16]);
    const TWO: NodeId = NodeId([2; 16]);

    /// How often one node that always has a fault has the endpoint opened anew within ten minutes.
    fn opened(is_only_node: bool, moves_nothing: bool) -> u64 {
        let (mut faults, mut opened) = (NodeFaults::default(), 0);
        for now in (0..600).map(|second| second * SECOND) {
            faults.note_address(ONE, b"one");
            match faults.record(ONE, now, is_only_node, moves_nothing) {
                FaultRemedy::RenewEndpoint => panic!("of one node alone"),
                FaultRemedy::RenewForNode => faults.request_renewal(ONE, "it moves nothing"),
                FaultRemedy::RestartRings => {}
            }
            let due = faults.due(now, |_| is_only_node).next();
            if let Some((node, _)) = due {
                opened += 1;
                faults.clear(now, Some((node, is_only_node)));
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
        let mut faults = NodeFaults::default();
        assert_eq!(faults.record(ONE, SECOND, false, true), FaultRemedy::RestartRings);
        assert_eq!(faults.record(TWO, 2 * SECOND, false, true), FaultRemedy::RenewEndpoint);
        faults.clear(2 * SECOND, None);
        // Not at the same time.
        assert_eq!(faults.record(ONE, 3 * SECOND, false, true), FaultRemedy::RestartRings);
        assert_eq!(
            faults.record(TWO, 3 * SECOND + SAME_CAUSE_WINDOW, false, true),
            FaultRemedy::RestartRings
        );
        // A second time within half a minute, and later.
        assert_eq!(faults.record(TWO, 9 * SECOND, false, true), FaultRemedy::RenewForNode);
        assert_eq!(
            faults.record(TWO, 9 * SECOND + REPEAT_WINDOW, false, true),
            FaultRemedy::RestartRings
        );
    }

    #[test]
    fn node_with_another_endpoint_has_no_fault_any_more() {
        let mut faults = NodeFaults::default();
        assert!(!faults.is_known(ONE));
        faults.note_address(ONE, b"one");
        assert!(faults.is_known(ONE) && !faults.is_known(TWO));
        faults.record(ONE, 0, false, true);
        faults.request_renewal(ONE, "it moves nothing");
        faults.request_renewal(TWO, RETAINED_MEMORY_LIMIT);
        faults.note_address(ONE, b"one");
        assert_eq!(faults.due(0, |_| false).count(), 2);
        faults.note_address(ONE, b"another");
        faults.cancel_renewal(TWO);
        assert_eq!(faults.due(0, |_| false).collect::<Vec<_>>(), [(TWO, RETAINED_MEMORY_LIMIT)]);
        assert_eq!(faults.record(ONE, SECOND, false, true), FaultRemedy::RestartRings);
        faults.clear(SECOND, Some((TWO, false)));
        assert!(!faults.is_known(ONE));
        faults.request_renewal(TWO, RETAINED_MEMORY_LIMIT);
        let due = |now, is_only_node| faults.due(now, |_| is_only_node).count();
        assert_eq!((due(2 * SECOND, false), due(2 * SECOND, true)), (0, 1));
        assert_eq!(due(SECOND + RENEWAL_INTERVAL_PER_NODE, false), 1);
    }
}
