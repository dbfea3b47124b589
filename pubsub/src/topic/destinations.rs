//! Nodes to which a topic's messages are owed, noted for whoever serves this node next.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::Words;

use super::layout::{CARRIED, DESTINATIONS, MOST_DESTINATIONS};
use super::words::TopicWords;
use crate::pool::{origin_of, origin_words};

/// Words of a destination: its node, or zeros. The second half is written first, and what is
/// half written names nobody.
const WORDS: usize = 2;

impl<W: Words + Clone> TopicWords<W> {
    fn destination_at(&self, place: usize) -> [u64; WORDS] {
        [0, 1].map(|half| self.words().load(DESTINATIONS + place * WORDS + half, Acquire))
    }

    /// The nodes that are noted.
    pub(crate) fn destinations(&self) -> Vec<[u8; 16]> {
        (0..MOST_DESTINATIONS)
            .filter(|place| !self.is_being_given_up(*place))
            .map(|place| self.destination_at(place))
            .filter(|words| words[0] != 0)
            .map(origin_of)
            .collect()
    }

    pub(super) fn place_of_destination(&self, node: &[u8; 16]) -> Option<usize> {
        let words = origin_words(node);
        (0..MOST_DESTINATIONS).find(|place| self.destination_at(*place) == words)
    }

    /// Notes a node; false if there is no place for one more. By who serves the node.
    pub(crate) fn note_destination(&self, node: &[u8; 16]) -> bool {
        self.finish_giving_up();
        if self.place_of_destination(node).is_some() {
            return true;
        }
        let is_free = |place: &usize| self.destination_at(*place)[0] == 0;
        let Some(place) = (0..MOST_DESTINATIONS).find(is_free) else { return false };
        let (words, at) = (origin_words(node), DESTINATIONS + place * WORDS);
        self.words().store(at + 1, words[1], Release);
        // An identity whose first half is zero would be nobody's: there is none of random bits.
        self.words().store(at, words[0], Release);
        true
    }

    /// Nothing is owed to it any more: it does not want it. One that wants it is
    /// [given up](Self::give_up).
    pub(crate) fn forget_destination(&self, node: &[u8; 16]) {
        self.finish_giving_up();
        if let Some(place) = self.place_of_destination(node) {
            self.clear_destination(place as u64);
        }
    }

    /// Which of those that there are, if it is one.
    pub(super) fn clear_destination(&self, place: u64) {
        if let Some(place) = (0..MOST_DESTINATIONS).find(|known| *known as u64 == place) {
            self.words().store(DESTINATIONS + place * WORDS, 0, Release);
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
