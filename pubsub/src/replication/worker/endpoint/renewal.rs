//! Renewal of the endpoint.
//!
//! Only closing an endpoint guarantees that the provider has finished with all memory it was given,
//! and that no write arrives any more. So the endpoint is closed and replaced,
//!
//! - if a provider does not report the completion of a write: its source is released only then;
//! - if closed rings quarantine too much memory, in all or of one node;
//! - if the completion queue has no capacity for another ring, and closed rings hold some of it;
//! - if unreachable nodes return, or connections stall: data in flight may be retransmitted late,
//!   or never arrive. The [faults](super::node_faults) of each node decide whether this concerns
//!   all;
//! - if too many addresses of former peers remain;
//! - if the thread of a further lane ended, which still holds its writes.
//!
//! Afterwards all connections restart with control messages, as after a disconnection. This takes a
//! few round trips, so renewals are limited: one every few seconds, and because of one node among
//! others one every half minute.

use std::collections::HashMap;

use fabric::ring::Port;
use fabric::{AddressVector, MrMode};

use super::WorkerEndpoint;
use super::node_faults::FaultRemedy;
use super::renewal_reason::RenewalReason;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::NodeId;
use crate::replication::worker::RENEW;

/// Limits of quarantined memory, in rings of the largest size: for one node, and in all.
const QUARANTINED_RING_LIMITS: (u64, u64) = (8, 32);
/// Number of addresses that triggers a renewal, and its hard limit.
pub(super) const ADDRESS_LIMITS: (usize, usize) = (512, 4096);
/// Minimum age of an endpoint in nanoseconds, unless a provider hangs.
const MIN_ENDPOINT_AGE: u64 = 5_000_000_000;
const MIN_AGE_AFTER_RETURN: u64 = 1_000_000_000;
/// Limit of doublings of the shorter age while nodes return repeatedly, to spare other nodes.
const MAX_DOUBLINGS: u32 = 4;
/// When the last return is forgotten.
const RETURN_MEMORY: u64 = 60_000_000_000;

/// When and why the endpoint has to be renewed.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    /// Quarantined bytes of this endpoint, by node.
    quarantined_bytes: HashMap<NodeId, u64>,
    /// Reason of the next renewal, unless one node is the reason.
    pending_reason: Option<RenewalReason>,
    /// The last requested ring could not be created for lack of capacity.
    lacks_capacity: bool,
    /// Time of the last renewal.
    last: u64,
    /// Renewals after returns in quick succession.
    quick_returns: u32,
    count: u64,
}

impl Renewal {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Minimum age of this endpoint before a renewal for this reason. `is_only_node`: the reason is
    /// one node, and no other one is connected.
    fn min_age(&self, why: Option<RenewalReason>, is_only_node: bool) -> u64 {
        use RenewalReason::{ConnectionStalled, NodeReturned};
        match why {
            Some(NodeReturned | ConnectionStalled) if self.count == 0 => 0,
            // Losing a node takes longer than this.
            Some(NodeReturned) if is_only_node => MIN_AGE_AFTER_RETURN,
            Some(NodeReturned) => MIN_AGE_AFTER_RETURN << self.quick_returns.min(MAX_DOUBLINGS),
            _ => MIN_ENDPOINT_AGE,
        }
    }

    /// Requests a renewal for a reason that concerns no single node.
    fn request_renewal(&mut self, why: RenewalReason) {
        // A return allows an earlier renewal.
        if why == RenewalReason::NodeReturned || self.pending_reason.is_none() {
            self.pending_reason = Some(why);
        }
    }

    /// Records whether a ring could be created. Capacity of the completion queue held by closed
    /// rings returns only with a new endpoint.
    fn record_ring_capacity(&mut self, has_capacity: bool, quarantined_quotas: usize) {
        if !has_capacity && quarantined_quotas > 0 {
            self.pending_reason.get_or_insert(RenewalReason::NoRingCapacity);
        }
        if has_capacity && self.pending_reason == Some(RenewalReason::NoRingCapacity) {
            // The capacity returned by itself.
            self.pending_reason = None;
        }
        self.lacks_capacity = !has_capacity;
    }

