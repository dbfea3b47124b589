//! Table of publishers.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use ipc::{Participant, Words};

use super::PublisherInfo;
use super::backpressure::Backpressure;
use super::intent::Intent;
use super::layout::{
    CACHE_LINE_WORDS, DROPS, PUBLISHER_CHANGES, PUBLISHER_SLOTS, PUBLISHERS, SERIAL,
};
use crate::error::{Error, ErrorKind, Result};

const OWNER: usize = 0;
const NUMBER: usize = 1;
const SEQUENCE: usize = 2;
const INTENT: usize = 3;
const MESSAGES: usize = 4;
const BYTES: usize = 5;
const WAITS: usize = 6;
const DROPPED: usize = 7;
/// Flag of a serial: the publisher has left. Its counters stay until the next one.
const HAS_LEFT: u64 = 1 << 63;
/// Flag of an owner: the service has reserved memory for its loans.
const RESERVED: u64 = 1 << 32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct PublisherSlot<'a, W> {
    words: &'a W,
    index: usize,
}

/// The last sequences of a topic's publishers on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    /// The serial of the last publisher.
    pub(crate) serial: u64,
    /// The present publishers, each with its last sequence; 0 before the first.
    pub(crate) publishers: Vec<(u64, u64)>,
}

impl Published {
    pub(crate) fn serial_of(publisher: u64) -> u64 {
        publisher >> 8
    }
}

pub(super) fn slots<W: Words>(words: &W) -> impl Iterator<Item = PublisherSlot<'_, W>> {
    (0..PUBLISHER_SLOTS).map(|index| PublisherSlot { words, index })
}

/// Claims a slot for a new publisher; returns it with its serial. The slot that was freed first is
/// used, so that counters of publishers that left stay for a while.
pub(super) fn claim<W: Words>(words: &W, me: Participant) -> Result<(PublisherSlot<'_, W>, u64)> {
    let free = |slot: &PublisherSlot<'_, W>| {
        words.compare_exchange(slot.at(OWNER), 0, u64::from(me.number())).is_ok()
    };
    let mut all: Vec<_> = slots(words).collect();
    // Each serial is read once: other processes change them, and a sort with changing keys panics.
    all.sort_by_cached_key(|slot| slot.word(NUMBER) & !HAS_LEFT);
    let Some(slot) = all.into_iter().find(free) else {
        let detail =
            format!("the topic has {PUBLISHER_SLOTS} publishers on this node, the maximum");
        return Err(Error::new("create publisher of topic", ErrorKind::TooMany, detail));
    };
    // First: a reader of the following stores sees that they are not the last publisher's.
    words.store(slot.at(NUMBER), 0, Release);
    for which in [SEQUENCE, MESSAGES, BYTES, WAITS, DROPPED] {
        words.store(slot.at(which), 0, Release);
    }
    let serial = words.fetch_add(SERIAL, 1).wrapping_add(1);
    words.store(slot.at(NUMBER), serial, Release);
    Ok((slot, serial))
}

impl<'a, W: Words> PublisherSlot<'a, W> {
    #[inline]
    pub(crate) fn of(words: &'a W, id: u64) -> Self {
        Self { words, index: (id & 0xff) as usize % PUBLISHER_SLOTS }
    }

    #[inline]
    fn at(&self, which: usize) -> usize {
        PUBLISHERS + self.index * CACHE_LINE_WORDS + which
    }

    #[inline]
    fn word(&self, which: usize) -> u64 {
        self.words.load(self.at(which), Relaxed)
    }

    pub(crate) fn id(&self, serial: u64) -> u64 {
        serial << 8 | self.index as u64
    }

    /// Returns true if the slot still belongs to this publisher.
    #[inline]
    pub(crate) fn is_of(&self, me: Participant, id: u64) -> bool {
        self.word(OWNER) as u32 == me.number() && self.word(NUMBER) == id >> 8
    }

    /// Returns true if this publisher holds the slot, even after it has [left](Self::leave).
    pub(crate) fn is_held_by(&self, me: Participant, id: u64) -> bool {
        self.word(OWNER) as u32 == me.number() && self.word(NUMBER) & !HAS_LEFT == id >> 8
    }

