//! Beginning anew with another endpoint.
//!
//! Only when an endpoint is closed is it certain that a provider is done with all memory that it
//! was ever given, and that nothing arrives any more. So it is closed, and another one opened in
//! its place,
//!
//! - if a provider does not say what became of a write: what it was made from is released only then;
//! - if rings whose writers are gone take too much memory, in all or of one node;
//! - if there is no room for another ring's notices, and rings that are gone keep theirs;
//! - if nodes that could not be reached are back, or connections move nothing: what they have on their
//!   way may be sent again late, or never arrive. Whether that is for all is decided by the
//!   [faults](super::faults) of each node;
//! - if there are too many addresses of those that are gone;
//! - if a thread of a further lane ended, which has what it was given.
//!
//! All connections begin again after that, with letters, as if they had been lost. That takes a
//! few round trips, so it is not done often: no more than every few seconds, and because of one
//! node that is not alone no more than every half minute.

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
pub(super) const RETAINED_MEMORY_LIMIT: &str =
    "rings of writers that are gone retain too much memory";
const NO_RING_CAPACITY: &str = "closed rings hold all ring slots of the completion queue";
/// A connection with a node moves nothing, though there is something to be moved.
pub(super) const CONNECTION_STALLED: &str = "a connection moves nothing";
/// What connections have on their way may be sent again late.
pub(super) const NODE_RETURNED: &str = "a node returned after its link was down";
/// Rings of the greatest size that are kept for one node, and in all.
const RETAINED_RING_LIMITS: (u64, u64) = (8, 32);
/// Addresses after which there should be a new endpoint, and how many there may be until then.
const ADDRESS_LIMITS: (usize, usize) = (512, 4096);
/// How long an endpoint is used at least, unless a provider hangs, in nanoseconds.
const MIN_ENDPOINT_AGE: u64 = 5_000_000_000;
const MIN_AGE_AFTER_RETURN: u64 = 1_000_000_000;
/// Doublings of the short one while nodes come back repeatedly: others must not pay for them.
const MAX_DOUBLINGS: u32 = 4;
/// When the last return is forgotten.
const RETURN_MEMORY: u64 = 60_000_000_000;

/// When there has to be a new endpoint.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    /// Bytes of memory of rings that are gone, of each node, that this endpoint keeps.
    retained_bytes: HashMap<NodeId, u64>,
    /// Why there is to be another one, if that is not because of one node.
    pending_reason: Option<&'static str>,
    /// What went wrong with each node.
    pub(super) faults: NodeFaults,
    /// The last ring that was wished for could not be made for lack of room.
    lacks_capacity: bool,
    /// When it was done last.
    last: u64,
    /// How often it was done since a link was back, one soon after the other.
    quick_returns: u32,
    count: u64,
}

impl Renewal {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// How long this endpoint is used at least, if there is to be another one for this reason,
    /// which lies in a node that is the only one, or not.
    fn rest(&self, why: Option<&'static str>, is_only_node: bool) -> u64 {
        match why {
            Some(NODE_RETURNED | CONNECTION_STALLED) if self.count == 0 => 0,
            // It takes longer to lose a node.
            Some(NODE_RETURNED) if is_only_node => MIN_AGE_AFTER_RETURN,
            Some(NODE_RETURNED) => MIN_AGE_AFTER_RETURN << self.quick_returns.min(MAX_DOUBLINGS),
            _ => MIN_ENDPOINT_AGE,
        }
    }

    /// There is to be another endpoint, for a reason that lies in no single node.
    fn request_renewal(&mut self, why: &'static str) {
        // Another endpoint may follow sooner where nodes are back.
        if why == NODE_RETURNED || self.pending_reason.is_none() {
            self.pending_reason = Some(why);
        }
    }

    /// May a node have another ring?
    pub(super) fn may_offer_ring(&mut self, node: NodeId, ring: u64) -> bool {
        let retained_bytes = self.retained_bytes.get(&node).copied().unwrap_or(0);
        let is_allowed = retained_bytes < RETAINED_RING_LIMITS.0.saturating_mul(ring);
        if !is_allowed {
            self.faults.request_renewal(node, RETAINED_MEMORY_LIMIT);
        }
        is_allowed
    }

    /// A ring was made, or not for lack of room. What rings that are gone keep of the completion
    /// queue comes back with a new endpoint only.
    fn had_room(&mut self, had_room: bool, quarantined_quotas: usize) {
        if !had_room && quarantined_quotas > 0 {
            self.pending_reason.get_or_insert(NO_RING_CAPACITY);
        }
        if had_room && self.pending_reason == Some(NO_RING_CAPACITY) {
            // Shares came back by themselves.
            self.pending_reason = None;
        }
        self.lacks_capacity = !had_room;
    }

    /// Is there a place for one more address?
    pub(super) fn check_address_limit(&self, addresses: usize) -> Result<()> {
        if addresses < ADDRESS_LIMITS.1 {
            return Ok(());
        }
        let detail = format!("there are {addresses} addresses already");
        Err(Error::new("connect a topic to a node", ErrorKind::TooMany, detail))
    }
}

