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
use super::layout::{ARRIVING, LINE, MOST_ORIGINS, ORIGIN_USES, ORIGINS, WRITER};
use super::{Line, TopicWords};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::pool::{Ledger, origin_words};

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
const NOWHERE: u64 = u64::MAX;
/// Lines that one node has at most: those of topics that it made anew take each other's place.
pub(super) const MOST_OF_NODE: usize = 8;

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
        let [low, high] = origin_words(&self.node);
        [low, high, self.topic]
    }
}

/// What became of a message from another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It was delivered, and its block is the topic's.
    Delivered(Published),
    /// Nobody subscribes: it counts as delivered, and the block is still the caller's.
    Nobody,
    /// It, or a later one, was delivered before; the block is still the caller's.
    Before,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Origin<'a, W> {
    words: &'a W,
    at: usize,
}

impl<'a, W: Words> Origin<'a, W> {
    fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MOST_ORIGINS).map(move |number| Self { words, at: ORIGINS + number * LINE })
    }

    fn find(words: &'a W, origin: &OriginId) -> Option<Self> {
        let identity = origin.words();
        Self::all(words).find(|line| line.state() != FREE && line.identity() == identity)
    }

    /// A line for one that has none. `received` is what nobody may lose.
    fn make(words: &'a W, origin: &OriginId, received: &[OriginId]) -> Option<Self> {
        let line = Self::place_for(words, origin, received)?;
        // Whoever dies in the middle of this leaves a line that is nobody's.
        words.store(line.at + STATE, FREE, Release);
        for (at, word) in origin.words().into_iter().enumerate() {
            words.store(line.at + IDENTITY + at, word, Release);
        }
        words.store(line.at + COPIES, NONE, Release);
        words.store(line.at + COPIES + COPY, NONE, Release);
        words.store(line.at + STATE, line.used(0), Release);
        Some(line)
    }

    /// A free line; else that of one that nothing comes from now: the longest unused, but
    /// first of those that have a later one of the same node beside them. A node that has many
    /// already takes one of its own.
    fn place_for(words: &'a W, origin: &OriginId, received: &[OriginId]) -> Option<Self> {
        let node = &origin.words()[..2];
        let of_node = Self::all(words).filter(|line| line.is_of(node)).count();
        if of_node < MOST_OF_NODE
            && let Some(free) = Self::all(words).find(|line| line.state() == FREE)
        {
            return Some(free);
        }
        let is_idle = |line: &Self| {
            let identity = line.identity();
            !received.iter().any(|one| one.words() == identity)
        };
        let may_go = |line: &Self| of_node < MOST_OF_NODE || line.is_of(node);
        let idle = Self::all(words).filter(|line| line.state() != FREE && may_go(line));
        idle.filter(is_idle).min_by_key(|line| {
            let (node, uses) = (line.identity(), line.uses());
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
    pub(super) fn last(&self, queue: &Line<W>) -> Option<u64> {
        let current = self.current();
        let (number, position) = self.copy(current);
        if number == NONE {
            return None;
        }
        if position == NOWHERE || queue.was_delivered(position) {
            return Some(number);
        }
        let (number, _) = self.copy(1 - current);
        (number != NONE).then_some(number)
    }

    /// This message is about to be delivered at this position. What was said before counts.
    pub(super) fn note(&self, number: u64, position: u64) {
        let next = 1 - self.current();
        let at = self.at + COPIES + next * COPY;
        self.words.store(at, number, Release);
        self.words.store(at + 1, position, Release);
        self.words.store(self.at + STATE, self.used(next), Release);
    }

    /// What was said and did not happen is taken back. Nobody has delivered anything since.
    fn settle(&self, queue: &Line<W>) {
        let current = self.current();
        let (number, position) = self.copy(current);
        let happened = number == NONE || position == NOWHERE || queue.was_delivered(position);
        if self.state() != FREE && !happened {
            self.words.store(self.at + STATE, self.holds(1 - current, self.uses()), Release);
        }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// The last message of a node's topic that was delivered.
    pub(crate) fn delivered(&self, origin: &OriginId) -> Option<u64> {
        Origin::find(self.words(), origin)?.last(self.arrivals())
    }

    /// This process receives it from now on: what was delivered of it stays known, whoever
    /// else comes.
    pub(crate) fn receives(&self, origin: OriginId) {
        lock(&self.received).push(origin);
    }

    /// It does not any more.
    pub(crate) fn receives_no_more(&self, origin: &OriginId) {
        let mut all = lock(&self.received);
        if let Some(place) = all.iter().position(|one| one == origin) {
            all.swap_remove(place);
        }
    }

    /// No message of this one will come any more.
    pub(crate) fn forget_origin(&self, origin: &OriginId) {
        // Its line must not be given to another meanwhile.
        let _all = lock(&self.received);
        if let Some(line) = Origin::find(self.words(), origin) {
            self.words().store(line.at + STATE, FREE, Release);
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
        arrivals: &Ledger<W>,
    ) -> Result<Delivery> {
        let line = self.origin_to_write(caller, origin, arrivals)?;
        if line.last(self.arrivals()).is_some_and(|last| number <= last) {
            return Ok(Delivery::Before);
        }
        let way = self.arriving(arrivals);
        match way.publish(caller, entry, |position| line.note(number, position)) {
            Ok(published) => {
                // Those that wait for messages wait there.
                self.here().ring_messages();
                Ok(Delivery::Delivered(published))
            }
            Err(QueueError::NoSubscribers) => {
                line.note(number, NOWHERE);
                Ok(Delivery::Nobody)
            }
            Err(cause) => Err(below::of_queue("deliver a message", cause).on(self.name())),
        }
    }

    /// A message that is dropped, for want of room, counts as delivered.
    pub(crate) fn pass_over_in(
        &self,
        caller: &Caller<'_>,
        (origin, number): (&OriginId, u64),
        arrivals: &Ledger<W>,
    ) -> Result<()> {
        let line = self.origin_to_write(caller, origin, arrivals)?;
        if line.last(self.arrivals()).is_none_or(|last| number > last) {
            line.note(number, NOWHERE);
        }
        Ok(())
    }

    pub(super) fn origin_to_write(
        &self,
        caller: &Caller<'_>,
        origin: &OriginId,
        arrivals: &Ledger<W>,
    ) -> Result<Origin<'_, W>> {
        if self.words().load(WRITER, Acquire) != u64::from(caller.me.number()) {
            self.settle_arrivals(caller, arrivals)?;
            self.words().store(WRITER, u64::from(caller.me.number()), Release);
        }
        if let Some(found) = Origin::find(self.words(), origin) {
            return Ok(found);
        }
        let received = lock(&self.received);
        Origin::make(self.words(), origin, &received).ok_or_else(|| {
            let detail = format!("messages of {MOST_ORIGINS} topics of other nodes come already");
            Error::new("deliver a message", ErrorKind::TooMany, detail).on(self.name())
        })
    }

    /// After the one who delivered has died: what it was about to deliver and did not.
    pub(super) fn settle_arrivals(&self, caller: &Caller<'_>, arrivals: &Ledger<W>) -> Result<()> {
        let operation = "clean up after one who delivered";
        // Whoever takes the lock from the dead finishes what was delivered.
        let looked = self.arrivals().find_entries(caller, |_| {});
        looked.map_err(|cause| below::of_queue(operation, cause).on(self.name()))?;
        Origin::all(self.words()).for_each(|line| line.settle(self.arrivals()));
        self.arriving(arrivals).recover(caller)?;
        Ok(())
    }

    /// Has this one delivered, or been about to?
    pub(super) fn is_writer(&self, who: ipc::Participant) -> bool {
        self.words().load(WRITER, Acquire) == u64::from(who.number())
    }

    /// The last that delivered, or was about to.
    pub(super) fn writer(&self) -> Option<ipc::Participant> {
        ipc::Participant::from_number(self.words().load(WRITER, Acquire) as u32)
    }

    pub(super) fn has_no_writer(&self) {
        self.words().store(WRITER, 0, Release);
    }

    fn arriving<'a>(&'a self, arrivals: &'a Ledger<W>) -> super::intent::HandOver<'a, W> {
        self.hand_over(
            super::intent::Intent { words: self.words(), at: ARRIVING },
            self.arrivals(),
            arrivals,
        )
    }
}
