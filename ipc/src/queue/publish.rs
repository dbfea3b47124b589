//! Publishing, and recovery after the death of a publisher.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use super::layout::{self, UNREAD};
use super::{OverflowPolicy, Queue, QueueError, Result};
use crate::doorbell::{Doorbell, WaitStrategy};
use crate::lock::{Acquired, Guard};
use crate::participant::Caller;
use crate::words::Words;

/// The result of publishing an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// The entry's position in the order of all entries.
    pub position: u64,
    /// The number of its subscribers.
    pub readers: u32,
}

pub(super) struct Locked<'a, W: Words, const E: usize> {
    queue: &'a Queue<W, E>,
    _guard: Guard<'a, W>,
}

impl<W: Words, const E: usize> Queue<W, E> {
    /// The doorbell of processes that wait for entries. A caller that also waits for another event
    /// can wait here, if the source of that event rings here as well.
    #[inline]
    pub fn messages(&self) -> Doorbell<&W> {
        Doorbell::at(&self.words, layout::MESSAGES)
    }

    /// The doorbell of processes that wait for space, as [`messages`](Self::messages).
    #[inline]
    pub fn room(&self) -> Doorbell<&W> {
        Doorbell::at(&self.words, layout::ROOM)
    }

    #[inline(always)]
    pub(super) fn lock<'a>(&'a self, caller: &'a Caller<'a>) -> Result<Locked<'a, W, E>> {
        if !self.fork_generation.is_current() {
            return Err(QueueError::Forked);
        }
        let (guard, taken) = Guard::take(&self.words, layout::LOCK, caller)?;
        let locked = Locked { queue: self, _guard: guard };
        if taken == Acquired::OwnerDied {
            locked.repair();
        }
        Ok(locked)
    }

    /// Delivers an entry to all subscribers, if there is space.
    ///
    /// `dispose` gets the entries that no subscriber will read any more: dropped entries, and
    /// those not [marked as disposed](Self::mark_disposed), whose last reader is dead or not
    /// finished. So an entry may be disposed of twice, by different processes, and that must be
    /// harmless.
    ///
    /// After the delivery there is a [fence](Words::fence), before the caller's next step.
    ///
    /// # Errors
    /// `Full`, `NoSubscribers`, `LockTimeout`: then the entry still belongs to the caller.
    #[inline]
    pub fn publish(
        &self,
        caller: &Caller<'_>,
        entry: [u64; E],
        dispose: impl FnMut([u64; E]),
    ) -> Result<Published> {
        self.publish_with(caller, entry, |_| {}, dispose)
    }

    /// Like [`publish`](Self::publish). `hand_over` is called with the entry's position, when
    /// it is certain that the entry will be delivered unless the caller dies, and before it is
    /// visible: there the caller transfers what the entry names. If the caller dies, others
    /// find out with [`find_entries`](Self::find_entries), or by the position, whether the
    /// entry [was delivered](Self::was_delivered).
    ///
    /// # Errors
    /// As `publish`.
    #[inline]
    pub fn publish_with(
        &self,
        caller: &Caller<'_>,
        entry: [u64; E],
        hand_over: impl FnOnce(u64),
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<Published> {
        let locked = self.lock(caller)?;
        let tail = self.words.load(layout::TAIL, Relaxed);
        let active = self.active();
        if active == 0 {
            return Err(QueueError::NoSubscribers);
        }
        self.prefetch_slot(tail);
        let position = match self.overflow_policy {
            OverflowPolicy::Reject => {
                if self.words.load(self.slot(tail) + Self::READERS, Acquire) != 0 {
                    return Err(QueueError::Full);
                }
                tail
            }
            OverflowPolicy::DropOldest | OverflowPolicy::DropNewest => {
                locked.drop_oldest_entries(tail, active, &mut dispose)?;
                locked.first_not_held(tail, active, &mut dispose)?
            }
        };
        let slot = self.slot(position);
        if !self.was_disposed(slot, position)
            && self.words.load(slot + layout::SEQUENCE, Relaxed) != 0
        {
            // Its last reader died before it disposed of it. Do that before the slot is reused,
            // or it could be lost again.
            dispose(self.entry(slot));
        }
        hand_over(position);
        locked.write(slot, position, entry, active);
        drop(locked);
        self.messages().ring();
        Ok(Published { position, readers: active.count_ones() })
    }

    /// Prefetches the lines that the next call of `publish` writes to.
    #[inline]
    pub fn prefetch_for_publish(&self) {
        self.prefetch_slot(self.words.load(layout::TAIL, Relaxed));
    }

    /// Not the line of the entry: polling readers would take it back.
    #[inline]
    fn prefetch_slot(&self, position: u64) {
        self.words.prefetch_for_write(self.slot(position) + Self::READERS);
        self.words.prefetch_for_write(layout::TAIL);
    }

    /// Is the previous entry of this slot certainly disposed of? Reading the entry's line would
    /// cost a transfer from polling readers, and back.
    #[inline]
    pub(super) fn was_disposed(&self, slot: usize, position: u64) -> bool {
        let before = position.checked_sub(self.slots).map(|before| before + 1);
        before == Some(self.words.load(slot + Self::DISPOSED, Acquire))
    }

    /// Waits for space until the deadline, and publishes.
    ///
    /// # Errors
    /// As [`publish`](Self::publish); `Full` if the deadline passes.
    pub fn publish_until(
        &self,
        caller: &Caller<'_>,
        entry: [u64; E],
        spin: &mut WaitStrategy,
        deadline: Instant,
        mut dispose: impl FnMut([u64; E]),
    ) -> Result<Published> {
        let mut attempt = || match self.publish(caller, entry, &mut dispose) {
            Err(QueueError::Full) => None,
            other => Some(other),
        };
        let waited = self.room().wait(spin, deadline, &mut attempt);
        waited.unwrap_or(Err(QueueError::Full))
    }

    /// Was an entry delivered at this position? After the death of a publisher, the answer is
    /// only valid until the next entry is published there.
    #[must_use]
    pub fn was_delivered(&self, position: u64) -> bool {
        self.position() > position
            || self.words.load(self.slot(position) + layout::SEQUENCE, Acquire) == position + 1
    }

    /// Would an entry be accepted now?
    #[must_use]
    pub fn has_room(&self) -> bool {
        let tail = self.words.load(layout::TAIL, Acquire);
        let slots = if self.overflow_policy.drops() { self.slots } else { 1 };
        let is_free = |position| self.words.load(self.slot(position) + Self::READERS, Acquire) == 0;
        (tail..tail.saturating_add(slots)).any(is_free)
    }

    /// Visits all entries that were delivered and not disposed of, while publishers are locked
    /// out.
    ///
    /// # Errors
    /// `LockTimeout`.
    pub fn find_entries(&self, caller: &Caller<'_>, mut each: impl FnMut([u64; E])) -> Result<()> {
        let _locked = self.lock(caller)?;
        for slot in self.slots_used() {
            if self.words.load(slot + layout::SEQUENCE, Acquire) != 0 {
                each(self.entry(slot));
            }
        }
        Ok(())
    }
}

