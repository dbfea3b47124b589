//! Publishers that died: what other nodes are told of those of this one, and what this one was told
//! of theirs. By who serves the node, one at a time.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::Words;

use super::TopicWords;
use super::layout::{
    LAST_LOST_ELSEWHERE, LOST_ELSEWHERE, LOST_ELSEWHERE_WORDS, LOST_TOLD, MOST_LOST,
};
use crate::pool::origin_words;

/// A publisher of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    pub(crate) node: [u8; 16],
    /// Its name among all that the topic ever had there.
    pub(crate) publisher: u64,
}

impl Elsewhere {
    fn words(&self) -> [u64; LOST_ELSEWHERE_WORDS] {
        let [low, high] = origin_words(&self.node);
        [low, high, self.publisher]
    }

    fn from_words([low, high, publisher]: [u64; LOST_ELSEWHERE_WORDS]) -> Self {
        let node = (u128::from(high) << 64 | u128::from(low)).to_le_bytes();
        Self { node, publisher }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// Another node says that a publisher there died. Once more is harmless, as long as it is among
    /// the last. True if it was not known.
    pub(crate) fn is_lost_elsewhere(&self, lost: Elsewhere) -> bool {
        let count = self.publishers_lost_elsewhere();
        let first = count.saturating_sub(MOST_LOST as u64);
        if (first..count).any(|number| self.publisher_lost_elsewhere(number) == Some(lost)) {
            return false;
        }
        let at = Self::place_of_loss(count);
        for (which, word) in lost.words().into_iter().enumerate() {
            self.words().store(at + which, word, Release);
        }
        // One store: this is the moment.
        self.words().store(LOST_ELSEWHERE, count.wrapping_add(1), Release);
        self.here().ring_messages();
        true
    }

    fn place_of_loss(number: u64) -> usize {
        LAST_LOST_ELSEWHERE + number as usize % MOST_LOST * LOST_ELSEWHERE_WORDS
    }

    /// How many publishers of other nodes were lost, as far as these have told.
    #[inline]
    pub(crate) fn publishers_lost_elsewhere(&self) -> u64 {
        self.words().load(LOST_ELSEWHERE, Acquire)
    }

    /// Which was lost as the `number`th, if that is still known.
    pub(crate) fn publisher_lost_elsewhere(&self, number: u64) -> Option<Elsewhere> {
        let at = Self::place_of_loss(number);
        let words = [0, 1, 2].map(|which| self.words().load(at + which, Acquire));
        let count = self.words().load(LOST_ELSEWHERE, Relaxed);
        // The oldest one may be about to be written over.
        let is_known = number < count && count - number < MOST_LOST as u64;
        is_known.then(|| Elsewhere::from_words(words))
    }

    /// How many of the publishers that were lost here other nodes were told of.
    pub(crate) fn losses_told(&self) -> u64 {
        self.words().load(LOST_TOLD, Acquire)
    }

    /// Other nodes were told of so many, or there are none.
    pub(crate) fn set_losses_told(&self, count: u64) {
        self.words().store(LOST_TOLD, count, Release);
    }
}
