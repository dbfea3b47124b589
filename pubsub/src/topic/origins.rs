//! Delivery of messages of other nodes, each message once.
//!
//! A message's number is its position in its own node's queue. A slot for each topic of a node has
//! the last delivered number, with its position here. It is written before the delivery, and valid
//! only if the delivery happened. There are two copies, so that the earlier number is known until
//! then.
//!
//! Without a free slot, the slot of an inactive origin is reused. If that origin becomes active
//! again, it may deliver a message again that it had no acknowledgement for; none is lost.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Caller, Participant, Published, QueueError, Words};
use threads::lock;

use super::entry::Entry;
use super::intent::{BlockHandoff, Intent};
use super::layout::{
    CACHE_LINE_WORDS, INBOUND_INTENT, MAX_ORIGINS, ORIGIN_USES, ORIGINS, WRITER, store_all,
};
use super::{TopicQueue, TopicWords};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::ids::id_to_words;
use crate::pool::PoolControl;

/// Word of an origin with its node, and its topic number there.
const IDENTITY: usize = 0;
const STATE: usize = 3;
const COPIES: usize = 4;
/// Words of a copy: the message's number, and its position here.
const COPY: usize = 2;

/// A free slot. Otherwise the lower bits name the valid copy, and the others the time of use.
const FREE: u64 = 0;
/// The first copy is valid; the next number stands for the second one.
const FIRST: u64 = 1;
/// Above these bits: the count of uses of all slots at the last use of this slot.
const COPY_BITS: u32 = 2;
/// No message.
const NONE: u64 = u64::MAX;
/// Without subscribers there is no position, but the message counts as delivered.
const NO_POSITION: u64 = u64::MAX;
/// Maximum number of slots of a node: topics that it re-created replace each other.
pub(super) const MAX_ORIGINS_PER_NODE: usize = 8;

/// The origin of messages: a topic of a node. A topic that is re-created under the same name is
/// another one, since its positions begin at 0 again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OriginId {
    pub(crate) node: [u8; 16],
    /// The topic's number on that node.
    pub(crate) topic: u64,
}

impl OriginId {
    fn words(&self) -> [u64; 3] {
        let [low, high] = id_to_words(&self.node);
        [low, high, self.topic]
    }
}

