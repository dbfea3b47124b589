//! Eviction of subscribers that block publishers.

use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use ipc::{Caller, QueueError, SubscriptionId, Words};

use super::TopicWords;
use super::entry::Entry;
use super::layout;
use super::publishers;
use super::subscribers::SubscriberSlot;
use crate::clock;
use crate::error::Result;
use crate::error_mapping::During;
use crate::pool::{Direction, PoolControl, Readiness};

/// A record of the last service counts for so long.
const LONGEST_TAKEOVER: Duration = Duration::from_secs(15);

impl<W: Words + Clone> TopicWords<W> {
    /// In a full topic: subscribers with unread messages or, if these hold the maximum, with held
    /// ones, each with the position of the oldest. The one with the very oldest blocks publishers
    /// that [wait](Self::backpressure); the others may be next.
    ///
    /// Empty while there is room: missing memory is then used by loans, or other topics; and if
    /// evicted subscribers hold the maximum.
    pub(crate) fn holders(&self, direction: Direction) -> Vec<(SubscriptionId, u64)> {
        self.queue(direction).blocking()
    }

    /// Evicted subscribers that still hold messages of a full topic, each with their number.
    pub(crate) fn evicted_holders(&self, direction: Direction) -> Vec<(SubscriptionId, u32)> {
        let queue = self.queue(direction);
        if queue.has_room() { Vec::new() } else { queue.evicted_holders() }
    }

    /// Records for the next service how long the message at this position has blocked publishers.
    pub(crate) fn record_blocking(&self, direction: Direction, position: u64, held_for: Duration) {
        let at = layout::BLOCKING + direction as usize * layout::BLOCKING_WORDS;
        let held_for = u64::try_from(held_for.as_nanos()).unwrap_or(u64::MAX);
        // Zero stands for none. A process that dies in the middle of this records none.
        self.words().store(at, 0, Release);
        self.words().store(at + 1, held_for, Release);
        self.words().store(at + 2, clock::now(), Release);
        self.words().store(at, position.wrapping_add(1), Release);
    }

    /// How long this message had blocked publishers when the last service recorded it, and since
    /// then. None if it recorded another message.
    pub(crate) fn recorded_blocking(
        &self,
        direction: Direction,
        position: u64,
    ) -> Option<Duration> {
        let at = layout::BLOCKING + direction as usize * layout::BLOCKING_WORDS;
        let [recorded, held_for, when] =
            [0, 1, 2].map(|word| self.words().load(at + word, Acquire));
        let since = Duration::from_nanos(clock::now().saturating_sub(when));
        let is_recent = recorded == position.wrapping_add(1) && since < LONGEST_TAKEOVER;
        is_recent.then(|| Duration::from_nanos(held_for) + since)
    }

    /// Returns true if a subscriber can take no more messages since a stream still has to write one
    /// that it has taken, or its next one. Then it does not block publishers.
    pub(crate) fn waits_for_stream(&self, holder: SubscriptionId, local: &PoolControl<W>) -> bool {
        let (next, _) = self.local().progress_of(holder);
        let mut waits = false;
        self.local().for_each_unreleased(holder, 0, |position, words| {
            let entry = Entry::from_words(words);
            waits |= position <= next
                && entry.sync_point.is_some_and(|sync_point| {
                    local.readiness(entry.block, sync_point) == Some(Readiness::Pending)
                });
        });
        waits
    }

    /// How long a refused attempt counts as waiting. It is shorter than the release deadline, so
    /// that a single attempt evicts no subscriber.
    pub(crate) fn refusal_window(&self) -> Duration {
        self.settings().release_deadline() / 4 * 3
    }

    /// Since when the longest waiting publisher waits for room; None if none does. A refused
    /// attempt counts [for a while](Self::refusal_window).
    pub(crate) fn backpressure(&self) -> Option<u64> {
        let holds = self.refusal_window();
        let waiting = publishers::slots(self.words()).filter(|slot| slot.participant().is_some());
        waiting.filter_map(|slot| slot.backpressure().since(holds)).min()
    }

    /// Evicts a living subscriber from both queues, with the reason. It keeps its subscriptions, and
    /// the messages that it holds, until it ends them itself. The [reclaim](Self::reclaim_in) after a process that died here
    /// does the rest.
    pub(crate) fn evict_in(
        &self,
        caller: &Caller<'_>,
        (direction, subscription_id): (Direction, SubscriptionId),
        held_for: Duration,
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        let Some(slot) = SubscriberSlot::find(self.words(), direction, subscription_id) else {
            // Its two subscriptions are not joined yet.
            return self.evict_from(caller, direction, subscription_id, controls);
        };
        let subscription_ids = slot.subscription_ids();
        if subscription_ids[direction as usize] != subscription_id.to_bits() {
            // It has ended its subscription itself, and the slot was reused.
            return Ok(());
        }
        // First: the subscriber then finds the reason when it detects the eviction.
        slot.evict(subscription_ids[0], held_for);
        // Before there is room: a publisher that gets the room then sees the eviction.
        slot.count(subscription_ids[0]);
        let evicted = self.evict_both(caller, subscription_ids, controls);
        if evicted.is_err() && self.are_active(subscription_ids) {
            slot.undo_eviction();
        }
        evicted
    }

    fn are_active(&self, subscription_ids: [u64; 2]) -> bool {
        [self.local(), self.inbound()].into_iter().zip(subscription_ids).all(|(queue, bits)| {
            // A subscription stays its own when it is evicted.
            queue.find_subscription(bits).is_some_and(|it| queue.is_subscription_active(it))
        })
    }

    /// Finishes evictions of processes that died, or could not get a lock.
    pub(super) fn finish_evictions(
        &self,
        caller: &Caller<'_>,
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        for slot in SubscriberSlot::all(self.words()) {
            if let Some(subscription_ids) = slot.evicted_subscriptions() {
                slot.count(subscription_ids[0]);
                self.evict_both(caller, subscription_ids, controls)?;
            }
        }
        Ok(())
    }

    fn evict_both(
        &self,
        caller: &Caller<'_>,
        subscription_ids: [u64; 2],
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        for (direction, bits) in Direction::BOTH.into_iter().zip(subscription_ids) {
            if let Some(subscription_id) = self.queue(direction).find_subscription(bits) {
                self.evict_from(caller, direction, subscription_id, controls)?;
            }
        }
        self.local().messages().ring();
        Ok(())
    }

    fn evict_from(
        &self,
        caller: &Caller<'_>,
        direction: Direction,
        subscription_id: SubscriptionId,
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        let dispose = |words| _ = self.dispose(caller, controls[direction as usize], words);
        match self.queue(direction).evict(caller, subscription_id, dispose) {
            // Or it has ended its subscription itself.
            Ok(()) | Err(QueueError::NotSubscribed) => Ok(()),
            Err(cause) => Err(cause.during("evict subscriber of topic").on(self.name())),
        }
    }
}
