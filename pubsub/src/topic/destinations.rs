//! Nodes to which a topic's messages are owed, noted for whoever serves this node next.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::Words;

use super::layout::{DESTINATIONS, MAX_DESTINATIONS, REPLICATED};
use super::words::TopicWords;
use crate::pool::{id_from_words, id_to_words};

/// Words of a destination: its node, or zeros. The second half is written first, and what is
/// half written names nobody.
const WORDS: usize = 2;

impl<W: Words + Clone> TopicWords<W> {
    fn destination_at(&self, place: usize) -> [u64; WORDS] {
        [0, 1].map(|half| self.words().load(DESTINATIONS + place * WORDS + half, Acquire))
    }

    /// The nodes that are noted.
    pub(crate) fn destinations(&self) -> Vec<[u8; 16]> {
        (0..MAX_DESTINATIONS)
            .filter(|place| !self.is_being_given_up(*place))
            .map(|place| self.destination_at(place))
            .filter(|words| words[0] != 0)
            .map(id_from_words)
            .collect()
    }

    pub(super) fn destination_slot(&self, node: &[u8; 16]) -> Option<usize> {
        let words = id_to_words(node);
        (0..MAX_DESTINATIONS).find(|place| self.destination_at(*place) == words)
    }

    /// Notes a node; false if there is no place for one more. By who serves the node.
    pub(crate) fn add_destination(&self, node: &[u8; 16]) -> bool {
        self.finish_giving_up();
        if self.destination_slot(node).is_some() {
            return true;
        }
        let is_free = |place: &usize| self.destination_at(*place)[0] == 0;
        let Some(place) = (0..MAX_DESTINATIONS).find(is_free) else { return false };
        let (words, at) = (id_to_words(node), DESTINATIONS + place * WORDS);
        self.words().store(at + 1, words[1], Release);
        // An identity whose first half is zero would be nobody's: there is none of random bits.
        self.words().store(at, words[0], Release);
        true
    }

    /// Nothing is owed to it any more: it does not want it. One that wants it is
    /// [given up](Self::give_up).
    pub(crate) fn remove_destination(&self, node: &[u8; 16]) {
        self.finish_giving_up();
        if let Some(place) = self.destination_slot(node) {
            self.clear_destination(place as u64);
        }
    }

    /// Which of those that there are, if it is one.
    pub(super) fn clear_destination(&self, place: u64) {
        if let Some(place) = (0..MAX_DESTINATIONS).find(|known| *known as u64 == place) {
            self.words().store(DESTINATIONS + place * WORDS, 0, Release);
        }
    }

    /// Are messages kept for other nodes? Then whoever publishes tells who carries them.
    #[inline]
    pub(crate) fn is_replicated(&self) -> bool {
        self.words().load(REPLICATED, Acquire) != 0
    }

    pub(crate) fn set_replicated(&self, is_replicated: bool) {
        self.words().store(REPLICATED, u64::from(is_replicated), Release);
    }
}
