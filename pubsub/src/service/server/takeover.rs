//! Taking over a node whose service has ended: its members hand over what they know.
//!
//! Nothing is cleaned up and nothing is given out before all are back: whether a message of
//! a dead process was published is told by all topics together, and a topic that is not
//! handed over yet may be asked for by its name.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipc::{Liveness, Participant};

use super::Service;
use crate::error::ErrorKind;
use crate::peers::NodeId;

/// How long to wait for the first who brings the hall: those that hold it look for a service
/// many times within this.
const SEGMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// And then for all others. One that is stopped, or starved, comes back later.
const MEMBERS_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Takeover {
    since: Instant,
    /// Which hall it has to be, if that is known.
    node: Option<NodeId>,
    /// Those that are not back yet; None until the hall is known, which names them.
    awaited: Option<BTreeSet<Participant>>,
    /// Those that want to join, and wait until all others are back.
    pub(super) joining_clients: Vec<super::clients::JoiningClient>,
}

impl Takeover {
    pub(super) fn begin(now: Instant, node: Option<NodeId>) -> Self {
        Self { since: now, node, awaited: None, joining_clients: Vec::new() }
    }

    /// May this be the hall? Not that of a node in whose place another was founded since.
    pub(super) fn expects(&self, node: NodeId) -> bool {
        self.node.is_none_or(|expected| expected == node)
    }

    /// The hall has come: these are members of it.
    pub(super) fn set_awaited(&mut self, now: Instant, members: BTreeSet<Participant>) {
        self.since = now;
        self.awaited = Some(members);
    }

    /// One is back.
    pub(super) fn mark_returned(&mut self, who: Participant) {
        if let Some(awaited) = &mut self.awaited {
            awaited.remove(&who);
        }
    }

    /// Those never come back of whom this is true.
    fn remove_dead(&mut self, is_dead: impl Fn(Participant) -> bool) {
        if let Some(awaited) = &mut self.awaited {
            awaited.retain(|who| !is_dead(*who));
        }
    }

    /// Is it over? And is there a hall?
    fn outcome(&self, now: Instant) -> Option<bool> {
        let waited = now.saturating_duration_since(self.since);
        match &self.awaited {
            None => (waited >= SEGMENT_TIMEOUT).then_some(false),
            Some(awaited) => (awaited.is_empty() || waited >= MEMBERS_TIMEOUT).then_some(true),
        }
    }
}

impl Service {
    /// Looks whether all are back.
    pub(super) fn advance_takeover(&mut self) {
        let Some(takeover) = &mut self.takeover else { return };
        if let Some(served_node) = &self.served_node {
            // Some were seen to be dead by others.
            takeover.remove_dead(|who| served_node.roster.is_dead(Some(who)));
        }
        let outcome = takeover.outcome(Instant::now());
        let founded = match (outcome, &self.served_node) {
            (Some(true), _) => {
                self.complete();
                Ok(true)
            }
            // Whoever held the members' lock knows of no hall, or is stopped.
            (Some(false), _) => {
                tracing::warn!("no member returned the node segment: a new node is founded");
                self.found().map(|()| true)
            }
            // Or has let go of it since.
            (None, None) => self.found_if_empty(),
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
        let Some(takeover) = self.takeover.take() else { return };
        for joining_client in takeover.joining_clients {
            self.admit(joining_client);
        }
        let held: Vec<_> = self
            .clients
            .iter_mut()
            .flat_map(|(who, client)| {
                std::mem::take(&mut client.held).into_iter().map(|it| (*who, it))
            })
            .collect();
        for (who, request) in held {
            self.execute(who, request);
        }
    }

    /// All that there is was handed over: whoever has less gets the rest, and what the last
    /// service began is finished.
    fn complete(&mut self) {
        self.remove_unknown_members();
        self.resume_growth();
        for who in self.clients.keys().copied().collect::<Vec<_>>() {
            self.send_missing(who);
        }
        if let Some(served_node) = &self.served_node {
            // Those whose end nobody was there to see, the last service among them.
            self.unreclaimed.extend(served_node.roster.dead_participants());
        }
        self.reclaim_all();
        for number in self.registry.topics.keys().copied().collect::<Vec<_>>() {
            self.topic_changed(number);
            self.remove_unused(number);
        }
    }

    /// Turns away one who was a member of another hall.
    pub(super) fn reject_other_node(&mut self, connection: &mut super::Connection) {
        let reason = "the node was re-created without this process";
        self.refusals.reject(connection, ErrorKind::Closed, reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_ends_when_all_are_back_or_have_had_their_time() {
        let start = Instant::now();
        let mut takeover = Takeover::begin(start, None);
        assert_eq!(takeover.outcome(start), None);
        assert_eq!(takeover.outcome(start + SEGMENT_TIMEOUT), Some(false));
        let members: Vec<_> = (1..3).filter_map(|place| Participant::new(place, 1)).collect();
        takeover.set_awaited(start + SEGMENT_TIMEOUT / 2, members.iter().copied().collect());
        assert_eq!(takeover.outcome(start + SEGMENT_TIMEOUT), None);
        assert_eq!(takeover.outcome(start + SEGMENT_TIMEOUT / 2 + MEMBERS_TIMEOUT), Some(true));
        takeover.mark_returned(members[0]);
        assert_eq!(takeover.outcome(start + SEGMENT_TIMEOUT), None);
        takeover.mark_returned(members[1]);
        assert_eq!(takeover.outcome(start + SEGMENT_TIMEOUT), Some(true));
    }
}
