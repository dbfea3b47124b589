//! The publishers' table: a line for each.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use ipc::{Participant, Words};

use super::backpressure::Backpressure;
use super::intent::Intent;
use super::layout::{CACHE_LINE_WORDS, DROPS, PUBLISHER_SLOTS, PUBLISHERS, SERIAL};
use crate::error::{Error, ErrorKind, Result};

const OWNER: usize = 0;
const NUMBER: usize = 1;
const SEQUENCE: usize = 2;
const INTENT: usize = 3;
const MESSAGES: usize = 4;
const BYTES: usize = 5;
const WAITS: usize = 6;
const DROPPED: usize = 7;
/// Beside the number of a publisher: it is at the line no more. What it did is known until the next.
const GONE: u64 = 1 << 63;
/// Beside the name of whose it is: the service has reserved memory for its loans.
const RESERVED: u64 = 1 << 32;

/// One publisher's line.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PublisherSlot<'a, W> {
    words: &'a W,
    index: usize,
}

/// What a line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PublisherInfo {
    /// In whose name.
    pub(crate) who: Participant,
    /// Its name among all publishers that the topic ever had on this node.
    pub(crate) id: u64,
    /// Of its last message; 0 before the first.
    pub(crate) sequence: u64,
    /// Messages that it published.
    pub(crate) messages: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// Messages that found no room, and were dropped.
    pub(crate) dropped: u64,
    /// Since when it waits for room; None while it does not.
    pub(crate) waits_since: Option<u64>,
}

/// What was published of a topic on this node up to now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Published {
    /// The serial of the last publisher that was made.
    pub(crate) serial: u64,
    /// Those that are there, each with the number of its last message; 0 before the first.
    pub(crate) publishers: Vec<(u64, u64)>,
}

impl Published {
    /// The how manieth of its topic a publisher is.
    pub(crate) fn serial_of(publisher: u64) -> u64 {
        publisher >> 8
    }
}

/// The serial of the last publisher that was made.
pub(super) fn last_serial<W: Words>(words: &W) -> u64 {
    words.load(SERIAL, Acquire)
}

/// The lines of all publishers.
pub(super) fn slots<W: Words>(words: &W) -> impl Iterator<Item = PublisherSlot<'_, W>> {
    (0..PUBLISHER_SLOTS).map(|index| PublisherSlot { words, index })
}

/// A line for one publisher more; with the serial that it has now. Of those that are free the one that
/// was left first: what the last publisher of a line did is known for a while.
pub(super) fn claim<W: Words>(words: &W, me: Participant) -> Result<(PublisherSlot<'_, W>, u64)> {
    let free = |slot: &PublisherSlot<'_, W>| {
        words.compare_exchange(slot.at(OWNER), 0, u64::from(me.number())).is_ok()
    };
    let mut all: Vec<_> = slots(words).collect();
    all.sort_by_key(|slot| slot.word(NUMBER) & !GONE);
    let Some(slot) = all.into_iter().find(free) else {
        let detail =
            format!("the topic has {PUBLISHER_SLOTS} publishers on this node, the maximum");
        return Err(Error::new("make a publisher", ErrorKind::TooMany, detail));
    };
    // First: whoever sees something of what follows sees that it is not the last one's.
    words.store(slot.at(NUMBER), 0, Release);
    for which in [SEQUENCE, MESSAGES, BYTES, WAITS, DROPPED] {
        words.store(slot.at(which), 0, Release);
    }
    let serial = words.fetch_add(SERIAL, 1).wrapping_add(1);
    words.store(slot.at(NUMBER), serial, Release);
    Ok((slot, serial))
}

impl<'a, W: Words> PublisherSlot<'a, W> {
    /// The line of a publisher's id.
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

    /// The publisher's id, with this serial.
    pub(crate) fn id(&self, serial: u64) -> u64 {
        serial << 8 | self.index as u64
    }

    /// Is it still this publisher's?
    #[inline]
    pub(crate) fn is_of(&self, me: Participant, id: u64) -> bool {
        self.word(OWNER) as u32 == me.number() && self.word(NUMBER) == id >> 8
    }

    /// Has memory been reserved for its loans?
    pub(crate) fn has_reservation(&self) -> bool {
        self.words.load(self.at(OWNER), Acquire) & RESERVED != 0
    }

    /// Memory is reserved for its loans until it [is given back](Self::give_back). False if it is
    /// not this one's any more.
    pub(crate) fn reserve(&self, who: Participant) -> bool {
        let unreserved = u64::from(who.number());
        let reserved_publishers = unreserved | RESERVED;
        match self.words.compare_exchange(self.at(OWNER), unreserved, reserved_publishers) {
            Ok(_) => true,
            Err(found) => found == reserved_publishers,
        }
    }

