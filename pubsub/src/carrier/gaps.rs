//! What is missing among the messages of another node's topic, told from those that come.
//!
//! A message that was never written there is not sent, nor is one that was dropped since this node
//! lags behind. Where nothing is dropped positions follow one another, so each that is skipped is
//! a message that is missing. Where the oldest are, there are positions of no message; but those of
//! one publisher are numbered.

use std::collections::BTreeMap;

use crate::bridge::MessageHeader;
use crate::settings::Reliability;

/// Publishers are told apart by their lines, of which a topic has no more.
const LINES: u64 = 256;

#[derive(Debug)]
pub(super) enum Gaps {
    /// The position of the last message.
    Positions(Option<u64>),
    /// By publishers' lines: which it is, and the number of its last message.
    Sequences(BTreeMap<u64, (u64, u64)>),
}

impl Gaps {
    /// Of a topic that nothing came of yet: what was before is nothing that anybody waits for here.
    pub(super) fn new(reliability: Reliability) -> Self {
        match reliability {
            Reliability::Reliable | Reliability::DropNewest => Self::Positions(None),
            Reliability::DropOldest => Self::Sequences(BTreeMap::new()),
        }
    }

    /// How many are missing right before this one.
    pub(super) fn before(&self, header: &MessageHeader) -> u32 {
        let (last, this) = match self {
            Self::Positions(last) => (*last, header.position),
            Self::Sequences(all) => {
                let last = all.get(&(header.publisher % LINES));
                let last = last.filter(|(publisher, _)| *publisher == header.publisher);
                (last.map(|(_, last)| *last), header.sequence)
            }
        };
        let missing = last.map_or(0, |last| this.saturating_sub(last).saturating_sub(1));
        u32::try_from(missing).unwrap_or(u32::MAX)
    }

    /// This one came, whatever became of it here.
    pub(super) fn came(&mut self, header: &MessageHeader) {
        match self {
            Self::Positions(last) => *last = (*last).max(Some(header.position)),
            Self::Sequences(all) => {
                let line = all.entry(header.publisher % LINES).or_default();
                let last = if line.0 == header.publisher { line.1 } else { 0 };
                *line = (header.publisher, last.max(header.sequence));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bridge::Metadata;

    fn header(position: u64, publisher: u64, sequence: u64) -> MessageHeader {
        let (length, published, posted) = (1, 0, 0);
        let metadata = Metadata::NONE;
        MessageHeader { position, length, publisher, sequence, published, posted, metadata }
    }

    fn told(reliability: Reliability, all: &[(u64, u64, u64)]) -> Vec<u32> {
        let mut gaps = Gaps::new(reliability);
        let each = all.iter().map(|(position, publisher, sequence)| {
            let header = header(*position, *publisher, *sequence);
            let before = gaps.before(&header);
            gaps.came(&header);
            before
        });
        each.collect()
    }

    #[test]
    fn where_nothing_is_dropped_a_skipped_position_is_a_missing_message() {
        // Once more, too, after a loss of the connection.
        let all = [(7, 1, 1), (8, 2, 5), (11, 1, 3), (10, 1, 2), (11, 1, 3), (12, 1, 4)];
        for reliability in [Reliability::Reliable, Reliability::DropNewest] {
            assert_eq!(told(reliability, &all), [0, 0, 2, 0, 0, 0]);
        }
        let far = [(0, 1, 1), (1 << 40, 1, 2)];
        assert_eq!(told(Reliability::Reliable, &far), [0, u32::MAX]);
    }

    #[test]
    fn where_the_oldest_are_dropped_a_publishers_number_tells() {
        let all = [(7, 1, 4), (9, 2, 5), (20, 1, 6), (21, 2, 6), (22, 2, 9), (23, 2, 9)];
        assert_eq!(told(Reliability::DropOldest, &all), [0, 0, 1, 0, 2, 0]);
        // One that comes to the line of another is another one.
        let all = [(7, 1, 4), (8, LINES + 1, 9), (9, LINES + 1, 11), (10, 1, 20)];
        assert_eq!(told(Reliability::DropOldest, &all), [0, 0, 1, 0]);
    }
}
