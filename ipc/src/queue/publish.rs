//! Publishing, and what a dead publisher leaves behind.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use super::layout::{self, UNREAD};
use super::{OverflowPolicy, Queue, QueueError, Result};
use crate::doorbell::{Doorbell, WaitStrategy};
use crate::lock::{Acquired, Guard};
use crate::participant::Caller;
use crate::words::Words;

/// What became of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Its place in the order of all.
    pub position: u64,
    /// How many it was delivered to.
    pub readers: u32,
}

/// The queue, locked.
pub(super) struct Locked<'a, W: Words, const E: usize> {
    queue: &'a Queue<W, E>,
    _guard: Guard<'a, W>,
}

impl<W: Words, const E: usize> Queue<W, E> {
    /// Where those sleep that wait for entries.
    #[inline]
    pub(super) fn messages(&self) -> Doorbell<&W> {
        Doorbell::at(&self.words, layout::MESSAGES)
    }

    /// Where those sleep that wait for room.
    #[inline]
    pub(super) fn room(&self) -> Doorbell<&W> {
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

    /// Delivers an entry to all who subscribe, if there is room.
    ///
    /// `dispose` is given the entries that nobody will read any more: dropped ones,
    /// and those that are not [settled](Self::settle), since who released them last is
    /// dead, or not yet so far. So an entry may be disposed of twice, by different
    /// processes, and that has to be harmless.
    ///
    /// Once it is delivered there is a [fence](Words::fence), before what the caller does next.
    ///
    /// # Errors
    /// `Full`, `NoSubscribers`, `Held`: then the entry is still the caller's.
    #[inline]
    pub fn publish(
        &self,
        caller: &Caller<'_>,
        entry: [u64; E],
        dispose: impl FnMut([u64; E]),
    ) -> Result<Published> {
        self.publish_with(caller, entry, |_| {}, dispose)
    }

    /// As [`publish`](Self::publish). `hand_over` is called when it is certain that the
    /// entry will be delivered unless the caller dies, and before anybody can see it: the
    /// place to give away what the entry names. It is told the entry's position. Who finds
    /// the caller dead looks, with [`find_entries`](Self::find_entries), or by the position,
    /// whether the entry [was delivered](Self::was_delivered).
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
            // Its last reader died before it had disposed of it. That comes before
            // the slot is used again, or it could be lost once more.
            dispose(self.entry(slot));
        }
        hand_over(position);
        locked.write(slot, position, entry, active);
        drop(locked);
        self.messages().ring();
        Ok(Published { position, readers: active.count_ones() })
    }

    /// An entry will be published soon: what that writes to is fetched meanwhile. Whoever knows
    /// says so; it changes nothing else.
    #[inline]
    pub fn prefetch_for_publish(&self) {
        self.prefetch_slot(self.words.load(layout::TAIL, Relaxed));
    }

    /// Not the line of the entry: readers look at it all the time, and would take it back.
    #[inline]
    fn prefetch_slot(&self, position: u64) {
        self.words.prefetch_for_write(self.slot(position) + Self::READERS);
        self.words.prefetch_for_write(layout::TAIL);
    }

    /// Is the entry that was in this slot before surely disposed of? A look at the line of the
    /// entry costs the way from readers that look there, and back.
    #[inline]
    pub(super) fn was_disposed(&self, slot: usize, position: u64) -> bool {
        let before = position.checked_sub(self.slots).map(|before| before + 1);
        before == Some(self.words.load(slot + Self::DISPOSED, Acquire))
    }

    /// Waits until there is room, or the deadline has passed, and publishes.
    ///
    /// # Errors
    /// As [`publish`](Self::publish); `Full` once the deadline has passed.
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

    /// Was an entry delivered at this position? Of one that died publishing it is known as
    /// long as nobody has published since; later it may have been another's.
    #[must_use]
    pub fn was_delivered(&self, position: u64) -> bool {
        self.position() > position
            || self.words.load(self.slot(position) + layout::SEQUENCE, Acquire) == position + 1
    }

    /// Would an entry be taken now?
    #[must_use]
    pub fn has_room(&self) -> bool {
        let tail = self.words.load(layout::TAIL, Acquire);
        let slots = if self.overflow_policy.drops() { self.slots } else { 1 };
        let is_free = |position| self.words.load(self.slot(position) + Self::READERS, Acquire) == 0;
        (tail..tail.saturating_add(slots)).any(is_free)
    }

    /// Waits, as one who waits for room does, until `look` finds something: for who needs
    /// something else, too, and whoever gives that rings [here](Self::ring_room) as well. None
    /// once the deadline has passed.
    pub fn wait_for_room_with<T>(
        &self,
        spin: &mut WaitStrategy,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.room().wait(spin, deadline, look)
    }

    /// Wakes those that wait for room.
    #[inline]
    pub fn ring_room(&self) {
        self.room().ring();
    }

    /// Wakes those that wait for entries.
    #[inline]
    pub fn ring_messages(&self) {
        self.messages().ring();
    }

    /// Looks through all entries that were delivered and are not disposed of, while
    /// nobody publishes.
    ///
    /// # Errors
    /// `Held`.
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

    /// Puts an entry into a slot that nobody reads. The store of the sequence is the
    /// moment: it delivers the entry, to readers that are counted already.
    #[inline]
    fn write(&self, slot: usize, position: u64, entry: [u64; E], active: u32) {
        let words = self.words();
        words.store(slot + layout::SEQUENCE, 0, Release);
        // Who sees any of this sees that the sequence is gone, too.
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

    /// Takes the entries that are too old, when there is one more, from those that have still to
    /// read them. Entries count, and not positions: what others hold makes nobody miss anything.
    ///
    /// # Errors
    /// `Full` where the newest is dropped and nobody has room for it.
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
        // What comes later than this has a number that is not too old, either.
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

    /// Takes the marks of those off an entry that have still to read it.
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

    /// The first position from here on whose slot nobody holds.
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

    /// Where others hold all other slots, the oldest of those that only wait is taken back, though it
    /// is not too old: what is held must stop nothing.
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

    /// Would an entry that is unread have been dropped before? It was held when its turn came,
    /// by one that claimed it unawares and put it back.
    fn is_overdue(&self, slot: usize) -> bool {
        let sequence = self.words().load(slot + layout::SEQUENCE, Acquire);
        sequence != 0 && sequence <= self.words().load(layout::OLDEST, Relaxed)
    }

    /// After a holder of the lock has died: what it began is brought to an end.
    #[cold]
    fn repair(&self) {
        self.repair_tail();
        if self.queue.overflow_policy.drops() {
            self.repair_skipped();
        }
        self.queue.finish_removals();
    }

    /// One who has died may have skipped positions, and delivered nothing: they count with the next.
    fn repair_skipped(&self) {
        let words = self.words();
        if let Some(last) = words.load(layout::TAIL, Acquire).checked_sub(1) {
            let number = words.load(self.queue.slot(last) + Queue::<W, E>::NUMBER, Acquire);
            words.store(layout::SKIPPED, last.saturating_sub(number), Relaxed);
        }
    }

    /// Was the entry of one who has died delivered, or not?
    fn repair_tail(&self) {
        let words = self.words();
        let tail = words.load(layout::TAIL, Acquire);
        for position in tail..tail.saturating_add(self.queue.slots) {
            let slot = self.queue.slot(position);
            match words.load(slot + layout::SEQUENCE, Acquire) {
                // It was: the tail did not follow.
                sequence if sequence == position + 1 => {
                    words.store(layout::TAIL, position + 1, Release);
                    return;
                }
                // It was not: nobody has seen the marks.
                0 if words.load(slot + Queue::<W, E>::READERS, Acquire) != 0 => {
                    words.store(slot + Queue::<W, E>::READERS, 0, Release);
                }
                _ => {}
            }
        }
    }
}