    pub(crate) fn has_reservation(&self) -> bool {
        self.words.load(self.at(OWNER), Acquire) & RESERVED != 0
    }

    /// Marks memory as reserved for its loans until [`give_back`](Self::give_back). False if the
    /// slot belongs to another publisher.
    pub(crate) fn reserve(&self, participant: Participant) -> bool {
        let unreserved = u64::from(participant.number());
        let reserved_publishers = unreserved | RESERVED;
        match self.words.compare_exchange(self.at(OWNER), unreserved, reserved_publishers) {
            Ok(_) => {
                self.words.fetch_add(PUBLISHER_CHANGES, 1);
                true
            }
            Err(found) => found == reserved_publishers,
        }
    }

    pub(super) fn index(&self) -> usize {
        self.index
    }

    /// Returns true if the slot has a publisher that the service has admitted, and that has not
    /// left.
    pub(super) fn is_present(&self) -> bool {
        let number = || self.words.load(self.at(NUMBER), Acquire);
        self.has_reservation() && !matches!(number(), 0 | HAS_LEFT..)
    }

    /// The serial of the slot's last publisher, if that has left.
    pub(super) fn left(&self) -> Option<u64> {
        let number = self.words.load(self.at(NUMBER), Acquire);
        (number & HAS_LEFT != 0).then_some(number & !HAS_LEFT)
    }

    pub(super) fn participant(&self) -> Option<Participant> {
        Participant::from_number(self.words.load(self.at(OWNER), Acquire) as u32)
    }

