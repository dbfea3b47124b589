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

use super::NodeIdentity;
use super::endpoint;
use super::engine::Engine;
use super::faults::{Faults, Remedy};
use super::reports::Report;
use super::topics::Task;
use crate::bridge::Side;
use crate::error::{Error, ErrorKind, Result};

const RENEW: &str = "begin a bridge's endpoint anew";
const RENEW_RINGS: &str = "begin the connections of a node anew";
pub(super) const MUCH_MEMORY: &str = "rings whose writers are gone take much memory";
const NO_SHARES: &str = "rings that are gone keep their shares of the completion queue";
/// A connection with a node moves nothing, though there is something to be moved.
pub(super) const MOVES_NOTHING: &str = "a connection moves nothing";
/// What connections have on their way may be sent again late.
pub(super) const LINK_IS_BACK: &str = "a node that could not be reached is back";
/// Rings of the greatest size that are kept for one node, and in all.
const MOST_RINGS: (u64, u64) = (8, 32);
/// Addresses after which there should be a new endpoint, and how many there may be until then.
const MOST_ADDRESSES: (usize, usize) = (512, 4096);
/// How long an endpoint is used at least, unless a provider hangs, in nanoseconds.
const REST: u64 = 5_000_000_000;
const SHORT_REST: u64 = 1_000_000_000;
/// Doublings of the short one while nodes come back repeatedly: others must not pay for them.
const MOST_DOUBLINGS: u32 = 4;
/// When the last return is forgotten.
const FORGOTTEN: u64 = 60_000_000_000;

/// When there has to be a new endpoint.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    /// Bytes of memory of rings that are gone, of each node, that this endpoint keeps.
    kept: HashMap<NodeIdentity, u64>,
    /// Why there is to be another one, if that is not because of one node.
    awaited: Option<&'static str>,
    /// What went wrong with each node.
    pub(super) faults: Faults,
    /// The last ring that was wished for could not be made for lack of room.
    is_short: bool,
    /// When it was done last.
    last: u64,
    /// How often it was done since a link was back, one soon after the other.
    returns: u32,
    count: u64,
}

impl Renewal {
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// How long this endpoint is used at least, if there is to be another one for this reason,
    /// which lies in a node that is the only one, or not.
    fn rest(&self, why: Option<&'static str>, is_alone: bool) -> u64 {
        match why {
            Some(LINK_IS_BACK | MOVES_NOTHING) if self.count == 0 => 0,
            // It takes longer to lose a node.
            Some(LINK_IS_BACK) if is_alone => SHORT_REST,
            Some(LINK_IS_BACK) => SHORT_REST << self.returns.min(MOST_DOUBLINGS),
            _ => REST,
        }
    }

    /// There is to be another endpoint, for a reason that lies in no single node.
    fn want(&mut self, why: &'static str) {
        // Another endpoint may follow sooner where nodes are back.
        if why == LINK_IS_BACK || self.awaited.is_none() {
            self.awaited = Some(why);
        }
    }

    /// May a node have another ring?
    pub(super) fn allows(&mut self, node: NodeIdentity, ring: u64) -> bool {
        let kept = self.kept.get(&node).copied().unwrap_or(0);
        let is_allowed = kept < MOST_RINGS.0.saturating_mul(ring);
        if !is_allowed {
            self.faults.want(node, MUCH_MEMORY);
        }
        is_allowed
    }

    /// A ring was made, or not for lack of room. What rings that are gone keep of the completion
    /// queue comes back with a new endpoint only.
    fn had_room(&mut self, had_room: bool, quarantined_shares: usize) {
        if !had_room && quarantined_shares > 0 {
            self.awaited.get_or_insert(NO_SHARES);
        }
        if had_room && self.awaited == Some(NO_SHARES) {
            // Shares came back by themselves.
            self.awaited = None;
        }
        self.is_short = !had_room;
    }

    /// Is there a place for one more address?
    pub(super) fn has_place(&self, addresses: usize) -> Result<()> {
        if addresses < MOST_ADDRESSES.1 {
            return Ok(());
        }
        let detail = format!("there are {addresses} addresses already");
        Err(Error::new("connect a topic to a node", ErrorKind::TooMany, detail))
    }
}

impl Engine {
    /// Lets go of a ring of a node, whose memory may have to be kept.
    pub(super) fn bury<T>(&mut self, node: NodeIdentity, how: impl FnOnce(&mut Port) -> T) -> T {
        let before = self.deck.port.quarantined();
        let done = how(&mut self.deck.port);
        let more = self.deck.port.quarantined().saturating_sub(before);
        if more > 0 {
            *self.renewal.kept.entry(node).or_default() += more;
        }
        done
    }

    /// Takes note of whether there was room for a ring: it is wished for again later if not.
    pub(super) fn note_room(&mut self, refused: Option<&Error>) {
        let Some(error) = refused else { return self.renewal.had_room(true, 0) };
        if error.kind() == ErrorKind::TooMany {
            if !self.renewal.is_short {
                tracing::warn!(%error, "topics wait until there is room for their rings");
            }
            self.renewal.had_room(false, self.deck.port.quarantined_shares());
        }
    }

