//! Lost publishers: those of this node, which are reported to other nodes, and those that other
//! nodes reported. Only the service writes them, one at a time.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::Words;

use super::TopicWords;
use super::layout::{LAST_LOST, LOSSES_SENT, LOST, LOST_WORDS, MAX_REMEMBERED_LOSSES, store_all};
use crate::ids::{id_from_words, id_to_words};
use crate::pool::Direction;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LostPublisher {
    /// Zeros for a publisher of this node.
    pub(crate) node: [u8; 16],
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
    /// Records a lost publisher of this node, or one that another node reported. Idempotent while
    /// it is among the last ones. True if it is new.
    pub(crate) fn record_loss(&self, direction: Direction, lost: LostPublisher) -> bool {
        let count = self.publishers_lost(direction);
        let first = count.saturating_sub(MAX_REMEMBERED_LOSSES as u64);
        if (first..count).any(|number| self.publisher_lost(direction, number) == Some(lost)) {
            return false;
        }
        let at = Self::loss_slot(direction, count);
        store_all(self.words(), at, lost.words());
        // One store commits.
        self.words().store(LOST + direction as usize, count.wrapping_add(1), Release);
        true
    }

    fn loss_slot(direction: Direction, number: u64) -> usize {
        let slot =
            direction as usize * MAX_REMEMBERED_LOSSES + number as usize % MAX_REMEMBERED_LOSSES;
        LAST_LOST + slot * LOST_WORDS
    }

    /// The number of lost publishers so far; of other nodes, as far as these have reported.
    #[inline]
    pub(crate) fn publishers_lost(&self, direction: Direction) -> u64 {
        self.words().load(LOST + direction as usize, Acquire)
    }

    /// The `number`th lost publisher, if it is still recorded.
    pub(crate) fn publisher_lost(
        &self,
        direction: Direction,
        number: u64,
    ) -> Option<LostPublisher> {
        let at = Self::loss_slot(direction, number);
        let words = [0, 1, 2].map(|which| self.words().load(at + which, Acquire));
        let count = self.words().load(LOST + direction as usize, Relaxed);
        // The oldest slot may be about to be overwritten.
        let is_recorded = number < count && count - number < MAX_REMEMBERED_LOSSES as u64;
        is_recorded.then(|| LostPublisher::from_words(words))
    }

    /// How many of this node's lost publishers were reported to other nodes.
    pub(crate) fn losses_sent(&self) -> u64 {
        self.words().load(LOSSES_SENT, Acquire)
    }

    /// Records how many were reported, or that there are no other nodes.
    pub(crate) fn set_losses_sent(&self, count: u64) {
        self.words().store(LOSSES_SENT, count, Release);
    }
}
