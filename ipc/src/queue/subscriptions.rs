//! Subscribing, and removing subscriptions of participants that leave or die.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::layout::{
    self, EVICTED, FLAGS, MAX_PROCESS_SUBSCRIBERS, MAX_SUBSCRIBERS, REMOVED, held_bit, unread_bit,
};
use super::{Queue, QueueError, Result, Subscriber, SubscriptionId};
use crate::participant::{Caller, Participant};
use crate::words::Words;

impl<W: Words, const E: usize> Queue<W, E> {
    /// Subscribes: the caller gets all entries from now on.
    ///
    /// # Errors
    /// `TooManySubscribers`, `LockTimeout`.
    pub fn subscribe(&self, caller: &Caller<'_>) -> Result<Subscriber> {
        self.subscribe_as(caller, caller.me)
    }

    /// Subscribes as a role, which outlives the caller. Entries stay until a process
    /// [resumes](Self::resume) or [removes](Self::remove_participant) the subscription. One
    /// slot is reserved for a role, however many processes subscribe.
    ///
    /// # Errors
    /// `TooManySubscribers`, `LockTimeout`.
    pub fn subscribe_as(
        &self,
        caller: &Caller<'_>,
        participant: Participant,
    ) -> Result<Subscriber> {
        // Before it takes the first entry.
        self.words.prepare_light_fence();
        let locked = self.lock(caller)?;
        let name = |index| self.words.load(layout::subscriber(index, layout::PARTICIPANT), Relaxed);
        let is_free = |index: &u32| name(*index) == 0 && self.active() >> index & 1 == 0;
        let index = match participant.is_role() {
            true => (0..MAX_SUBSCRIBERS).rev().find(is_free),
            false => (0..MAX_PROCESS_SUBSCRIBERS).find(is_free),
        };
        let index = index.ok_or(QueueError::TooManySubscribers)?;
        let cursor = self.words.load(layout::TAIL, Relaxed);
        let line = |which| layout::subscriber(index, which);
        self.words.store(line(layout::CURSOR), cursor, Relaxed);
        self.words.store(line(layout::MISSED), 0, Relaxed);
        let name = self.next_name(participant);
        self.words.store(line(layout::PARTICIPANT), name, Release);
        // The subscription begins with this single store.
        let active = self.words.load(layout::ACTIVE, Relaxed) | 1 << index;
        self.words.store(layout::ACTIVE, active, Release);
        drop(locked);
        let subscription_id = self.subscription_id(index, name);
        let has_stale_owner = self.words.load(line(layout::HAS_STALE_OWNER), Relaxed) != 0;
        Ok(Subscriber::new(subscription_id, cursor, has_stale_owner))
    }

