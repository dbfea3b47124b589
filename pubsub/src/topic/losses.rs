//! Publishers that died: those of this node, of which other nodes are told, and those of others, of
//! which this one was told. By who serves the node, one at a time.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::Words;

use super::TopicWords;
use super::layout::{LAST_LOST, LOSSES_SENT, LOST, LOST_WORDS, MAX_REMEMBERED_LOSSES};
use crate::pool::{Direction, id_from_words, id_to_words};

/// A publisher that died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LostPublisher {
    /// Of no node, if it was here.
    pub(crate) node: [u8; 16],
    /// Its name among all that the topic ever had there.
    pub(crate) publisher: u64,
}

impl LostPublisher {
    pub(super) fn local(publisher: u64) -> Self {
        Self { node: [0; 16], publisher }
    }

    fn words(&self) -> [u64; LOST_WORDS] {
        let [low, high] = id_to_words(&self.node);
        [low, high, self.publisher]
    }

    fn from_words([low, high, publisher]: [u64; LOST_WORDS]) -> Self {
        Self { node: id_from_words([low, high]), publisher }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// A publisher died here, or another node says that one there did. Once more is harmless, as long
    /// as it is among the last. True if it was not known.
    pub(crate) fn record_loss(&self, direction: Direction, lost: LostPublisher) -> bool {
        let count = self.publishers_lost(direction);
        let first = count.saturating_sub(MAX_REMEMBERED_LOSSES as u64);
        if (first..count).any(|number| self.publisher_lost(direction, number) == Some(lost)) {
            return false;
        }
        let at = Self::loss_slot(direction, count);
        for (which, word) in lost.words().into_iter().enumerate() {
            self.words().store(at + which, word, Release);
        }
        // One store: this is the moment.
        self.words().store(LOST + direction as usize, count.wrapping_add(1), Release);
        true
    }

    fn loss_slot(direction: Direction, number: u64) -> usize {
        let slot =
            direction as usize * MAX_REMEMBERED_LOSSES + number as usize % MAX_REMEMBERED_LOSSES;
        LAST_LOST + slot * LOST_WORDS
    }

    /// How many publishers were lost so far; those of other nodes as far as these have told.
    #[inline]
    pub(crate) fn publishers_lost(&self, direction: Direction) -> u64 {
        self.words().load(LOST + direction as usize, Acquire)
    }

    /// Which was lost as the `number`th, if that is still known.
    pub(crate) fn publisher_lost(
        &self,
        direction: Direction,
        number: u64,
    ) -> Option<LostPublisher> {
        let at = Self::loss_slot(direction, number);
        let words = [0, 1, 2].map(|which| self.words().load(at + which, Acquire));
        let count = self.words().load(LOST + direction as usize, Relaxed);
        // The oldest one may be about to be written over.
        let is_known = number < count && count - number < MAX_REMEMBERED_LOSSES as u64;
        is_known.then(|| LostPublisher::from_words(words))
    }

    /// How many of the publishers that were lost here other nodes were told of.
    pub(crate) fn losses_sent(&self) -> u64 {
        self.words().load(LOSSES_SENT, Acquire)
    }

    /// Other nodes were told of so many, or there are none.
    pub(crate) fn set_losses_sent(&self, count: u64) {
        self.words().store(LOSSES_SENT, count, Release);
    }
}
