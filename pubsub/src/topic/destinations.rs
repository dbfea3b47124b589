//! Nodes to which a topic's messages are owed, noted for whoever serves this node next.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::Words;

use super::layout::{CARRIED, DESTINATIONS, MOST_DESTINATIONS};
use super::words::TopicWords;
use crate::pool::origin_words;

/// Words of a destination: its node, or zeros. The second half is written first, and what is
/// half written names nobody.
const WORDS: usize = 2;

impl<W: Words + Clone> TopicWords<W> {
    fn destination_lines() -> impl Iterator<Item = usize> {
        (0..MOST_DESTINATIONS).map(|number| DESTINATIONS + number * WORDS)
    }

    fn destination_at(&self, at: usize) -> [u64; WORDS] {
        [0, 1].map(|half| self.words().load(at + half, Acquire))
    }

    /// The nodes that are noted.
    pub(crate) fn destinations(&self) -> Vec<[u8; 16]> {
        Self::destination_lines()
            .map(|at| self.destination_at(at))
            .filter(|words| words[0] != 0)
            .map(|[low, high]| (u128::from(high) << 64 | u128::from(low)).to_le_bytes())
            .collect()
    }

    /// Notes a node; false if there is no place for one more. By who serves the node.
    pub(crate) fn note_destination(&self, node: &[u8; 16]) -> bool {
        let words = origin_words(node);
        if Self::destination_lines().any(|at| self.destination_at(at) == words) {
            return true;
        }
        let Some(at) = Self::destination_lines().find(|at| self.destination_at(*at)[0] == 0) else {
            return false;
        };
        self.words().store(at + 1, words[1], Release);
        // An identity whose first half is zero would be nobody's: there is none of random bits.
        self.words().store(at, words[0], Release);
        true
    }

    /// Nothing is owed to it any more.
    pub(crate) fn forget_destination(&self, node: &[u8; 16]) {
        let words = origin_words(node);
        for at in Self::destination_lines().filter(|at| self.destination_at(*at) == words) {
            self.words().store(at, 0, Release);
        }
    }

    /// Are messages kept for other nodes? Then whoever publishes tells who carries them.
    #[inline]
    pub(crate) fn is_carried(&self) -> bool {
        self.words().load(CARRIED, Acquire) != 0
    }

    pub(crate) fn set_carried(&self, is_carried: bool) {
        self.words().store(CARRIED, u64::from(is_carried), Release);
    }
}
