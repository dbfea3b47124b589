//! Table of subscribers: joined subscriptions, missed messages, and evictions.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use ipc::{SubscriptionId, Words};

use super::layout::{CACHE_LINE_WORDS, EVICTIONS, MAX_SUBSCRIBERS, SUBSCRIBERS};
use crate::pool::Direction;

const LOCAL: usize = 0;
const INBOUND: usize = 1;
const EVICTED_AFTER: usize = 2;
/// The evicted subscription, by its identifier in the local queue.
const EVICTED_SUBSCRIPTION: usize = 3;
/// Ordinal of this eviction in the topic.
const EVICTION: usize = 4;
const EVICTION_SUBSCRIPTION: usize = 5;
/// Number of missed messages, as the subscriber reports itself.
const MISSED: usize = 6;

/// A subscriber has a subscription of each of the topic's queues. Its slot joins the two, and has
/// the reason of an eviction. The slot has the index of the local subscription.
#[derive(Debug, Clone, Copy)]
pub(super) struct SubscriberSlot<'a, W> {
    words: &'a W,
    index: usize,
}

impl<'a, W: Words> SubscriberSlot<'a, W> {
    pub(super) fn of(words: &'a W, local: SubscriptionId) -> Self {
        Self { words, index: local.index() as usize % MAX_SUBSCRIBERS }
    }

    /// The slot of the subscriber with one of these subscriptions.
    pub(super) fn find(
        words: &'a W,
        direction: Direction,
        subscription_id: SubscriptionId,
    ) -> Option<Self> {
        let bits = subscription_id.to_bits();
        Self::all(words).find(|slot| slot.subscription_ids()[direction as usize] == bits)
    }

    fn at(&self, which: usize) -> usize {
        SUBSCRIBERS + self.index * CACHE_LINE_WORDS + which
    }

    pub(super) fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MAX_SUBSCRIBERS).map(move |index| Self { words, index })
    }

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

    pub(super) fn subscription_ids(&self) -> [u64; 2] {
        [LOCAL, INBOUND].map(|which| self.words.load(self.at(which), Acquire))
    }

    /// Stores that this subscriber is evicted, and how long it blocked publishers. A later
    /// subscriber of this slot is not affected.
    pub(super) fn evict(&self, local: u64, held_for: Duration) {
        let held_for = u64::try_from(held_for.as_nanos()).unwrap_or(u64::MAX);
        self.words.store(self.at(EVICTED_AFTER), held_for, Release);
        self.words.store(self.at(EVICTED_SUBSCRIPTION), local, Release);
    }

    /// Counts an eviction. Idempotent, also after an interruption.
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

    /// Takes the eviction back: it failed.
    pub(super) fn undo_eviction(&self) {
        let number = self.words.load(self.at(EVICTION), Acquire);
        if number == evictions(self.words) {
            self.words.store(EVICTIONS, number.saturating_sub(1), Release);
        }
        self.words.store(self.at(EVICTION_SUBSCRIPTION), 0, Release);
        self.words.store(self.at(EVICTED_SUBSCRIPTION), 0, Release);
    }

    /// The subscriptions of this slot, if the present subscriber is about to be evicted, or was.
    /// Both are read at once, since the slot may be reused at any time.
    pub(super) fn evicted_subscriptions(&self) -> Option<[u64; 2]> {
        let subscription_ids = self.subscription_ids();
        let evicted = self.words.load(self.at(EVICTED_SUBSCRIPTION), Acquire);
        (evicted != 0 && evicted == subscription_ids[0]).then_some(subscription_ids)
    }

    /// How long the subscriber blocked publishers, if it was evicted for that.
    pub(super) fn evicted(&self, local: SubscriptionId) -> Option<Duration> {
        let is_own = self.words.load(self.at(EVICTED_SUBSCRIPTION), Acquire) == local.to_bits();
        is_own.then(|| Duration::from_nanos(self.words.load(self.at(EVICTED_AFTER), Acquire)))
    }
}

pub(super) fn evictions<W: Words>(words: &W) -> u64 {
    words.load(EVICTIONS, Acquire)
}
