//! Reading.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use threads::ForkGeneration;

use super::Queue;
use super::layout::{self, EVICTED, held_bit, unread_bit};
use crate::doorbell::{Doorbell, WaitStrategy};
use crate::participant::Participant;
use crate::words::Words;

/// The name of a subscription. Other threads can use it to release entries, even after the
/// subscriber itself was dropped. It is stale after the subscription has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriptionId {
    index: u32,
    /// The word of its line, as long as it is subscribed.
    name: u64,
    fork_generation: ForkGeneration,
}

impl SubscriptionId {
    /// Slot of the subscription among the subscribers.
    #[inline]
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }

    /// Participant of the subscription.
    #[must_use]
    pub fn participant(self) -> Option<Participant> {
        Participant::from_number(self.name as u32)
    }

    /// One word, unique among all subscriptions of the queue, at all times.
    #[inline]
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.name
    }
}

/// A reader. It belongs to one process, and to one thread at a time: in a forked child it is
/// [not subscribed](Queue::is_subscribed).
#[derive(Debug)]
pub struct Subscriber {
    subscription_id: SubscriptionId,
    cursor: u64,
    /// Missed entries in total, as far as they were reported with an entry.
    missed: u64,
    reported: u64,
    /// Entries before this position may have been released by a previous owner of the
    /// subscription.
    resumed: u64,
    /// A process lost this slot and may not know it.
    has_stale_owner: bool,
    spin: WaitStrategy,
}

impl Subscriber {
    pub(super) fn new(subscription_id: SubscriptionId, cursor: u64, has_stale_owner: bool) -> Self {
        let spin = WaitStrategy::default();
        Self { subscription_id, cursor, missed: 0, reported: 0, resumed: 0, has_stale_owner, spin }
    }

    /// Continues after a previous owner, which got entries before this position, and these
    /// numbers of missed entries.
    pub(super) fn resumed(self, resumed: u64, reported: u64, missed: u64) -> Self {
        Self { resumed, reported, missed, ..self }
    }

    /// The subscriber's slot among all.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.subscription_id.index
    }

    /// The subscriber's id, by which other threads act on it.
    #[must_use]
    pub fn subscription_id(&self) -> SubscriptionId {
        self.subscription_id
    }

    /// The position that it reads next.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.cursor
    }

    /// The total number of entries that were dropped before it read them. The sum is exact in
    /// the end. But an entry that is being dropped just now may be counted with the next one;
    /// if its publisher dies during the drop, never.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// The number of missed entries that were not reported yet.
    fn take_unreported(&mut self) -> u64 {
        let untold = self.missed.wrapping_sub(self.reported);
        self.reported = self.missed;
        untold
    }

    /// Sets how it waits.
    pub fn set_wait_strategy(&mut self, spin: WaitStrategy) {
        self.spin = spin;
    }
}

/// An entry, held until it is [released](Queue::release).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenEntry<const E: usize> {
    /// The published words.
    pub entry: [u64; E],
    /// The entry's position in the order of all entries.
    pub position: u64,
    /// Entries missed since the previous one, as [`Subscriber::missed`] counts.
    pub missed: u64,
}

impl<W: Words, const E: usize> Queue<W, E> {
    pub(super) fn subscription_id(&self, index: u32, name: u64) -> SubscriptionId {
        SubscriptionId { index, name, fork_generation: self.fork_generation }
    }

    /// The next entry, if there is one. It is held until it is released, even if others are
    /// taken before.
    #[inline]
    pub fn take(&self, subscriber: &mut Subscriber) -> Option<TakenEntry<E>> {
        if !self.is_subscribed(subscriber) {
            return None;
        }
        if self.overflow_policy.drops() {
            self.take_droppable(subscriber)
        } else {
            self.take_reliable(subscriber)
        }
    }

    /// Is it still subscribed? Not if it was removed, as dead, or evicted, as too slow, or if it is a
    /// forked copy of its parent's: then it gets no more entries.
    #[inline]
    #[must_use]
    pub fn is_subscribed(&self, subscriber: &Subscriber) -> bool {
        self.is_subscription_active(subscriber.subscription_id)
    }

    /// Does this subscription get entries, and was it made after the last fork?
    #[inline]
    #[must_use]
    pub fn is_subscription_active(&self, subscription_id: SubscriptionId) -> bool {
        let at = layout::subscriber(subscription_id.index, layout::PARTICIPANT);
        self.words.load(at, Relaxed) == subscription_id.name
            && subscription_id.fork_generation.is_current()
    }

    /// Does it keep the entries that it holds? It does so until it has ended, even if it was stopped
    /// or [evicted](Self::evict), unless its participant was taken for dead.
    #[inline]
    #[must_use]
    pub fn holds_entries(&self, subscription_id: SubscriptionId) -> bool {
        let at = layout::subscriber(subscription_id.index, layout::PARTICIPANT);
        self.words.load(at, Relaxed) & !EVICTED == subscription_id.name
            && subscription_id.fork_generation.is_current()
    }