    /// Resumes the existing subscription of a role, if there is one. Its unread and held
    /// entries are delivered again, except those that were held while too many others were
    /// dropped: these count as missed. The previous owner loses the subscription, dead or not.
    /// If the role has several, the first is resumed.
    ///
    /// # Errors
    /// `LockTimeout`.
    pub fn resume(
        &self,
        caller: &Caller<'_>,
        participant: Participant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<Option<Subscriber>> {
        self.words.prepare_light_fence();
        let locked = self.lock(caller)?;
        let mut subscriptions = self.subscription_ids();
        let Some(old) = subscriptions.find(|old| old.participant() == Some(participant)) else {
            return Ok(None);
        };
        let index = old.index();
        // First, so that the previous owner releases nothing that is delivered again.
        self.words.store(layout::subscriber(index, layout::HAS_STALE_OWNER), 1, Relaxed);
        let name = self.next_name(participant);
        self.words.store(layout::subscriber(index, layout::PARTICIPANT), name, Release);
        // The previous owner may live, like an evicted subscriber: what it stored before it
        // found its subscription active must be visible to all processes that dispose of its
        // held entries.
        self.words.fence();
        let subscription_id = self.subscription_id(index, name);
        let (_, reported) = self.progress_of(subscription_id);
        let resumed = self.words.load(layout::TAIL, Relaxed);
        for slot in self.slots_used() {
            let sequence = self.words.load(slot + layout::SEQUENCE, Acquire);
            // A held entry may have been moved out of the ring.
            if sequence != 0 && self.slot(sequence - 1) != slot {
                self.count_missed(slot, index, &mut dispose);
            } else {
                self.change_mark(slot, held_bit(index), unread_bit(index));
            }
        }
        let cursor = self.oldest_unreleased(subscription_id);
        self.words.store(layout::subscriber(index, layout::CURSOR), cursor, Relaxed);
        drop(locked);
        let (_, missed) = self.progress_of(subscription_id);
        let subscriber = Subscriber::new(subscription_id, cursor, true);
        Ok(Some(subscriber.resumed(resumed, reported, missed)))
    }

    /// No process will reach this entry, which the subscriber in this slot held. The queue must
    /// be locked.
    fn count_missed(&self, slot: usize, index: u32, dispose: &mut impl FnMut([u64; E])) {
        let marks = layout::marks(index);
        if self.words.load(slot + Self::READERS, Acquire) & marks != 0 {
            self.clear_marks(slot, marks, dispose);
            self.words.fetch_add(layout::subscriber(index, layout::MISSED), 1);
        }
    }

    /// The word of the next subscription's line. The queue must be locked.
    fn next_name(&self, participant: Participant) -> u64 {
        let serial = self.words.load(layout::SERIAL, Relaxed).wrapping_add(1);
        self.words.store(layout::SERIAL, serial, Relaxed);
        serial << 32 | u64::from(participant.number())
    }

    /// Stops a subscription without ending it: it gets no more entries, and its unread ones are
    /// disposed of. It keeps its held entries until they are released, or the subscription
    /// [ends](Self::end_subscription). [`take`](Self::take) finds nothing from then on.
    ///
    /// # Errors
    /// `LockTimeout`: then it continues. `NotSubscribed` if it was removed before.
    pub fn stop(
        &self,
        caller: &Caller<'_>,
        subscriber: &mut Subscriber,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        let tail = self.stop_subscription(caller, subscriber.subscription_id(), dispose)?;
        self.advance(subscriber, tail);
        Ok(())
    }

    /// Like [`stop`](Self::stop), for a subscription whose reader takes nothing any more.
    /// Returns the position up to which entries were delivered.
    ///
    /// # Errors
    /// As for `stop`.
    pub fn stop_subscription(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<u64> {
        let locked = self.lock(caller)?;
        if !self.is_subscription_active(subscription_id) {
            return Err(QueueError::NotSubscribed);
        }
        self.deactivate(subscription_id.index());
        let tail = self.words.load(layout::TAIL, Relaxed);
        let (cursor, _) = self.progress_of(subscription_id);
        for position in cursor.max(tail.saturating_sub(self.depth))..tail {
            let slot = self.slot(position);
            if self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1 {
                self.clear_marks(slot, layout::marks(subscription_id.index()), &mut dispose);
            }
        }
        // Entries that other subscribers have not read stay, and still list this subscriber,
        // whose mark is gone: the next release may be the last.
        drop(locked);
        self.room().ring();
        Ok(tail)
    }

    /// Stops delivery to a participant. Its unread and held entries stay unchanged, and so do
    /// its slots, until it is [removed](Self::remove_participant): so they can be counted, and
    /// nothing is added. A halted subscription cannot be [resumed](Self::resume). A second call
    /// does no harm.
    ///
    /// # Errors
    /// `LockTimeout`: then nothing is changed.
    pub fn halt(&self, caller: &Caller<'_>, participant: Participant) -> Result<()> {
        let _locked = self.lock(caller)?;
        self.subscriptions_of(participant).for_each(|id| self.deactivate(id.index()));
        Ok(())
    }

    /// Ends a subscription, evicted or not, for its owner: its id releases nothing any more,
    /// and its slot may be reused. Disposes of the entries that only this subscriber had unread
    /// or held.
    ///
    /// # Errors
    /// `LockTimeout`: then it is still subscribed. `NotSubscribed` if it has ended before.
    pub fn end_subscription(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        self.end(caller, subscription_id, RemovedSlot::Freed, dispose)
    }

    /// Ends another participant's subscription for being too slow; its owner lives and may be doing
    /// anything. It gets no more entries, and its unread ones are given up; those that it holds stay
    /// as they are until it releases them, or [ends](Self::end_subscription) the subscription, or is
    /// [dead](Self::remove_participant). Until then its slot is not reused. The subscription is
    /// [inactive](Self::is_subscription_active) before anything is disposed of.
    ///
    /// If the caller dies here, the next lock owner completes the eviction. A second call does
    /// no harm.
    ///
    /// # Errors
    /// `LockTimeout`: then it is still subscribed. `NotSubscribed` if it has ended before.
    pub fn evict(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        let locked = self.lock(caller)?;
        let (index, name) = (subscription_id.index(), subscription_id.to_bits());
        let at = layout::subscriber(index, layout::PARTICIPANT);
        if self.words.load(at, Relaxed) & !EVICTED != name {
            return Err(QueueError::NotSubscribed);
        }
        // First: from now on it takes nothing.
        self.words.store(at, name | EVICTED, Release);
        for (slot, marks) in self.unread_of_evicted(index) {
            self.clear_marks(slot, marks, &mut dispose);
        }
        drop(locked);
        self.room().ring();
        Ok(())
    }

    /// Slots of the unread entries of an evicted subscriber, each with its marks there. From now on
    /// it gets no more. The queue must be locked.
    fn unread_of_evicted(&self, index: u32) -> impl Iterator<Item = (usize, u64)> {
        // Either this sees what it has taken, or it has seen the eviction.
        self.words.heavy_fence();
        self.deactivate(index);
        let cursor = self.words.load(layout::subscriber(index, layout::CURSOR), Acquire);
        let drops = self.overflow_policy.drops();
        let marks = if drops { unread_bit(index) } else { layout::marks(index) };
        let is_unread =
            move |slot: &usize| drops || self.words.load(slot + layout::SEQUENCE, Acquire) > cursor;
        self.slots_used().filter(is_unread).map(move |slot| (slot, marks))
    }

    fn end(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        then: RemovedSlot,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        let is_meant = |name| name & !FLAGS == subscription_id.to_bits();
        let is_removed = self.remove(caller, subscription_id.index(), is_meant, then, dispose)?;
        if is_removed { Ok(()) } else { Err(QueueError::NotSubscribed) }
    }

    /// Removes all subscriptions of a dead participant; returns their number. May be repeated
    /// after an interruption, and called by several threads at once.
    ///
    /// Also disposes of entries without readers, and wakes all sleepers here: the dead
    /// participant may have been about to do so.
    ///
    /// # Errors
    /// `LockTimeout`: some may be removed already.
    pub fn remove_participant(
        &self,
        caller: &Caller<'_>,
        participant: Participant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<usize> {
        let mut removed = 0;
        for index in 0..MAX_SUBSCRIBERS {
            let of_participant = |name: u64| (name & !FLAGS) as u32 == participant.number();
            let is_removed =
                self.remove(caller, index, of_participant, RemovedSlot::Reclaimed, &mut dispose)?;
            removed += usize::from(is_removed);
        }
        let locked = self.lock(caller)?;
        for slot in self.slots_used() {
            self.clear_marks(slot, 0, &mut dispose);
        }
        drop(locked);
        self.messages().ring_unconditionally();
        self.room().ring_unconditionally();
        Ok(removed)
    }

    /// The subscriber in this slot gets no more entries. The queue must be locked.
    fn deactivate(&self, index: u32) {
        let active = self.words.load(layout::ACTIVE, Relaxed) & !(1 << index);
        self.words.store(layout::ACTIVE, active, Release);
    }

    /// Clears marks of an entry, and disposes of it if it has no reader: also if its last
    /// reader died before doing so. The queue must be locked.
    fn clear_marks(&self, slot: usize, marks: u64, dispose: &mut impl FnMut([u64; E])) {
        // Most slots are not affected, and may never have been used.
        let mut was = self.words.load(slot + Self::READERS, Acquire);
        if was & marks != 0 {
            was = self.words.fetch_and(slot + Self::READERS, !marks);
        }
        let sequence = self.words.load(slot + layout::SEQUENCE, Acquire);
        if was & !marks == 0 && sequence != 0 {
            dispose(self.entry(slot));
            self.mark_disposed(sequence - 1);
        }
    }

    fn remove(
        &self,
        caller: &Caller<'_>,
        index: u32,
        is_meant: impl Fn(u64) -> bool,
        then: RemovedSlot,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<bool> {
        let at = layout::subscriber(index, layout::PARTICIPANT);
        let of_participant =
            || Some(self.words.load(at, Acquire)).filter(|name| *name != 0 && is_meant(*name));
        if of_participant().is_none() {
            return Ok(false);
        }
        let locked = self.lock(caller)?;
        let Some(name) = of_participant() else { return Ok(false) };
        // First: a process that reads what is disposed of below, and checks its subscription
        // afterwards, sees that it is inactive.
        self.words.store(at, name | REMOVED, Release);
        // Before the first mark: what the subscriber stored before it found its subscription
        // active is visible to all processes that dispose of its held entries.
        self.words.fence();
        self.deactivate(index);
        for slot in self.slots_used() {
            self.clear_marks(slot, layout::marks(index), &mut dispose);
        }
        if then == RemovedSlot::Reclaimed {
            self.words.store(layout::subscriber(index, layout::HAS_STALE_OWNER), 1, Relaxed);
        }
        // Last: if the caller dies before, another process repeats the removal.
        self.words.store(at, 0, Release);
        drop(locked);
        self.room().ring();
        Ok(true)
    }

    /// After the death of a lock owner: the subscribers that it was about to remove lose all
    /// entries, and evicted ones their unread entries. Entries without readers are disposed of by the
    /// next process that reaches them. The queue must be locked.
    pub(super) fn finish_removals(&self) {
        let name_of =
            |index| self.words.load(layout::subscriber(index, layout::PARTICIPANT), Acquire);
        for index in (0..MAX_SUBSCRIBERS).filter(|index| self.is_evicted(*index)) {
            for (slot, marks) in self.unread_of_evicted(index) {
                self.remove_marks(slot, marks);
            }
        }
        let leaving = (0..MAX_SUBSCRIBERS).filter(|index| name_of(*index) & REMOVED != 0);
        let slot_bits = leaving.fold(0_u32, |slot_bits, index| slot_bits | 1 << index);
        if slot_bits == 0 {
            return;
        }
        // The dead owner may have died before this step.
        self.words.fence();
        let active = u64::from(self.active() & !slot_bits);
        self.words.store(layout::ACTIVE, active, Release);
        let marks = u64::from(slot_bits) << 32 | u64::from(slot_bits);
        self.slots_used().for_each(|slot| self.remove_marks(slot, marks));
    }

    fn remove_marks(&self, slot: usize, marks: u64) {
        if self.words.load(slot + Self::READERS, Acquire) & marks != 0 {
            self.words.fetch_and(slot + Self::READERS, !marks);
        }
    }
}

/// The state of a removed subscriber's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RemovedSlot {
    /// Free: its owner has ended the subscription.
    Freed,
    /// Free: the owner is dead, or was taken for dead.
    Reclaimed,
}
