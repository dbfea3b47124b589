//! A bounded queue in shared memory: many publishers, and many subscribers each of
//! which gets every entry.
//!
//! An entry is a few words, meant to name something larger. Each slot knows who has
//! still to read it, and an entry is delivered to all who subscribe at that moment
//! by one single store, which also counts them as its readers: no crash leaves a
//! reader without its entry, or an entry with readers that are not counted. Who
//! takes the last reader's mark off a slot is told so, and disposes of what the
//! entry names.
//!
//! Publishers keep each other out by a robust lock. Subscribers take none: a
//! subscriber of a queue that [refuses](OverflowPolicy::Refuse) when it is full only looks,
//! and takes its mark off when it is done. Where entries are dropped it claims each before it
//! looks: what a subscriber has not claimed yet is taken back when its publisher needs the room, from
//! this one alone; what it has claimed is its own until it lets go.
//!
//! ```
//! use ipc::{Caller, AlwaysAlive, LocalWords, Participant, Queue, QueueSetup, OverflowPolicy};
//! let setup = QueueSetup { depth: 4, overflow_policy: OverflowPolicy::Reject };
//! let words = LocalWords::zeroed(Queue::<LocalWords, 2>::required_words(setup));
//! let queue = Queue::<_, 2>::format(words, setup)?;
//! let caller = Caller::new(Participant::new(0, 1).unwrap(), &AlwaysAlive);
//!
//! let mut reader = queue.subscribe(&caller)?;
//! queue.publish(&caller, [7, 8], |_| {})?;
//! let taken = queue.take(&mut reader).unwrap();
//! assert_eq!((taken.entry, taken.position), ([7, 8], 0));
//! assert!(queue.release(&reader, taken.position).is_some(), "nobody else reads it");
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

use self::layout::{FIRST_SLOT, MAX_PROCESS_SUBSCRIBERS, MAX_SUBSCRIBERS};
use crate::lock::LockTimeout;
use crate::participant::Participant;
use crate::pidfd::ForkGeneration;
use crate::words::Words;

pub use self::publish::Published;
pub use self::subscriber::{Subscriber, SubscriptionId, TakenEntry};

/// A queue of entries of `E` words. See the [module](self).
#[derive(Debug)]
pub struct Queue<W, const E: usize> {
    words: W,
    slots: u64,
    depth: u64,
    overflow_policy: OverflowPolicy,
    fork_generation: ForkGeneration,
}

/// What happens to an entry for which there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverflowPolicy {
    /// It is not taken: the publisher waits, or goes on without.
    Reject,
    /// The oldest one makes room. Those who had still to read it learn how many they missed; the
    /// others miss nothing.
    DropOldest,
    /// It is refused if no subscriber has room for it. Where some have, the oldest one makes room as
    /// with [`DropOldest`](Self::DropOldest): those that lag miss it, and hold up nobody.
    DropNewest,
}

impl OverflowPolicy {
    /// Is it taken from subscribers what they have not claimed yet?
    fn drops(self) -> bool {
        !matches!(self, Self::Reject)
    }

    fn word(self) -> u64 {
        match self {
            Self::Reject => 0,
            Self::DropOldest => 1,
            Self::DropNewest => 2,
        }
    }
}

/// How a queue is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueSetup {
    /// Entries that may be waiting to be read.
    pub depth: u32,
    /// What happens to one more.
    pub overflow_policy: OverflowPolicy,
}

impl QueueSetup {
    /// Where entries are dropped readers may still hold what was dropped for
    /// others, and go on holding it: there have to be slots for those, too.
    fn slots(self) -> u64 {
        match self.overflow_policy {
            OverflowPolicy::Reject => u64::from(self.depth),
            OverflowPolicy::DropOldest | OverflowPolicy::DropNewest => {
                2 * u64::from(self.depth) + u64::from(MAX_SUBSCRIBERS)
            }
        }
    }
}

