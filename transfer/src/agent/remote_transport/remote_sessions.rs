//! Sessions of remote initiators, and lost rails: the events that an agent reports.
//!
//! A peer that connects by several rails has a session by each, and joins and leaves with all of
//! them together. A rail between two agents may carry sessions both ways. It is lost when one
//! direction lost it, and restored when both are restored.
//!
//! This module knows neither fabrics nor clocks.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::agent::{Departure, Event};
use crate::path::metrics::Count;

#[cfg(test)]
mod tests;

type Identity = [u8; 16];

/// The lost direction of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LostHalf {
    /// The session of a remote initiator.
    InboundSession(u64),
    /// The link of this agent to a peer.
    Link(u32),
}

#[derive(Debug)]
struct InitiatorSessions {
    label: String,
    /// By rail.
    sessions: BTreeMap<usize, u64>,
}

/// All remote initiators, and all lost rails.
#[derive(Debug, Default)]
pub(super) struct RemoteSessions {
    initiators: HashMap<(Identity, u64), InitiatorSessions>,
    by_session: HashMap<(usize, u64), (Identity, u64)>,
    lost_halves: HashMap<(Identity, usize), BTreeSet<LostHalf>>,
    events: Vec<Event>,
}

impl RemoteSessions {
    pub(super) fn take_events(&mut self) -> impl Iterator<Item = Event> {
        self.events.drain(..)
    }

    /// An initiator opened a session by a rail.
    pub(super) fn session_opened(
        &mut self,
        rail: usize,
        session: u64,
        (from, connection_id): (Identity, u64),
        label: String,
    ) {
        let initiator = self.initiators.entry((from, connection_id)).or_insert_with(|| {
            self.events.push(Event::Joined { from, label: label.clone() });
            InitiatorSessions { label: label.clone(), sessions: BTreeMap::new() }
        });
        initiator.sessions.insert(rail, session);
        self.by_session.insert((rail, session), (from, connection_id));
        self.half_restored(from, rail, LostHalf::InboundSession(connection_id), label);
    }

    /// Is this session still open? Numbers are unique per rail.
    pub(super) fn has_session(&self, rail: usize, session: u64) -> bool {
        self.by_session.contains_key(&(rail, session))
    }

    pub(super) fn sessions_on(&self, rail: usize) -> impl Iterator<Item = u64> {
        let by_it = self.by_session.keys().filter(move |(by, _)| *by == rail);
        by_it.map(|(_, session)| *session)
    }

    /// A session closed cleanly, or was lost for this reason.
    pub(super) fn session_closed(&mut self, rail: usize, session: u64, lost: Option<String>) {
        let Some((from, connection_id)) = self.by_session.remove(&(rail, session)) else { return };
        let Some(initiator) = self.initiators.get_mut(&(from, connection_id)) else { return };
        if initiator.sessions.get(&rail) != Some(&session) {
            // The initiator had already reconnected.
            return;
        }
        initiator.sessions.remove(&rail);
        let (is_last, label) = (initiator.sessions.is_empty(), initiator.label.clone());
        let (half, is_dead) = (LostHalf::InboundSession(connection_id), lost.is_some());
        if let Some(reason) = lost {
            self.half_lost(rail, half, (from, label.clone()), Departure::Dead, reason);
        }
        if is_last {
            self.initiators.remove(&(from, connection_id));
            self.forget(half, Some(from));
            self.events.push(Event::Left { from, label, is_dead });
        }
    }

    /// The agent closed the link, so its loss does not matter any more.
    pub(super) fn link_closed(&mut self, link: u32) {
        self.forget(LostHalf::Link(link), None);
    }

    pub(super) fn half_lost(
        &mut self,
        rail: usize,
        half: LostHalf,
        (with, label): (Identity, String),
        departure: Departure,
        reason: String,
    ) {
        let lost_halves = self.lost_halves.entry((with, rail)).or_default();
        let is_first = lost_halves.is_empty();
        lost_halves.insert(half);
        if is_first {
            Count::RailLost.add(1);
            match departure {
                Departure::Closed => tracing::debug!(peer = label, rail, "the peer closed a rail"),
                Departure::Dead => tracing::warn!(peer = label, rail, reason, "rail lost"),
            }
            self.events.push(Event::RailLost { with, label, rail, reason });
        }
    }

    pub(super) fn half_restored(
        &mut self,
        with: Identity,
        rail: usize,
        half: LostHalf,
        label: String,
    ) {
        let Some(lost_halves) = self.lost_halves.get_mut(&(with, rail)) else { return };
        if lost_halves.remove(&half) && lost_halves.is_empty() {
            self.lost_halves.remove(&(with, rail));
            Count::RailRestored.add(1);
            tracing::info!(peer = label, rail, "rail restored");
            self.events.push(Event::RailRestored { with, label, rail });
        }
    }

    fn forget(&mut self, half: LostHalf, of: Option<Identity>) {
        self.lost_halves.retain(|(with, _), lost_halves| {
            if of.is_none_or(|of| of == *with) {
                lost_halves.remove(&half);
            }
            !lost_halves.is_empty()
        });
    }
}