    /// Did this subscription hold its entries while the caller read what they name? Then nothing of
    /// that was disposed of before it was read.
    #[inline]
    #[must_use]
    pub fn held_entries(&self, subscription_id: SubscriptionId) -> bool {
        self.words.fence_loads();
        self.holds_entries(subscription_id)
    }

    /// Waits for the next entry; None if the deadline passes.
    pub fn take_until(
        &self,
        subscriber: &mut Subscriber,
        deadline: Instant,
    ) -> Option<TakenEntry<E>> {
        let mut spin = subscriber.spin;
        let taken = self.messages().wait(&mut spin, deadline, || self.take(subscriber));
        subscriber.spin = spin;
        taken
    }

    /// The doorbell of processes that wait for entries, for a caller that cannot sleep here.
    #[must_use]
    pub fn message_doorbell(&self) -> Doorbell<W>
    where
        W: Clone,
    {
        Doorbell::at(self.words.clone(), layout::MESSAGES)
    }

    /// Would [`take`](Self::take) find an entry to check? It may turn out to be none. Any
    /// thread may call it; another thread may still see an entry that was just taken.
    #[must_use]
    pub fn has_more(&self, subscription_id: SubscriptionId) -> bool {
        let (cursor, _) = self.progress_of(subscription_id);
        let sequence = self.words.load(self.slot(cursor) + layout::SEQUENCE, Acquire);
        sequence == cursor.wrapping_add(1)
            || self.overflow_policy.drops() && self.position() > cursor
    }

    /// Unread entries stay: reading is enough.
    #[inline]
    fn take_reliable(&self, subscriber: &mut Subscriber) -> Option<TakenEntry<E>> {
        loop {
            let position = subscriber.cursor;
            let slot = self.slot(position);
            if self.words.load(slot + layout::SEQUENCE, Acquire) != position + 1 {
                if position < subscriber.resumed && self.is_subscribed(subscriber) {
                    self.advance(subscriber, position + 1);
                    continue;
                }
                return None;
            }
            let is_delivered = self.is_delivered(subscriber, slot);
            // After its removal, it may read while others write.
            let entry = self.entry_of(slot, position)?;
            if is_delivered {
                self.advance(subscriber, position + 1);
                // Either the process that evicts it sees that this entry is held, or this sees the
                // eviction. Then the entry may keep a mark until the subscription ends.
                self.words.light_fence();
                if !self.is_subscribed(subscriber) {
                    return None;
                }
                return Some(TakenEntry { entry, position, missed: subscriber.take_unreported() });
            }
            // A stopped subscription gets no entries, so it has missed none.
            let is_active = self.active() >> subscriber.index() & 1 == 1;
            if !is_active || !self.is_subscribed(subscriber) {
                return None;
            }
            if position >= subscriber.resumed {
                // A previous owner of this subscription, which lives and was stopped during a
                // release, took the mark for its own. The entry counts as missed, instead of a
                // wait without end.
                subscriber.missed = subscriber.missed.wrapping_add(1);
            }
            self.advance(subscriber, position + 1);
        }
    }

    /// Was the entry in this slot delivered to this subscriber, with its mark still set?
    ///
    /// The subscribers are stored with the entry. The marks are in another line, which moves
    /// between all readers when they release. The two differ only in two cases. Either the
    /// subscriber was removed, which its own line records before a mark is cleared; or a previous
    /// owner of this slot acts on it unknowingly, which is recorded, too.
    #[inline]
    fn is_delivered(&self, subscriber: &Subscriber, slot: usize) -> bool {
        let index = subscriber.index();
        if self.words.load(slot + layout::DELIVERED_TO, Acquire) >> index & 1 == 0 {
            return false;
        }
        if subscriber.has_stale_owner
            && self.words.load(slot + Self::READERS, Acquire) & unread_bit(index) == 0
        {
            return false;
        }
        // Last: the slot may belong to its next owner by now.
        self.is_subscribed(subscriber)
    }

    /// Unread entries may be dropped at any moment: they must be claimed.
    fn take_droppable(&self, subscriber: &mut Subscriber) -> Option<TakenEntry<E>> {
        loop {
            let (mut position, mut slot) = (subscriber.cursor, self.slot(subscriber.cursor));
            if self.words.load(slot + layout::SEQUENCE, Acquire) != position + 1 {
                let tail = self.words.load(layout::TAIL, Acquire);
                if tail <= position {
                    return None;
                }
                // Only now: it may have been published since the last read, in another slot.
                slot = self.slot(position);
                if self.words.load(slot + layout::SEQUENCE, Acquire) != position + 1 {
                    // Dropped, and perhaps overwritten. Far behind: continue at the oldest entry of
                    // the ring.
                    let next = tail.saturating_sub(self.depth).max(position + 1);
                    match self.first_unread_spare(subscriber.index(), position..next) {
                        Some(unread) => (position, slot) = unread,
                        None => {
                            self.advance(subscriber, next);
                            continue;
                        }
                    }
                }
            }
            if self.claim(subscriber.subscription_id, slot, position) {
                let entry = self.entry_of(slot, position)?;
                self.advance(subscriber, position + 1);
                // The dropping process counts it a moment later.
                let at = layout::subscriber(subscriber.index(), layout::MISSED);
                subscriber.missed = self.words.load(at, Acquire);
                return Some(TakenEntry { entry, position, missed: subscriber.take_unreported() });
            }
            // Dropped for this subscriber.
            self.advance(subscriber, position + 1);
        }
    }

