//! The last sequence of each publisher of another node. That node sends it when all earlier messages
//! were delivered or lost. A subscriber that has read all inbound messages misses the others up to
//! this sequence.
//!
//! Only the service writes them, one at a time. A slot is written under a version, which is odd in
//! the meantime. If a service dies then, the slot is written again later.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::fence;

use ipc::Words;

use super::TopicWords;
use super::layout::{
    CACHE_LINE_WORDS, MAX_REMOTE_LAST_SEQUENCES, REMOTE_LAST_SEQUENCE_CHANGES,
    REMOTE_LAST_SEQUENCES, store_all,
};
use super::remote_accounts::{PublisherStart, RemotePublisher};
use crate::ids::{id_from_words, id_to_words};

/// Grows by two with each change, and is odd during one. 0: the slot is free.
const VERSION: usize = 0;
const CONTENT: usize = 1;
const WORDS: usize = 7;

/// The last sequence of a publisher of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RemoteLastSequence {
    pub(crate) node: [u8; 16],
    pub(crate) publisher: u64,
    /// The sequence of its last message.
    pub(crate) last: u64,
    /// Where its messages start for this node.
    pub(crate) start: PublisherStart,
    /// The next inbound position at the time of the record.
    pub(crate) at: u64,
}

impl RemoteLastSequence {
    fn words(&self) -> [u64; WORDS] {
        let [low, high] = id_to_words(&self.node);
        let [first, since] = self.start.words();
        [low, high, self.publisher, self.last, first, since, self.at]
    }

    fn from_words([low, high, publisher, last, first, since, at]: [u64; WORDS]) -> Self {
        let (node, start) = (id_from_words([low, high]), PublisherStart::new(first, since));
        Self { node, publisher, last, start, at }
    }

    pub(crate) fn of_publisher(&self) -> RemotePublisher {
        RemotePublisher::new(self.node, self.publisher)
    }
}

impl<W: Words + Clone> TopicWords<W> {
    #[inline]
    pub(crate) fn remote_last_sequence_changes(&self) -> u64 {
        self.words().load(REMOTE_LAST_SEQUENCE_CHANGES, Acquire)
    }

    /// All recorded last sequences; one that is being written counts as another change.
    ///
    /// Only those that were recorded after this count of changes: a subscriber that knows the accounts
    /// as of then has nothing to learn from earlier ones, which may belong to a former subscription.
    pub(crate) fn remote_last_sequences(&self, changes: u64) -> Vec<RemoteLastSequence> {
        let slots = self.remote_last_sequence_slots();
        let is_later = |at: &usize| self.words().load(at + VERSION, Acquire) / 2 > changes;
        slots.filter(|(at, _)| is_later(at)).filter_map(|(_, found)| found).collect()
    }

    /// Offset and content of each slot.
    fn remote_last_sequence_slots(
        &self,
    ) -> impl Iterator<Item = (usize, Option<RemoteLastSequence>)> {
        (0..MAX_REMOTE_LAST_SEQUENCES).map(|slot| {
            let at = REMOTE_LAST_SEQUENCES + slot * CACHE_LINE_WORDS;
            let version = self.words().load(at + VERSION, Acquire);
            let content =
                std::array::from_fn(|word| self.words().load(at + CONTENT + word, Acquire));
            fence(Acquire);
            let is_whole = version != 0
                && version.is_multiple_of(2)
                && self.words().load(at + VERSION, Acquire) == version;
            (at, is_whole.then(|| RemoteLastSequence::from_words(content)))
        })
    }

    /// Records a last sequence, in the slot with the oldest one if none is free. False if it was
    /// recorded before.
    pub(crate) fn record_remote_last_sequence(&self, content: &RemoteLastSequence) -> bool {
        let words = self.words();
        let version = |at: usize| words.load(at + VERSION, Acquire);
        let mut same = None;
        for (at, found) in self.remote_last_sequence_slots() {
            let Some(found) = found.filter(|found| found.of_publisher() == content.of_publisher())
            else {
                continue;
            };
            // A service may have died between the slot and the count of changes.
            let is_counted = version(at) / 2 <= self.remote_last_sequence_changes();
            if is_counted && (RemoteLastSequence { at: content.at, ..found }) == *content {
                return false;
            }
            same = Some(at);
        }
        let at = same.unwrap_or_else(|| {
            // A slot that a dead service left half-written is used first, then a free one.
            let slots = (0..MAX_REMOTE_LAST_SEQUENCES)
                .map(|slot| REMOTE_LAST_SEQUENCES + slot * CACHE_LINE_WORDS);
            let age = |at: &usize| if version(*at) % 2 == 1 { 0 } else { version(*at) };
            slots.min_by_key(age).unwrap_or(REMOTE_LAST_SEQUENCES)
        });
        let changes = self.remote_last_sequence_changes().wrapping_add(1);
        words.store(at + VERSION, changes.wrapping_mul(2) | 1, Release);
        fence(Release);
        store_all(words, at + CONTENT, content.words());
        words.store(at + VERSION, changes.wrapping_mul(2), Release);
        words.store(REMOTE_LAST_SEQUENCE_CHANGES, changes, Release);
        true
    }
}