/// Why a queue did not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QueueError {
    /// As many as its depth have not been read, by any where entries are dropped, and else by all; or
    /// all slots are held.
    Full,
    /// Nobody subscribes: the entry was not taken.
    NoSubscribers,
    /// There is no place for one more subscriber.
    TooManySubscribers,
    /// The subscriber is none any more: it was removed, as dead or too slow.
    NotSubscribed,
    /// A living process holds the lock.
    LockTimeout(LockTimeout),
    /// The process forked since it opened the queue: two under one name would undo each
    /// other's doing. A child joins, attaches and subscribes by itself.
    Forked,
    /// What is said to be a queue is none, or another one.
    NotAQueue {
        /// What is wrong.
        why: &'static str,
    },
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the queue is full"),
            Self::NoSubscribers => f.write_str("the queue has no subscribers"),
            Self::TooManySubscribers => {
                write!(f, "there are {MAX_PROCESS_SUBSCRIBERS} subscribers already")
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

/// What queue calls give.
pub type Result<T> = std::result::Result<T, QueueError>;

impl<W: Words, const E: usize> Queue<W, E> {
    /// The most entries that may wait.
    pub const MAX_DEPTH: u32 = 1 << 20;

    /// In a slot.
    const READERS: usize = layout::readers(E);
    const DISPOSED: usize = layout::disposed(E);
    const NUMBER: usize = layout::number(E);

    /// Words that such a queue takes.
    #[must_use]
    pub fn required_words(setup: QueueSetup) -> usize {
        FIRST_SLOT + setup.slots() as usize * layout::stride(E)
    }

    /// Makes an empty queue. The words must be nobody else's until this is done.
    ///
    /// # Errors
    /// `NotAQueue` if there are too few words, or the depth is 0 or too large.
    pub fn format(words: W, setup: QueueSetup) -> Result<Self> {
        let needed = Self::required_words(setup).min(words.count());
        (layout::KIND..needed).for_each(|at| words.store(at, 0, Release));
        Self::format_zeroed(words, setup)
    }

    /// As [`format`](Self::format), in words that are all 0, as those of a new segment: what
    /// is not needed yet is not touched, and takes no memory.
    ///
    /// # Errors
    /// As `format`.
    pub fn format_zeroed(words: W, setup: QueueSetup) -> Result<Self> {
        if setup.depth == 0 || setup.depth > Self::MAX_DEPTH {
            return Err(QueueError::NotAQueue { why: "a depth from 1 to 2^20 is possible" });
        }
        let needed = Self::required_words(setup);
        if words.count() < needed {
            return Err(QueueError::NotAQueue { why: "too few words for the depth" });
        }
        words.store(layout::SLOTS, setup.slots(), Relaxed);
        words.store(layout::ENTRY, E as u64, Relaxed);
        words.store(layout::DEPTH, u64::from(setup.depth), Relaxed);
        words.store(layout::WHEN_FULL, setup.overflow_policy.word(), Relaxed);
        words.store(layout::KIND, layout::LAYOUT, Release);
        Self::attach(words)
    }

    /// Opens a queue that somebody made.
    ///
    /// # Errors
    /// `NotAQueue`, with what is wrong.
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
        let known =
            [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest];
        let overflow_policy = words.load(layout::WHEN_FULL, Relaxed);
        let Some(overflow_policy) = known.into_iter().find(|known| known.word() == overflow_policy)
        else {
            return refuse("its header is inconsistent");
        };
        let depth = words.load(layout::DEPTH, Relaxed);
        if depth == 0 || depth > u64::from(Self::MAX_DEPTH) {
            return refuse("its header is inconsistent");
        }
        let setup = QueueSetup { depth: depth as u32, overflow_policy };
        let slots = words.load(layout::SLOTS, Relaxed);
        if slots != setup.slots() {
            return refuse("its header is inconsistent");
        }
        if words.count() < Self::required_words(setup) {
            return refuse("it is truncated");
        }
        Ok(Self {
            words,
            slots,
            depth,
            overflow_policy,
            fork_generation: ForkGeneration::current(),
        })
    }

    /// Entries that were ever published, with positions that were skipped.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.words.load(layout::TAIL, Acquire)
    }

    /// Marks that were taken off unread entries to make room, in all.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.words.load(layout::DROPPED, Relaxed)
    }

    /// Has everybody released the entry of this position that it was delivered to?
    #[inline]
    #[must_use]
    pub fn is_released(&self, position: u64) -> bool {
        let slot = self.slot(position);
        self.words.load(slot + layout::SEQUENCE, Acquire) != position + 1
            || self.words.load(slot + Self::READERS, Acquire) == 0
    }

    /// How many subscribe.
    #[must_use]
    pub fn subscribers(&self) -> u32 {
        self.active().count_ones()
    }

    /// All subscriptions, by place.
    pub fn subscription_ids(&self) -> impl Iterator<Item = SubscriptionId> {
        self.subscriptions_among(self.active())
    }

    /// All that a participant has, also those that were stopped or evicted and have not ended.
    pub fn subscriptions_of(&self, who: Participant) -> impl Iterator<Item = SubscriptionId> {
        self.subscriptions_among(u32::MAX)
            .filter(move |subscription_id| subscription_id.who() == Some(who))
    }

    fn subscriptions_among(&self, places: u32) -> impl Iterator<Item = SubscriptionId> {
        (0..MAX_SUBSCRIBERS).filter(move |index| places >> index & 1 == 1).filter_map(|index| {
            let name = self.name_at(index);
            (name != 0).then_some(SubscriptionId {
                index,
                name,
                fork_generation: self.fork_generation,
            })
        })
    }

    /// The seat that has [these bits](Seat::to_bits), also of one that was stopped or evicted;
    /// None once it has ended.
    #[must_use]
    pub fn find_subscription(&self, bits: u64) -> Option<SubscriptionId> {
        let found = (0..MAX_SUBSCRIBERS).find(|index| bits != 0 && self.name_at(*index) == bits);
        found.map(|index| SubscriptionId {
            index,
            name: bits,
            fork_generation: self.fork_generation,
        })
    }

    /// Whose this place is, or was until it was removed.
    fn name_at(&self, index: u32) -> u64 {
        self.words.load(layout::subscriber(index, layout::PARTICIPANT), Acquire) & !layout::REMOVED
    }

    /// How far this subscription has read, and how many entries were dropped that it had
    /// still to read.
    #[must_use]
    pub fn progress_of(&self, subscription_id: SubscriptionId) -> (u64, u64) {
        let word =
            |which| self.words.load(layout::subscriber(subscription_id.index, which), Relaxed);
        (word(layout::CURSOR), word(layout::MISSED))
    }

    /// The oldest position whose entry this subscription has still to read, or holds; the
    /// position of the next one to be published if there is none.
    #[must_use]
    pub fn oldest_unreleased(&self, subscription_id: SubscriptionId) -> u64 {
        let tail = self.position();
        if !self.is_subscription_active(subscription_id) {
            return tail;
        }
        let mine =
            layout::unread_bit(subscription_id.index) | layout::held_bit(subscription_id.index);
        let is_marked = |position: &u64| self.readers_of(*position) & mine != 0;
        self.positions_kept().find(is_marked).unwrap_or(tail)
    }

    #[inline]
    fn active(&self) -> u32 {
        self.words.load(layout::ACTIVE, Acquire) as u32
    }

    /// Where the slot of a position begins.
    #[inline]
    fn slot(&self, position: u64) -> usize {
        FIRST_SLOT + (position % self.slots) as usize * layout::stride(E)
    }

    /// How many entries this subscription has still to read, and how many it holds.
    #[must_use]
    pub fn backlog_of(&self, subscription_id: SubscriptionId) -> (u32, u32) {
        let (cursor, _) = self.progress_of(subscription_id);
        let mine =
            layout::unread_bit(subscription_id.index) | layout::held_bit(subscription_id.index);
        let (mut unread, mut held) = (0, 0);
        for position in self.positions_kept().filter(|at| self.readers_of(*at) & mine != 0) {
            if position < cursor { held += 1 } else { unread += 1 }
        }
        (unread, held)
    }

    /// Calls for each entry, from this position on, that the subscription has still to read, or
    /// holds; also for one that was [halted](Self::halt).
    pub fn for_each_unreleased(
        &self,
        subscription_id: SubscriptionId,
        from: u64,
        mut each: impl FnMut([u64; E]),
    ) {
        let mine =
            layout::unread_bit(subscription_id.index) | layout::held_bit(subscription_id.index);
        let is_marked = |position| self.readers_of(position) & mine != 0;
        let kept = self.positions_kept();
        for position in kept.start.max(from)..kept.end {
            if is_marked(position) {
                let entry = self.entry(self.slot(position));
                // It may have been let go of meanwhile, and be another's.
                if is_marked(position) {
                    each(entry);
                }
            }
        }
    }

    /// Of each subscription that has entries still to read, or holds some, the oldest position of these.
    #[must_use]
    pub fn oldest_of_each(&self) -> Vec<(SubscriptionId, u64)> {
        let marks = |position| {
            let readers = self.readers_of(position);
            (position, (readers >> 32) as u32 | readers as u32)
        };
        self.first_of_each(self.positions_kept().map(marks))
    }

    /// Where entries are dropped: of each subscription that holds some, the oldest position of these. It
    /// may be older than all that can still be read.
    #[must_use]
    pub fn oldest_held_of_each(&self) -> Vec<(SubscriptionId, u64)> {
        let held = self.slots_used().filter_map(|slot| {
            let holders = self.words.load(slot + Self::READERS, Acquire) as u32;
            let position = self.words.load(slot + layout::SEQUENCE, Acquire).checked_sub(1)?;
            Some((position, holders & self.readers_of(position) as u32))
        });
        self.first_of_each(held)
    }

    /// Of positions, each with the places that are marked there, the lowest of each place.
    fn first_of_each(
        &self,
        marked: impl Iterator<Item = (u64, u32)>,
    ) -> Vec<(SubscriptionId, u64)> {
        let (mut lowest, mut all) = ([u64::MAX; MAX_SUBSCRIBERS as usize], 0);
        for (position, places) in marked {
            all |= places;
            let mut left = places;
            while left != 0 {
                let index = left.trailing_zeros() as usize;
                lowest[index] = lowest[index].min(position);
                left &= left - 1;
            }
        }
        self.subscriptions_among(all)
            .map(|subscription_id| (subscription_id, lowest[subscription_id.index as usize]))
            .collect()
    }

    /// The first position from here on whose entry somebody has still to read, or holds, and
    /// that is meant.
    #[must_use]
    pub fn find_unreleased(
        &self,
        from: u64,
        mut is_meant: impl FnMut([u64; E]) -> bool,
    ) -> Option<u64> {
        let kept = self.positions_kept();
        (kept.start.max(from)..kept.end).find(|position| {
            // What was published there meanwhile was asked for by nobody.
            self.readers_of(*position) != 0
                && is_meant(self.entry(self.slot(*position)))
                && self.readers_of(*position) != 0
        })
    }

    fn positions_kept(&self) -> std::ops::Range<u64> {
        let tail = self.position();
        tail.saturating_sub(self.slots)..tail
    }

    /// The marks on the entry of a position; none if its slot has another one.
    fn readers_of(&self, position: u64) -> u64 {
        let slot = self.slot(position);
        let readers = self.words.load(slot + Self::READERS, Acquire);
        let is_there = self.words.load(slot + layout::SEQUENCE, Acquire) == position + 1;
        if is_there { readers } else { 0 }
    }

    /// The slots that ever held an entry: the others need not be touched.
    fn slots_used(&self) -> impl Iterator<Item = usize> {
        (0..self.slots.min(self.position())).map(|position| self.slot(position))
    }

    #[inline]
    fn entry(&self, slot: usize) -> [u64; E] {
        std::array::from_fn(|at| self.words.load(slot + layout::PAYLOAD + at, Acquire))
    }
}