    pub(super) fn who(&self) -> Option<Participant> {
        Participant::from_number(self.words.load(self.at(OWNER), Acquire) as u32)
    }

    pub(super) fn intent(&self) -> Intent<'a, W> {
        Intent { words: self.words, at: self.at(INTENT) }
    }

    pub(crate) fn backpressure(&self) -> Backpressure<'a, W> {
        Backpressure { words: self.words, at: self.at(WAITS) }
    }

    /// A message of this number is about to be published, or dropped. Who subscribes from here on
    /// does not expect it.
    #[inline]
    pub(crate) fn begin(&self, sequence: u64) {
        self.words.store(self.at(SEQUENCE), sequence, Relaxed);
    }

    /// One more was published.
    #[inline]
    pub(crate) fn count(&self, bytes: u64) {
        let words = self.words;
        words.store(self.at(MESSAGES), self.word(MESSAGES).wrapping_add(1), Release);
        words.store(self.at(BYTES), self.word(BYTES).wrapping_add(bytes), Relaxed);
        self.backpressure().relieved();
    }

    /// One found no room.
    pub(crate) fn count_dropped(&self) {
        self.words.fetch_add(self.at(DROPPED), 1);
        self.words.fetch_add(DROPS, 1);
    }

    /// Is it, or was it, a publisher's?
    pub(super) fn is_used(&self) -> bool {
        self.word(NUMBER) != 0
    }

    /// The publisher whose line it is, or was last, and the number of its last message, if it is at none
    /// now: nothing before is still to be delivered.
    pub(super) fn settled(&self) -> Option<(u64, u64)> {
        let (publisher, last) = self.last()?;
        let word = |which| self.words.load(self.at(which), Acquire);
        // One that died at a message has published it, or never will.
        let is_idle = word(OWNER) == 0 || word(SEQUENCE) == last;
        (is_idle && word(NUMBER) & !GONE == publisher >> 8).then_some((publisher, last))
    }

    /// As [`settled`](Self::settled), also if it is at the next one now.
    pub(super) fn last(&self) -> Option<(u64, u64)> {
        let word = |which| self.words.load(self.at(which), Acquire);
        let serial = word(NUMBER) & !GONE;
        let last = word(MESSAGES).wrapping_add(word(DROPPED));
        (serial != 0).then(|| (self.id(serial), last))
    }

    pub(crate) fn seen(&self) -> Option<PublisherInfo> {
        let who = self.who()?;
        let serial = self.words.load(self.at(NUMBER), Acquire);
        (serial != 0 && serial & GONE == 0).then(|| PublisherInfo {
            who,
            id: self.id(serial),
            sequence: self.word(SEQUENCE),
            messages: self.word(MESSAGES),
            bytes: self.word(BYTES),
            dropped: self.word(DROPPED),
            waits_since: self.backpressure().since(Duration::ZERO),
        })
    }

    /// For the next publisher. Its intent is settled, and nothing is promised to it any more. What it
    /// did stays known until there is another one.
    pub(crate) fn give_back(&self) {
        self.backpressure().clear();
        // First: who dies with the line in its name, before it has made it its own, is another one.
        let number = self.word(NUMBER);
        if number != 0 {
            self.words.store(self.at(NUMBER), number | GONE, Release);
        }
        self.words.store(self.at(OWNER), 0, Release);
    }
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;

    #[test]
    fn killed_while_it_takes_a_used_line_it_is_not_the_last_publisher() {
        let words = &LocalWords::zeroed(PUBLISHERS + PUBLISHER_SLOTS * CACHE_LINE_WORDS);
        let [first, second] = [1, 2].map(|place| Participant::new(place, 1).unwrap());
        let (slot, serial) = claim(&words, first).unwrap();
        slot.count(8);
        assert_eq!(slot.seen().map(|seen| (seen.who, seen.id)), Some((first, slot.id(serial))));
        slot.give_back();
        // It has taken the line, and nothing more.
        words.compare_exchange(slot.at(OWNER), 0, u64::from(second.number())).unwrap();
        assert_eq!((slot.who(), slot.seen()), (Some(second), None));
        assert!(!slot.is_of(second, slot.id(serial)));
        // What the last one did is known all the same.
        assert_eq!(slot.last(), Some((slot.id(serial), 1)));
        slot.give_back();
        assert_eq!(slot.settled(), Some((slot.id(serial), 1)));
    }
}
