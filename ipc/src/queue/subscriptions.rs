//! Subscribing, and removing those that leave or have died.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::layout::{
    self, MAX_PROCESS_SUBSCRIBERS, MAX_SUBSCRIBERS, REMOVED, held_bit, unread_bit,
};
use super::{Queue, QueueError, Result, Subscriber, SubscriptionId};
use crate::doorbell::WaitStrategy;
use crate::participant::{Caller, Participant};
use crate::words::Words;

impl<W: Words, const E: usize> Queue<W, E> {
    /// Subscribes: entries from now on are delivered to the caller, too.
    ///
    /// # Errors
    /// `TooManySubscribers`, `Held`.
    pub fn subscribe(&self, caller: &Caller<'_>) -> Result<Subscriber> {
        self.subscribe_as(caller, caller.me)
    }

    /// Subscribes in another name: that of a role, which outlives the caller. What is
    /// delivered to it stays until somebody [resumes](Self::resume) the subscription, or
    /// [removes](Self::expel) it. There is a place for a role however many processes subscribe.
    ///
    /// # Errors
    /// `TooManySubscribers`, `Held`.
    pub fn subscribe_as(&self, caller: &Caller<'_>, who: Participant) -> Result<Subscriber> {
        let locked = self.lock(caller)?;
        let name = |index| self.words.load(layout::subscriber(index, layout::PARTICIPANT), Relaxed);
        let is_free = |index: &u32| name(*index) == 0 && self.active() >> index & 1 == 0;
        let index = match who.is_role() {
            true => (0..MAX_SUBSCRIBERS).rev().find(is_free),
            false => (0..MAX_PROCESS_SUBSCRIBERS).find(is_free),
        };
        let index = index.ok_or(QueueError::TooManySubscribers)?;
        let cursor = self.words.load(layout::TAIL, Relaxed);
        let line = |which| layout::subscriber(index, which);
        self.words.store(line(layout::CURSOR), cursor, Relaxed);
        self.words.store(line(layout::MISSED), 0, Relaxed);
        let name = self.next_name(who);
        self.words.store(line(layout::PARTICIPANT), name, Release);
        // One store: this is the moment.
        let active = self.words.load(layout::ACTIVE, Relaxed) | 1 << index;
        self.words.store(layout::ACTIVE, active, Release);
        drop(locked);
        let subscription_id = SubscriptionId { index, name, fork_generation: self.fork_generation };
        let has_stale_owner = self.words.load(line(layout::HAS_STALE_OWNER), Relaxed) != 0;
        let spin = WaitStrategy::default();
        Ok(Subscriber {
            subscription_id,
            cursor,
            missed: 0,
            reported: 0,
            resumed: 0,
            has_stale_owner,
            spin,
        })
    }