    /// The endpoint was renewed.
    fn restart(&mut self, why: RenewalReason, now: u64) {
        let is_soon = self.count > 0 && now - self.last < RETURN_MEMORY;
        let quick_returns = match why == RenewalReason::NodeReturned && is_soon {
            true => (self.quick_returns + 1).min(MAX_DOUBLINGS),
            false if is_soon => self.quick_returns,
            false => 0,
        };
        *self = Self { last: now, count: self.count + 1, quick_returns, ..Self::default() };
    }
}

impl WorkerEndpoint {
    /// Closes a ring of a node, and records newly quarantined memory.
    pub(super) fn reclaim<T>(&mut self, node: NodeId, close: impl FnOnce(&mut Port) -> T) -> T {
        let port = self.transport.port_mut();
        let before = port.quarantined_bytes();
        let done = close(port);
        let more = port.quarantined_bytes().saturating_sub(before);
        if more > 0 {
            *self.renewal.quarantined_bytes.entry(node).or_default() += more;
        }
        done
    }

    /// Returns true if a node may have another ring; if not, its request waits for a new endpoint.
    pub(crate) fn may_offer_ring(&mut self, node: NodeId) -> bool {
        let bytes = self.renewal.quarantined_bytes.get(&node).copied().unwrap_or(0);
        let is_allowed = bytes < QUARANTINED_RING_LIMITS.0.saturating_mul(self.largest_ring);
        if !is_allowed {
            self.faults.request_renewal(node, RenewalReason::QuarantineLimit);
        }
        is_allowed
    }

    /// Notes whether a ring could be created; if not, it is requested again later.
    pub(crate) fn note_ring_capacity(&mut self, refused: Option<&Error>) {
        let Some(error) = refused else { return self.renewal.record_ring_capacity(true, 0) };
        if error.kind() == ErrorKind::TooMany {
            if !self.renewal.lacks_capacity {
                tracing::warn!(%error, "no capacity for more rings: topics wait");
            }
            let quarantined_quotas = self.transport.port().quarantined_quotas();
            self.renewal.record_ring_capacity(false, quarantined_quotas);
        }
    }

    /// Returns true if the endpoint can be replaced: no memory is bound to it (FI_MR_ENDPOINT).
    pub(crate) fn can_be_renewed(&self) -> bool {
        let capabilities = self.transport.port().endpoint().domain().capabilities();
        !capabilities.registration.mr_mode.contains(MrMode::ENDPOINT)
    }

    /// Records a fault of a node, which a renewal or a restart of its rings follows. False if no
    /// data of it is in flight on this endpoint.
    pub(crate) fn record_fault(
        &mut self,
        node: NodeId,
        why: RenewalReason,
        is_only_node: bool,
        now: u64,
    ) -> bool {
        if !self.faults.is_known(node) {
            return false;
        }
        let is_stalled = why == RenewalReason::ConnectionStalled;
        let remedy = self.faults.record(node, now, is_only_node, is_stalled);
        tracing::debug!(%node, why = why.text(), ?remedy, "fault of a node");
        match remedy {
            FaultRemedy::RestartRings => {}
            _ if !self.can_be_renewed() => tracing::warn!(
                why = why.text(),
                "cannot renew the endpoint: memory is bound to it (FI_MR_ENDPOINT)"
            ),
            FaultRemedy::RenewEndpoint => self.renewal.request_renewal(why),
            FaultRemedy::RenewForNode => self.faults.request_renewal(node, why),
        }
        true
    }

    /// A node disconnected: its connections need no renewal any more, and its rings are probed
    /// again.
    pub(crate) fn node_lost(&mut self, node: NodeId) {
        self.faults.cancel_renewal(node);
        self.device_rings.node_lost(node);
    }

    /// Why the endpoint is to be renewed now, and because of which node, if only one.
    pub(crate) fn renewal_due(
        &self,
        now: u64,
        is_only_node: impl Fn(NodeId) -> bool,
    ) -> Option<(RenewalReason, Option<NodeId>)> {
        let renewal = &self.renewal;
        let is_old_enough =
            |why, is_only_node| now >= renewal.last + renewal.min_age(why, is_only_node);
        if is_old_enough(renewal.pending_reason, false)
            && let Some(why) = self.common_renewal_reason()
        {
            return Some((why, None));
        }
        let mut due = self.faults.due(now, &is_only_node);
        let (node, why) = due.find(|(node, why)| is_old_enough(Some(*why), is_only_node(*node)))?;
        Some((why, Some(node)))
    }

