//! Who visits by rails, and which rails to whom are lost: what an agent is told of it.
//!
//! A peer that visits by several rails has a session by each, and comes and goes with all of them
//! together. A rail between two agents may serve visits both ways; it is lost when one of them lost
//! it, and back when none misses it any more.
//!
//! Nothing here knows a fabric or a clock.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::events::Event;
use crate::path::metrics::Count;

#[cfg(test)]
mod tests;

type Identity = [u8; 16];

/// What is missing of a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LostHalf {
    /// The session of a visit.
    InboundSession(u64),
    /// Our way to a peer.
    Link(u32),
}

/// One that visits.
#[derive(Debug)]
struct InitiatorSessions {
    label: String,
    /// By rail.
    sessions: BTreeMap<usize, u64>,
}

/// All that visit by rails, and all rails that are lost.
#[derive(Debug, Default)]
pub(super) struct RemoteSessions {
    initiators: HashMap<(Identity, u64), InitiatorSessions>,
    by_session: HashMap<(usize, u64), (Identity, u64)>,
    lost_halves: HashMap<(Identity, usize), BTreeSet<LostHalf>>,
    /// What the agent is to be told.
    pub(super) events: Vec<Event>,
}

impl RemoteSessions {
    /// A guest came by a rail.
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
        self.found(from, rail, LostHalf::InboundSession(connection_id), label);
    }

    /// Is a guest still there under this number, which it does not have twice?
    pub(super) fn has_session(&self, rail: usize, session: u64) -> bool {
        self.by_session.contains_key(&(rail, session))
    }

    /// Is any guest there by a rail?
    pub(super) fn has_sessions_on(&self, rail: usize) -> bool {
        self.by_session.keys().any(|(by, _)| *by == rail)
    }

    /// All sessions of guests by a rail.
    pub(super) fn sessions_on(&self, rail: usize) -> Vec<u64> {
        let by_it = self.by_session.keys().filter(|(by, _)| *by == rail);
        by_it.map(|(_, session)| *session).collect()
    }

    /// A session of a guest is over: it said so, or why it was lost.
    pub(super) fn session_closed(&mut self, rail: usize, session: u64, lost: Option<String>) {
        let Some((from, connection_id)) = self.by_session.remove(&(rail, session)) else { return };
        let Some(initiator) = self.initiators.get_mut(&(from, connection_id)) else { return };
        if initiator.sessions.get(&rail) != Some(&session) {
            // It came again, before the first one was missed.
            return;
        }
        initiator.sessions.remove(&rail);
        let (is_last, label) = (initiator.sessions.is_empty(), initiator.label.clone());
        let is_dead = lost.is_some();
        if let Some(reason) = lost {
            self.half_lost(
                rail,
                LostHalf::InboundSession(connection_id),
                (from, label.clone()),
                reason,
            );
        }
        if is_last {
            self.initiators.remove(&(from, connection_id));
            self.forget(
                |lost_halves| lost_halves == LostHalf::InboundSession(connection_id),
                Some(from),
            );
            self.events.push(Event::Left { from, label, is_dead });
        }
    }

    /// Nobody wants it any more.
    pub(super) fn left(&mut self, link: u32) {
        self.forget(|lost_halves| lost_halves == LostHalf::Link(link), None);
    }

    /// Something of rail lost.
    pub(super) fn half_lost(
        &mut self,
        rail: usize,
        what: LostHalf,
        (with, label): (Identity, String),
        reason: String,
    ) {
        let lost_halves = self.lost_halves.entry((with, rail)).or_default();
        let is_first = lost_halves.is_empty();
        lost_halves.insert(what);
        if is_first {
            Count::RailLost.add(1);
            tracing::warn!(peer = label, rail, reason, "rail lost");
            self.events.push(Event::RailLost { with, label, rail, reason });
        }
    }

    /// It is there again.
    pub(super) fn found(&mut self, with: Identity, rail: usize, what: LostHalf, label: String) {
        let Some(lost_halves) = self.lost_halves.get_mut(&(with, rail)) else { return };
        if lost_halves.remove(&what) && lost_halves.is_empty() {
            self.lost_halves.remove(&(with, rail));
            Count::RailRestored.add(1);
            tracing::info!(peer = label, rail, "rail restored");
            self.events.push(Event::RailRestored { with, label, rail });
        }
    }

    fn forget(&mut self, which: impl Fn(LostHalf) -> bool, of: Option<Identity>) {
        self.lost_halves.retain(|(with, _), lost_halves| {
            if of.is_none_or(|of| of == *with) {
                lost_halves.retain(|what| !which(*what));
            }
            !lost_halves.is_empty()
        });
    }
}
