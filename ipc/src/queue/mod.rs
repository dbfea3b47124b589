//! A bounded queue in shared memory: many publishers, and many subscribers, each of which gets
//! every entry.
//!
//! An entry is a few words, usually the name of something larger. Each slot records which
//! subscribers have not read it. A single store delivers an entry to all current subscribers,
//! and also counts them as its readers. So no crash leaves a reader without its entry, or an
//! entry with uncounted readers. The call that clears the last reader's mark of a slot reports
//! this, and its caller disposes of what the entry names.
//!
//! Publishers exclude each other by a robust lock; subscribers take none. A subscriber of a
//! queue that [rejects](OverflowPolicy::Reject) entries when it is full only reads, and clears
//! its mark afterwards. Where entries are dropped, it claims each entry before it reads. An
//! unclaimed entry is taken back from this subscriber alone when its publisher needs the space.
//!
//! An entry that a subscriber has taken stays until it is released, and takes no space of unread
//! entries: when the ring comes to its slot, a spare slot takes its place. Subscribers may hold
//! [so many](QueueSetup::max_held) of these together. One that blocks others can be
//! [evicted](Queue::evict): it gets no more entries, and keeps those that it holds, for which there
//! are as many spare slots again.
//!
//! ```
//! use ipc::{Caller, AlwaysAlive, LocalWords, Participant, Queue, QueueSetup, OverflowPolicy};
//! let setup = QueueSetup { depth: 4, max_held: 4, overflow_policy: OverflowPolicy::Reject };
//! let words = LocalWords::zeroed(Queue::<LocalWords, 2>::required_words(setup));
//! let queue = Queue::<_, 2>::format(words, setup)?;
//! let caller = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
//!
//! let mut reader = queue.subscribe(&caller)?;
//! queue.publish(&caller, [7, 8], |_| {})?;
//! let taken = queue.take(&mut reader).unwrap();
//! assert_eq!((taken.entry, taken.position), ([7, 8], 0));
//! assert!(queue.release(&reader, taken.position).is_some(), "there is no other reader");
//! assert!(queue.take(&mut reader).is_none());
//! # Ok::<(), ipc::QueueError>(())
//! ```

#[cfg(test)]
mod halt_tests;
#[cfg(test)]
mod interleaving_tests;
mod layout;
mod publish;
mod subscriber;
mod subscriptions;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use threads::ForkGeneration;

use self::layout::{EVICTED, FLAGS, MAX_PROCESS_SUBSCRIBERS, MAX_SUBSCRIBERS};
use crate::lock::LockTimeout;
use crate::participant::Participant;
use crate::words::Words;

pub use self::publish::Published;
pub use self::subscriber::{Subscriber, SubscriptionId, TakenEntry};

/// A queue of entries of `E` words. See the [module](self).
#[derive(Debug)]
pub struct Queue<W, const E: usize> {
    words: W,
    setup: QueueSetup,
    /// The first word of the slots.
    first_slot: usize,
    depth: u64,
    overflow_policy: OverflowPolicy,
    fork_generation: ForkGeneration,
}

/// The policy for an entry without space, by its number in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverflowPolicy {
    /// The new entry is rejected: the publisher waits, or continues without it.
    Reject = 0,
    /// The oldest entry is dropped. Its subscribers that had not read it learn how many they
    /// missed; the others miss nothing.
    DropOldest = 1,
    /// The new entry is rejected if no subscriber has space for it. If some have, the oldest entry
    /// is dropped as with [`DropOldest`](Self::DropOldest): slow subscribers miss it, and delay no
    /// others.
    DropNewest = 2,
}

impl OverflowPolicy {
    /// Can unclaimed entries be taken back from subscribers?
    fn drops(self) -> bool {
        !matches!(self, Self::Reject)
    }
}

/// The parameters of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSetup {
    /// Capacity of unread entries.
    pub depth: u32,
    /// Entries beyond these that subscribers may hold together; and as many that evicted ones may.
    pub max_held: u32,
    /// The policy for one more entry.
    pub overflow_policy: OverflowPolicy,
}

