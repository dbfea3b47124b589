//! Delivering what other nodes send, each message once.
//!
//! A message's number is its position in its own node's queue. A line for each node keeps the
//! last number that was delivered, and where: written before the delivery, it counts only if
//! that happened. Two copies, so that what was delivered before is known until then.

use std::sync::atomic::Ordering::{Acquire, Release};

use ipc::{Caller, Published, QueueError, Words};

use super::entry::Entry;
use super::layout::{ARRIVING, LINE, MOST_ORIGINS, ORIGINS, WRITER};
use super::{Line, TopicWords};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Ledger, origin_words};

const IDENTITY: usize = 0;
const STATE: usize = 2;
const COPIES: usize = 3;
/// Words of a copy: the message's number, and where it was delivered.
const COPY: usize = 2;

/// No node's line.
const FREE: u64 = 0;
/// The first of the copies holds; the next number stands for the second.
const FIRST: u64 = 1;
/// No message.
const NONE: u64 = u64::MAX;
/// Nowhere, since nobody wanted it: it counts.
const NOWHERE: u64 = u64::MAX;

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
struct Origin<'a, W> {
    words: &'a W,
    at: usize,
}

impl<'a, W: Words> Origin<'a, W> {
    fn all(words: &'a W) -> impl Iterator<Item = Self> {
        (0..MOST_ORIGINS).map(move |number| Self { words, at: ORIGINS + number * LINE })
    }

    fn find(words: &'a W, origin: &[u8; 16]) -> Option<Self> {
        let identity = origin_words(origin);
        Self::all(words).find(|line| line.state() != FREE && line.identity() == identity)
    }

    fn make(words: &'a W, origin: &[u8; 16]) -> Option<Self> {
        let line = Self::all(words).find(|line| line.state() == FREE)?;
        for (at, word) in origin_words(origin).into_iter().enumerate() {
            words.store(line.at + IDENTITY + at, word, Release);
        }
        words.store(line.at + COPIES, NONE, Release);
        words.store(line.at + COPIES + COPY, NONE, Release);
        words.store(line.at + STATE, FIRST, Release);
        Some(line)
    }

    fn identity(&self) -> [u64; 2] {
        [0, 1].map(|at| self.words.load(self.at + IDENTITY + at, Acquire))
    }

    fn state(&self) -> u64 {
        self.words.load(self.at + STATE, Acquire)
    }

    /// Which copy holds.
    fn current(&self) -> usize {
        usize::from(self.state() != FIRST)
    }

    fn copy(&self, which: usize) -> (u64, u64) {
        let word = |at| self.words.load(self.at + COPIES + which * COPY + at, Acquire);
        (word(0), word(1))
    }

    /// The last message that was delivered.
    fn last(&self, queue: &Line<W>) -> Option<u64> {
        let counts = |(_, position)| position == NOWHERE || queue.was_delivered(position);
        let current = self.current();
        let copies = [self.copy(current), self.copy(1 - current)];
        let (number, _) = copies.into_iter().find(|copy| copy.0 != NONE && counts(*copy))?;
        Some(number)
    }

    /// This message is about to be delivered at this position. What was said before counts.
    fn note(&self, number: u64, position: u64) {
        let next = 1 - self.current();
        let at = self.at + COPIES + next * COPY;
        self.words.store(at, number, Release);
        self.words.store(at + 1, position, Release);
        self.words.store(self.at + STATE, FIRST + next as u64, Release);
    }

    /// What was said and did not happen is taken back. Nobody has delivered anything since.
    fn settle(&self, queue: &Line<W>) {
        let current = self.current();
        let (number, position) = self.copy(current);
        let happened = number == NONE || position == NOWHERE || queue.was_delivered(position);
        if self.state() != FREE && !happened {
            self.words.store(self.at + STATE, FIRST + (1 - current) as u64, Release);
        }
    }
}

impl<W: Words + Clone> TopicWords<W> {
    /// The last message of a node that was delivered.
    pub(crate) fn delivered(&self, origin: &[u8; 16]) -> Option<u64> {
        Origin::find(self.words(), origin)?.last(self.arrivals())
    }

    /// No message of this node will come any more.
    pub(crate) fn forget_origin(&self, origin: &[u8; 16]) {
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
        (origin, number): (&[u8; 16], u64),
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
        (origin, number): (&[u8; 16], u64),
        arrivals: &Ledger<W>,
    ) -> Result<()> {
        let line = self.origin_to_write(caller, origin, arrivals)?;
        if line.last(self.arrivals()).is_none_or(|last| number > last) {
            line.note(number, NOWHERE);
        }
        Ok(())
    }

    fn origin_to_write(
        &self,
        caller: &Caller<'_>,
        origin: &[u8; 16],
        arrivals: &Ledger<W>,
    ) -> Result<Origin<'_, W>> {
        if self.words().load(WRITER, Acquire) != u64::from(caller.me.number()) {
            self.settle_arrivals(caller, arrivals)?;
            self.words().store(WRITER, u64::from(caller.me.number()), Release);
        }
        let found = Origin::find(self.words(), origin);
        found.or_else(|| Origin::make(self.words(), origin)).ok_or_else(|| {
            let detail = format!("messages of {MOST_ORIGINS} nodes come already");
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
