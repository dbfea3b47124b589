//! Attributes faults to one node, or to the endpoint.
//!
//! A node can cause faults at will: it disconnects and returns, or claims writes that never
//! arrived. Other nodes must not suffer from that. So a fault of one node restarts only the rings
//! with that node. All connections restart, through another endpoint, in these cases:
//!
//! - several nodes have a fault within [`SAME_CAUSE_WINDOW`];
//! - one node has a fault, and no other node is connected;
//! - restarting the rings of one node had no effect, or closed rings of it keep much memory; for
//!   each node at most once within [`RENEWAL_INTERVAL_PER_NODE`].
//!
//! A provider such as `net` has one connection for each pair of endpoints. It closes the connection
//! only with one of the endpoints, not when an address is removed. Renewing one side is enough: so
//! the fault of a node ends when it has another endpoint.

use std::collections::{BTreeMap, HashMap};

use super::renewal_reason::RenewalReason;
use crate::replication::NodeId;

const SECOND: u64 = 1_000_000_000;
/// Faults of several nodes within this time have one cause.
const SAME_CAUSE_WINDOW: u64 = 3 * SECOND;
/// A stall this soon after the last fault: the restart had no effect.
const REPEAT_WINDOW: u64 = 30 * SECOND;
/// Minimum time between two renewals for one node while others are connected.
pub(super) const RENEWAL_INTERVAL_PER_NODE: u64 = 30 * SECOND;
/// Limit of tracked nodes.
const MAX_NODES: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultRemedy {
    RestartRings,
    /// Renew the endpoint because of this node, at its limited rate.
    RenewForNode,
    /// Renew the endpoint: several nodes are affected.
    RenewEndpoint,
}

/// Faults of the nodes that an endpoint was connected to.
#[derive(Debug, Default)]
pub(super) struct NodeFaults {
    /// The address of each node's endpoint.
    addresses: HashMap<NodeId, Vec<u8>>,
    last_fault: HashMap<NodeId, u64>,
    /// Nodes that need another endpoint, with the reason.
    renewal_wanted: BTreeMap<NodeId, RenewalReason>,
    /// Time of the last renewal for a node while others were connected.
    last_renewal: HashMap<NodeId, u64>,
}

impl NodeFaults {
    /// Notes the endpoint address of a node. A changed address ends the node's fault.
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

    /// Returns true if the provider may have a connection with a node.
    pub(super) fn is_known(&self, node: NodeId) -> bool {
        self.addresses.contains_key(&node)
    }

    /// Records a fault of a node. `is_stalled`: none of its rings makes progress.
    pub(super) fn record(
        &mut self,
        node: NodeId,
        now: u64,
        is_only_node: bool,
        is_stalled: bool,
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
        let is_repeated = is_stalled && before.is_some();
        if is_only_node || is_repeated {
            FaultRemedy::RenewForNode
        } else {
            FaultRemedy::RestartRings
        }
    }

    /// Requests another endpoint because of a node, as soon as allowed.
    pub(super) fn request_renewal(&mut self, node: NodeId, why: RenewalReason) {
        let renewal_wanted = self.renewal_wanted.entry(node).or_insert(why);
        // A return allows an earlier renewal.
        if why == RenewalReason::NodeReturned && *renewal_wanted != RenewalReason::QuarantineLimit {
            *renewal_wanted = why;
        }
    }

    /// A node disconnected: its connections need no renewal any more.
    pub(super) fn cancel_renewal(&mut self, node: NodeId) {
        // Quarantined memory of its rings remains.
        if self.renewal_wanted.get(&node).is_some_and(|why| *why != RenewalReason::QuarantineLimit)
        {
            self.renewal_wanted.remove(&node);
        }
    }

    /// The nodes that may have the endpoint renewed now.
    pub(super) fn due(
        &self,
        now: u64,
        is_only_node: impl Fn(NodeId) -> bool,
    ) -> impl Iterator<Item = (NodeId, RenewalReason)> {
        self.renewal_wanted.iter().map(|(node, why)| (*node, *why)).filter(move |(node, _)| {
            let last_renewal = self.last_renewal.get(node);
            last_renewal.is_none_or(|last_renewal| now >= last_renewal + RENEWAL_INTERVAL_PER_NODE)
                || is_only_node(*node)
        })
    }

    /// The endpoint was renewed: because of this node, if any, with whether no other node was
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

    /// How often a node with constant faults has the endpoint renewed within ten minutes.
    fn renewals(is_only_node: bool, is_stalled: bool) -> u64 {
        let (mut faults, mut count) = (NodeFaults::default(), 0);
        for now in (0..600).map(|second| second * SECOND) {
            faults.note_address(ONE, b"one");
            match faults.record(ONE, now, is_only_node, is_stalled) {
                FaultRemedy::RenewEndpoint => panic!("faults of only one node"),
                FaultRemedy::RenewForNode => {
                    faults.request_renewal(ONE, RenewalReason::ConnectionStalled)
                }
                FaultRemedy::RestartRings => {}
            }
            let due = faults.due(now, |_| is_only_node).next();
            if let Some((node, _)) = due {
                count += 1;
                faults.clear(now, Some((node, is_only_node)));
            }
        }
        count
    }

    #[test]
    fn one_node_renews_the_shared_endpoint_twice_a_minute_at_most() {
        // A node that returns repeatedly, and one whose rings are stalled.
        assert_eq!(renewals(false, false), 0);
        assert!((19..=20).contains(&renewals(false, true)), "{}", renewals(false, true));
        // No other node is affected.
        assert_eq!(renewals(true, false), 600);
    }

    #[test]
    fn simultaneous_faults_of_several_nodes_renew_the_endpoint() {
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
    fn fault_ends_when_the_node_has_another_endpoint() {
        let mut faults = NodeFaults::default();
        assert!(!faults.is_known(ONE));
        faults.note_address(ONE, b"one");
        assert!(faults.is_known(ONE) && !faults.is_known(TWO));
        faults.record(ONE, 0, false, true);
        faults.request_renewal(ONE, RenewalReason::ConnectionStalled);
        faults.request_renewal(TWO, RenewalReason::QuarantineLimit);
        faults.note_address(ONE, b"one");
        assert_eq!(faults.due(0, |_| false).count(), 2);
        faults.note_address(ONE, b"another");
        faults.cancel_renewal(TWO);
        assert_eq!(
            faults.due(0, |_| false).collect::<Vec<_>>(),
            [(TWO, RenewalReason::QuarantineLimit)]
        );
        assert_eq!(faults.record(ONE, SECOND, false, true), FaultRemedy::RestartRings);
        faults.clear(SECOND, Some((TWO, false)));
        assert!(!faults.is_known(ONE));
        faults.request_renewal(TWO, RenewalReason::QuarantineLimit);
        let due = |now, is_only_node| faults.due(now, |_| is_only_node).count();
        assert_eq!((due(2 * SECOND, false), due(2 * SECOND, true)), (0, 1));
        assert_eq!(due(SECOND + RENEWAL_INTERVAL_PER_NODE, false), 1);
    }
}
