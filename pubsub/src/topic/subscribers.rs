//! What is told to subscribers in other processes: that they were removed.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use ipc::{SubscriptionId, Words};

use super::layout::{CACHE_LINE_WORDS, EVICTIONS, MAX_SUBSCRIBERS, SUBSCRIBERS};

const LOCAL: usize = 0;
const INBOUND: usize = 1;
const EVICTED_AFTER: usize = 2;
/// Whom that is about: by the seat at the queue of what is published here.
const EVICTED_SUBSCRIPTION: usize = 3;
/// The how manieth eviction of the topic that of this seat was.
const EVICTION: usize = 4;
const EVICTION_SUBSCRIPTION: usize = 5;
/// How many messages it missed, as it says itself.
const MISSED: usize = 6;

/// A subscriber has a seat at each of the topic's queues; its line joins the two, and says
/// why it was removed. It has the number of its seat at the queue of what is published here.
#[derive(Debug, Clone, Copy)]
pub(super) struct SubscriberSlot<'a, W> {
    words: &'a W,
    place: usize,
}

impl<'a, W: Words> SubscriberSlot<'a, W> {
    pub(super) fn of(words: &'a W, local: SubscriptionId) -> Self {
        Self { words, place: local.index() as usize % MAX_SUBSCRIBERS }
    }

    /// The line of the subscriber that has one of the two seats.
    pub(super) fn find(
        words: &'a W,
        subscription_id: SubscriptionId,
        is_arrivals: bool,
    ) -> Option<Self> {
        let which = if is_arrivals { INBOUND } else { LOCAL };
        Self::all(words)
            .find(|slot| words.load(slot.at(which), Acquire) == subscription_id.to_bits())
    }

    fn at(&self, which: usize) -> usize {
        SUBSCRIBERS + self.place * CACHE_LINE_WORDS + which
    }

    pub(super) fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MAX_SUBSCRIBERS).map(move |place| Self { words, place })
    }

    /// Joins two seats.
    pub(super) fn join_subscriptions(&self, local: SubscriptionId, inbound: SubscriptionId) {
        self.words.store(self.at(LOCAL), 0, Release);
        self.words.store(self.at(EVICTED_SUBSCRIPTION), 0, Release);
        self.words.store(self.at(MISSED), 0, Release);
        self.words.store(self.at(INBOUND), inbound.to_bits(), Release);
        self.words.store(self.at(LOCAL), local.to_bits(), Release);
    }

    pub(super) fn report_missed(&self, count: u64) {
        self.words.store(self.at(MISSED), count, Release);
    }

    pub(super) fn missed(&self) -> u64 {
        self.words.load(self.at(MISSED), Acquire)
    }

    /// The names of both seats.
    pub(super) fn subscription_ids(&self) -> [u64; 2] {
        [LOCAL, INBOUND].map(|which| self.words.load(self.at(which), Acquire))
    }

    /// Tells the subscriber that has this seat that it is removed, and how long it was in the
    /// way. Another one that comes to this line meanwhile is not told.
    pub(super) fn evict(&self, local: u64, held_for: Duration) {
        let held_for = u64::try_from(held_for.as_nanos()).unwrap_or(u64::MAX);
        self.words.store(self.at(EVICTED_AFTER), held_for, Release);
        self.words.store(self.at(EVICTED_SUBSCRIPTION), local, Release);
    }

    /// It is about to be removed, and counted: not twice, however often that is done, or cut short.
    pub(super) fn count(&self, local: u64) {
        if self.words.load(self.at(EVICTION_SUBSCRIPTION), Acquire) != local {
            self.words.store(self.at(EVICTION), evictions(self.words).wrapping_add(1), Release);
            self.words.store(self.at(EVICTION_SUBSCRIPTION), local, Release);
        }
        let number = self.words.load(self.at(EVICTION), Acquire);
        if number > evictions(self.words) {
            self.words.store(EVICTIONS, number, Release);
        }
    }

    /// It could not be removed.
    pub(super) fn undo_eviction(&self) {
        let number = self.words.load(self.at(EVICTION), Acquire);
        if number == evictions(self.words) {
            self.words.store(EVICTIONS, number.saturating_sub(1), Release);
        }
        self.words.store(self.at(EVICTION_SUBSCRIPTION), 0, Release);
        self.words.store(self.at(EVICTED_SUBSCRIPTION), 0, Release);
    }

    /// The seats of the subscriber that is here now, if that is about to be removed, or was. Looked
    /// at once: another one may come here at any time.
    pub(super) fn evicted_subscriptions(&self) -> Option<[u64; 2]> {
        let subscription_ids = self.subscription_ids();
        let whom = self.words.load(self.at(EVICTED_SUBSCRIPTION), Acquire);
        (whom != 0 && whom == subscription_ids[0]).then_some(subscription_ids)
    }

    /// How long it was in the way, if that is why it was removed.
    pub(super) fn evicted(&self, local: SubscriptionId) -> Option<Duration> {
        let is_mine = self.words.load(self.at(EVICTED_SUBSCRIPTION), Acquire) == local.to_bits();
        is_mine.then(|| Duration::from_nanos(self.words.load(self.at(EVICTED_AFTER), Acquire)))
    }
}

/// How many subscribers were removed since they were in somebody's way.
pub(super) fn evictions<W: Words>(words: &W) -> u64 {
    words.load(EVICTIONS, Acquire)
}