impl QueueSetup {
    /// Entries that there can be at a time.
    #[must_use]
    pub fn slots(self) -> u64 {
        u64::from(self.depth) + self.spares()
    }

    /// Slots for entries that are held: for those of subscribers, and of evicted ones.
    fn spares(self) -> u64 {
        2 * u64::from(self.max_held)
    }

    /// The first word of the slots.
    fn first_slot(self) -> usize {
        (layout::RING + self.slots() as usize).next_multiple_of(layout::LINE)
    }
}

/// Why a queue call failed.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueError {
    /// The queue is full: for all subscribers where entries are dropped, otherwise for any; or
    /// subscribers hold the maximum of entries.
    Full,
    /// There are no subscribers: the entry was not published.
    NoSubscribers,
    /// All subscriber slots are in use.
    TooManySubscribers,
    /// The subscription has ended: it was removed, as dead or too slow.
    NotSubscribed,
    /// A living process holds the lock.
    LockTimeout(LockTimeout),
    /// The process forked after it attached: two processes under one participant would undo
    /// each other's changes. A child must join, attach and subscribe itself.
    Forked,
    /// The words are not a queue, or not one of this kind.
    NotAQueue {
        /// The reason.
        why: &'static str,
    },
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the queue is full"),
            Self::NoSubscribers => f.write_str("the queue has no subscribers"),
            Self::TooManySubscribers => {
                write!(
                    f,
                    "there are {MAX_PROCESS_SUBSCRIBERS} subscribers already, with those that were \
                     evicted and still hold messages"
                )
            }
            Self::NotSubscribed => f.write_str("the subscriber was removed from the queue"),
            Self::LockTimeout(held) => held.fmt(f),
            Self::Forked => {
                f.write_str("the queue was attached before a fork. Attach it again in the child")
            }
            Self::NotAQueue { why } => write!(f, "not a queue: {why}"),
        }
    }
}

crate::debug::debug_for_people!(QueueError {
    Full,
    NoSubscribers,
    TooManySubscribers,
    NotSubscribed,
    LockTimeout(by),
    Forked,
    NotAQueue { why },
});

impl std::error::Error for QueueError {}

impl From<LockTimeout> for QueueError {
    fn from(held: LockTimeout) -> Self {
        Self::LockTimeout(held)
    }
}

/// Who holds an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HolderClass {
    /// A subscriber, perhaps among evicted ones.
    Subscribed,
    /// Evicted subscribers only.
    Evicted,
}

/// The result of queue calls.
pub type Result<T> = std::result::Result<T, QueueError>;

impl<W: Words, const E: usize> Queue<W, E> {
    /// The largest number of unread entries, and of held ones.
    pub const MAX_DEPTH: u32 = 1 << 20;

    /// In a slot, behind the whole lines of the entry. Upper half: subscribers that have not read
    /// it; lower half: subscribers that hold it.
    const READERS: usize = (layout::PAYLOAD + E).next_multiple_of(layout::LINE);
    /// The position plus 1 of the last entry that its last reader disposed of: then no other
    /// process has to.
    const DISPOSED: usize = Self::READERS + 1;
    /// Words of a slot.
    const STRIDE: usize = Self::READERS + layout::LINE;

    /// Number of words of such a queue.
    #[must_use]
    pub fn required_words(setup: QueueSetup) -> usize {
        setup.first_slot() + setup.slots() as usize * Self::STRIDE
    }

    /// Initialises an empty queue. No other thread may use the words before this returns.
    ///
    /// # Errors
    /// `NotAQueue` if there are too few words, or the depth is 0 or too large.
    pub fn format(words: W, setup: QueueSetup) -> Result<Self> {
        let needed = Self::required_words(setup).min(words.count());
        (layout::KIND..needed).for_each(|at| words.store(at, 0, Release));
        Self::format_zeroed(words, setup)
    }