    fn common_renewal_reason(&self) -> Option<RenewalReason> {
        let port = self.transport.port();
        if port.lane_error().is_some() {
            return Some(RenewalReason::LaneEnded);
        }
        if self.renewal.pending_reason.is_some() {
            return self.renewal.pending_reason;
        }
        if port.quarantined_bytes() > QUARANTINED_RING_LIMITS.1.saturating_mul(self.largest_ring) {
            return Some(RenewalReason::QuarantineLimit);
        }
        let addresses = self.fabric_peers.len().max(port.lane_peer_count());
        (addresses > ADDRESS_LIMITS.0).then_some(RenewalReason::AddressLimit)
    }

    /// Replaces the endpoint; closes the old one with all rings, which are disconnected.
    /// `for_node`: the node that is the reason, if any, with whether no other one was connected.
    pub(crate) fn renew(
        &mut self,
        why: RenewalReason,
        for_node: Option<(NodeId, bool)>,
        now: u64,
    ) -> Result<()> {
        let of_fabric = |error| Error::of(RENEW, error);
        let port = self.transport.port_mut();
        let domain = port.endpoint().domain().clone();
        let addresses = AddressVector::open(&domain).map_err(of_fabric)?;
        let setting = self.device_rings.setting();
        let (endpoint, queue, _) = super::begin(&domain, &addresses, setting).map_err(of_fabric)?;
        let address = endpoint.address().map_err(of_fabric)?.0;
        port.replace_endpoint(endpoint, queue).map_err(of_fabric)?;
        super::add_lanes(port, &self.lane_domains);
        (self.addresses, self.address) = (addresses, address);
        self.fabric_peers.clear();
        self.closing_rings.clear();
        drop(self.transport.take_closed());
        self.transport.forget_probes();
        self.renewal.restart(why, now);
        self.faults.clear(now, for_node);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::RenewalReason::*;
    use super::*;

    #[test]
    fn endpoint_has_a_minimum_age_shorter_after_a_return() {
        let min_age = |count, why| Renewal { count, ..Renewal::default() }.min_age(why, false);
        assert_eq!([None, Some(QuarantineLimit)].map(|why| min_age(0, why)), [MIN_ENDPOINT_AGE; 2]);
        assert_eq!(
            [Some(NodeReturned), Some(ConnectionStalled)].map(|why| min_age(0, why)),
            [0; 2]
        );
        assert_eq!(
            [Some(NodeReturned), Some(ConnectionStalled)].map(|why| min_age(1, why)),
            [MIN_AGE_AFTER_RETURN, MIN_ENDPOINT_AGE]
        );
        // Repeated returns lengthen it, unless no other node is affected.
        let min_age = |quick_returns, is_only_node| {
            Renewal { count: 1, quick_returns, ..Renewal::default() }
                .min_age(Some(NodeReturned), is_only_node)
        };
        let expected = [1, 2, 16, 16].map(|times| times * MIN_AGE_AFTER_RETURN);
        assert_eq!([0, 1, 4, 9].map(|quick_returns| min_age(quick_returns, false)), expected);
        assert_eq!(
            [0, 1, 4, 9].map(|quick_returns| min_age(quick_returns, true)),
            [MIN_AGE_AFTER_RETURN; 4]
        );
    }

    #[test]
    fn returned_node_takes_precedence_as_renewal_reason() {
        let mut renewal = Renewal::default();
        for (why, reason) in [
            (ConnectionStalled, ConnectionStalled),
            (QuarantineLimit, ConnectionStalled),
            (NodeReturned, NodeReturned),
            (ConnectionStalled, NodeReturned),
        ] {
            renewal.request_renewal(why);
            assert_eq!(renewal.pending_reason, Some(reason), "{why:?}");
        }
    }

    #[test]
    fn capacity_held_by_closed_rings_is_a_renewal_reason() {
        let mut renewal = Renewal::default();
        renewal.record_ring_capacity(true, 9);
        assert_eq!(renewal.pending_reason, None);
        // Open rings use all capacity: a renewal would not help.
        renewal.record_ring_capacity(false, 0);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (None, true));
        renewal.record_ring_capacity(false, 1);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (Some(NoRingCapacity), true));
        // The capacity returned by itself.
        renewal.record_ring_capacity(true, 0);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (None, false));
    }
}
