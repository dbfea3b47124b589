//! Cleaning up after those that died, and removing those that are in the way.

use std::time::Duration;

use ipc::{Caller, Participant, QueueError, SubscriptionId, Words};

use super::TopicWords;
use super::entry::Entry;
use super::losses::LostPublisher;
use super::publishers;
use super::subscribers::SubscriberSlot;
use crate::error::Result;
use crate::pool::{Direction, PoolControl, Readiness};
use crate::settings::Reliability;

impl<W: Words + Clone> TopicWords<W> {
    /// Cleans up after one who is dead, or leaves: publishers, subscriptions, and what it was
    /// about to hand over. Afterwards its loans are [reclaimed](crate::pool::Pool::reclaim), pool by
    /// pool, when that was done for all topics. May be done again, if it was cut short.
    pub(crate) fn reclaim_in(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        local: &PoolControl<W>,
        inbound: &PoolControl<W>,
    ) -> Result<()> {
        for slot in publishers::slots(self.words()).filter(|slot| slot.who() == Some(who)) {
            self.handoff(slot.intent(), self.local(), local).recover(caller)?;
            if let Some(seen) = slot.seen() {
                self.record_loss(Direction::Local, LostPublisher::local(seen.id));
            }
            slot.give_back();
        }
        if self.is_inbound_writer(who) {
            self.settle_inbound(caller, inbound)?;
            self.clear_inbound_writer();
        }
        // What its streams were at is anybody's: they ended with it. First, while it is known which
        // places it had.
        for (queue, control) in [(self.inbound(), inbound), (self.local(), local)] {
            let places = queue
                .subscriptions_of(who)
                .fold(0, |places, subscription_id| places | 1 << subscription_id.index());
            control.end_all_stream_reads(self.number(), places);
        }
        self.finish_evictions(caller, [local, inbound])?;
        // Last: this wakes those that wait for what was done here.
        for (queue, control) in [(self.inbound(), inbound), (self.local(), local)] {
            let expelled = queue.remove_participant(caller, who, |words| {
                self.dispose(caller, control, words);
            });
            expelled.map_err(|cause| self.queue_error("clean up after a participant", cause))?;
        }
        Ok(())
    }

    /// Where there is no room: those that hold messages, or have still to read some, each with the
    /// position of the oldest. Who holds the oldest of all is in the way of those that
    /// [wait](Self::pressure) for room, if it stays so; the others may come to be.
    ///
    /// Nobody is in the way of anybody as long as there is room: memory that is wanting then is taken
    /// by loans, or by other topics. Where messages are dropped only those that are held are in the way.
    pub(crate) fn holders(&self, direction: Direction) -> Vec<(SubscriptionId, u64)> {
        let queue = self.queue(direction);
        match self.settings().reliability {
            _ if queue.has_room() => Vec::new(),
            Reliability::Reliable => queue.oldest_of_each(),
            Reliability::DropOldest | Reliability::DropNewest => queue.oldest_held_of_each(),
        }
    }

    /// The position of the oldest message of all, and who holds it.
    #[cfg(test)]
    pub(crate) fn blocking_subscribers(
        &self,
        direction: Direction,
    ) -> Option<(u64, Vec<SubscriptionId>)> {
        let holders = self.holders(direction);
        let oldest = holders.iter().map(|(_, position)| *position).min()?;
        let is_oldest = |(subscription_id, position): (SubscriptionId, u64)| {
            (position == oldest).then_some(subscription_id)
        };
        Some((oldest, holders.into_iter().filter_map(is_oldest).collect()))
    }

    /// Is it a stream that has still to write this message? Then who holds it is in nobody's way.
    pub(crate) fn is_being_written(&self, position: u64, local: &PoolControl<W>) -> bool {
        let is_pending = |words| {
            let entry = Entry::from_words(words);
            entry.sync_point.is_some_and(|sync_point| {
                local.readiness(entry.block, sync_point) == Some(Readiness::Pending)
            })
        };
        // Of this position or, if it was released meanwhile, of one that comes later.
        let mut looks = 0;
        let first = |words| {
            looks += 1;
            looks > 1 || is_pending(words)
        };
        self.local().find_unreleased(position, first) == Some(position)
    }