    /// The first entry at these positions that is unread in a spare slot: this subscriber had claimed
    /// it by mistake when that slot was replaced in the ring.
    fn first_unread_spare(&self, index: u32, positions: Range<u64>) -> Option<(u64, usize)> {
        let unread = self.spares_used().filter_map(|slot| {
            let position = self.words.load(slot + layout::SEQUENCE, Acquire).checked_sub(1)?;
            (self.readers_at(slot, position) & unread_bit(index) != 0).then_some((position, slot))
        });
        unread.filter(|(position, _)| positions.contains(position)).min()
    }

    /// The entry in the slot, if it is still that of this position: a removed subscriber may
    /// read while others write.
    #[inline]
    fn entry_of(&self, slot: usize, position: u64) -> Option<[u64; E]> {
        let entry = self.entry(slot);
        let is_still = self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1;
        is_still.then_some(entry)
    }

    /// Changes "unread" to "held", if the mark is still set.
    fn claim(&self, subscription_id: SubscriptionId, slot: usize, position: u64) -> bool {
        let unread = unread_bit(subscription_id.index);
        let held = held_bit(subscription_id.index);
        if !self.change_mark(slot, unread, held) {
            return false;
        }
        if self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1 {
            return true;
        }
        // Meanwhile the slot got another entry, which was claimed by mistake, and is read in its
        // turn. A subscriber that was removed since then has nothing to revert.
        self.change_mark(slot, held, unread);
        if !self.is_subscription_active(subscription_id) {
            // Its unread entries were given up in between.
            self.change_mark(slot, unread, 0);
        }
        false
    }

    /// Replaces a mark of an entry by another; false if it is not set.
    pub(super) fn change_mark(&self, slot: usize, from: u64, to: u64) -> bool {
        let at = slot + Self::READERS;
        let mut readers = self.words.load(at, Acquire);
        while readers & from != 0 {
            match self.words.compare_exchange(at, readers, readers & !from | to) {
                Ok(_) => return true,
                Err(found) => readers = found,
            }
        }
        false
    }

    #[inline]
    pub(super) fn advance(&self, subscriber: &mut Subscriber, to: u64) {
        subscriber.cursor = to;
        // So that others see its position; also used at the end of a subscription whose reader
        // is gone.
        self.words.store(layout::subscriber(subscriber.index(), layout::CURSOR), to, Relaxed);
    }

    /// Releases an entry. If no other subscriber has it unread or holds it, the caller gets it
    /// to dispose of; then [`mark_disposed`](Self::mark_disposed) must be called.
    #[inline]
    pub fn release(&self, subscriber: &Subscriber, position: u64) -> Option<[u64; E]> {
        self.release_by(subscriber.subscription_id, position)
    }

    /// Like [`release`](Self::release), from any thread, whatever the subscriber does.
    #[inline]
    pub fn release_by(&self, subscription_id: SubscriptionId, position: u64) -> Option<[u64; E]> {
        let own_marks = layout::marks(subscription_id.index);
        // A removed subscriber has nothing to release. If it is removed at this moment, no
        // other subscriber gets its slot before the subscription has ended.
        if !self.holds_entries(subscription_id) {
            return None;
        }
        // The slot keeps this entry as long as it has the mark.
        let slot = self.find_slot(position)?;
        let entry = self.entry(slot);
        let was = self.words.fetch_and(slot + Self::READERS, !own_marks);
        if was & own_marks == 0 || was & !own_marks != 0 {
            return None;
        }
        self.room().ring();
        Some(entry)
    }

    /// The entry of this position was disposed of. Without this call another process will
    /// dispose of it again.
    #[inline]
    pub fn mark_disposed(&self, position: u64) {
        // Before the tail has passed it, a publisher may be dying at this entry, and the
        // sequence is the proof that it was delivered.
        if self.words.load(layout::TAIL, Acquire) > position
            && let Some(slot) = self.find_slot(position)
        {
            let at = slot + layout::SEQUENCE;
            if self.words.compare_exchange(at, position + 1, 0).is_ok() {
                // If it has another entry by now, its publisher checks by itself.
                self.words.store(slot + Self::DISPOSED, position + 1, Release);
            }
        }
    }
}
