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
pub(super) enum Missing {
    /// The session of a visit.
    Visit(u64),
    /// Our way to a peer.
    Link(u32),
}

/// One that visits.
#[derive(Debug)]
struct Stay {
    label: String,
    /// By rail.
    sessions: BTreeMap<usize, u64>,
}

/// All that visit by rails, and all rails that are lost.
#[derive(Debug, Default)]
pub(super) struct Company {
    stays: HashMap<(Identity, u64), Stay>,
    visits: HashMap<(usize, u64), (Identity, u64)>,
    missing: HashMap<(Identity, usize), BTreeSet<Missing>>,
    /// What the agent is to be told.
    pub(super) told: Vec<Event>,
}

impl Company {
    /// A guest came by a rail.
    pub(super) fn came(
        &mut self,
        rail: usize,
        session: u64,
        (from, visit): (Identity, u64),
        label: String,
    ) {
        let stay = self.stays.entry((from, visit)).or_insert_with(|| {
            self.told.push(Event::Joined { from, label: label.clone() });
            Stay { label: label.clone(), sessions: BTreeMap::new() }
        });
        stay.sessions.insert(rail, session);
        self.visits.insert((rail, session), (from, visit));
        self.found(from, rail, Missing::Visit(visit), label);
    }

    /// Is a guest still there under this number, which it does not have twice?
    pub(super) fn is_here(&self, rail: usize, session: u64) -> bool {
        self.visits.contains_key(&(rail, session))
    }

    /// Is any guest there by a rail?
    pub(super) fn has_any_by(&self, rail: usize) -> bool {
        self.visits.keys().any(|(by, _)| *by == rail)
    }

    /// All sessions of guests by a rail.
    pub(super) fn sessions_by(&self, rail: usize) -> Vec<u64> {
        let by_it = self.visits.keys().filter(|(by, _)| *by == rail);
        by_it.map(|(_, session)| *session).collect()
    }

    /// A session of a guest is over: it said so, or why it was lost.
    pub(super) fn gone(&mut self, rail: usize, session: u64, lost: Option<String>) {
        let Some((from, visit)) = self.visits.remove(&(rail, session)) else { return };
        let Some(stay) = self.stays.get_mut(&(from, visit)) else { return };
        if stay.sessions.get(&rail) != Some(&session) {
            // It came again, before the first one was missed.
            return;
        }
        stay.sessions.remove(&rail);
        let (is_last, label) = (stay.sessions.is_empty(), stay.label.clone());
        let is_dead = lost.is_some();
        if let Some(reason) = lost {
            self.miss(rail, Missing::Visit(visit), (from, label.clone()), reason);
        }
        if is_last {
            self.stays.remove(&(from, visit));
            self.forget(|missing| missing == Missing::Visit(visit), Some(from));
            self.told.push(Event::Left { from, label, is_dead });
        }
    }

    /// Nobody wants it any more.
    pub(super) fn left(&mut self, link: u32) {
        self.forget(|missing| missing == Missing::Link(link), None);
    }

    /// Something of a rail is lost.
    pub(super) fn miss(
        &mut self,
        rail: usize,
        what: Missing,
        (with, label): (Identity, String),
        reason: String,
    ) {
        let missing = self.missing.entry((with, rail)).or_default();
        let is_first = missing.is_empty();
        missing.insert(what);
        if is_first {
            Count::RailLost.add(1);
            tracing::warn!(peer = label, rail, reason, "a rail is lost");
            self.told.push(Event::RailLost { with, label, rail, reason });
        }
    }

    /// It is there again.
    pub(super) fn found(&mut self, with: Identity, rail: usize, what: Missing, label: String) {
        let Some(missing) = self.missing.get_mut(&(with, rail)) else { return };
        if missing.remove(&what) && missing.is_empty() {
            self.missing.remove(&(with, rail));
            Count::RailBack.add(1);
            tracing::info!(peer = label, rail, "a rail is back");
            self.told.push(Event::RailBack { with, label, rail });
        }
    }

    fn forget(&mut self, which: impl Fn(Missing) -> bool, of: Option<Identity>) {
        self.missing.retain(|(with, _), missing| {
            if of.is_none_or(|of| of == *with) {
                missing.retain(|what| !which(*what));
            }
            !missing.is_empty()
        });
    }
}
