//! Start sequences: for each publisher the first sequence number that a newly matched node is to
//! get, sent before the first message.
//!
//! The first received message of a publisher need not be the first one sent, and no earlier message
//! makes the gap visible. So a node that begins to retain messages for another one reports what was
//! published before: the next message of each known publisher is for that node, and so are all
//! messages of later publishers.

use serde::{Deserialize, Serialize};

use crate::topic::{Published, Topic};

/// Number of publishers that a topic of a node can have.
pub(crate) const MAX_PUBLISHERS: usize = 256;
/// Sequence number of a publisher's first message.
const FIRST: u64 = 1;

/// State of a topic's publishers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartSequences {
    /// The topic's number at its node.
    pub(crate) topic: u64,
    /// Number of publishers that it ever had.
    serial: u64,
    /// The topic's publishers, each with its last sequence.
    publishers: Vec<(u64, u64)>,
}

impl StartSequences {
    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        (self.publishers.len() > MAX_PUBLISHERS).then_some("too many publishers")
    }

    /// The current state of a topic.
    pub(crate) fn of(topic: &Topic) -> Self {
        let Published { serial, publishers } = topic.published();
        Self { topic: u64::from(topic.number()), serial, publishers }
    }

    /// The first sequence of a publisher that counts, if known.
    pub(crate) fn first_of(&self, publisher: u64) -> Option<u64> {
        let known = self.publishers.iter().find(|(id, _)| *id == publisher);
        match known {
            Some((_, last)) => Some(last.saturating_add(1)),
            // A later publisher.
            None => (Published::serial_of(publisher) > self.serial).then_some(FIRST),
        }
    }
}

/// Where the messages of a node's topic start for this node.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplicationStart {
    /// If the node has sent them.
    start_sequences: Option<StartSequences>,
    /// The position of the next arrival when receiving began.
    since: u64,
}

impl ReplicationStart {
    pub(crate) fn new(start_sequences: Option<StartSequences>, since: u64) -> Self {
        Self { start_sequences, since }
    }

    /// The sequence of a publisher's first message for this node, 0 if unknown. It holds for
    /// subscribers that subscribed at or before the returned position of arrivals.
    pub(crate) fn first_of(&self, publisher: u64) -> (u64, u64) {
        let first = self.start_sequences.as_ref().and_then(|start| start.first_of(publisher));
        (first.unwrap_or(0), self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl StartSequences {
        pub(crate) fn at(serial: u64, publishers: Vec<(u64, u64)>) -> Self {
            Self { topic: 3, serial, publishers }
        }
    }

    fn start_sequences(publishers: Vec<(u64, u64)>) -> StartSequences {
        StartSequences::at(4, publishers)
    }

    #[test]
    fn next_message_counts_and_all_of_later_publishers() {
        let start_sequences = start_sequences(vec![(2 << 8, 9), (4 << 8 | 1, 0)]);
        let first = |serial: u64, index: u64| start_sequences.first_of(serial << 8 | index);
        assert_eq!((first(2, 0), first(4, 1)), (Some(10), Some(1)));
        // A publisher that had closed, and a later one at its index.
        assert_eq!((first(3, 2), first(5, 2)), (None, Some(1)));
    }
}