    /// Like [`format`](Self::format), for words that are all 0, as in a new segment: unused
    /// pages are not touched, and take no memory.
    ///
    /// # Errors
    /// As `format`.
    pub fn format_zeroed(words: W, setup: QueueSetup) -> Result<Self> {
        if setup.depth == 0 || setup.depth > Self::MAX_DEPTH {
            return Err(QueueError::NotAQueue { why: "the depth must be from 1 to 2^20" });
        }
        if setup.max_held == 0 || setup.max_held > Self::MAX_DEPTH {
            let why = "the number of held entries must be from 1 to 2^20";
            return Err(QueueError::NotAQueue { why });
        }
        let needed = Self::required_words(setup);
        if words.count() < needed {
            return Err(QueueError::NotAQueue { why: "too few words for the depth" });
        }
        words.store(layout::SLOTS, setup.slots(), Relaxed);
        words.store(layout::ENTRY, E as u64, Relaxed);
        words.store(layout::DEPTH, u64::from(setup.depth), Relaxed);
        words.store(layout::MAX_HELD, u64::from(setup.max_held), Relaxed);
        words.store(layout::OVERFLOW_POLICY, setup.overflow_policy as u64, Relaxed);
        words.store(layout::KIND, layout::LAYOUT, Release);
        Self::attach(words)
    }

    /// Attaches to an initialised queue.
    ///
    /// # Errors
    /// `NotAQueue`, with the reason.
    pub fn attach(words: W) -> Result<Self> {
        let refuse = |why| Err(QueueError::NotAQueue { why });
        match words.load(layout::KIND, Acquire) {
            layout::LAYOUT => {}
            other if other >> 16 == layout::LAYOUT >> 16 => return refuse("another version"),
            _ => return refuse("not initialised, or of another kind"),
        }
        if words.load(layout::ENTRY, Relaxed) != E as u64 {
            return refuse("its entries are of another size");
        }
        let policies =
            [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest];
        let policy = words.load(layout::OVERFLOW_POLICY, Relaxed);
        let numbers = [layout::DEPTH, layout::MAX_HELD].map(|at| words.load(at, Relaxed));
        let [depth, max_held] = numbers;
        let slots = words.load(layout::SLOTS, Relaxed);
        let overflow_policy = policies.into_iter().find(|one| *one as u64 == policy);
        let setup = overflow_policy.map(|overflow_policy| QueueSetup {
            depth: depth as u32,
            max_held: max_held as u32,
            overflow_policy,
        });
        let is_in_range = |number: u64| (1..=u64::from(Self::MAX_DEPTH)).contains(&number);
        let is_valid =
            |setup: &QueueSetup| numbers.into_iter().all(is_in_range) && setup.slots() == slots;
        let Some(setup) = setup.filter(is_valid) else {
            return refuse("its header is inconsistent");
        };
        if words.count() < Self::required_words(setup) {
            return refuse("it is truncated");
        }
        let (overflow_policy, fork_generation) = (setup.overflow_policy, ForkGeneration::current());
        let first_slot = setup.first_slot();
        Ok(Self { words, setup, first_slot, depth, overflow_policy, fork_generation })
    }