impl WorkerLoop {
    /// Lets go of a ring of a node, whose memory may have to be kept.
    pub(super) fn reclaim_ring<T>(&mut self, node: NodeId, how: impl FnOnce(&mut Port) -> T) -> T {
        let before = self.transport.port.quarantined_bytes();
        let done = how(&mut self.transport.port);
        let more = self.transport.port.quarantined_bytes().saturating_sub(before);
        if more > 0 {
            *self.renewal.retained_bytes.entry(node).or_default() += more;
        }
        done
    }

    /// Takes note of whether there was room for a ring: it is wished for again later if not.
    pub(super) fn note_ring_capacity(&mut self, refused: Option<&Error>) {
        let Some(error) = refused else { return self.renewal.had_room(true, 0) };
        if error.kind() == ErrorKind::TooMany {
            if !self.renewal.lacks_capacity {
                tracing::warn!(%error, "no capacity for more rings: topics wait");
            }
            self.renewal.had_room(false, self.transport.port.quarantined_quotas());
        }
    }

    /// The most bytes of a ring.
    pub(super) fn largest_ring(&self) -> u64 {
        self.options.ring.saturating_mul(1 + self.lane_domains.len() as u64)
    }

    /// Something is wrong with the connections of a node: they begin anew, or all do.
    pub(super) fn handle_fault(&mut self, node: NodeId, why: &'static str) {
        if !self.renewal.faults.is_known(node) {
            // Nothing of it is on its way by this endpoint.
            return;
        }
        let is_only_node = self.is_only_node(node);
        let (now, moves_nothing) = (self.now.monotonic, why == CONNECTION_STALLED);
        let remedy = self.renewal.faults.record(node, now, is_only_node, moves_nothing);
        tracing::debug!(%node, why, ?remedy, "the connections of a node begin anew");
        let mr_mode = self.transport.port.endpoint().domain().capabilities().mr_mode;
        let can_be_renewed = !mr_mode.contains(MrMode::ENDPOINT);
        if remedy != FaultRemedy::RestartRings && !can_be_renewed {
            tracing::warn!(why, "the endpoint cannot be begun anew: memory belongs to it");
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

    /// Is no other node connected?
    fn is_only_node(&self, node: NodeId) -> bool {
        let mut connections = self.outbound_topics.iter().flat_map(|topic| &topic.connections);
        let mut taps = self.inbound_topics.iter().filter(|topic| topic.origin != node);
        !connections.any(|(other, link)| *other != node && link.requested_since.is_none())
            && !taps.any(|topic| {
                topic.inbound_ring.as_ref().is_some_and(|inbound_ring| inbound_ring.is_connected)
            })
    }

    /// All rings to and from a node end, and others take their place.
    fn restart_rings(&mut self, node: NodeId, why: &'static str) {
        let reason = || Error::new(RENEW_RINGS, ErrorKind::Failed, why).on(node);
        for place in 0..self.outbound_topics.len() {
            if self
                .outbound_topics
                .get(place)
                .is_some_and(|topic| topic.connections.contains_key(&node))
            {
                self.disconnect_writer(place, node, Some(reason()));
            }
        }
        for place in 0..self.inbound_topics.len() {
            if self
                .inbound_topics
                .get(place)
                .is_some_and(|it| it.origin == node && it.inbound_ring.is_some())
            {
                self.disconnect_inbound_ring(place, reason());
            }
        }
    }

    /// Why there is to be another endpoint now, and because of which node, if it is one.
    fn renewal_reason(&self) -> Option<(&'static str, Option<NodeId>)> {
        let outbound_topics = self.outbound_topics.iter().chain(&self.draining_outbound);
        if outbound_topics.into_iter().any(|topic| topic.outbound.is_overdue(self.now)) {
            return Some(("the provider does not say what became of a write", None));
        }
        let (now, renewal) = (self.now.monotonic, &self.renewal);
        let has_rested = |why, is_only_node| now >= renewal.last + renewal.rest(why, is_only_node);
        if has_rested(renewal.pending_reason, false)
            && let Some(why) = self.common_renewal_reason()
        {
            return Some((why, None));
        }
        let mut due = renewal.faults.due(now, |node| self.is_only_node(node));
        let (node, why) =
            due.find(|(node, why)| has_rested(Some(why), self.is_only_node(*node)))?;
        Some((why, Some(node)))
    }

    fn common_renewal_reason(&self) -> Option<&'static str> {
        if self.transport.port.lane_error().is_some() {
            return Some("a thread of a lane has ended");
        }
        if self.renewal.pending_reason.is_some() {
            return self.renewal.pending_reason;
        }
        let most = RETAINED_RING_LIMITS.1.saturating_mul(self.largest_ring());
        if self.transport.port.quarantined_bytes() > most {
            return Some(RETAINED_MEMORY_LIMIT);
        }
        let addresses = self.fabric_peers.len().max(self.transport.port.lane_peer_count());
        (addresses > ADDRESS_LIMITS.0).then_some("there are many addresses")
    }

    /// Closes the endpoint and opens another one, if it is time. True if that was so.
    pub(super) fn renew_if_due(&mut self) -> bool {
        let Some((why, node)) = self.renewal_reason() else { return false };
        if let Err(error) = self.replace_endpoint(why, node) {
            tracing::error!(%error, why, "the endpoint was not renewed");
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
        let mr_mode = self.transport.port.endpoint().domain().capabilities().mr_mode;
        if mr_mode.contains(MrMode::ENDPOINT) {
            let detail = format!("{why}; here memory belongs to an endpoint");
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
        for place in 0..self.outbound_topics.len() {
            if let Some(topic) = self.outbound_topics.get(place) {
                topic.outbound.forget_rings();
                self.ready(TopicSlot::Out(place));
            }
        }
        self.draining_outbound.iter_mut().for_each(|topic| topic.outbound.forget_rings());
        // Some may wait for an answer to their wishes.
        (0..self.inbound_topics.len()).for_each(|place| self.ready(TopicSlot::In(place)));
        self.release_drained();
        Ok(())
    }

    /// Before the endpoint is closed: all connections are lost.
    fn disconnect_all_rings(&mut self, why: &'static str) {
        let reason = || Error::new(RENEW, ErrorKind::Closed, why);
        for place in 0..self.outbound_topics.len() {
            let Some(topic) = self.outbound_topics.get(place) else { continue };
            let nodes: Vec<_> = topic.connections.keys().copied().collect();
            for node in nodes {
                self.disconnect_writer(place, node, Some(reason().on(node)));
            }
            if let Some(topic) = self.outbound_topics.get(place) {
                topic.outbound.disconnect_all(&mut self.transport);
            }
        }
        for place in 0..self.inbound_topics.len() {
            self.request_restart(place, why);
            let Some(topic) = self.inbound_topics.get(place) else { continue };
            if topic.disconnect().is_some() {
                let (key, node, side) = (topic.key, topic.origin, Side::Reader);
                self.events.tell(WorkerEvent::Disconnected {
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
    fn endpoints_are_used_for_a_while_and_less_long_where_a_node_is_back() {
        let rest = |count, why| Renewal { count, ..Renewal::default() }.rest(why, false);
        assert_eq!(
            [None, Some(RETAINED_MEMORY_LIMIT)].map(|why| rest(0, why)),
            [MIN_ENDPOINT_AGE; 2]
        );
        assert_eq!([Some(NODE_RETURNED), Some(CONNECTION_STALLED)].map(|why| rest(0, why)), [0; 2]);
        assert_eq!(
            [Some(NODE_RETURNED), Some(CONNECTION_STALLED)].map(|why| rest(1, why)),
            [MIN_AGE_AFTER_RETURN, MIN_ENDPOINT_AGE]
        );
        // Where nodes come back repeatedly, longer each time, if that is at the expense of others.
        let rest = |quick_returns, is_only_node| {
            Renewal { count: 1, quick_returns, ..Renewal::default() }
                .rest(Some(NODE_RETURNED), is_only_node)
        };
        let expected = [1, 2, 16, 16].map(|times| times * MIN_AGE_AFTER_RETURN);
        assert_eq!([0, 1, 4, 9].map(|quick_returns| rest(quick_returns, false)), expected);
        assert_eq!(
            [0, 1, 4, 9].map(|quick_returns| rest(quick_returns, true)),
            [MIN_AGE_AFTER_RETURN; 4]
        );
    }

    #[test]
    fn node_that_is_back_is_the_reason_whatever_else_is_wrong() {
        let mut renewal = Renewal::default();
        for (why, reason) in [
            (CONNECTION_STALLED, CONNECTION_STALLED),
            (RETAINED_MEMORY_LIMIT, CONNECTION_STALLED),
            (NODE_RETURNED, NODE_RETURNED),
            (CONNECTION_STALLED, NODE_RETURNED),
        ] {
            renewal.request_renewal(why);
            assert_eq!(renewal.pending_reason, Some(reason), "{why}");
        }
    }

    #[test]
    fn shares_of_rings_that_are_gone_are_a_reason_once_none_is_left() {
        let mut renewal = Renewal::default();
        renewal.had_room(true, 9);
        assert_eq!(renewal.pending_reason, None);
        // All of them are in use: there is nothing to be had by another endpoint.
        renewal.had_room(false, 0);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (None, true));
        renewal.had_room(false, 1);
        assert_eq!(
            (renewal.pending_reason, renewal.lacks_capacity),
            (Some(NO_RING_CAPACITY), true)
        );
        // They came back by themselves.
        renewal.had_room(true, 0);
        assert_eq!((renewal.pending_reason, renewal.lacks_capacity), (None, false));
    }
}
