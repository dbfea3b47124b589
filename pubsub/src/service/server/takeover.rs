//! Takeover of a node whose service has ended: its members return their objects.
//!
//! Nothing is reclaimed or granted before all members have rejoined: only all topics together show
//! whether a message of a dead process was published, and a requested topic may not be returned
//! yet.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipc::{Liveness, Participant};

use super::{JoiningClient, Service};
use crate::ids::NodeId;
use crate::service::connection::Connection;

/// How long to wait for the first member to return the node segment: members look for a service
/// many times within this.
const SEGMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for the others after that. A stopped or starved process rejoins later.
const MEMBERS_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Takeover {
    since: Instant,
    /// The expected node, if known.
    node: Option<NodeId>,
    /// Members that have not rejoined yet; None until the node segment is known.
    awaited: Option<BTreeSet<Participant>>,
    /// Clients that are admitted once all members have rejoined.
    joining_clients: Vec<JoiningClient>,
}

impl Takeover {
    pub(super) fn begin(now: Instant, node: Option<NodeId>) -> Self {
        Self { since: now, node, awaited: None, joining_clients: Vec::new() }
    }

    /// Returns true if this may be the segment of the node: not if the node was re-created since.
    pub(super) fn expects(&self, node: NodeId) -> bool {
        self.node.is_none_or(|expected| expected == node)
    }

    /// The node segment is known, with these members.
    pub(super) fn set_awaited(&mut self, now: Instant, members: BTreeSet<Participant>) {
        self.since = now;
        self.awaited = Some(members);
    }

    pub(super) fn admit_later(&mut self, joining_client: JoiningClient) {
        self.joining_clients.push(joining_client);
    }

    pub(super) fn into_connections(self) -> impl Iterator<Item = Connection> {
        self.joining_clients.into_iter().map(|joining_client| joining_client.connection)
    }

    pub(super) fn mark_returned(&mut self, participant: Participant) {
        if let Some(awaited) = &mut self.awaited {
            awaited.remove(&participant);
        }
    }

    /// Some if the takeover is over: true with a node segment, false without.
    fn outcome(&self, now: Instant) -> Option<bool> {
        let waited = now.saturating_duration_since(self.since);
        match &self.awaited {
            None => (waited >= SEGMENT_TIMEOUT).then_some(false),
            Some(awaited) => (awaited.is_empty() || waited >= MEMBERS_TIMEOUT).then_some(true),
        }
    }
}

impl Service {
    /// Checks whether all members have rejoined.
    pub(super) fn advance_takeover(&mut self) {
        let Some(takeover) = &mut self.takeover else { return };
        if let (Some(served_node), Some(awaited)) = (&self.served_node, &mut takeover.awaited) {
            // Dead members do not rejoin. Other processes may have marked them.
            awaited.retain(|participant| !served_node.participants.is_dead(Some(*participant)));
        }
        let outcome = takeover.outcome(Instant::now());
        let created = match (outcome, &self.served_node) {
            (Some(true), _) => {
                self.complete();
                Ok(true)
            }
            // The holder of the member lock has no node segment, or is stopped.
            (Some(false), _) => {
                tracing::warn!("no member returned the node segment: the node is re-created");
                self.recreate().map(|()| true)
            }
            // Or it has released the lock since.
            (None, None) => self.create_if_empty(),
            (None, Some(_)) => Ok(false),
        };
        match created {
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
        for (participant, request) in self.broker.take_held() {
            self.execute(participant, request);
        }
    }

    /// All objects were returned: members get what they lack, and unfinished growth continues.
    fn complete(&mut self) {
        self.remove_unknown_members();
        let Some(served_node) = &self.served_node else { return };
        let caller = served_node.caller();
        self.broker.resume_growth(&caller);
        for participant in self.broker.members().map(|(it, _)| it).collect::<Vec<_>>() {
            self.broker.send_missing(participant);
        }
        // Deaths that were not reported, the last service among them.
        self.reclaimer.reclaim_later(served_node.participants.dead_participants());
        self.reclaim_all();
        self.review_topics(self.broker.registry().topic_numbers());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takeover_ends_when_all_rejoined_or_at_the_timeout() {
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
