//! Reading.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use super::Queue;
use super::layout::{self, held_bit, unread_bit};
use crate::doorbell::{Doorbell, WaitStrategy};
use crate::participant::Participant;
use crate::pidfd::ForkGeneration;
use crate::words::Words;

/// The place of one who subscribes, as others may know it: what was taken can be let go of by
/// it on any thread, and after the subscriber itself is gone. It goes stale when the
/// subscription ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubscriptionId {
    pub(super) index: u32,
    /// What its line says for as long as it subscribes.
    pub(super) name: u64,
    pub(super) fork_generation: ForkGeneration,
}

impl SubscriptionId {
    /// Its place among the subscribers.
    #[must_use]
    pub fn index(self) -> u32 {
        self.index
    }

    /// In whose name it subscribes.
    #[must_use]
    pub fn who(self) -> Option<Participant> {
        Participant::from_number(self.name as u32)
    }

    /// One word, which no other subscription of the queue has, at whatever time.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        self.name
    }
}

/// One who reads. It belongs to one process, and to one thread at a time: in a child that
/// was forked it [subscribes](Queue::is_subscribed) to nothing.
#[derive(Debug)]
pub struct Subscriber {
    pub(super) subscription_id: SubscriptionId,
    pub(super) cursor: u64,
    /// In all, and as many as were told with an entry.
    pub(super) missed: u64,
    pub(super) reported: u64,
    /// Of the entries before this position, one who had the seat before may have let go.
    pub(super) resumed: u64,
    /// Somebody lost this place who may not know it.
    pub(super) has_stale_owner: bool,
    pub(super) spin: WaitStrategy,
}

impl Subscriber {
    /// Its place among the subscribers.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.subscription_id.index
    }

    /// Its place, for others to act on.
    #[must_use]
    pub fn subscription_id(&self) -> SubscriptionId {
        self.subscription_id
    }

    /// The position that it reads next.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.cursor
    }

    /// Entries that it is known to have missed, in all: dropped before it came to read them.
    /// In sum this is exact, but one that is being dropped just now may be counted with the
    /// next entry; and if its publisher dies in the middle of that, not at all.
    #[must_use]
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// How many it has missed that it was not told of yet.
    fn take_unreported(&mut self) -> u64 {
        let untold = self.missed.wrapping_sub(self.reported);
        self.reported = self.missed;
        untold
    }

    /// How it waits.
    pub fn set_wait_strategy(&mut self, spin: WaitStrategy) {
        self.spin = spin;
    }
}

/// An entry, held until it is [released](Queue::release).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenEntry<const E: usize> {
    /// What was published.
    pub entry: [u64; E],
    /// Its place in the order of all.
    pub position: u64,
    /// Entries that were missed since the one before, as [`Subscriber::missed`] counts.
    pub missed: u64,
}

impl<W: Words, const E: usize> Queue<W, E> {
    /// The next entry, if there is one. It is held for this subscriber until it is
    /// released, also while it takes others.
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

    /// Does it still subscribe, or was it removed, as dead or too slow, or is it a forked
    /// copy of its parent's? Then nothing is delivered to it any more.
    #[inline]
    #[must_use]
    pub fn is_subscribed(&self, subscriber: &Subscriber) -> bool {
        self.is_subscription_active(subscriber.subscription_id)
    }

    /// Does this subscription still exist, and was it not made before a fork?
    #[inline]
    #[must_use]
    pub fn is_subscription_active(&self, subscription_id: SubscriptionId) -> bool {
        let at = layout::subscriber(subscription_id.index, layout::PARTICIPANT);
        self.words.load(at, Relaxed) == subscription_id.name
            && subscription_id.fork_generation.is_current()
    }

    /// Did this subscription exist while the caller read what entries name that it holds? Then
    /// nothing of that was disposed of before it was read.
    #[inline]
    #[must_use]
    pub fn was_subscription_active(&self, subscription_id: SubscriptionId) -> bool {
        self.words.fence_loads();
        self.is_subscription_active(subscription_id)
    }