    /// The most bytes of a ring.
    pub(super) fn largest_ring(&self) -> u64 {
        self.options.ring.saturating_mul(1 + self.lane_domains.len() as u64)
    }

    /// Something is wrong with the connections of a node: they begin anew, or all do.
    pub(super) fn has_fault(&mut self, node: NodeIdentity, why: &'static str) {
        if !self.renewal.faults.is_known(node) {
            // Nothing of it is on its way by this endpoint.
            return;
        }
        let is_alone = self.is_alone(node);
        let (now, moves_nothing) = (self.now.steady, why == MOVES_NOTHING);
        let remedy = self.renewal.faults.record(node, now, is_alone, moves_nothing);
        tracing::debug!(%node, why, ?remedy, "the connections of a node begin anew");
        let mr_mode = self.deck.port.endpoint().domain().capabilities().mr_mode;
        let can_be_renewed = !mr_mode.contains(MrMode::ENDPOINT);
        if remedy != Remedy::Rings && !can_be_renewed {
            tracing::warn!(why, "the endpoint cannot be begun anew: memory belongs to it");
        }
        match remedy {
            Remedy::Endpoint if can_be_renewed => self.renewal.want(why),
            Remedy::ForTheNode if can_be_renewed => self.renewal.faults.want(node, why),
            _ => {}
        }
        if !self.renew_if_due() {
            self.begin_rings_anew(node, why);
        }
    }

    /// Is no other node connected?
    fn is_alone(&self, node: NodeIdentity) -> bool {
        let mut links = self.outs.iter().flat_map(|topic| &topic.links);
        let mut taps = self.ins.iter().filter(|topic| topic.origin != node);
        !links.any(|(other, link)| *other != node && link.wished.is_none())
            && !taps.any(|topic| topic.tap.as_ref().is_some_and(|tap| tap.is_connected))
    }

    /// All rings to and from a node end, and others take their place.
    fn begin_rings_anew(&mut self, node: NodeIdentity, why: &'static str) {
        let reason = || Error::new(RENEW_RINGS, ErrorKind::Failed, why).on(node);
        for place in 0..self.outs.len() {
            if self.outs.get(place).is_some_and(|topic| topic.links.contains_key(&node)) {
                self.lose_link(place, node, Some(reason()));
            }
        }
        for place in 0..self.ins.len() {
            if self.ins.get(place).is_some_and(|it| it.origin == node && it.tap.is_some()) {
                self.lose_tap(place, reason());
            }
        }
    }

    /// Why there is to be another endpoint now, and because of which node, if it is one.
    fn why_renew(&self) -> Option<(&'static str, Option<NodeIdentity>)> {
        let outs = self.outs.iter().chain(&self.leaving);
        if outs.into_iter().any(|topic| topic.outbound.is_overdue(self.now)) {
            return Some(("the provider does not say what became of a write", None));
        }
        let (now, renewal) = (self.now.steady, &self.renewal);
        let has_rested = |why, is_alone| now >= renewal.last + renewal.rest(why, is_alone);
        if has_rested(renewal.awaited, false)
            && let Some(why) = self.why_renew_for_all()
        {
            return Some((why, None));
        }
        let mut due = renewal.faults.due(now, |node| self.is_alone(node));
        let (node, why) = due.find(|(node, why)| has_rested(Some(why), self.is_alone(*node)))?;
        Some((why, Some(node)))
    }