    /// The subscription that exists in this name, if there is one, for the caller to go on
    /// with: what it had still to read and what it held are delivered once more, but for what
    /// was held while so many others were dropped that it is out of reach: that counts as
    /// missed. Who had it before has it no longer, dead or not. Of several in one name the
    /// first is meant.
    ///
    /// # Errors
    /// `Held`.
    pub fn resume(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<Option<Subscriber>> {
        let locked = self.lock(caller)?;
        let Some(SubscriptionId { index, .. }) =
            self.subscription_ids().find(|subscription_id| subscription_id.who() == Some(who))
        else {
            return Ok(None);
        };
        // First, so that the one before lets go of nothing that is delivered once more.
        self.words.store(layout::subscriber(index, layout::HAS_STALE_OWNER), 1, Relaxed);
        let name = self.next_name(who);
        self.words.store(layout::subscriber(index, layout::PARTICIPANT), name, Release);
        // As one that is removed may the one before live: what it has said before it saw that it has
        // its seat is seen by all that come to dispose of what it held.
        self.words.fence();
        let subscription_id = SubscriptionId { index, name, fork_generation: self.fork_generation };
        let (_, reported) = self.progress_of(subscription_id);
        let resumed = self.words.load(layout::TAIL, Relaxed);
        for slot in self.slots_used() {
            let sequence = self.words.load(slot + layout::SEQUENCE, Acquire);
            if sequence != 0 && sequence + self.slots <= resumed {
                self.count_missed(slot, index, &mut dispose);
            } else {
                self.release_held(slot, index);
            }
        }
        let cursor = self.oldest_unreleased(subscription_id);
        self.words.store(layout::subscriber(index, layout::CURSOR), cursor, Relaxed);
        drop(locked);
        let (_, missed) = self.progress_of(subscription_id);
        let (has_stale_owner, spin) = (true, WaitStrategy::default());
        Ok(Some(Subscriber {
            subscription_id,
            cursor,
            missed,
            reported,
            resumed,
            has_stale_owner,
            spin,
        }))
    }

    /// Nobody comes by this entry any more, which the one at this place held. The queue is
    /// locked.
    fn count_missed(&self, slot: usize, index: u32, dispose: &mut impl FnMut([u64; E])) {
        let marks = unread_bit(index) | held_bit(index);
        if self.words.load(slot + Self::READERS, Acquire) & marks != 0 {
            self.clear_marks(slot, marks, dispose);
            self.words.fetch_add(layout::subscriber(index, layout::MISSED), 1);
        }
    }

    /// Who holds an entry has it still to read.
    fn release_held(&self, slot: usize, index: u32) {
        let (from, to) = (held_bit(index), unread_bit(index));
        let at = slot + Self::READERS;
        let mut readers = self.words.load(at, Acquire);
        while readers & from != 0 {
            match self.words.compare_exchange(at, readers, readers & !from | to) {
                Ok(_) => break,
                Err(found) => readers = found,
            }
        }
    }

    /// What the next subscription's line says. The queue is locked.
    fn next_name(&self, who: Participant) -> u64 {
        let serial = self.words.load(layout::SERIAL, Relaxed).wrapping_add(1);
        self.words.store(layout::SERIAL, serial, Relaxed);
        serial << 32 | u64::from(who.number())
    }

    /// Ends a subscription. Entries that only this subscriber had still to read or
    /// held are disposed of.
    ///
    /// # Errors
    /// `Held`: then it subscribes still. `NotSubscribed` if it has ended before.
    pub fn unsubscribe(
        &self,
        caller: &Caller<'_>,
        subscriber: &Subscriber,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        self.end_subscription(caller, subscriber.subscription_id, dispose)
    }

    /// Stops a subscription short of its end: nothing more is delivered to it, and what it has
    /// not read yet is disposed of, but what it holds it goes on holding, until that is
    /// released, or the subscription [ends](Self::unseat). [Taking](Self::take) finds nothing from
    /// then on.
    ///
    /// # Errors
    /// `Held`: then it goes on. `NotSubscribed` if it was removed before.
    pub fn stop(
        &self,
        caller: &Caller<'_>,
        subscriber: &mut Subscriber,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        let tail = self.stop_subscription(caller, subscriber.subscription_id, dispose)?;
        self.advance(subscriber, tail);
        Ok(())
    }

    /// As [`stop`](Self::stop), for a subscription that nothing is taken by any more. Gives the
    /// position up to which entries were delivered.
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
        self.deactivate(subscription_id.index);
        let tail = self.words.load(layout::TAIL, Relaxed);
        let (cursor, _) = self.progress_of(subscription_id);
        for position in cursor.max(tail.saturating_sub(self.slots))..tail {
            let slot = self.slot(position);
            if self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1 {
                self.clear_marks(
                    slot,
                    unread_bit(subscription_id.index) | held_bit(subscription_id.index),
                    &mut dispose,
                );
            }
        }
        // What others have still to read stays, and says that it was delivered to this one, too,
        // whose mark is gone: the next who lets go of it may be the last.
        drop(locked);
        self.room().ring();
        Ok(tail)
    }

    /// From here on nothing more is delivered to a participant. What it has still to read, and
    /// what it holds, stays as it is, and so do its places, until it is [expelled](Self::expel):
    /// so it can be counted, and nothing is added to it. Nobody
    /// [resumes](Self::resume) what is halted. Once more is harmless.
    ///
    /// # Errors
    /// `Held`: then nothing is changed.
    pub fn halt(&self, caller: &Caller<'_>, who: Participant) -> Result<()> {
        let locked = self.lock(caller)?;
        self.subscriptions_of(who)
            .for_each(|subscription_id| self.deactivate(subscription_id.index));
        drop(locked);
        Ok(())
    }

    /// Ends a subscription, evicted or not, by who has it: nothing is released by this seat
    /// any more, and its place may be another's.
    ///
    /// # Errors
    /// As [`unsubscribe`](Self::unsubscribe).
    pub fn end_subscription(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        self.end(caller, subscription_id, RemovedSlot::Freed, dispose)
    }