/// Result of the delivery of a message of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The message was delivered, and its block belongs to the topic.
    Delivered(Published),
    /// There are no subscribers: it counts as delivered, and the block still belongs to the caller.
    NoSubscribers,
    /// This message, or a later one, was delivered before; the block still belongs to the caller.
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

    /// A slot for a new origin. Slots of `tracked_origins` are not reused.
    fn make(words: &'a W, origin: &OriginId, tracked_origins: &[OriginId]) -> Option<Self> {
        let slot = Self::slot_for(words, origin, tracked_origins)?;
        // A process that dies in the middle of this leaves a free slot.
        words.store(slot.at + STATE, FREE, Release);
        store_all(words, slot.at + IDENTITY, origin.words());
        words.store(slot.at + COPIES, NONE, Release);
        words.store(slot.at + COPIES + COPY, NONE, Release);
        words.store(slot.at + STATE, slot.used(0), Release);
        Some(slot)
    }

    /// A free slot; otherwise that of an inactive origin: the longest unused, but first those of
    /// nodes that have a later one. A node with the maximum number of slots reuses one of its own.
    fn slot_for(words: &'a W, origin: &OriginId, tracked_origins: &[OriginId]) -> Option<Self> {
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

    /// The count of uses of all slots at the last use of this one.
    fn uses(&self) -> u64 {
        self.state() >> COPY_BITS
    }

    /// The state with this copy valid, used now.
    fn used(&self, copy: usize) -> u64 {
        let all = self.words.load(ORIGIN_USES, Acquire);
        let mut own_uses = self.uses();
        // While no other slot is used, this one is the last used.
        if own_uses == 0 || own_uses != all {
            own_uses = all.wrapping_add(1);
            self.words.store(ORIGIN_USES, own_uses, Release);
        }
        self.holds(copy, own_uses)
    }

    fn holds(&self, copy: usize, uses: u64) -> u64 {
        uses << COPY_BITS | (FIRST + copy as u64)
    }

    /// The valid copy.
    fn current(&self) -> usize {
        usize::from(self.state() & ((1 << COPY_BITS) - 1) != FIRST)
    }

    fn copy(&self, which: usize) -> (u64, u64) {
        let word = |at| self.words.load(self.at + COPIES + which * COPY + at, Acquire);
        (word(0), word(1))
    }

    /// The last delivered message. The other copy is only read if the delivery of the current one
    /// did not happen. Otherwise it may be about to be written, or was invalidated, and its
    /// position may belong to another message now.
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

    /// Records that this message is about to be delivered at this position. The earlier copy is
    /// valid now.
    pub(super) fn record(&self, number: u64, position: u64) {
        let next = 1 - self.current();
        store_all(self.words, self.at + COPIES + next * COPY, [number, position]);
        self.words.store(self.at + STATE, self.used(next), Release);
    }

    /// Invalidates a record whose delivery did not happen. No process has delivered anything since.
    fn mark_disposed(&self, queue: &TopicQueue<W>) {
        let current = self.current();
        let (number, position) = self.copy(current);
        let is_done = number == NONE || position == NO_POSITION || queue.was_delivered(position);
        if self.state() != FREE && !is_done {
            self.words.store(self.at + STATE, self.holds(1 - current, self.uses()), Release);
        }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// The last delivered message of a node's topic.
    pub(crate) fn delivered(&self, origin: &OriginId) -> Option<u64> {
        Origin::find(self.words(), origin)?.last(self.inbound())
    }

    /// This process receives the origin from now on: its slot is not reused.
    pub(crate) fn track_origin(&self, origin: OriginId) {
        lock(&self.tracked_origins).push(origin);
    }

    pub(crate) fn untrack_origin(&self, origin: &OriginId) {
        let mut all = lock(&self.tracked_origins);
        if let Some(index) = all.iter().position(|one| one == origin) {
            all.swap_remove(index);
        }
    }

    /// No more messages of this origin will be received.
    pub(crate) fn remove_origin(&self, origin: &OriginId) {
        // Its slot must not be reused in the meantime.
        let _all = lock(&self.tracked_origins);
        if let Some(slot) = Origin::find(self.words(), origin) {
            self.words().store(slot.at + STATE, FREE, Release);
        }
    }

    /// Delivers a message of another node, whose block is the caller's, unless that was done
    /// before. One process at a time delivers: the service.
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
        let handoff = self.inbound_handoff(inbound);
        match handoff.publish(caller, entry, |position| slot.record(number, position)) {
            Ok(published) => {
                // Subscribers wait at this doorbell.
                self.local().messages().ring();
                Ok(Delivery::Delivered(published))
            }
            Err(QueueError::NoSubscribers) => {
                slot.record(number, NO_POSITION);
                Ok(Delivery::NoSubscribers)
            }
            Err(cause) => Err(cause.during("deliver message to topic").on(self.name())),
        }
    }

    /// A message that is dropped for lack of room counts as delivered.
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
        let me = u64::from(caller.me.number());
        if self.words().load(WRITER, Acquire) != me {
            self.settle_inbound(caller, inbound, me)?;
        }
        if let Some(found) = Origin::find(self.words(), origin) {
            return Ok(found);
        }
        let tracked_origins = lock(&self.tracked_origins);
        Origin::make(self.words(), origin, &tracked_origins).ok_or_else(|| {
            let detail = format!("table of origins full: {MAX_ORIGINS}");
            Error::new("deliver message to topic", ErrorKind::TooMany, detail).on(self.name())
        })
    }

    /// Repairs the unfinished delivery of a dead service. Then `writer` is the last writer; 0: none.
    pub(super) fn settle_inbound(
        &self,
        caller: &Caller<'_>,
        inbound: &PoolControl<W>,
        writer: u64,
    ) -> Result<()> {
        // The process that takes the lock of a dead one finishes its delivery.
        let searched = self.inbound().find_entries(caller, |_| {});
        searched.during("reclaim after replication writer of topic").on(self.name())?;
        Origin::all(self.words()).for_each(|slot| slot.mark_disposed(self.inbound()));
        self.inbound_handoff(inbound).recover(caller)?;
        self.words().store(WRITER, writer, Release);
        Ok(())
    }

    /// The process that last delivered, or was about to.
    pub(super) fn writer(&self) -> Option<Participant> {
        Participant::from_number(self.words().load(WRITER, Acquire) as u32)
    }

    fn inbound_handoff<'a>(&'a self, inbound: &'a PoolControl<W>) -> BlockHandoff<'a, W> {
        self.handoff(Intent::new(self.words(), INBOUND_INTENT), self.inbound(), inbound)
    }
}
