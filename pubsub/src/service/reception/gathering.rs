//! Taking over a node whose service has ended: its members hand over what they know.
//!
//! Nothing is cleaned up and nothing is given out before all are back: whether a message of
//! a dead process was published is told by all topics together, and a topic that is not
//! handed over yet may be asked for by its name.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipc::{Fate, Participant};

use super::Reception;
use crate::error::ErrorKind;
use crate::peers::NodeIdentity;

/// How long to wait for the first who brings the hall: those that hold it look for a service
/// many times within this.
const FIRST: Duration = Duration::from_secs(5);
/// And then for all others. One that is stopped, or starved, comes back later.
const OTHERS: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Gathering {
    since: Instant,
    /// Which hall it has to be, if that is known.
    node: Option<NodeIdentity>,
    /// Those that are not back yet; None until the hall is known, which names them.
    awaited: Option<BTreeSet<Participant>>,
    /// Those that want to join, and wait until all others are back.
    pub(super) newcomers: Vec<super::guests::Newcomer>,
}

impl Gathering {
    pub(super) fn begin(now: Instant, node: Option<NodeIdentity>) -> Self {
        Self { since: now, node, awaited: None, newcomers: Vec::new() }
    }

    /// May this be the hall? Not that of a node in whose place another was founded since.
    pub(super) fn expects(&self, node: NodeIdentity) -> bool {
        self.node.is_none_or(|expected| expected == node)
    }

    /// The hall has come: these are members of it.
    pub(super) fn awaits(&mut self, now: Instant, members: BTreeSet<Participant>) {
        self.since = now;
        self.awaited = Some(members);
    }

    /// One is back.
    pub(super) fn is_back(&mut self, who: Participant) {
        if let Some(awaited) = &mut self.awaited {
            awaited.remove(&who);
        }
    }

    /// Those never come back of whom this is true.
    fn are_gone(&mut self, is_dead: impl Fn(Participant) -> bool) {
        if let Some(awaited) = &mut self.awaited {
            awaited.retain(|who| !is_dead(*who));
        }
    }

    /// Is it over? And is there a hall?
    fn outcome(&self, now: Instant) -> Option<bool> {
        let waited = now.saturating_duration_since(self.since);
        match &self.awaited {
            None => (waited >= FIRST).then_some(false),
            Some(awaited) => (awaited.is_empty() || waited >= OTHERS).then_some(true),
        }
    }
}

impl Reception {
    /// Looks whether all are back.
    pub(super) fn gather(&mut self) {
        let Some(gathering) = &mut self.gathering else { return };
        if let Some(seat) = &self.seat {
            // Some were seen to be dead by others.
            gathering.are_gone(|who| seat.roster.is_dead(Some(who)));
        }
        let outcome = gathering.outcome(Instant::now());
        let founded = match (outcome, &self.seat) {
            (Some(true), _) => {
                self.complete();
                Ok(true)
            }
            // Whoever held the members' lock knows of no hall, or is stopped.
            (Some(false), _) => {
                tracing::warn!("nobody brought the hall of the node: it is founded anew");
                self.found().map(|()| true)
            }
            // Or has let go of it since.
            (None, None) => self.found_if_nobody_is_there(),
            (None, Some(_)) => Ok(false),
        };
        match founded {
            Ok(false) => return,
            Ok(true) => {}
            Err(error) => {
                tracing::error!(%error, "the node cannot be served");
                self.has_failed = true;
                self.is_over.store(true, std::sync::atomic::Ordering::Release);
                return;
            }
        }
        let Some(gathering) = self.gathering.take() else { return };
        for newcomer in gathering.newcomers {
            self.admit(newcomer);
        }
        let held: Vec<_> = self
            .guests
            .iter_mut()
            .flat_map(|(who, guest)| {
                std::mem::take(&mut guest.held).into_iter().map(|it| (*who, it))
            })
            .collect();
        for (who, request) in held {
            self.fulfil(who, request);
        }
    }

    /// All that there is was handed over: whoever has less gets the rest, and what the last
    /// service began is finished.
    fn complete(&mut self) {
        self.strike_off_strays();
        self.finish_growing();
        for who in self.guests.keys().copied().collect::<Vec<_>>() {
            self.send_missing(who);
        }
        if let Some(seat) = &self.seat {
            // Those whose end nobody was there to see, the last service among them.
            self.unburied.extend(seat.roster.the_dead());
        }
        self.bury_all();
        for number in self.registry.topics.keys().copied().collect::<Vec<_>>() {
            self.has_changed(number);
            self.forget_unused(number);
        }
    }

    /// Turns away one who was a member of another hall.
    pub(super) fn is_of_another_hall(&mut self, connection: &mut super::Connection) {
        let why = "the node was founded anew without this process";
        self.refusals.see_off(connection, ErrorKind::Closed, why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_all_are_back_or_have_had_their_time() {
        let start = Instant::now();
        let mut gathering = Gathering::begin(start, None);
        assert_eq!(gathering.outcome(start), None);
        assert_eq!(gathering.outcome(start + FIRST), Some(false));
        let members: Vec<_> = (1..3).filter_map(|place| Participant::new(place, 1)).collect();
        gathering.awaits(start + FIRST / 2, members.iter().copied().collect());
        assert_eq!(gathering.outcome(start + FIRST), None);
        assert_eq!(gathering.outcome(start + FIRST / 2 + OTHERS), Some(true));
        gathering.is_back(members[0]);
        assert_eq!(gathering.outcome(start + FIRST), None);
        gathering.is_back(members[1]);
        assert_eq!(gathering.outcome(start + FIRST), Some(true));
    }
}
