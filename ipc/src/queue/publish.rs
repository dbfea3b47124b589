//! Publishing, and recovery after the death of a publisher.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use super::layout::{self, UNREAD};
use super::{HolderClass, OverflowPolicy, Queue, QueueError, Result};
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
        let slot = self.slot(tail);
        let slot = match self.words.load(slot + Self::READERS, Acquire) {
            0 => slot,
            readers => locked.make_space(slot, readers, active, &mut dispose)?,
        };
        if !self.was_disposed(slot, tail) && self.words.load(slot + layout::SEQUENCE, Relaxed) != 0
        {
            // Its last reader died before it disposed of it. Do that before the slot is reused,
            // or it could be lost again.
            dispose(self.entry(slot));
        }
        hand_over(tail);
        locked.write(slot, tail, entry, active);
        drop(locked);
        self.messages().ring();
        Ok(Published { position: tail, readers: active.count_ones() })
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
        let before = position.checked_sub(self.depth).map(|before| before + 1);
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

    /// Would an entry be accepted now? Where entries are dropped, unread ones leave space.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let slot = self.slot(self.words.load(layout::TAIL, Acquire));
        let mut readers = self.words.load(slot + Self::READERS, Acquire);
        if self.overflow_policy.drops() {
            readers &= !UNREAD;
        }
        let class = || self.holder_class(slot, readers);
        readers == 0 || class().is_some_and(|class| self.find_spare(class).is_some())
    }

    /// A spare slot for an entry that is held: one that was used before and is free, or the next.
    /// None if subscribers, or evicted ones, hold the maximum of entries in such slots.
    fn find_spare(&self, class: HolderClass) -> Option<u64> {
        let (free, taken) = self.spares_of(class);
        free.filter(|_| taken < u64::from(self.setup.max_held))
    }

    /// A free spare slot, and how many such holders have taken.
    pub(super) fn spares_of(&self, class: HolderClass) -> (Option<u64>, u64) {
        let (mut free, mut taken) = (None, 0);
        let mut which = 0;
        for slot in self.spares_used() {
            let mut readers = self.words.load(slot + Self::READERS, Acquire);
            if self.overflow_policy.drops() {
                readers &= !UNREAD;
            }
            if readers == 0 {
                free = free.or(Some(which));
            } else if self.class_of(readers) == class {
                taken += 1;
            }
            which += 1;
        }
        let next = (which < self.setup.spares()).then_some(which);
        (free.or(next), taken)
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
        words.store(slot + Queue::<W, E>::READERS, u64::from(active) << 32, Release);
        words.store(slot + layout::SEQUENCE, position + 1, Release);
        words.store(layout::TAIL, position + 1, Release);
    }

    /// Makes space for one more entry in the ring, whose next slot has an entry with these marks.
    /// Takes it back from subscribers that have not read it, where entries are dropped. If it is
    /// held, a spare slot takes its place.
    ///
    /// # Errors
    /// `Full`.
    #[cold]
    fn make_space(
        &self,
        slot: usize,
        readers: u64,
        active: u32,
        dispose: &mut impl FnMut([u64; E]),
    ) -> Result<usize> {
        let queue = self.queue;
        if !queue.overflow_policy.drops() {
            return match queue.holder_class(slot, readers) {
                Some(class) => self.use_spare(class, dispose),
                // It was released meanwhile.
                None if self.words().load(slot + Queue::<W, E>::READERS, Acquire) == 0 => Ok(slot),
                None => Err(QueueError::Full),
            };
        }
        if queue.overflow_policy == OverflowPolicy::DropNewest
            && u64::from(active) & !(readers >> 32) == 0
        {
            return Err(QueueError::Full);
        }
        let held = readers & !UNREAD;
        if held != 0 && queue.find_spare(queue.class_of(held)).is_none() {
            return Err(QueueError::Full);
        }
        self.drop_entry(slot, dispose);
        // It may have been claimed just now.
        match self.words().load(slot + Queue::<W, E>::READERS, Acquire) {
            0 => Ok(slot),
            held => self.use_spare(queue.class_of(held), dispose),
        }
    }

    /// Puts a spare slot in the place of the next slot of the ring, which becomes a spare one.
    fn use_spare(&self, class: HolderClass, dispose: &mut impl FnMut([u64; E])) -> Result<usize> {
        let (queue, words) = (self.queue, self.words());
        let which = self.free_spare(class, dispose)?;
        let spare = queue.spare(which);
        if words.load(layout::SPARES_USED, Relaxed) <= which {
            words.store(layout::SPARES_USED, which + 1, Release);
        }
        let at = words.load(layout::TAIL, Relaxed) % queue.depth;
        let held = queue.name_of_slot(queue.slot(at));
        // Until the second store the held slot is in both places, so that its readers find it.
        words.store(layout::RING + (queue.depth + which) as usize, held, Release);
        words.store(layout::RING + at as usize, queue.name_of_slot(spare), Release);
        Ok(spare)
    }

    /// A spare slot without entry. A reader may have claimed its entry by mistake, and not have read it
    /// since: then it is dropped.
    fn free_spare(&self, class: HolderClass, dispose: &mut impl FnMut([u64; E])) -> Result<u64> {
        let queue = self.queue;
        for _ in 0..queue.setup.spares() {
            let which = queue.find_spare(class).ok_or(QueueError::Full)?;
            let spare = queue.spare(which);
            self.drop_entry(spare, dispose);
            if self.words().load(spare + Queue::<W, E>::READERS, Acquire) == 0 {
                return Ok(which);
            }
            // A reader is claiming the entry just now: the next look finds the slot held.
        }
        Err(QueueError::Full)
    }

    /// Finishes [`use_spare`](Self::use_spare) of a dead owner: a slot that is in the ring is not a
    /// spare one, but the slot that is in no place is.
    fn repair_spares(&self) {
        let (queue, words) = (self.queue, self.words());
        let used = words.load(layout::SPARES_USED, Acquire).min(queue.setup.spares());
        let mut is_named = vec![false; queue.setup.slots() as usize];
        let number = |slot| (queue.name_of_slot(slot) - 1) as usize;
        for at in 0..queue.depth {
            is_named[number(queue.slot(at))] = true;
        }
        let named_twice = (0..used).filter(|which| {
            let number = number(queue.spare(*which));
            std::mem::replace(&mut is_named[number], true)
        });
        let named_twice: Vec<_> = named_twice.collect();
        let known = (queue.depth + used) as usize;
        let mut unnamed = is_named.into_iter().take(known).enumerate();
        for which in named_twice {
            let Some((number, _)) = unnamed.find(|(_, is_named)| !is_named) else { return };
            let at = layout::RING + (queue.depth + which) as usize;
            words.store(at, number as u64 + 1, Release);
        }
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

    /// After the death of a lock owner: completes its operation.
    #[cold]
    fn repair(&self) {
        self.repair_tail();
        self.repair_spares();
        self.queue.finish_removals();
    }

    /// Was the entry of a dead publisher delivered, or not?
    fn repair_tail(&self) {
        let words = self.words();
        let tail = words.load(layout::TAIL, Acquire);
        let slot = self.queue.slot(tail);
        match words.load(slot + layout::SEQUENCE, Acquire) {
            // It was: only the tail is behind.
            sequence if sequence == tail + 1 => words.store(layout::TAIL, tail + 1, Release),
            // It was not: no reader has seen the marks.
            0 if words.load(slot + Queue::<W, E>::READERS, Acquire) != 0 => {
                words.store(slot + Queue::<W, E>::READERS, 0, Release);
            }
            _ => {}
        }
    }
}