    /// Takes all that it has from a subscription that is another's, who lives and may be in the
    /// middle of anything: it [has its seat](Self::is_subscription_active) no longer, before anything is
    /// disposed of. Its place is nobody's until it [ends](Self::unseat) the subscription, or
    /// is [dead](Self::expel), so that what it lets go of meanwhile is no other's.
    ///
    /// What it stores, before a [fence](Words::fence), and then finds that it has its seat, is seen
    /// by whoever is given to dispose of what it held.
    ///
    /// Whoever takes the lock from one that died here does the rest. Once more is harmless.
    ///
    /// # Errors
    /// As [`unsubscribe`](Self::unsubscribe).
    pub fn evict(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        self.end(caller, subscription_id, RemovedSlot::Reserved, dispose)
    }

    fn end(
        &self,
        caller: &Caller<'_>,
        subscription_id: SubscriptionId,
        then: RemovedSlot,
        dispose: impl FnMut([u64; E]),
    ) -> Result<()> {
        let is_meant = |name| name & !REMOVED == subscription_id.name;
        let is_removed = self.remove(caller, subscription_id.index, is_meant, then, dispose)?;
        if is_removed { Ok(()) } else { Err(QueueError::NotSubscribed) }
    }

    /// Removes all subscriptions of a participant, who is dead; gives how many there were. May
    /// be called again if it was cut short, and by several at once.
    ///
    /// Also disposes of what nobody reads any more, and wakes all that sleep here: one who died
    /// may have been about to.
    ///
    /// # Errors
    /// `Held`: some may be removed already.
    pub fn remove_participant(
        &self,
        caller: &Caller<'_>,
        who: Participant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<usize> {
        let mut removed = 0;
        for index in 0..MAX_SUBSCRIBERS {
            let theirs = |name: u64| (name & !REMOVED) as u32 == who.number();
            let is_removed =
                self.remove(caller, index, theirs, RemovedSlot::Reclaimed, &mut dispose)?;
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

    /// From here on nothing is delivered to the subscriber at this place any more. The queue
    /// is locked.
    fn deactivate(&self, index: u32) {
        let active = self.words.load(layout::ACTIVE, Relaxed) & !(1 << index);
        self.words.store(layout::ACTIVE, active, Release);
    }

    /// Takes marks off an entry, and disposes of it if nobody reads it: also if its last
    /// reader died before it had done so. The queue is locked.
    fn clear_marks(&self, slot: usize, marks: u64, dispose: &mut impl FnMut([u64; E])) {
        // Most slots have nothing to do with it, and may never have been used.
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
        let theirs =
            || Some(self.words.load(at, Acquire)).filter(|name| *name != 0 && is_meant(*name));
        if theirs().is_none() {
            return Ok(false);
        }
        let locked = self.lock(caller)?;
        let Some(name) = theirs() else { return Ok(false) };
        // First: who reads what is disposed of below, and looks at its seat afterwards, sees
        // that it has none.
        self.words.store(at, name | REMOVED, Release);
        // Before the first mark: what it has said before it saw that it has its seat is seen by all
        // that come to dispose of what it held.
        self.words.fence();
        self.deactivate(index);
        for slot in self.slots_used() {
            self.clear_marks(slot, unread_bit(index) | held_bit(index), &mut dispose);
        }
        if then == RemovedSlot::Reclaimed {
            self.words.store(layout::subscriber(index, layout::HAS_STALE_OWNER), 1, Relaxed);
        }
        if then != RemovedSlot::Reserved {
            // Last: whoever is cut short before is followed by another.
            self.words.store(at, 0, Release);
        }
        drop(locked);
        self.room().ring();
        Ok(true)
    }

    /// After a holder of the lock has died: those whom it was about to remove have nothing any
    /// more. What nobody reads now is disposed of by whoever comes by it. The queue is locked.
    pub(super) fn finish_removals(&self) {
        let who = |index| self.words.load(layout::subscriber(index, layout::PARTICIPANT), Acquire);
        let leaving = (0..MAX_SUBSCRIBERS).filter(|index| who(*index) & REMOVED != 0);
        let places = leaving.fold(0_u32, |places, index| places | 1 << index);
        if places == 0 {
            return;
        }
        // As whoever has died may not have come so far.
        self.words.fence();
        let active = u64::from(self.active() & !places);
        self.words.store(layout::ACTIVE, active, Release);
        let marks = u64::from(places) << 32 | u64::from(places);
        for slot in self.slots_used() {
            if self.words.load(slot + Self::READERS, Acquire) & marks != 0 {
                self.words.fetch_and(slot + Self::READERS, !marks);
            }
        }
    }
}

/// What becomes of the place of one that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RemovedSlot {
    /// It is for the next one: its own has ended its subscription.
    Freed,
    /// It is for the next one, in place of one that is dead, or was taken for dead.
    Reclaimed,
    /// It is for nobody yet: the one that had it may still act on it.
    Reserved,
}
