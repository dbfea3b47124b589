//! Nodes for which a topic's messages are retained, stored for later services.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::Words;

use super::TopicWords;
use super::layout::{DESTINATIONS, MAX_DESTINATIONS, REPLICATED};
use crate::ids::{id_from_words, id_to_words};

/// Words of a destination: its node, or zeros. The second half is written first, so a half-written
/// slot is empty.
const WORDS: usize = 2;

impl<W: Words + Clone> TopicWords<W> {
    fn destination_at(&self, slot: usize) -> [u64; WORDS] {
        [0, 1].map(|half| self.words().load(DESTINATIONS + slot * WORDS + half, Acquire))
    }

    pub(crate) fn destinations(&self) -> Vec<[u8; 16]> {
        let slots = (0..MAX_DESTINATIONS).filter(|slot| !self.is_being_given_up(*slot));
        let nodes = slots.map(|slot| self.destination_at(slot)).filter(|words| words[0] != 0);
        nodes.map(id_from_words).collect()
    }

    pub(super) fn destination_slot(&self, node: &[u8; 16]) -> Option<usize> {
        let words = id_to_words(node);
        (0..MAX_DESTINATIONS).find(|slot| self.destination_at(*slot) == words)
    }

    /// Stores a node; false if there is no free slot. Called by the service.
    pub(crate) fn add_destination(&self, node: &[u8; 16]) -> bool {
        self.finish_giving_up();
        if self.destination_slot(node).is_some() {
            return true;
        }
        let is_free = |slot: &usize| self.destination_at(*slot)[0] == 0;
        let Some(slot) = (0..MAX_DESTINATIONS).find(is_free) else { return false };
        let (words, at) = (id_to_words(node), DESTINATIONS + slot * WORDS);
        self.words().store(at + 1, words[1], Release);
        // An identity whose first half is zero would look like an empty slot; random bits make that
        // negligible.
        self.words().store(at, words[0], Release);
        true
    }

    /// Removes a node that unsubscribed. A node that still subscribes is [dropped](Self::give_up).
    pub(crate) fn remove_destination(&self, node: &[u8; 16]) {
        self.finish_giving_up();
        if let Some(slot) = self.destination_slot(node) {
            self.clear_destination(slot as u64);
        }
    }

    /// Clears the slot, if the number is valid.
    pub(super) fn clear_destination(&self, slot: u64) {
        if let Some(slot) = (0..MAX_DESTINATIONS).find(|known| *known as u64 == slot) {
            self.words().store(DESTINATIONS + slot * WORDS, 0, Release);
        }
    }

    /// Returns true if messages are retained for other nodes. Then publishers ring replication.
    #[inline]
    pub(crate) fn is_replicated(&self) -> bool {
        self.words().load(REPLICATED, Acquire) != 0
    }

    pub(crate) fn set_replicated(&self, is_replicated: bool) {
        self.words().store(REPLICATED, u64::from(is_replicated), Release);
    }
}