    /// Waits for the next entry; None once the deadline has passed.
    pub fn take_until(
        &self,
        subscriber: &mut Subscriber,
        deadline: Instant,
    ) -> Option<TakenEntry<E>> {
        let mut spin = subscriber.spin;
        let taken = self.wait_with(&mut spin, deadline, || self.take(subscriber));
        subscriber.spin = spin;
        taken
    }

    /// Waits, as one who waits for entries does, until `look` finds something: for who looks
    /// elsewhere, too, and whoever puts something there [rings here](Self::ring_messages) as
    /// well. None once the deadline has passed.
    pub fn wait_with<T>(
        &self,
        spin: &mut WaitStrategy,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.messages().wait(spin, deadline, look)
    }

    /// The bell that those wait at who wait for entries, for one who cannot sleep here.
    #[must_use]
    pub fn message_doorbell(&self) -> Doorbell<W>
    where
        W: Clone,
    {
        Doorbell::at(self.words.clone(), layout::MESSAGES)
    }

    /// Would [`take`](Self::take) find something to look at? It may turn out to be nothing. Can
    /// be asked by any thread; one that does not take itself may see what was taken just now.
    #[must_use]
    pub fn has_more(&self, subscription_id: SubscriptionId) -> bool {
        let (cursor, _) = self.progress_of(subscription_id);
        let sequence = self.words.load(self.slot(cursor) + layout::SEQUENCE, Acquire);
        sequence == cursor.wrapping_add(1)
            || self.overflow_policy.drops() && self.position() > cursor
    }

