//! From where on the messages of a topic are for another node, told to that one before the first goes
//! there.
//!
//! The first message of a publisher that comes need not be the first that was to come, and there is
//! none before it by which those could be seen that are missing. So a node that begins
//! to keep messages for another one tells it what was published before: what comes next is
//! for that one, and so is all of publishers that are made later.

use serde::{Deserialize, Serialize};

use crate::peers::NodeId;
use crate::replication::Replicator;
use crate::replication::control_messages::ControlMessage;
use crate::topic::{Published, Topic};

/// As many as can publish in a topic of a node.
pub(in crate::replication) const MAX_PUBLISHERS: usize = 256;
/// The number of a publisher's first message.
const FIRST: u64 = 1;

/// What had been published of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::replication) struct StartSequences {
    /// The topic's number at its node.
    pub(in crate::replication) topic: u64,
    /// How many publishers it had had.
    serial: u64,
    /// Those that it had, each with the number of its last message.
    pub(in crate::replication) publishers: Vec<(u64, u64)>,
}

impl StartSequences {
    /// From now on.
    pub(in crate::replication) fn of(topic: &Topic) -> Self {
        let Published { serial, publishers } = topic.published();
        Self { topic: u64::from(topic.number()), serial, publishers }
    }

    /// The first message of a publisher that counts, if that is known.
    pub(in crate::replication) fn first_of(&self, publisher: u64) -> Option<u64> {
        let known = self.publishers.iter().find(|(id, _)| *id == publisher);
        match known {
            Some((_, last)) => Some(last.saturating_add(1)),
            // It came later.
            None => (Published::serial_of(publisher) > self.serial).then_some(FIRST),
        }
    }
}

/// From where on the messages of a node's topic are for this node.
#[derive(Debug, Clone, Default)]
pub(in crate::replication) struct ReplicationStart {
    /// If the node told it.
    start_sequences: Option<StartSequences>,
    /// The position of the next arrival when they began to be received.
    since: u64,
}

impl ReplicationStart {
    pub(in crate::replication) fn new(start_sequences: Option<StartSequences>, since: u64) -> Self {
        Self { start_sequences, since }
    }

    /// The number of a publisher's first message for this node, 0 if it is not known. It holds for
    /// subscribers that subscribed at or before the position of the arrivals that comes second.
    pub(in crate::replication) fn first_of(&self, publisher: u64) -> (u64, u64) {
        let first = self
            .start_sequences
            .as_ref()
            .and_then(|start_sequences| start_sequences.first_of(publisher));
        (first.unwrap_or(0), self.since)
    }
}

impl Replicator {
    /// Tells a node what is not for it.
    pub(in crate::replication) fn send_start_sequences(
        &self,
        node: NodeId,
        topic: &Topic,
        start_sequences: &StartSequences,
    ) {
        let (topic, start_sequences) = (topic.name().to_owned(), start_sequences.clone());
        self.write(node, &ControlMessage::StartSequences { topic, start_sequences });
    }

    /// Another node tells what is not for this one.
    pub(in crate::replication) fn handle_start_sequences(
        &mut self,
        node: NodeId,
        topic: &str,
        start_sequences: StartSequences,
    ) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        let number = facts.topic.number();
        // Who receives it knows better what came last.
        if !self.is_receiving(number, node, start_sequences.topic) {
            self.announced_starts.insert((number, node), start_sequences);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl StartSequences {
        pub(in crate::replication) fn at(serial: u64, publishers: Vec<(u64, u64)>) -> Self {
            Self { topic: 3, serial, publishers }
        }
    }

    fn beginning(publishers: Vec<(u64, u64)>) -> StartSequences {
        StartSequences::at(4, publishers)
    }

    #[test]
    fn what_comes_next_counts_and_all_of_those_that_come_later() {
        let start_sequences = beginning(vec![(2 << 8, 9), (4 << 8 | 1, 0)]);
        let first = |serial: u64, line: u64| start_sequences.first_of(serial << 8 | line);
        assert_eq!((first(2, 0), first(4, 1)), (Some(10), Some(1)));
        // One that had left, and one that came later, in its line.
        assert_eq!((first(3, 2), first(5, 2)), (None, Some(1)));
    }
}
