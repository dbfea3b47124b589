//! Last sequences: for each publisher the last sequence number, reported to subscribing nodes.
//!
//! Readers detect missing messages by gaps in sequence numbers, but no message follows the last
//! one. So a node reports the last sequence once a publisher has been idle for a second, and its
//! messages were delivered or given up. It reports it again to a node that returns.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::topic::{PUBLISHER_SLOTS, RemoteLastSequence, RemotePublisher, Topic};

/// Number of publishers in one message.
pub(crate) const MAX_PUBLISHERS: usize = PUBLISHER_SLOTS;

/// Publishers, each with its last sequence.
pub(super) type PublisherSequences = Vec<(u64, u64)>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LastSequences {
    publishers: PublisherSequences,
}

impl LastSequences {
    /// All of these, in as few messages as possible.
    pub(crate) fn of(publishers: &[(u64, u64)]) -> impl Iterator<Item = Self> {
        let some = publishers.chunks(MAX_PUBLISHERS);
        some.map(|publishers| Self { publishers: publishers.to_vec() })
    }

    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        let is_valid = (1..=MAX_PUBLISHERS).contains(&self.publishers.len());
        (!is_valid).then_some("last sequences: none, or too many")
    }

    /// Records the last sequences of another node.
    pub(crate) fn record(self, node: NodeId, topic: &Topic) {
        let (mut is_new, mut slot) = (false, 0);
        for (publisher, last) in self.publishers {
            let start = topic.note_passed(&mut slot, RemotePublisher::new(node.0, publisher), last);
            let at = topic.inbound().position();
            let reported = RemoteLastSequence { node: node.0, publisher, last, start, at };
            is_new |= topic.record_remote_last_sequence(&reported);
        }
        if is_new {
            topic.local().messages().ring();
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Snapshot {
    publishers: PublisherSequences,
    /// All messages of these publishers lie before this position, or were dropped.
    position: u64,
    drops: u64,
}

impl Snapshot {
    fn of(topic: &Topic) -> Self {
        let mut publishers = topic.last_of_all();
        publishers.retain(|(_, last)| *last > 0);
        Self { publishers, position: topic.local().position(), drops: topic.drops() }
    }
}

/// Finds publishers that have become idle; polled once a second.
#[derive(Debug, Default)]
pub(crate) struct IdlePublishers {
    before: Option<Snapshot>,
    /// Nothing has happened since all were found idle.
    are_all_idle: bool,
    reported_before: BTreeSet<(u64, u64)>,
}

impl IdlePublishers {
    /// Publishers that have become idle since the last call, if all their messages were delivered
    /// or given up.
    pub(crate) fn poll(&mut self, topic: &Topic) -> PublisherSequences {
        let now = (topic.local().position(), topic.drops());
        let is_as_before = |before: &Snapshot| (before.position, before.drops) == now;
        if self.are_all_idle && self.before.as_ref().is_some_and(is_as_before) {
            return PublisherSequences::new();
        }
        if self.before.as_ref().is_some_and(|before| !topic.is_replicated_until(before.position)) {
            return PublisherSequences::new();
        }
        let now = Snapshot::of(topic);
        self.are_all_idle = self.before.as_ref() == Some(&now);
        let idle = self.before.iter().flat_map(|before| &before.publishers).copied();
        let idle: PublisherSequences = idle.filter(|it| now.publishers.contains(it)).collect();
        let changes =
            idle.iter().filter(|it| !self.reported_before.contains(it)).copied().collect();
        self.reported_before = idle.into_iter().collect();
        self.before = Some(now);
        changes
    }
}

#[cfg(test)]
impl LastSequences {
    pub(crate) fn publishers(&self) -> &[(u64, u64)] {
        &self.publishers
    }

    pub(crate) fn at(publishers: Vec<(u64, u64)>) -> Self {
        Self { publishers }
    }
}
