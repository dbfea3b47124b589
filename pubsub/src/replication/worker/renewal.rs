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
use std::mem;

use fabric::MrMode;
use fabric::ring::Port;

use super::NodeId;
use super::endpoint;
use super::event_loop::WorkerLoop;
use super::events::WorkerEvent;
use super::node_faults::{FaultRemedy, NodeFaults};
use super::topic_table::TopicSlot;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::Side;

const RENEW: &str = "renew the endpoint";
const RENEW_RINGS: &str = "restart the rings of a node";
pub(super) const QUARANTINE_LIMIT: &str = "rings of writers that are gone retain too much memory";
const NO_RING_CAPACITY: &str = "closed rings hold capacity of the completion queue";
/// A connection has data to move, and makes no progress.
pub(super) const CONNECTION_STALLED: &str = "a connection is stalled";
/// Data in flight may be retransmitted late.
pub(super) const NODE_RETURNED: &str = "a node returned after its link was down";
/// Limits of quarantined memory, in rings of the largest size: for one node, and in all.
const QUARANTINED_RING_LIMITS: (u64, u64) = (8, 32);
/// Number of addresses that triggers a renewal, and its hard limit.
const ADDRESS_LIMITS: (usize, usize) = (512, 4096);
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
    pending_reason: Option<&'static str>,
    /// Faults of each node.
    pub(super) faults: NodeFaults,
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
    fn min_age(&self, why: Option<&'static str>, is_only_node: bool) -> u64 {
        match why {
            Some(NODE_RETURNED | CONNECTION_STALLED) if self.count == 0 => 0,
            // Losing a node takes longer than this.
            Some(NODE_RETURNED) if is_only_node => MIN_AGE_AFTER_RETURN,
            Some(NODE_RETURNED) => MIN_AGE_AFTER_RETURN << self.quick_returns.min(MAX_DOUBLINGS),
            _ => MIN_ENDPOINT_AGE,
        }
    }

    /// Requests a renewal for a reason that concerns no single node.
    fn request_renewal(&mut self, why: &'static str) {
        // A return allows an earlier renewal.
        if why == NODE_RETURNED || self.pending_reason.is_none() {
            self.pending_reason = Some(why);
        }
    }

    /// Whether a node may have another ring.
    pub(super) fn may_offer_ring(&mut self, node: NodeId, ring: u64) -> bool {
        let bytes = self.quarantined_bytes.get(&node).copied().unwrap_or(0);
        let is_allowed = bytes < QUARANTINED_RING_LIMITS.0.saturating_mul(ring);
        if !is_allowed {
            self.faults.request_renewal(node, QUARANTINE_LIMIT);
        }
        is_allowed
    }

    /// Records whether a ring could be created. Capacity of the completion queue held by closed
    /// rings returns only with a new endpoint.
    fn record_ring_capacity(&mut self, has_capacity: bool, quarantined_quotas: usize) {
        if !has_capacity && quarantined_quotas > 0 {
            self.pending_reason.get_or_insert(NO_RING_CAPACITY);
        }
        if has_capacity && self.pending_reason == Some(NO_RING_CAPACITY) {
            // The capacity returned by itself.
            self.pending_reason = None;
        }
        self.lacks_capacity = !has_capacity;
    }

    /// Fails if the address limit is reached.
    pub(super) fn check_address_limit(&self, addresses: usize) -> Result<()> {
        if addresses < ADDRESS_LIMITS.1 {
            return Ok(());
        }
        let detail = format!("the limit of {addresses} addresses is reached");
        Err(Error::new("connect a topic to a node", ErrorKind::TooMany, detail))
    }
}

impl WorkerLoop {
    /// Closes a ring of a node, and records newly quarantined memory.
    pub(super) fn reclaim_ring<T>(
        &mut self,
        node: NodeId,
        close: impl FnOnce(&mut Port) -> T,
    ) -> T {
        let before = self.transport.port.quarantined_bytes();
        let done = close(&mut self.transport.port);
        let more = self.transport.port.quarantined_bytes().saturating_sub(before);
        if more > 0 {
            *self.renewal.quarantined_bytes.entry(node).or_default() += more;
        }
        done
    }

    /// Notes whether a ring could be created; if not, it is requested again later.
    pub(super) fn note_ring_capacity(&mut self, refused: Option<&Error>) {
        let Some(error) = refused else { return self.renewal.record_ring_capacity(true, 0) };
        if error.kind() == ErrorKind::TooMany {
            if !self.renewal.lacks_capacity {
                tracing::warn!(%error, "no capacity for more rings: topics wait");
            }
            self.renewal.record_ring_capacity(false, self.transport.port.quarantined_quotas());
        }
    }

    /// Bytes of the largest ring.
    pub(super) fn largest_ring(&self) -> u64 {
        self.options.ring.saturating_mul(1 + self.lane_domains.len() as u64)
    }