    fn why_renew_for_all(&self) -> Option<&'static str> {
        if self.deck.port.broken_lane().is_some() {
            return Some("a thread of a lane has ended");
        }
        if self.renewal.awaited.is_some() {
            return self.renewal.awaited;
        }
        let most = MOST_RINGS.1.saturating_mul(self.largest_ring());
        if self.deck.port.quarantined() > most {
            return Some(MUCH_MEMORY);
        }
        let addresses = self.peers.len().max(self.deck.port.lane_peers());
        (addresses > MOST_ADDRESSES.0).then_some("there are many addresses")
    }

    /// Closes the endpoint and opens another one, if it is time. True if that was so.
    pub(super) fn renew_if_due(&mut self) -> bool {
        let Some((why, node)) = self.why_renew() else { return false };
        if let Err(error) = self.renew(why, node) {
            tracing::error!(%error, why, "a bridge's endpoint was not begun anew");
            self.is_over = true;
        }
        true
    }

    fn renew(&mut self, why: &'static str, node: Option<NodeIdentity>) -> Result<()> {
        match node {
            Some(node) => {
                tracing::info!(why, %node, "a bridge's endpoint is closed, and another one opened");
            }
            None => tracing::info!(why, "a bridge's endpoint is closed, and another one opened"),
        }
        let mr_mode = self.deck.port.endpoint().domain().capabilities().mr_mode;
        if mr_mode.contains(MrMode::ENDPOINT) {
            let detail = format!("{why}; here memory belongs to an endpoint");
            return Err(Error::new(RENEW, ErrorKind::Failed, detail));
        }
        let for_node = node.map(|node| (node, self.is_alone(node)));
        self.let_go_of_rings(why);
        let (addresses, address) = endpoint::renew(&mut self.deck.port)?;
        endpoint::add_lanes(&mut self.deck.port, &self.lane_domains);
        self.doorbell.wakes(self.deck.port.parts().1.waker());
        self.addresses = addresses;
        self.address = address;
        self.peers.clear();
        self.senders.clear();
        self.receivers.clear();
        self.closing.clear();
        self.deck.closed.clear();
        let (count, before) = (self.renewal.count + 1, &self.renewal);
        let is_soon = before.count > 0 && self.now.steady - before.last < FORGOTTEN;
        let returns = match why == LINK_IS_BACK && is_soon {
            true => (before.returns + 1).min(MOST_DOUBLINGS),
            false if is_soon => before.returns,
            false => 0,
        };
        let last = self.now.steady;
        let mut faults = mem::take(&mut self.renewal.faults);
        faults.clear(last, for_node);
        self.renewal = Renewal { last, count, returns, faults, ..Renewal::default() };
        for place in 0..self.outs.len() {
            if let Some(topic) = self.outs.get(place) {
                topic.outbound.forget_rings();
                self.heat(Task::Out(place));
            }
        }
        self.leaving.iter_mut().for_each(|topic| topic.outbound.forget_rings());
        // Some may wait for an answer to their wishes.
        (0..self.ins.len()).for_each(|place| self.heat(Task::In(place)));
        self.let_go();
        Ok(())
    }

    /// Before the endpoint is closed: all connections are lost.
    fn let_go_of_rings(&mut self, why: &'static str) {
        let reason = || Error::new(RENEW, ErrorKind::Closed, why);
        for place in 0..self.outs.len() {
            let Some(topic) = self.outs.get(place) else { continue };
            let nodes: Vec<_> = topic.links.keys().copied().collect();
            for node in nodes {
                self.lose_link(place, node, Some(reason().on(node)));
            }
            if let Some(topic) = self.outs.get(place) {
                topic.outbound.disconnect_all(&mut self.deck);
            }
        }
        for place in 0..self.ins.len() {
            self.say_again(place, why);
            let Some(topic) = self.ins.get(place) else { continue };
            if topic.disconnect().is_some() {
                let (key, node, side) = (topic.key, topic.origin, Side::Reader);
                self.reports.tell(Report::Lost { key, node, side, reason: reason().on(node) });
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
        assert_eq!([None, Some(MUCH_MEMORY)].map(|why| rest(0, why)), [REST; 2]);
        assert_eq!([Some(LINK_IS_BACK), Some(MOVES_NOTHING)].map(|why| rest(0, why)), [0; 2]);
        assert_eq!(
            [Some(LINK_IS_BACK), Some(MOVES_NOTHING)].map(|why| rest(1, why)),
            [SHORT_REST, REST]
        );
        // Where nodes come back repeatedly, longer each time, if that is at the expense of others.
        let rest = |returns, is_alone| {
            Renewal { count: 1, returns, ..Renewal::default() }.rest(Some(LINK_IS_BACK), is_alone)
        };
        let expected = [1, 2, 16, 16].map(|times| times * SHORT_REST);
        assert_eq!([0, 1, 4, 9].map(|returns| rest(returns, false)), expected);
        assert_eq!([0, 1, 4, 9].map(|returns| rest(returns, true)), [SHORT_REST; 4]);
    }

    #[test]
    fn node_that_is_back_is_the_reason_whatever_else_is_wrong() {
        let mut renewal = Renewal::default();
        for (why, reason) in [
            (MOVES_NOTHING, MOVES_NOTHING),
            (MUCH_MEMORY, MOVES_NOTHING),
            (LINK_IS_BACK, LINK_IS_BACK),
            (MOVES_NOTHING, LINK_IS_BACK),
        ] {
            renewal.want(why);
            assert_eq!(renewal.awaited, Some(reason), "{why}");
        }
    }

    #[test]
    fn shares_of_rings_that_are_gone_are_a_reason_once_none_is_left() {
        let mut renewal = Renewal::default();
        renewal.had_room(true, 9);
        assert_eq!(renewal.awaited, None);
        // All of them are in use: there is nothing to be had by another endpoint.
        renewal.had_room(false, 0);
        assert_eq!((renewal.awaited, renewal.is_short), (None, true));
        renewal.had_room(false, 1);
        assert_eq!((renewal.awaited, renewal.is_short), (Some(NO_SHARES), true));
        // They came back by themselves.
        renewal.had_room(true, 0);
        assert_eq!((renewal.awaited, renewal.is_short), (None, false));
    }
}