    /// For how long what was refused and does not wait counts as if it did: it has to come again for
    /// somebody to be in its way for as long as messages may be held.
    pub(crate) fn refusal_window(&self) -> Duration {
        self.settings().release_deadline() / 4 * 3
    }

    /// Since when a publisher waits for room, the longest of all; None if none does. One that
    /// was refused and does not wait counts [for a while](Self::refusal_window).
    pub(crate) fn backpressure(&self) -> Option<u64> {
        let holds = self.refusal_window();
        let waiting = publishers::slots(self.words()).filter(|slot| slot.who().is_some());
        waiting.filter_map(|slot| slot.backpressure().since(holds)).min()
    }

    /// Removes one that lives from both queues, and tells it why. Its places are its own until it
    /// ends its subscription by itself. Whoever [cleans up](Self::reclaim_in) after one that died
    /// here does the rest.
    pub(crate) fn evict_in(
        &self,
        caller: &Caller<'_>,
        (direction, subscription_id): (Direction, SubscriptionId),
        held_for: Duration,
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        let Some(slot) =
            SubscriberSlot::find(self.words(), subscription_id, direction == Direction::Inbound)
        else {
            // It has not come so far that the two are joined.
            return self.evict_from(caller, direction, subscription_id, controls);
        };
        let subscription_ids = slot.subscription_ids();
        if subscription_ids[(direction == Direction::Inbound) as usize] != subscription_id.to_bits()
        {
            // It has ended its subscription by itself, and another one has come.
            return Ok(());
        }
        // First, so that it knows why when it sees that it is removed.
        slot.evict(subscription_ids[0], held_for);
        // And before there is room, so that who waited for it knows what made it.
        slot.count(subscription_ids[0]);
        let evicted = self.evict_both(caller, subscription_ids, controls);
        if evicted.is_err() && self.are_seated(subscription_ids) {
            slot.undo_eviction();
        }
        evicted
    }

    fn are_seated(&self, subscription_ids: [u64; 2]) -> bool {
        [self.local(), self.inbound()].into_iter().zip(subscription_ids).all(|(queue, bits)| {
            // Its place is still its own when it is evicted.
            queue
                .find_subscription(bits)
                .is_some_and(|subscription_id| queue.is_subscription_active(subscription_id))
        })
    }

    /// What was begun by one that died, or could not get a lock.
    fn finish_evictions(&self, caller: &Caller<'_>, controls: [&PoolControl<W>; 2]) -> Result<()> {
        let slots = SubscriberSlot::all(self.words());
        let mut begun = slots.filter_map(|slot| {
            slot.evicted_subscriptions().map(|subscription_ids| (slot, subscription_ids))
        });
        begun.try_for_each(|(slot, subscription_ids)| {
            slot.count(subscription_ids[0]);
            self.evict_both(caller, subscription_ids, controls)
        })
    }

    fn evict_both(
        &self,
        caller: &Caller<'_>,
        subscription_ids: [u64; 2],
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        for (direction, bits) in Direction::BOTH.into_iter().zip(subscription_ids) {
            let Some(subscription_id) = self.queue(direction).find_subscription(bits) else {
                continue;
            };
            self.evict_from(caller, direction, subscription_id, controls)?;
        }
        self.local().ring_messages();
        Ok(())
    }

    fn evict_from(
        &self,
        caller: &Caller<'_>,
        direction: Direction,
        subscription_id: SubscriptionId,
        controls: [&PoolControl<W>; 2],
    ) -> Result<()> {
        let control = controls[usize::from(direction == Direction::Inbound)];
        let dispose = |words| {
            self.dispose(caller, control, words);
        };
        match self.queue(direction).evict(caller, subscription_id, dispose) {
            // Or it has ended its subscription by itself.
            Ok(()) | Err(QueueError::NotSubscribed) => Ok(()),
            Err(cause) => Err(self.queue_error("evict a subscriber", cause)),
        }
    }
}