    /// Handles a fault of a node: restarts its connections, or all connections.
    pub(super) fn handle_fault(&mut self, node: NodeId, why: &'static str) {
        if !self.renewal.faults.is_known(node) {
            // No data of it is in flight on this endpoint.
            return;
        }
        let is_only_node = self.is_only_node(node);
        let (now, is_stalled) = (self.now.monotonic, why == CONNECTION_STALLED);
        let remedy = self.renewal.faults.record(node, now, is_only_node, is_stalled);
        tracing::debug!(%node, why, ?remedy, "fault of a node");
        let mr_mode = self.transport.port.endpoint().domain().capabilities().registration.mr_mode;
        let can_be_renewed = !mr_mode.contains(MrMode::ENDPOINT);
        if remedy != FaultRemedy::RestartRings && !can_be_renewed {
            tracing::warn!(
                why,
                "cannot renew the endpoint: memory is bound to it (FI_MR_ENDPOINT)"
            );
        }
        match remedy {
            FaultRemedy::RenewEndpoint if can_be_renewed => self.renewal.request_renewal(why),
            FaultRemedy::RenewForNode if can_be_renewed => {
                self.renewal.faults.request_renewal(node, why)
            }
            _ => {}
        }
        if !self.renew_if_due() {
            self.restart_rings(node, why);
        }
    }

    /// Whether no other node is connected.
    fn is_only_node(&self, node: NodeId) -> bool {
        let mut connections = self.outbound_topics.iter().flat_map(|topic| &topic.connections);
        let mut rings = self.inbound_topics.iter().filter(|topic| topic.origin != node);
        !connections.any(|(other, link)| *other != node && link.requested_since.is_none())
            && !rings.any(|topic| {
                topic.inbound_ring.as_ref().is_some_and(|inbound_ring| inbound_ring.is_connected)
            })
    }

    /// Restarts all rings with a node.
    fn restart_rings(&mut self, node: NodeId, why: &'static str) {
        let reason = || Error::new(RENEW_RINGS, ErrorKind::Failed, why).on(node);
        for index in 0..self.outbound_topics.len() {
            if self
                .outbound_topics
                .get(index)
                .is_some_and(|topic| topic.connections.contains_key(&node))
            {
                self.disconnect_writer(index, node, Some(reason()));
            }
        }
        for index in 0..self.inbound_topics.len() {
            if self
                .inbound_topics
                .get(index)
                .is_some_and(|it| it.origin == node && it.inbound_ring.is_some())
            {
                self.disconnect_inbound_ring(index, reason());
            }
        }
    }

    /// Why the endpoint is to be renewed now, and because of which node, if only one.
    fn renewal_reason(&self) -> Option<(&'static str, Option<NodeId>)> {
        let outbound_topics = self.outbound_topics.iter().chain(&self.draining_outbound);
        if outbound_topics.into_iter().any(|topic| topic.outbound.is_overdue(self.now)) {
            return Some(("the provider does not report the completion of a write", None));
        }
        let (now, renewal) = (self.now.monotonic, &self.renewal);
        let is_old_enough =
            |why, is_only_node| now >= renewal.last + renewal.min_age(why, is_only_node);
        if is_old_enough(renewal.pending_reason, false)
            && let Some(why) = self.common_renewal_reason()
        {
            return Some((why, None));
        }
        let mut due = renewal.faults.due(now, |node| self.is_only_node(node));
        let (node, why) =
            due.find(|(node, why)| is_old_enough(Some(why), self.is_only_node(*node)))?;
        Some((why, Some(node)))
    }

