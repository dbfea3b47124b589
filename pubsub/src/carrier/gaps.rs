//! What is missing among the messages of another node's topic, told from those that come.
//!
//! A message that was never written there is not sent, nor is one that was dropped since this node
//! lags behind. Where nothing is dropped positions follow one another, so each that is skipped is
//! a message that is missing, and so is one that came and found no room. Where the oldest are, there are positions of no message; but those of
//! one publisher are numbered.

use std::collections::BTreeMap;

use super::beginnings::Beginning;
use crate::bridge::MessageHeader;
use crate::settings::Reliability;

/// Publishers are told apart by their lines, of which a topic has no more.
const LINES: u64 = 256;

#[derive(Debug)]
pub(super) enum Gaps {
    /// The first position that was not accounted for.
    Positions(Option<u64>),
    /// By publishers' lines: which it is, and its first number that was not accounted for; of those of
    /// which nothing came yet it is where they begin.
    Sequences(BTreeMap<u64, (u64, u64)>, Option<Beginning>),
}

impl Gaps {
    /// Of a topic that nothing came of yet: what was before its beginning is nothing that anybody waits
    /// for here. If that is not known, the first that comes is it.
    pub(super) fn new(reliability: Reliability, begins: Option<Beginning>) -> Self {
        match reliability {
            // All that is kept for this node comes.
            Reliability::Reliable => Self::Positions(None),
            Reliability::DropNewest => Self::Positions(begins.map(|begins| begins.position)),
            Reliability::DropOldest => Self::Sequences(BTreeMap::new(), begins),
        }
    }

    /// The first that was not accounted for before this one, and this one.
    fn find(&self, header: &MessageHeader) -> (Option<u64>, u64) {
        match self {
            Self::Positions(next) => (*next, header.position),
            Self::Sequences(all, begins) => {
                let line = all.get(&(header.publisher % LINES));
                let line = line.filter(|(publisher, _)| *publisher == header.publisher);
                let begins = || begins.as_ref()?.first_of(header.publisher);
                (line.map(|(_, next)| *next).or_else(begins), header.sequence)
            }
        }
    }

    fn set(&mut self, header: &MessageHeader, first: u64) {
        match self {
            Self::Positions(next) => *next = Some(first),
            Self::Sequences(all, _) => {
                all.insert(header.publisher % LINES, (header.publisher, first));
            }
        }
    }

    /// How many are missing right before this one.
    pub(super) fn before(&self, header: &MessageHeader) -> u32 {
        let (next, this) = self.find(header);
        let missing = next.map_or(0, |next| this.saturating_sub(next));
        u32::try_from(missing).unwrap_or(u32::MAX)
    }

    /// This one came, and those that read here were told what is missing before it, or nobody
    /// reads here, or it came before.
    pub(super) fn came(&mut self, header: &MessageHeader) {
        let (next, this) = self.find(header);
        self.set(header, next.unwrap_or(0).max(this.saturating_add(1)));
    }

    /// This one came and was dropped: it is missing, and so is what was missing before it.
    pub(super) fn was_dropped(&mut self, header: &MessageHeader) {
        let (next, this) = self.find(header);
        self.set(header, next.unwrap_or(this));
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
        let mut gaps = Gaps::new(reliability, None);
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
    fn one_that_was_dropped_here_is_told_of_with_what_was_missing_before_it() {
        let drops = |reliability, dropped: &[u64], then: u64| {
            let mut gaps = Gaps::new(reliability, None);
            gaps.came(&header(4, 1, 4));
            dropped.iter().for_each(|number| gaps.was_dropped(&header(*number, 1, *number)));
            gaps.before(&header(then, 1, then))
        };
        for reliability in [Reliability::DropNewest, Reliability::DropOldest] {
            assert_eq!(drops(reliability, &[6], 7), 2);
            assert_eq!(drops(reliability, &[5, 6, 9], 10), 5);
            // Also if it is the first one that came, and of each publisher.
            let mut gaps = Gaps::new(reliability, None);
            gaps.was_dropped(&header(0, 1, 0));
            assert_eq!(gaps.before(&header(1, 1, 1)), 1);
            gaps.came(&header(u64::MAX, 1, u64::MAX));
            assert_eq!(gaps.before(&header(u64::MAX, 1, u64::MAX)), 0);
        }
        let mut gaps = Gaps::new(Reliability::DropOldest, None);
        gaps.came(&header(1, 1, 9));
        gaps.was_dropped(&header(2, 1 + LINES, 3));
        assert_eq!(gaps.before(&header(3, 1 + LINES, 4)), 1);
    }

    #[test]
    fn where_the_oldest_are_dropped_a_publishers_number_tells() {
        let all = [(7, 1, 4), (9, 2, 5), (20, 1, 6), (21, 2, 6), (22, 2, 9), (23, 2, 9)];
        assert_eq!(told(Reliability::DropOldest, &all), [0, 0, 1, 0, 2, 0]);
        // One that comes to the line of another is another one.
        let all = [(7, 1, 4), (8, LINES + 1, 9), (9, LINES + 1, 11), (10, 1, 20)];
        assert_eq!(told(Reliability::DropOldest, &all), [0, 0, 1, 0]);
    }

    #[test]
    fn what_is_missing_before_the_first_one_is_known_if_it_is_known_where_that_is() {
        let begins = Beginning::at(70, 4, vec![(2 << 8, 9)]);
        let first = |reliability, header: MessageHeader| {
            let mut gaps = Gaps::new(reliability, Some(begins.clone()));
            let before = gaps.before(&header);
            gaps.was_dropped(&header);
            assert_eq!(gaps.before(&header), before);
            gaps.came(&header);
            assert_eq!(gaps.before(&header), 0);
            before
        };
        let (old, gone, new) = (2 << 8, 3 << 8, 5 << 8);
        assert_eq!(first(Reliability::DropOldest, header(80, old, 13)), 3);
        assert_eq!(first(Reliability::DropOldest, header(69, old, 9)), 0);
        assert_eq!(first(Reliability::DropOldest, header(80, gone, 13)), 0);
        assert_eq!(first(Reliability::DropOldest, header(80, new, 13)), 12);
        assert_eq!(first(Reliability::DropNewest, header(80, old, 13)), 10);
        assert_eq!(first(Reliability::Reliable, header(80, old, 13)), 0);
    }
}