impl<W: Words, const E: usize> Locked<'_, W, E> {
    fn words(&self) -> &W {
        &self.queue.words
    }

    /// Stores an entry in a free slot. The store of the sequence is the commit: it delivers the
    /// entry, to readers that are counted already.
    #[inline]
    fn write(&self, slot: usize, position: u64, entry: [u64; E], active: u32) {
        let words = self.words();
        words.store(slot + layout::SEQUENCE, 0, Release);
        // A process that sees any of this also sees that the sequence is cleared.
        words.store(slot + layout::DELIVERED_TO, active.into(), Release);
        for (at, word) in entry.into_iter().enumerate() {
            words.store(slot + layout::PAYLOAD + at, word, Release);
        }
        if self.queue.overflow_policy.drops() {
            let number = position.wrapping_sub(words.load(layout::SKIPPED, Relaxed));
            words.store(slot + Queue::<W, E>::NUMBER, number, Release);
        }
        words.store(slot + Queue::<W, E>::READERS, u64::from(active) << 32, Release);
        words.store(slot + layout::SEQUENCE, position + 1, Release);
        words.store(layout::TAIL, position + 1, Release);
    }

    /// Takes back entries that are too old for one more entry, from subscribers that have not
    /// read them. Only entries count, not positions: entries that others hold make no
    /// subscriber miss anything.
    ///
    /// # Errors
    /// `Full` if the policy drops the newest entry, and no subscriber has space for it.
    fn drop_oldest_entries(
        &self,
        tail: u64,
        active: u32,
        dispose: &mut impl FnMut([u64; E]),
    ) -> Result<()> {
        let (words, depth) = (self.words(), self.queue.depth);
        let next = tail.wrapping_sub(words.load(layout::SKIPPED, Relaxed));
        let first = words.load(layout::OLDEST, Relaxed);
        let mut oldest = first.max(tail.saturating_sub(self.queue.slots));
        // Later positions have numbers that are not too old, either.
        while oldest.saturating_add(depth) <= tail {
            let slot = self.queue.slot(oldest);
            if words.load(slot + layout::SEQUENCE, Acquire) == oldest + 1 {
                if words.load(slot + Queue::<W, E>::NUMBER, Relaxed).saturating_add(depth) > next {
                    break;
                }
                let waits = words.load(slot + Queue::<W, E>::READERS, Acquire) >> 32;
                if self.queue.overflow_policy == OverflowPolicy::DropNewest
                    && u64::from(active) & !waits == 0
                {
                    words.store(layout::OLDEST, oldest, Relaxed);
                    return Err(QueueError::Full);
                }
                self.drop_entry(slot, dispose);
            }
            oldest += 1;
        }
        words.store(layout::OLDEST, oldest, Relaxed);
        Ok(())
    }

    /// Clears the marks of subscribers that have not read an entry.
    fn drop_entry(&self, slot: usize, dispose: &mut impl FnMut([u64; E])) {
        let words = self.words();
        let was = words.fetch_and(slot + Queue::<W, E>::READERS, !UNREAD);
        let dropped = (was & UNREAD).count_ones();
        if dropped == 0 {
            return;
        }
        for index in
            (0..layout::MAX_SUBSCRIBERS).filter(|index| was & layout::unread_bit(*index) != 0)
        {
            words.fetch_add(layout::subscriber(index, layout::MISSED), 1);
        }
        let all = words.load(layout::DROPPED, Relaxed).wrapping_add(u64::from(dropped));
        words.store(layout::DROPPED, all, Relaxed);
        if was & !UNREAD == 0 {
            dispose(self.queue.entry(slot));
            words.store(slot + layout::SEQUENCE, 0, Release);
        }
    }

    /// The first position from here on whose slot is not held.
    fn first_not_held(
        &self,
        tail: u64,
        active: u32,
        dispose: &mut impl FnMut([u64; E]),
    ) -> Result<u64> {
        let words = self.words();
        let mut positions = tail..tail + self.queue.slots;
        let free = |position: &u64| {
            let slot = self.queue.slot(*position);
            let readers = words.load(slot + Queue::<W, E>::READERS, Acquire);
            readers == 0
                || readers & UNREAD != 0 && self.is_overdue(slot) && {
                    self.drop_entry(slot, dispose);
                    words.load(slot + Queue::<W, E>::READERS, Acquire) == 0
                }
        };
        let position = match positions.find(free) {
            Some(position) => position,
            None => self.reclaim_oldest(tail, active, dispose).ok_or(QueueError::Full)?,
        };
        if position != tail {
            let skipped = words.load(layout::SKIPPED, Relaxed).wrapping_add(position - tail);
            words.store(layout::SKIPPED, skipped, Relaxed);
        }
        Ok(position)
    }

    /// When other subscribers hold all other slots, takes back the oldest unread entry, though
    /// it is not too old: held entries must not stop the queue.
    #[cold]
    fn reclaim_oldest(
        &self,
        tail: u64,
        active: u32,
        dispose: &mut impl FnMut([u64; E]),
    ) -> Option<u64> {
        if !self.queue.overflow_policy.drops() {
            return None;
        }
        let words = self.words();
        let readers =
            |position| words.load(self.queue.slot(position) + Queue::<W, E>::READERS, Acquire);
        let may_go = |position: &u64| {
            let (waits, holds) = (readers(*position) >> 32, readers(*position) & !UNREAD);
            let has_room = u64::from(active) & !waits != 0;
            holds == 0 && (self.queue.overflow_policy != OverflowPolicy::DropNewest || has_room)
        };
        let number = |position: &u64| {
            words.load(self.queue.slot(*position) + Queue::<W, E>::NUMBER, Relaxed)
        };
        let position = (tail..tail + self.queue.slots).filter(may_go).min_by_key(number)?;
        self.drop_entry(self.queue.slot(position), dispose);
        // It may have been claimed just now.
        (readers(position) == 0).then_some(position)
    }

    /// Should an unread entry have been dropped before? It was claimed at that moment by a
    /// reader that reverted its claim.
    fn is_overdue(&self, slot: usize) -> bool {
        let sequence = self.words().load(slot + layout::SEQUENCE, Acquire);
        sequence != 0 && sequence <= self.words().load(layout::OLDEST, Relaxed)
    }

    /// After the death of a lock owner: completes its operation.
    #[cold]
    fn repair(&self) {
        self.repair_tail();
        if self.queue.overflow_policy.drops() {
            self.repair_skipped();
        }
        self.queue.finish_removals();
    }

    /// A dead owner may have skipped positions, and delivered nothing: they count for the next
    /// entry.
    fn repair_skipped(&self) {
        let words = self.words();
        if let Some(last) = words.load(layout::TAIL, Acquire).checked_sub(1) {
            let number = words.load(self.queue.slot(last) + Queue::<W, E>::NUMBER, Acquire);
            words.store(layout::SKIPPED, last.saturating_sub(number), Relaxed);
        }
    }

    /// Was the entry of a dead publisher delivered, or not?
    fn repair_tail(&self) {
        let words = self.words();
        let tail = words.load(layout::TAIL, Acquire);
        for position in tail..tail.saturating_add(self.queue.slots) {
            let slot = self.queue.slot(position);
            match words.load(slot + layout::SEQUENCE, Acquire) {
                // It was: only the tail is behind.
                sequence if sequence == position + 1 => {
                    words.store(layout::TAIL, position + 1, Release);
                    return;
                }
                // It was not: no reader has seen the marks.
                0 if words.load(slot + Queue::<W, E>::READERS, Acquire) != 0 => {
                    words.store(slot + Queue::<W, E>::READERS, 0, Release);
                }
                _ => {}
            }
        }
    }
}