    /// What waits to be read stays: to look is enough.
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
            // One that was removed may look at it while others write.
            let entry = self.entry_of(slot, position)?;
            if is_delivered {
                self.advance(subscriber, position + 1);
                return Some(TakenEntry { entry, position, missed: subscriber.take_unreported() });
            }
            // To one that has stopped nothing comes any more: it has missed nothing, either.
            let is_active = self.active() >> subscriber.index() & 1 == 1;
            if !is_active || !self.is_subscribed(subscriber) {
                return None;
            }
            if position >= subscriber.resumed {
                // One that had this seat before it was resumed, lives, and stopped in the
                // middle of letting go, took the mark for its own. Missed, then, rather than
                // waited for without end.
                subscriber.missed = subscriber.missed.wrapping_add(1);
            }
            self.advance(subscriber, position + 1);
        }
    }

    /// Was the entry in this slot delivered to this subscriber, and has nobody taken its mark off?
    ///
    /// Whom it was delivered to stands with the entry. The marks lie in another line, which all
    /// take from each other when they let go. They say something else only if the subscriber was
    /// removed, which its own line tells before a mark is gone; or where one that had this place
    /// before acts on it unawares, and that is known, too.
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
        // Last: it may all be meant for the next one that has this place.
        self.is_subscribed(subscriber)
    }

    /// What waits to be read may be dropped at any moment: it must be claimed.
    fn take_droppable(&self, subscriber: &mut Subscriber) -> Option<TakenEntry<E>> {
        loop {
            let position = subscriber.cursor;
            let slot = self.slot(position);
            let sequence = self.words.load(slot + layout::SEQUENCE, Acquire);
            if sequence == position + 1 {
                if self.claim(subscriber.index(), slot, position) {
                    let entry = self.entry_of(slot, position)?;
                    self.advance(subscriber, position + 1);
                    // Counted by those who dropped them, a moment after they did.
                    let at = layout::subscriber(subscriber.index(), layout::MISSED);
                    subscriber.missed = self.words.load(at, Acquire);
                    return Some(TakenEntry {
                        entry,
                        position,
                        missed: subscriber.take_unreported(),
                    });
                }
                // Not ours any more: dropped.
            } else {
                let tail = self.words.load(layout::TAIL, Acquire);
                if tail <= position {
                    return None;
                }
                // Only now: it may have been published since we looked.
                if self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1 {
                    continue;
                }
                // Skipped, or dropped and written over. Far behind: go where there is
                // something still.
                let oldest = tail.saturating_sub(self.slots);
                if position < oldest {
                    self.advance(subscriber, oldest);
                    continue;
                }
            }
            self.advance(subscriber, position + 1);
        }
    }

    /// What is in the slot, if that is still the entry of this position: one that was
    /// removed, as dead or too slow, may read while others write.
    #[inline]
    fn entry_of(&self, slot: usize, position: u64) -> Option<[u64; E]> {
        let entry = self.entry(slot);
        let is_still = self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1;
        is_still.then_some(entry)
    }

    /// Turns "has still to read" into "holds", if that is still so.
    fn claim(&self, index: u32, slot: usize, position: u64) -> bool {
        let (from, to) = (unread_bit(index), held_bit(index));
        let mut readers = self.words.load(slot + Self::READERS, Acquire);
        loop {
            if readers & from == 0 {
                return false;
            }
            let claimed = readers & !from | to;
            match self.words.compare_exchange(slot + Self::READERS, readers, claimed) {
                Ok(_) => break,
                Err(found) => readers = found,
            }
        }
        if self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1 {
            return true;
        }
        // Meanwhile the slot was given to another entry, which we claimed unawares. One that
        // was removed since then has nothing to put back.
        let mut readers = self.words.load(slot + Self::READERS, Acquire);
        while readers & to != 0 {
            let unclaimed = readers & !to | from;
            match self.words.compare_exchange(slot + Self::READERS, readers, unclaimed) {
                Ok(_) => break,
                Err(found) => readers = found,
            }
        }
        false
    }

    #[inline]
    pub(super) fn advance(&self, subscriber: &mut Subscriber, to: u64) {
        subscriber.cursor = to;
        // For others to see how far it is, and for the end of a subscription whose reader is gone.
        self.words.store(layout::subscriber(subscriber.index(), layout::CURSOR), to, Relaxed);
    }

    /// Lets go of an entry. If nobody else has it still to read or holds it, it is
    /// given to the caller to dispose of; then [`mark_disposed`](Self::settle) says that this
    /// is done.
    #[inline]
    pub fn release(&self, subscriber: &Subscriber, position: u64) -> Option<[u64; E]> {
        self.release_by(subscriber.subscription_id, position)
    }

    /// As [`release`](Self::release), by whoever took it, wherever the subscriber is by now.
    #[inline]
    pub fn release_by(&self, subscription_id: SubscriptionId, position: u64) -> Option<[u64; E]> {
        let slot = self.slot(position);
        let mine = unread_bit(subscription_id.index) | held_bit(subscription_id.index);
        // One that was removed has nothing to let go of. Should that happen just now, no mark
        // of its place is anybody's before it has ended its subscription.
        if !self.is_subscription_active(subscription_id) {
            return None;
        }
        if self.words.load(slot + layout::SEQUENCE, Acquire) != position + 1 {
            return None;
        }
        let entry = self.entry(slot);
        let was = self.words.fetch_and(slot + Self::READERS, !mine);
        if was & mine == 0 || was & !mine != 0 {
            return None;
        }
        self.room().ring();
        Some(entry)
    }

    /// The entry of this position was disposed of. Without this call somebody else will
    /// dispose of it once more.
    #[inline]
    pub fn mark_disposed(&self, position: u64) {
        // Before the tail has passed it, a publisher may be dying at this very entry,
        // and its sequence is what tells that it was delivered.
        if self.words.load(layout::TAIL, Acquire) > position {
            let slot = self.slot(position);
            let at = slot + layout::SEQUENCE;
            if self.words.compare_exchange(at, position + 1, 0).is_ok() {
                // Should it be another's by now, whoever publishes there looks by itself.
                self.words.store(slot + Self::DISPOSED, position + 1, Release);
            }
        }
    }
}
