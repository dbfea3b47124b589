//! Delivering what other nodes send, each message once.
//!
//! A message's number is its position in its own node's queue. A line for each topic of a node
//! keeps the last number that was delivered, and where: written before the delivery, it counts
//! only if that happened. Two copies, so that what was delivered before is known until then.
//!
//! When there is no free line, that of one from which nothing comes now is taken. If that one
//! comes again, it may bring a message again that it was not told had arrived; none is lost.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Caller, Published, QueueError, Words};

use super::entry::Entry;
use super::layout::{CACHE_LINE_WORDS, INBOUND_INTENT, MAX_ORIGINS, ORIGIN_USES, ORIGINS, WRITER};
use super::{TopicQueue, TopicWords};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::lock::lock;
use crate::pool::{PoolControl, id_to_words};

/// Its node, and its number there.
const IDENTITY: usize = 0;
const STATE: usize = 3;
const COPIES: usize = 4;
/// Words of a copy: the message's number, and where it was delivered.
const COPY: usize = 2;

/// No node's line. Else the lower bits say which copy holds, and the others when it was used.
const FREE: u64 = 0;
/// The first of the copies holds; the next number stands for the second.
const FIRST: u64 = 1;
/// Above these bits is the number of uses of all lines, as it was when this one was used.
const COPY_BITS: u32 = 2;
/// No message.
const NONE: u64 = u64::MAX;
/// Nowhere, since nobody wanted it: it counts.
const NO_POSITION: u64 = u64::MAX;
/// Lines that one node has at most: those of topics that it made anew take each other's place.
pub(super) const MAX_ORIGINS_PER_NODE: usize = 8;

/// Where messages come from: a topic of a node. One that the node makes anew under the same name
/// is another, since its messages begin from 0 on again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OriginId {
    /// The node.
    pub(crate) node: [u8; 16],
    /// The topic's number there.
    pub(crate) topic: u64,
}

impl OriginId {
    fn words(&self) -> [u64; 3] {
        let [low, high] = id_to_words(&self.node);
        [low, high, self.topic]
    }
}

/// What became of a message from another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It was delivered, and its block is the topic's.
    Delivered(Published),
    /// Nobody subscribes: it counts as delivered, and the block is still the caller's.
    NoSubscribers,
    /// It, or a later one, was delivered before; the block is still the caller's.
    Duplicate,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'a, W> {
    words: &'a W,
    at: usize,
}

