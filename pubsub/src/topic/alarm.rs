//! What is told to subscribers in other processes: that they were removed.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use ipc::{Seat, Words};

use super::layout::{ALARMS, EVICTIONS, LINE, MOST_SUBSCRIBERS};

const HERE: usize = 0;
const ARRIVALS: usize = 1;
const EVICTED: usize = 2;
/// Whom that is about: by the seat at the queue of what is published here.
const WHOM: usize = 3;
/// The how manieth eviction of the topic that of this seat was.
const NUMBER: usize = 4;
const NUMBERED: usize = 5;
/// How many messages it missed, as it says itself.
const MISSED: usize = 6;

/// A subscriber has a seat at each of the topic's queues; its line joins the two, and says
/// why it was removed. It has the number of its seat at the queue of what is published here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alarm<'a, W> {
    words: &'a W,
    place: usize,
}

impl<'a, W: Words> Alarm<'a, W> {
    pub(super) fn of(words: &'a W, here: Seat) -> Self {
        Self { words, place: here.place() as usize % MOST_SUBSCRIBERS }
    }

    /// The line of the subscriber that has one of the two seats.
    pub(super) fn find(words: &'a W, seat: Seat, is_arrivals: bool) -> Option<Self> {
        let which = if is_arrivals { ARRIVALS } else { HERE };
        Self::all(words).find(|line| words.load(line.at(which), Acquire) == seat.to_bits())
    }

    fn at(&self, which: usize) -> usize {
        ALARMS + self.place * LINE + which
    }

    pub(super) fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MOST_SUBSCRIBERS).map(move |place| Self { words, place })
    }

    /// Joins two seats.
    pub(super) fn enrol(&self, here: Seat, arrivals: Seat) {
        self.words.store(self.at(HERE), 0, Release);
        self.words.store(self.at(WHOM), 0, Release);
        self.words.store(self.at(MISSED), 0, Release);
        self.words.store(self.at(ARRIVALS), arrivals.to_bits(), Release);
        self.words.store(self.at(HERE), here.to_bits(), Release);
    }

    pub(super) fn says_missed(&self, count: u64) {
        self.words.store(self.at(MISSED), count, Release);
    }

    pub(super) fn missed(&self) -> u64 {
        self.words.load(self.at(MISSED), Acquire)
    }

    /// The names of both seats.
    pub(super) fn seats(&self) -> [u64; 2] {
        [HERE, ARRIVALS].map(|which| self.words.load(self.at(which), Acquire))
    }

    /// Tells the subscriber that has this seat that it is removed, and how long it was in the
    /// way. Another one that comes to this line meanwhile is not told.
    pub(super) fn evict(&self, here: u64, held_for: Duration) {
        let held_for = u64::try_from(held_for.as_nanos()).unwrap_or(u64::MAX);
        self.words.store(self.at(EVICTED), held_for, Release);
        self.words.store(self.at(WHOM), here, Release);
    }

    /// It is about to be removed, and counted: not twice, however often that is done, or cut short.
    pub(super) fn count(&self, here: u64) {
        if self.words.load(self.at(NUMBERED), Acquire) != here {
            self.words.store(self.at(NUMBER), evictions(self.words).wrapping_add(1), Release);
            self.words.store(self.at(NUMBERED), here, Release);
        }
        let number = self.words.load(self.at(NUMBER), Acquire);
        if number > evictions(self.words) {
            self.words.store(EVICTIONS, number, Release);
        }
    }

    /// It could not be removed.
    pub(super) fn take_back(&self) {
        let number = self.words.load(self.at(NUMBER), Acquire);
        if number == evictions(self.words) {
            self.words.store(EVICTIONS, number.saturating_sub(1), Release);
        }
        self.words.store(self.at(NUMBERED), 0, Release);
        self.words.store(self.at(WHOM), 0, Release);
    }

    /// The seats of the subscriber that is here now, if that is about to be removed, or was. Looked
    /// at once: another one may come here at any time.
    pub(super) fn evicted_seats(&self) -> Option<[u64; 2]> {
        let seats = self.seats();
        let whom = self.words.load(self.at(WHOM), Acquire);
        (whom != 0 && whom == seats[0]).then_some(seats)
    }

    /// How long it was in the way, if that is why it was removed.
    pub(super) fn evicted(&self, here: Seat) -> Option<Duration> {
        let is_mine = self.words.load(self.at(WHOM), Acquire) == here.to_bits();
        is_mine.then(|| Duration::from_nanos(self.words.load(self.at(EVICTED), Acquire)))
    }
}

/// How many subscribers were removed since they were in somebody's way.
pub(super) fn evictions<W: Words>(words: &W) -> u64 {
    words.load(EVICTIONS, Acquire)
}