    /// Number of published entries.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.words.load(layout::TAIL, Acquire)
    }

    /// Number of marks that were cleared from unread entries to make space.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.words.load(layout::DROPPED, Relaxed)
    }

    /// Have all subscribers of the entry at this position released it, except evicted ones?
    #[inline]
    #[must_use]
    pub fn is_released(&self, position: u64) -> bool {
        self.find_slot(position).is_none_or(|slot| {
            let readers = self.words.load(slot + Self::READERS, Acquire);
            readers == 0 || self.class_of(readers) == HolderClass::Evicted
        })
    }

    /// The number of subscribers.
    #[must_use]
    pub fn subscribers(&self) -> u32 {
        self.active().count_ones()
    }

    /// All subscriptions, by slot.
    pub fn subscription_ids(&self) -> impl Iterator<Item = SubscriptionId> {
        self.subscriptions_among(self.active())
    }

    /// All subscriptions of a participant, including stopped and evicted ones that have not
    /// ended.
    pub fn subscriptions_of(
        &self,
        participant: Participant,
    ) -> impl Iterator<Item = SubscriptionId> {
        self.subscriptions_among(u32::MAX)
            .filter(move |subscription_id| subscription_id.participant() == Some(participant))
    }

    fn subscriptions_among(&self, slot_bits: u32) -> impl Iterator<Item = SubscriptionId> {
        (0..MAX_SUBSCRIBERS).filter(move |index| slot_bits >> index & 1 == 1).filter_map(|index| {
            let name = self.name_at(index);
            (name != 0).then(|| self.subscription_id(index, name))
        })
    }

    /// The subscription with [these bits](SubscriptionId::to_bits), even if it was stopped or
    /// evicted; None after it has ended.
    #[must_use]
    pub fn find_subscription(&self, bits: u64) -> Option<SubscriptionId> {
        let found = (0..MAX_SUBSCRIBERS).find(|index| bits != 0 && self.name_at(*index) == bits);
        found.map(|index| self.subscription_id(index, bits))
    }

    /// The last participant of this slot, even if it was removed.
    fn name_at(&self, index: u32) -> u64 {
        self.words.load(layout::subscriber(index, layout::PARTICIPANT), Acquire) & !FLAGS
    }

    /// The read position of this subscription, and the number of its unread entries that were
    /// dropped.
    #[must_use]
    pub fn progress_of(&self, subscription_id: SubscriptionId) -> (u64, u64) {
        let word =
            |which| self.words.load(layout::subscriber(subscription_id.index(), which), Relaxed);
        (word(layout::CURSOR), word(layout::MISSED))
    }

    /// The oldest position that this subscription has not read, or holds; without one, the next
    /// position to be published.
    #[must_use]
    pub fn oldest_unreleased(&self, subscription_id: SubscriptionId) -> u64 {
        let tail = self.position();
        if !self.is_subscription_active(subscription_id) {
            return tail;
        }
        let own_marks = layout::marks(subscription_id.index());
        let marked = self.entries_with(own_marks).map(|(position, _)| position);
        marked.min().unwrap_or(tail)
    }

    #[inline]
    fn active(&self) -> u32 {
        self.words.load(layout::ACTIVE, Acquire) as u32
    }

    /// The first word of the slot that the ring has for a position.
    #[inline]
    fn slot(&self, position: u64) -> usize {
        let at = position % self.depth;
        self.slot_named(self.words.load(layout::RING + at as usize, Acquire), at)
    }

    /// The first word of the slot with this name; 0 stands for the slot of the word itself.
    #[inline]
    fn slot_named(&self, name: u64, at: u64) -> usize {
        // Any process may have written the name.
        let number = name.checked_sub(1).filter(|number| *number < self.setup.slots());
        self.first_slot + number.unwrap_or(at) as usize * Self::STRIDE
    }

    /// The name of a slot.
    fn name_of_slot(&self, slot: usize) -> u64 {
        ((slot - self.first_slot) / Self::STRIDE) as u64 + 1
    }

    /// The first word of a spare slot.
    fn spare(&self, which: u64) -> usize {
        let at = self.depth + which;
        self.slot_named(self.words.load(layout::RING + at as usize, Acquire), at)
    }

    /// All spare slots that were ever used.
    fn spares_used(&self) -> impl Iterator<Item = usize> {
        let used = self.words.load(layout::SPARES_USED, Acquire).min(self.setup.spares());
        (0..used).map(|which| self.spare(which))
    }

    /// The slot of the entry at a position, in the ring or held elsewhere.
    #[inline]
    fn find_slot(&self, position: u64) -> Option<usize> {
        let is_there = |slot: &usize| {
            self.words.load(*slot + layout::SEQUENCE, Acquire) == position.wrapping_add(1)
        };
        let slot = self.slot(position);
        if is_there(&slot) { Some(slot) } else { self.spares_used().find(is_there) }
    }

    /// The number of unread entries, and of held entries, of this subscription.
    #[must_use]
    pub fn backlog_of(&self, subscription_id: SubscriptionId) -> (u32, u32) {
        let (cursor, _) = self.progress_of(subscription_id);
        let (mut unread, mut held) = (0, 0);
        for (position, _) in self.entries_with(layout::marks(subscription_id.index())) {
            if position < cursor { held += 1 } else { unread += 1 }
        }
        (unread, held)
    }

    /// Calls the callback with position and entry for each unread or held entry of the subscription,
    /// from this position on; also for a [halted](Self::halt) one.
    pub fn for_each_unreleased(
        &self,
        subscription_id: SubscriptionId,
        from: u64,
        mut each: impl FnMut(u64, [u64; E]),
    ) {
        let own_marks = layout::marks(subscription_id.index());
        let mut kept: Vec<_> = self.entries_with(own_marks).collect();
        kept.sort_unstable();
        for (position, slot) in kept.into_iter().filter(|(position, _)| *position >= from) {
            let entry = self.entry(slot);
            // It may have been released meanwhile, and belong to another subscription.
            if self.readers_at(slot, position) & own_marks != 0 {
                each(position, entry);
            }
        }
    }

    /// The subscriptions that leave no space for one more entry, each with the position of its
    /// oldest entry that does; the one with the oldest of all has to release it. These are readers
    /// that have not read a full queue; or, if subscribers hold the maximum of entries, those that
    /// hold any. Empty while there is space, and if [evicted](Self::evict) ones hold the missing places.
    #[must_use]
    pub fn blocking(&self) -> Vec<(SubscriptionId, u64)> {
        if self.has_room() {
            return Vec::new();
        }
        let slot = self.slot(self.position());
        let readers = self.words.load(slot + Self::READERS, Acquire);
        // Where entries are dropped, only held ones are in the way.
        let drops = self.overflow_policy.drops();
        let is_unread = !drops && self.holder_class(slot, readers).is_none();
        if !is_unread {
            let held = if drops { readers & !layout::UNREAD } else { readers };
            let class = self.class_of(held);
            let (_, taken) = self.spares_of(class);
            // Evicted ones hold what is missing.
            if class == HolderClass::Evicted || taken < u64::from(self.setup.max_held) {
                return Vec::new();
            }
        }
        let marked = self.entries_with(u64::MAX).map(|(position, slot)| {
            let readers = self.readers_at(slot, position);
            let all = (readers >> 32) as u32 | readers as u32;
            let blocks = (0..MAX_SUBSCRIBERS).filter(|index| {
                all >> index & 1 == 1
                    && !self.is_evicted(*index)
                    && self.is_held_at(*index, readers, position) != is_unread
            });
            (position, blocks.fold(0, |bits, index| bits | 1 << index))
        });
        self.first_of_each(marked)
    }

    /// Evicted subscriptions that still hold entries, each with the number of these.
    #[must_use]
    pub fn evicted_holders(&self) -> Vec<(SubscriptionId, u32)> {
        let evicted = (0..MAX_SUBSCRIBERS).filter(|index| self.is_evicted(*index));
        let bits = evicted.fold(0, |bits, index| bits | 1 << index);
        let all = self.subscriptions_among(bits).map(|it| (it, self.backlog_of(it)));
        let counted = all.map(|(it, (unread, held))| (it, unread + held));
        counted.filter(|(_, held)| *held > 0).collect()
    }

    /// The lowest position for each slot that is marked at one of these positions.
    fn first_of_each(
        &self,
        marked: impl Iterator<Item = (u64, u32)>,
    ) -> Vec<(SubscriptionId, u64)> {
        let (mut lowest, mut all) = ([u64::MAX; MAX_SUBSCRIBERS as usize], 0);
        for (position, slot_bits) in marked {
            all |= slot_bits;
            let mut left = slot_bits;
            while left != 0 {
                let index = left.trailing_zeros() as usize;
                lowest[index] = lowest[index].min(position);
                left &= left - 1;
            }
        }
        self.subscriptions_among(all)
            .map(|subscription_id| (subscription_id, lowest[subscription_id.index() as usize]))
            .collect()
    }

    /// The first position from here on whose entry has marks of any subscriber that was not evicted,
    /// and passes the filter.
    #[must_use]
    pub fn find_unreleased(
        &self,
        from: u64,
        mut is_meant: impl FnMut([u64; E]) -> bool,
    ) -> Option<u64> {
        // Evicted subscribers are not active. Their lines, which readers write, are read only for marks
        // of inactive ones.
        let active = u64::from(self.active());
        let active_marks = active << 32 | active;
        let is_unreleased = |slot, position| {
            let readers = self.readers_at(slot, position);
            readers & active_marks != 0
                || readers != 0 && self.class_of(readers) == HolderClass::Subscribed
        };
        // The filter does not cover an entry that was published there meanwhile.
        let mut is_found = |slot, position| {
            is_unreleased(slot, position)
                && is_meant(self.entry(slot))
                && is_unreleased(slot, position)
        };
        let tail = self.position();
        let mut ring = from.max(tail.saturating_sub(self.depth))..tail;
        let in_ring = ring.find(|position| is_found(self.slot(*position), *position));
        // Afterwards: an entry that gets another place is in this one first.
        let spares = self.spares_used().filter_map(|slot| {
            let position = self.words.load(slot + layout::SEQUENCE, Acquire).checked_sub(1)?;
            (position >= from && is_found(slot, position)).then_some(position)
        });
        spares.chain(in_ring).min()
    }

    /// Position and slot of each entry that has any of these marks.
    fn entries_with(&self, marks: u64) -> impl Iterator<Item = (u64, usize)> {
        self.slots_used().filter_map(move |slot| {
            let position = self.words.load(slot + layout::SEQUENCE, Acquire).checked_sub(1)?;
            (self.readers_at(slot, position) & marks != 0).then_some((position, slot))
        })
    }

    /// The marks of the entry at a position; none if its slot has another entry.
    fn readers_at(&self, slot: usize, position: u64) -> u64 {
        let readers = self.words.load(slot + Self::READERS, Acquire);
        let is_there = self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1;
        if is_there { readers } else { 0 }
    }

    /// The slots that ever had an entry: the others need not be touched.
    fn slots_used(&self) -> impl Iterator<Item = usize> {
        let spares = self.words.load(layout::SPARES_USED, Acquire).min(self.setup.spares());
        let ring = 0..self.depth.min(self.position());
        let all = ring.chain(self.depth..self.depth + spares);
        all.map(|number| self.first_slot + number as usize * Self::STRIDE)
    }

    fn is_evicted(&self, index: u32) -> bool {
        self.words.load(layout::subscriber(index, layout::PARTICIPANT), Acquire) & EVICTED != 0
    }

    /// Has the subscriber taken the entry at this position, which has its mark? A role that no
    /// entries may be dropped for keeps what it has not passed on: it counts as unread.
    fn is_held_at(&self, index: u32, readers: u64, position: u64) -> bool {
        if self.overflow_policy.drops() {
            return readers & layout::held_bit(index) != 0;
        }
        let is_role = || {
            Participant::from_number(self.name_at(index) as u32).is_some_and(Participant::is_role)
        };
        // A stopped or evicted subscriber has no unread entries.
        let word = |which| self.words.load(layout::subscriber(index, which), Acquire);
        (self.active() >> index & 1 == 0 || word(layout::CURSOR) > position) && !is_role()
    }

    /// Who holds the entry in this slot, which has these marks. None if anyone has it unread.
    fn holder_class(&self, slot: usize, readers: u64) -> Option<HolderClass> {
        if self.overflow_policy.drops() {
            return (readers & layout::UNREAD == 0).then(|| self.class_of(readers));
        }
        let position = self.words.load(slot + layout::SEQUENCE, Acquire).checked_sub(1)?;
        let mut marked = (0..MAX_SUBSCRIBERS).filter(|index| readers & layout::marks(*index) != 0);
        let is_held = marked.all(|index| self.is_held_at(index, readers, position));
        is_held.then(|| self.class_of(readers))
    }

    fn class_of(&self, readers: u64) -> HolderClass {
        let mut marked = (0..MAX_SUBSCRIBERS).filter(|index| readers & layout::marks(*index) != 0);
        match marked.all(|index| self.is_evicted(index)) {
            true => HolderClass::Evicted,
            false => HolderClass::Subscribed,
        }
    }

    #[inline]
    fn entry(&self, slot: usize) -> [u64; E] {
        std::array::from_fn(|at| self.words.load(slot + layout::PAYLOAD + at, Acquire))
    }
}