    pub(super) fn intent(&self) -> Intent<'a, W> {
        Intent::new(self.words, self.at(INTENT))
    }

    pub(crate) fn backpressure(&self) -> Backpressure<'a, W> {
        Backpressure::new(self.words, self.at(WAITS))
    }

    /// A message with this number is about to be published, or dropped. Later subscribers do not
    /// expect it.
    #[inline]
    pub(crate) fn begin(&self, sequence: u64) {
        self.words.store(self.at(SEQUENCE), sequence, Relaxed);
    }

    #[inline]
    pub(crate) fn count(&self, bytes: u64) {
        let words = self.words;
        words.store(self.at(MESSAGES), self.word(MESSAGES).wrapping_add(1), Release);
        words.store(self.at(BYTES), self.word(BYTES).wrapping_add(bytes), Relaxed);
        self.backpressure().relieved();
    }

    /// Counts a message that found no room.
    pub(crate) fn count_dropped(&self) {
        self.words.fetch_add(self.at(DROPPED), 1);
        self.words.fetch_add(DROPS, 1);
    }

    /// Returns true if the slot has, or had, a publisher.
    pub(super) fn is_used(&self) -> bool {
        self.word(NUMBER) != 0
    }

    /// The present or last publisher of the slot, and its last sequence, if it is not publishing:
    /// no earlier message remains to be delivered.
    pub(super) fn settled(&self) -> Option<(u64, u64)> {
        let (publisher, last) = self.last()?;
        let word = |which| self.words.load(self.at(which), Acquire);
        // A publisher that died during a publish has delivered the message, or never will. One that
        // has left publishes nothing more.
        let has_ended = word(OWNER) == 0 || word(NUMBER) & HAS_LEFT != 0;
        let is_idle = has_ended || word(SEQUENCE) == last;
        (is_idle && word(NUMBER) & !HAS_LEFT == publisher >> 8).then_some((publisher, last))
    }

    /// The present publisher of the slot, with the sequence that it has begun last; otherwise its last
    /// publisher, with its last sequence.
    pub(super) fn begun(&self) -> Option<(u64, u64)> {
        let (publisher, last) = self.last()?;
        let is_present = self.words.load(self.at(OWNER), Acquire) != 0;
        let begun = if is_present { self.words.load(self.at(SEQUENCE), Acquire) } else { 0 };
        Some((publisher, last.max(begun)))
    }

    /// Like [`settled`](Self::settled), also while the publisher is publishing the next message.
    pub(super) fn last(&self) -> Option<(u64, u64)> {
        let word = |which| self.words.load(self.at(which), Acquire);
        let serial = word(NUMBER) & !HAS_LEFT;
        let last = word(MESSAGES).wrapping_add(word(DROPPED));
        (serial != 0).then(|| (self.id(serial), last))
    }

    pub(crate) fn seen(&self) -> Option<PublisherInfo> {
        let participant = self.participant()?;
        let serial = self.words.load(self.at(NUMBER), Acquire);
        (serial != 0 && serial & HAS_LEFT == 0).then(|| PublisherInfo {
            participant,
            id: self.id(serial),
            sequence: self.word(SEQUENCE),
            messages: self.word(MESSAGES),
            bytes: self.word(BYTES),
            dropped: self.word(DROPPED),
            waits_since: self.backpressure().since(Duration::ZERO),
        })
    }

    /// Marks the publisher as gone: it publishes nothing more. The slot and its reservation stay
    /// its own as long as it has loans.
    pub(crate) fn leave(&self) {
        self.backpressure().clear();
        let number = self.word(NUMBER);
        if number != 0 {
            self.words.store(self.at(NUMBER), number | HAS_LEFT, Release);
            // Also if it has left before: its process may have died before it counted.
            self.words.fetch_add(PUBLISHER_CHANGES, 1);
        }
    }

    /// Frees the slot of a publisher that was not admitted.
    pub(crate) fn abandon(&self) {
        self.words.store(self.at(NUMBER), 0, Release);
        self.words.store(self.at(OWNER), 0, Release);
        // The service may have named it, if only the answer is missing.
        self.words.fetch_add(PUBLISHER_CHANGES, 1);
    }

    /// Frees the slot. Its intent is settled, and its reservation ends. The counters stay until the
    /// next publisher.
    pub(crate) fn give_back(&self) {
        // First: a process that dies right after it has claimed the slot is another publisher.
        self.leave();
        self.words.store(self.at(OWNER), 0, Release);
    }
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;
    use crate::topic::layout::QUEUES;

    #[test]
    fn process_killed_while_claiming_a_slot_is_no_publisher() {
        let words = &LocalWords::zeroed(QUEUES);
        let [first, second] = [1, 2].map(|place| Participant::new(place, 1).unwrap());
        let (slot, serial) = claim(&words, first).unwrap();
        slot.count(8);
        assert_eq!(slot.seen().map(|it| (it.participant, it.id)), Some((first, slot.id(serial))));
        slot.give_back();
        // The next process has claimed the slot, and done nothing more.
        words.compare_exchange(slot.at(OWNER), 0, u64::from(second.number())).unwrap();
        assert_eq!((slot.participant(), slot.seen()), (Some(second), None));
        assert!(!slot.is_of(second, slot.id(serial)));
        // The counters of the last publisher stay all the same.
        assert_eq!(slot.last(), Some((slot.id(serial), 1)));
        slot.give_back();
        assert_eq!(slot.settled(), Some((slot.id(serial), 1)));
    }

    #[test]
    fn publisher_is_present_from_its_admission_until_it_leaves() {
        let words = &LocalWords::zeroed(QUEUES);
        let me = Participant::new(1, 1).unwrap();
        let changes = || words.load(PUBLISHER_CHANGES, Acquire);
        let (slot, serial) = claim(&words, me).unwrap();
        assert!(!slot.is_present() && slot.seen().is_some());
        slot.abandon();
        assert_eq!((slot.left(), slot.seen(), changes()), (None, None, 1));
        let (slot, serial) = (claim(&words, me).unwrap().0, serial + 1);
        assert!(slot.reserve(me) && slot.is_present());
        assert_eq!((slot.left(), changes()), (None, 2));
        slot.leave();
        assert!(!slot.is_present() && slot.has_reservation());
        assert!(slot.is_held_by(me, slot.id(serial)) && !slot.is_of(me, slot.id(serial)));
        assert_eq!((slot.left(), changes()), (Some(serial), 3));
        slot.give_back();
        assert!(!slot.has_reservation() && !slot.is_held_by(me, slot.id(serial)));
        assert_eq!((slot.left(), changes()), (Some(serial), 4));
    }
}