    fn common_renewal_reason(&self) -> Option<&'static str> {
        if self.transport.port.lane_error().is_some() {
            return Some("the thread of a lane ended");
        }
        if self.renewal.pending_reason.is_some() {
            return self.renewal.pending_reason;
        }
        let most = QUARANTINED_RING_LIMITS.1.saturating_mul(self.largest_ring());
        if self.transport.port.quarantined_bytes() > most {
            return Some(QUARANTINE_LIMIT);
        }
        let addresses = self.fabric_peers.len().max(self.transport.port.lane_peer_count());
        (addresses > ADDRESS_LIMITS.0).then_some("the address limit is reached")
    }

    /// Renews the endpoint if it is due. True if so.
    pub(super) fn renew_if_due(&mut self) -> bool {
        let Some((why, node)) = self.renewal_reason() else { return false };
        if let Err(error) = self.replace_endpoint(why, node) {
            tracing::error!(%error, why, "renewing the endpoint failed");
            self.is_stopping = true;
        }
        true
    }

    fn replace_endpoint(&mut self, why: &'static str, node: Option<NodeId>) -> Result<()> {
        match node {
            Some(node) => {
                tracing::info!(why, %node, "the endpoint is renewed");
            }
            None => tracing::info!(why, "the endpoint is renewed"),
        }
        let mr_mode = self.transport.port.endpoint().domain().capabilities().registration.mr_mode;
        if mr_mode.contains(MrMode::ENDPOINT) {
            let detail = format!("{why}; memory is bound to the endpoint (FI_MR_ENDPOINT)");
            return Err(Error::new(RENEW, ErrorKind::Failed, detail));
        }
        let for_node = node.map(|node| (node, self.is_only_node(node)));
        self.disconnect_all_rings(why);
        let (addresses, address) = endpoint::replace_endpoint(&mut self.transport.port)?;
        endpoint::add_lanes(&mut self.transport.port, &self.lane_domains);
        self.doorbell.set_waker(self.transport.port.parts().1.waker());
        self.addresses = addresses;
        self.address = address;
        self.fabric_peers.clear();
        self.sender_topics.clear();
        self.receiver_topics.clear();
        self.closing_rings.clear();
        self.transport.closed.clear();
        let (count, before) = (self.renewal.count + 1, &self.renewal);
        let is_soon = before.count > 0 && self.now.monotonic - before.last < RETURN_MEMORY;
        let quick_returns = match why == NODE_RETURNED && is_soon {
            true => (before.quick_returns + 1).min(MAX_DOUBLINGS),
            false if is_soon => before.quick_returns,
            false => 0,
        };
        let last = self.now.monotonic;
        let mut faults = mem::take(&mut self.renewal.faults);
        faults.clear(last, for_node);
        self.renewal = Renewal { last, count, quick_returns, faults, ..Renewal::default() };
        for index in 0..self.outbound_topics.len() {
            if let Some(topic) = self.outbound_topics.get(index) {
                topic.outbound.forget_rings();
                self.ready(TopicSlot::Out(index));
            }
        }
        self.draining_outbound.iter_mut().for_each(|topic| topic.outbound.forget_rings());
        // Some have requests to be answered.
        (0..self.inbound_topics.len()).for_each(|index| self.ready(TopicSlot::In(index)));
        self.release_drained();
        Ok(())
    }

    /// Disconnects all rings before the endpoint is closed.
    fn disconnect_all_rings(&mut self, why: &'static str) {
        let reason = || Error::new(RENEW, ErrorKind::Closed, why);
        for index in 0..self.outbound_topics.len() {
            let Some(topic) = self.outbound_topics.get(index) else { continue };
            let nodes: Vec<_> = topic.connections.keys().copied().collect();
            for node in nodes {
                self.disconnect_writer(index, node, Some(reason().on(node)));
            }
            if let Some(topic) = self.outbound_topics.get(index) {
                topic.outbound.disconnect_all(&mut self.transport);
            }
        }
        for index in 0..self.inbound_topics.len() {
            self.request_restart(index, why);
            let Some(topic) = self.inbound_topics.get(index) else { continue };
            if topic.disconnect().is_some() {
                let (key, node, side) = (topic.key, topic.origin, Side::Reader);
                self.events.send(WorkerEvent::Disconnected {
                    key,
                    node,
                    side,
                    reason: reason().on(node),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_has_a_minimum_age_shorter_after_a_return() {
        let min_age = |count, why| Renewal { count, ..Renewal::default() }.min_age(why, false);
        assert_eq!(
            [None, Some(QUARANTINE_LIMIT)].map(|why| min_age(0, why)),
            [MIN_ENDPOINT_AGE; 2]
        );
        assert_eq!(
            [Some(NODE_RETURNED), Some(CONNECTION_STALLED)].map(|why| min_age(0, why)),
            [0; 2]
        );
        assert_eq!(
            [Some(NODE_RETURNED), Some(CONNECTION_STALLED)].map(|why| min_age(1, why)),
            [MIN_AGE_AFTER_RETURN, MIN_ENDPOINT_AGE]
        );
        // Repeated returns lengthen it, unless no other node is affected.
        let min_age = |quick_returns, is_only_node| {
            Renewal { count: 1, quick_returns, ..Renewal::default() }
                .min_age(Some(NODE_RETURNED), is_only_node)
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
            (CONNECTION_STALLED, CONNECTION_STALLED),
            (QUARANTINE_LIMIT, CONNECTION_STALLED),
            (NODE_RETURNED, NODE_RETURNED),
            (CONNECTION_STALLED, NODE_RETURNED),
        ] {
            renewal.request_renewal(why);
            assert_eq!(renewal.pending_reason, Some(reason), "{why}");
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
        assert_eq!(
            (renewal.pending_reason, renewal.lacks_capacity),
            (Some(NO_RING_CAPACITY), true)
        );
        // The capacity returned by itself.
        renewal.record_ring_capacity(true, 0);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (None, false));
    }
}