impl<'a, W: Words> Origin<'a, W> {
    fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MAX_ORIGINS).map(move |number| Self { words, at: ORIGINS + number * CACHE_LINE_WORDS })
    }

    fn find(words: &'a W, origin: &OriginId) -> Option<Self> {
        let identity = origin.words();
        Self::all(words).find(|slot| slot.state() != FREE && slot.identity() == identity)
    }

    /// A line for one that has none. `tracked_origins` is what nobody may lose.
    fn make(words: &'a W, origin: &OriginId, tracked_origins: &[OriginId]) -> Option<Self> {
        let slot = Self::place_for(words, origin, tracked_origins)?;
        // Whoever dies in the middle of this leaves a line that is nobody's.
        words.store(slot.at + STATE, FREE, Release);
        for (at, word) in origin.words().into_iter().enumerate() {
            words.store(slot.at + IDENTITY + at, word, Release);
        }
        words.store(slot.at + COPIES, NONE, Release);
        words.store(slot.at + COPIES + COPY, NONE, Release);
        words.store(slot.at + STATE, slot.used(0), Release);
        Some(slot)
    }

    /// A free line; else that of one that nothing comes from now: the longest unused, but
    /// first of those that have a later one of the same node beside them. A node that has many
    /// already takes one of its own.
    fn place_for(words: &'a W, origin: &OriginId, tracked_origins: &[OriginId]) -> Option<Self> {
        let node = &origin.words()[..2];
        let of_node = Self::all(words).filter(|slot| slot.is_of(node)).count();
        if of_node < MAX_ORIGINS_PER_NODE
            && let Some(free) = Self::all(words).find(|slot| slot.state() == FREE)
        {
            return Some(free);
        }
        let is_idle = |slot: &Self| {
            let identity = slot.identity();
            !tracked_origins.iter().any(|one| one.words() == identity)
        };
        let may_go = |slot: &Self| of_node < MAX_ORIGINS_PER_NODE || slot.is_of(node);
        let idle = Self::all(words).filter(|slot| slot.state() != FREE && may_go(slot));
        idle.filter(is_idle).min_by_key(|slot| {
            let (node, uses) = (slot.identity(), slot.uses());
            let is_latest = !Self::all(words).any(|it| it.is_of(&node[..2]) && it.uses() > uses);
            (is_latest, uses)
        })
    }

    fn is_of(&self, node: &[u64]) -> bool {
        self.state() != FREE && self.identity()[..2] == *node
    }

    fn identity(&self) -> [u64; 3] {
        [0, 1, 2].map(|at| self.words.load(self.at + IDENTITY + at, Acquire))
    }

    fn state(&self) -> u64 {
        self.words.load(self.at + STATE, Acquire)
    }

    /// How often any line was used up to when this one was last.
    fn uses(&self) -> u64 {
        self.state() >> COPY_BITS
    }

    /// The state in which this copy holds, used now.
    fn used(&self, copy: usize) -> u64 {
        let all = self.words.load(ORIGIN_USES, Acquire);
        let mut mine = self.uses();
        // As long as no other is used, this one is the last that was.
        if mine == 0 || mine != all {
            mine = all.wrapping_add(1);
            self.words.store(ORIGIN_USES, mine, Release);
        }
        self.holds(copy, mine)
    }

    fn holds(&self, copy: usize, uses: u64) -> u64 {
        uses << COPY_BITS | (FIRST + copy as u64)
    }

    /// Which copy holds.
    fn current(&self) -> usize {
        usize::from(self.state() & ((1 << COPY_BITS) - 1) != FIRST)
    }

    fn copy(&self, which: usize) -> (u64, u64) {
        let word = |at| self.words.load(self.at + COPIES + which * COPY + at, Acquire);
        (word(0), word(1))
    }

    /// The last message that was delivered. The other copy is looked at only if what the current
    /// one says did not happen: what is in it otherwise is about to be said, or was taken back,
    /// and where that was to be another's message may be now.
    pub(super) fn last(&self, queue: &TopicQueue<W>) -> Option<u64> {
        let current = self.current();
        let (number, position) = self.copy(current);
        if number == NONE {
            return None;
        }
        if position == NO_POSITION || queue.was_delivered(position) {
            return Some(number);
        }
        let (number, _) = self.copy(1 - current);
        (number != NONE).then_some(number)
    }

    /// This message is about to be delivered at this position. What was said before counts.
    pub(super) fn record(&self, number: u64, position: u64) {
        let next = 1 - self.current();
        let at = self.at + COPIES + next * COPY;
        self.words.store(at, number, Release);
        self.words.store(at + 1, position, Release);
        self.words.store(self.at + STATE, self.used(next), Release);
    }

    /// What was said and did not happen is taken back. Nobody has delivered anything since.
    fn mark_disposed(&self, queue: &TopicQueue<W>) {
        let current = self.current();
        let (number, position) = self.copy(current);
        let happened = number == NONE || position == NO_POSITION || queue.was_delivered(position);
        if self.state() != FREE && !happened {
            self.words.store(self.at + STATE, self.holds(1 - current, self.uses()), Release);
        }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// The last message of a node's topic that was delivered.
    pub(crate) fn delivered(&self, origin: &OriginId) -> Option<u64> {
        Origin::find(self.words(), origin)?.last(self.inbound())
    }

    /// This process receives it from now on: what was delivered of it stays known, whoever
    /// else comes.
    pub(crate) fn track_origin(&self, origin: OriginId) {
        lock(&self.tracked_origins).push(origin);
    }

    /// It does not any more.
    pub(crate) fn untrack_origin(&self, origin: &OriginId) {
        let mut all = lock(&self.tracked_origins);
        if let Some(place) = all.iter().position(|one| one == origin) {
            all.swap_remove(place);
        }
    }

    /// No message of this one will come any more.
    pub(crate) fn remove_origin(&self, origin: &OriginId) {
        // Its line must not be given to another meanwhile.
        let _all = lock(&self.tracked_origins);
        if let Some(slot) = Origin::find(self.words(), origin) {
            self.words().store(slot.at + STATE, FREE, Release);
        }
    }

    /// Delivers a message of another node, whose block is the caller's, unless that was done
    /// before. One process at a time delivers: who serves the node.
    ///
    /// `WouldBlock` means that there is no room.
    pub(crate) fn deliver_in(
        &self,
        caller: &Caller<'_>,
        (origin, number): (&OriginId, u64),
        entry: Entry,
        inbound: &PoolControl<W>,
    ) -> Result<Delivery> {
        let slot = self.origin_to_write(caller, origin, inbound)?;
        if slot.last(self.inbound()).is_some_and(|last| number <= last) {
            return Ok(Delivery::Duplicate);
        }
        let way = self.inbound_handoff(inbound);
        match way.publish(caller, entry, |position| slot.record(number, position)) {
            Ok(published) => {
                // Those that wait for messages wait there.
                self.local().ring_messages();
                Ok(Delivery::Delivered(published))
            }
            Err(QueueError::NoSubscribers) => {
                slot.record(number, NO_POSITION);
                Ok(Delivery::NoSubscribers)
            }
            Err(cause) => {
                Err(error_mapping::from_queue("deliver a message", cause).on(self.name()))
            }
        }
    }

    /// A message that is dropped, for want of room, counts as delivered.
    pub(crate) fn skip_in(
        &self,
        caller: &Caller<'_>,
        (origin, number): (&OriginId, u64),
        inbound: &PoolControl<W>,
    ) -> Result<()> {
        let slot = self.origin_to_write(caller, origin, inbound)?;
        if slot.last(self.inbound()).is_none_or(|last| number > last) {
            slot.record(number, NO_POSITION);
        }
        Ok(())
    }

    pub(super) fn origin_to_write(
        &self,
        caller: &Caller<'_>,
        origin: &OriginId,
        inbound: &PoolControl<W>,
    ) -> Result<Origin<'_, W>> {
        if self.words().load(WRITER, Acquire) != u64::from(caller.me.number()) {
            self.settle_inbound(caller, inbound)?;
            self.words().store(WRITER, u64::from(caller.me.number()), Release);
        }
        if let Some(found) = Origin::find(self.words(), origin) {
            return Ok(found);
        }
        let tracked_origins = lock(&self.tracked_origins);
        Origin::make(self.words(), origin, &tracked_origins).ok_or_else(|| {
            let detail = format!("table of origins full: {MAX_ORIGINS}");
            Error::new("deliver a message", ErrorKind::TooMany, detail).on(self.name())
        })
    }

    /// After the one who delivered has died: what it was about to deliver and did not.
    pub(super) fn settle_inbound(
        &self,
        caller: &Caller<'_>,
        inbound: &PoolControl<W>,
    ) -> Result<()> {
        let operation = "clean up after a replication writer";
        // Whoever takes the lock from the dead finishes what was delivered.
        let looked = self.inbound().find_entries(caller, |_| {});
        looked.map_err(|cause| error_mapping::from_queue(operation, cause).on(self.name()))?;
        Origin::all(self.words()).for_each(|slot| slot.mark_disposed(self.inbound()));
        self.inbound_handoff(inbound).recover(caller)?;
        Ok(())
    }

    /// Has this one delivered, or been about to?
    pub(super) fn is_inbound_writer(&self, who: ipc::Participant) -> bool {
        self.words().load(WRITER, Acquire) == u64::from(who.number())
    }

    /// The last that delivered, or was about to.
    pub(super) fn writer(&self) -> Option<ipc::Participant> {
        ipc::Participant::from_number(self.words().load(WRITER, Acquire) as u32)
    }

    pub(super) fn clear_inbound_writer(&self) {
        self.words().store(WRITER, 0, Release);
    }

    fn inbound_handoff<'a>(
        &'a self,
        inbound: &'a PoolControl<W>,
    ) -> super::intent::BlockHandoff<'a, W> {
        self.handoff(
            super::intent::Intent { words: self.words(), at: INBOUND_INTENT },
            self.inbound(),
            inbound,
        )
    }
}
