//! Words by which streams say how far they are with a message, and what becomes of memory that a
//! stream is still at when nobody wants the message any more. For each block:
//!
//! ```text
//!  0 is the message there: the lower half, written by the publisher's stream
//!  1 the block's generation, and who publishes it; whether it is kept until that one is dead
//!  2 the block's generation, and the places of subscribers writer streams have still to pass it
//!  3 the block's generation, and the topic that these places are of
//! ```
//!
//! The first word counts up. A *turn* is one message that some stream writes: it is pending, then
//! ready or poisoned, and all later turns of the same block are beyond both. So a stream that
//! waits for a turn that is long over goes on.
//!
//! No block is given out again while a stream is at it, or a late write would hit another message.
//! Whoever would free it leaves it to the streams, in the name of an owner that is nobody. Anybody
//! [collects](Ledger::collect) it afterwards.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::{AllocatorError, Block, Caller, Owner, Participant, Words};

use super::{AllocResult, PoolControl, STREAM_OWNED, STREAMS};

/// Words for each block.
const WORDS: usize = 4;
const STATE: usize = 0;
const WRITER: usize = 1;
const READS_PENDING: usize = 2;
const READS_TOPIC: usize = 3;

/// Words of one of the system's pages: devices are let at whole pages.
pub(super) fn page() -> usize {
    ipc::page_size() / size_of::<u64>()
}

const PENDING: u32 = 1;
const READY: u32 = 2;
const POISONED: u32 = 3;
const PHASE: u32 = 3;
const PHASE_BITS: u32 = 2;

/// Beside the name of who publishes it, which has fewer bits: a stream of that one may be at the
/// block for as long as it lives.
const RETAINED: u32 = 1 << 31;

/// Whose the blocks are that were left to streams: nobody's, and so of nobody who can die.
pub(crate) const OWNED_BY_STREAMS: Owner = match Owner::other((1 << 29) - 1) {
    Some(owner) => owner,
    None => panic!("a number that an owner can have"),
};

/// Whole pages for the words of so many blocks: the first ones after all that is before.
pub(super) fn range_of(max_blocks: u32, before: usize, page: usize) -> Range<usize> {
    let first = before.next_multiple_of(page);
    first..first + (max_blocks as usize * WORDS).next_multiple_of(page)
}

/// How far a stream is with a message that it was published on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Readiness {
    /// The stream has not come so far.
    Pending,
    /// It is there, as all messages are that were not published on a stream.
    Ready,
    /// It will never be there: its publisher died, or its device failed, before it was written.
    Poisoned,
}

/// One message that some stream writes, among all that lie or lay in the same block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyncPoint(u32);

impl SyncPoint {
    const BITS: u32 = u32::BITS - PHASE_BITS;

    pub(crate) fn to_bits(self) -> u32 {
        self.0
    }

    /// From whatever bits.
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits & (u32::MAX >> PHASE_BITS))
    }

    fn after(word: u32) -> Self {
        Self::from_bits((word >> PHASE_BITS).wrapping_add(1))
    }

    fn word(self, phase: u32) -> u32 {
        self.0 << PHASE_BITS | phase
    }

    /// What the stream writes that writes the message; those that read it wait until the word is
    /// at least this, where numbers go round.
    pub(crate) fn ready(self) -> u32 {
        self.word(READY)
    }

    /// What a word says of this turn; None if another one has come since.
    fn seen_in(self, word: u32) -> Option<Readiness> {
        // A word of an earlier turn is one that was not written yet.
        let ahead = (word >> PHASE_BITS).wrapping_sub(self.0) << PHASE_BITS;
        match (ahead as i32, word & PHASE) {
            (1.., _) => None,
            (0, READY) => Some(Readiness::Ready),
            (0, POISONED) => Some(Readiness::Poisoned),
            _ => Some(Readiness::Pending),
        }
    }
}

const _: () = assert!(SyncPoint::BITS == 30);

fn generation(block: Block) -> u32 {
    (block.to_bits() >> 32) as u32
}

impl<W: Words + Clone> PoolControl<W> {
    fn at(&self, number: u32, which: usize) -> usize {
        match number < self.max_blocks {
            true => self.sync_words.start + number as usize * WORDS + which,
            // Swallows what it is told.
            false => self.words.count(),
        }
    }

    /// Where the word of a block lies that streams write and wait for, in bytes.
    pub(crate) fn sync_word_offset(&self, block: Block) -> u64 {
        (self.at(block.number(), STATE) * size_of::<u64>()) as u64
    }

    /// Where those of all blocks lie, in bytes.
    pub(crate) fn sync_words_range(&self) -> Range<u64> {
        let bytes = |words: usize| (words * size_of::<u64>()) as u64;
        bytes(self.sync_words.start)..bytes(self.sync_words.end)
    }

    /// Are messages handed over in the order of streams here?
    #[inline]
    pub(crate) fn is_stream_ordered(&self) -> bool {
        self.is_stream_ordered
    }

    /// Did any stream ever have to do with it?
    #[inline]
    fn is_used(&self) -> bool {
        self.words.load(STREAMS, Acquire) != 0
    }

    fn mark_used(&self) {
        if self.words.load(STREAMS, Relaxed) == 0 {
            self.words.store(STREAMS, 1, Release);
        }
    }

    /// A stream is going to write the message in this block, whose loan is `who`'s.
    pub(crate) fn begin_write(&self, block: Block, who: Participant) -> SyncPoint {
        self.mark_used();
        let number = block.number();
        let at = self.at(number, STATE);
        let sync_point = SyncPoint::after(self.words.load(at, Relaxed) as u32);
        let writer = u64::from(generation(block)) << 32 | u64::from(who.number());
        // First: whoever sees that it is pending sees whose it is, and does not take it for one of
        // the publisher before.
        self.words.store(self.at(number, WRITER), writer, Release);
        self.words.store(at, sync_point.word(PENDING).into(), Release);
        sync_point
    }

    /// Nothing comes of a turn: the message was not published. Or its stream has come so far, if
    /// that is seen by the processor.
    pub(crate) fn end_write(&self, block: Block, sync_point: SyncPoint) {
        let (at, pending) = (self.at(block.number(), STATE), sync_point.word(PENDING).into());
        let _ = self.words.compare_exchange(at, pending, sync_point.ready().into());
    }

    /// How far a message is; None if it is gone, and its block another's, or if it is none.
    pub(crate) fn readiness(&self, block: Block, sync_point: SyncPoint) -> Option<Readiness> {
        if !self.is_stream_ordered || self.owner(block).is_err() {
            return None;
        }
        sync_point.seen_in(self.words.load(self.at(block.number(), STATE), Acquire) as u32)
    }

    /// The message will not be written any more, and no stream writes its word: its publisher is
    /// dead, or its device is.
    pub(crate) fn poison(&self, block: Block, sync_point: SyncPoint) {
        self.poison_word(block.number(), sync_point.word(PENDING).into());
    }

    /// The message will not be said to be written, and nobody can tell how long its stream is at
    /// it: readers go on, and the block is nobody else's before its publisher is dead.
    pub(crate) fn poison_and_retain(&self, block: Block, sync_point: SyncPoint) {
        let at = self.at(block.number(), WRITER);
        let writer = self.words.load(at, Acquire);
        if (writer >> 32) as u32 == generation(block) {
            // First: whoever sees that it is poisoned sees that it is kept.
            let _ = self.words.compare_exchange(at, writer, writer | u64::from(RETAINED));
        }
        self.poison(block, sync_point);
    }

    fn poison_word(&self, number: u32, pending: u64) {
        let at = self.at(number, STATE);
        let poisoned = pending & !u64::from(PHASE) | u64::from(POISONED);
        let _ = self.words.compare_exchange(at, pending, poisoned);
    }

    /// No message of this one, who is dead, will be written any more.
    pub(super) fn poison_all(&self, who: Participant) {
        if !self.is_used() {
            return;
        }
        for number in 0..self.allocator.blocks_created() {
            let word = self.words.load(self.at(number, STATE), Acquire);
            let at = self.at(number, WRITER);
            let writer = self.words.load(at, Acquire);
            if writer as u32 & !RETAINED != who.number() {
                continue;
            }
            if word as u32 & PHASE == PENDING {
                self.poison_word(number, word);
            }
            if writer as u32 & RETAINED != 0 {
                let _ = self.words.compare_exchange(at, writer, writer & !u64::from(RETAINED));
            }
        }
    }

    /// A stream of the subscriber at this place has still to pass the message. Whoever is not
    /// evicted afterwards was not before, and nobody gets the block meanwhile. Of one who was, the
    /// block may be another's by now, of whose places this says nothing.
    pub(crate) fn begin_stream_read(&self, block: Block, topic: u32, place: u32) {
        if block.number() >= self.max_blocks {
            return;
        }
        self.mark_used();
        // First: whoever sees a place sees which topic's it is.
        self.update_tagged(block, READS_TOPIC, |_| topic);
        self.update_tagged(block, READS_PENDING, |places| {
            places | 1_u32.checked_shl(place).unwrap_or(0)
        });
        // Either whoever takes the message away sees this, or its subscriber sees that.
        self.words.fence();
    }

    /// It has.
    pub(crate) fn end_stream_read(&self, block: Block, place: u32) {
        self.clear_readers(block, 1_u32.checked_shl(place).unwrap_or(0));
    }

    /// Changes the lower half of one of a block's words, which is 0 if nothing was said of this
    /// block before; says nothing, if the block was given back.
    fn update_tagged(&self, block: Block, which: usize, change: impl Fn(u32) -> u32) {
        let at = self.at(block.number(), which);
        let mut was = self.words.load(at, Acquire);
        loop {
            // Looked at after the word: what was said since of a later block is not written over.
            let said = match (was >> 32) as u32 == generation(block) {
                true => was as u32,
                false if self.owner(block).is_ok() => 0,
                false => return,
            };
            let now = u64::from(generation(block)) << 32 | u64::from(change(said));
            match self.words.compare_exchange(at, was, now) {
                Ok(_) => return,
                Err(found) => was = found,
            }
        }
    }

    /// Streams of these places are not at this block any more.
    fn clear_readers(&self, block: Block, places: u32) {
        let at = self.at(block.number(), READS_PENDING);
        let mut was = self.words.load(at, Acquire);
        while (was >> 32) as u32 == generation(block) && was as u32 & places != 0 {
            match self.words.compare_exchange(at, was, was & !u64::from(places)) {
                Ok(_) => return,
                Err(found) => was = found,
            }
        }
    }

    /// The streams of these places of a topic, whose process is dead, are at no message any more.
    pub(crate) fn end_all_stream_reads(&self, topic: u32, places: u32) {
        if places == 0 || !self.is_used() {
            return;
        }
        for number in 0..self.allocator.blocks_created() {
            let word = |which| self.words.load(self.at(number, which), Acquire);
            let passing = word(READS_PENDING);
            let of_block = passing & !u64::from(u32::MAX);
            if passing as u32 & places != 0 && word(READS_TOPIC) == of_block | u64::from(topic) {
                self.clear_readers(Block::from_bits(of_block | u64::from(number)), places);
            }
        }
    }

    /// Is a stream still at this block?
    fn is_busy(&self, block: Block) -> bool {
        let word = |which| self.words.load(self.at(block.number(), which), Acquire);
        let is_of_block = |word: u64| (word >> 32) as u32 == generation(block);
        // Before whose it is: what is poisoned and kept is kept first.
        let (passing, is_pending) = (word(READS_PENDING), word(STATE) as u32 & PHASE == PENDING);
        let writer = word(WRITER);
        let is_written = is_pending || writer as u32 & RETAINED != 0;
        is_written && is_of_block(writer) || passing as u32 != 0 && is_of_block(passing)
    }

    /// Is it at its publisher's end at the earliest that no stream is at this block any more?
    fn is_retained(&self, block: Block) -> bool {
        let writer = self.words.load(self.at(block.number(), WRITER), Acquire);
        writer as u32 & RETAINED != 0 && (writer >> 32) as u32 == generation(block)
    }

    /// Frees a topic's block, unless that was done before; or leaves it to the streams that are
    /// at it. False if it could not be done now.
    ///
    /// No fence is needed to see that a stream is at it. A publisher says so before it hands the
    /// message over. A reader that says so and is not evicted afterwards is seen by who evicts it
    /// later, and by whoever takes the last mark off the message after that: who
    /// [evicts](ipc::Queue::evict) has a fence between taking the seat and the first mark.
    #[inline]
    pub(crate) fn retire(&self, caller: &Caller<'_>, block: Block, topic: Owner) -> bool {
        match self.is_used() && self.is_busy(block) {
            false => self.dispose(caller, block, topic),
            true => self.transfer_to_streams(caller, block, topic),
        }
    }

    #[cold]
    fn transfer_to_streams(&self, caller: &Caller<'_>, block: Block, topic: Owner) -> bool {
        match self.transfer(block, topic, OWNED_BY_STREAMS) {
            Ok(()) => {
                self.words.fetch_add(STREAM_OWNED, 1);
            }
            Err(AllocatorError::NotOwner { owner: OWNED_BY_STREAMS, .. }) => {}
            // It was freed before, or is no topic's.
            Err(_) => return true,
        }
        // By whom it was left is looked at once more: the stream may have been through since.
        self.free_if_idle(caller, block)
    }

    /// Frees a block that was left to streams, if they are through with it.
    pub(crate) fn free_if_idle(&self, caller: &Caller<'_>, block: Block) -> bool {
        self.words.fence();
        let is_left = self.owner(block) == Ok(OWNED_BY_STREAMS);
        !is_left || self.is_busy(block) || self.dispose(caller, block, OWNED_BY_STREAMS)
    }

    /// Is anything left to streams, as far as is known here?
    pub(crate) fn has_stream_owned(&self) -> bool {
        self.words.load(STREAM_OWNED, Acquire) != self.stream_owned_seen.load(Relaxed)
    }

    /// Frees what was left to streams that are through with it; gives how many blocks.
    pub(crate) fn collect(&self, caller: &Caller<'_>) -> AllocResult<usize> {
        if !self.is_used() {
            return Ok(0);
        }
        let left = self.words.load(STREAM_OWNED, Acquire);
        let mut is_any_busy = false;
        let freed = self.allocator.reclaim(caller, OWNED_BY_STREAMS, |block| {
            let is_busy = self.is_busy(block);
            // Who buries its publisher collects it.
            is_any_busy |= is_busy && !self.is_retained(block);
            is_busy
        })?;
        if !is_any_busy {
            // Those that are being left now are counted afterwards.
            self.stream_owned_seen.fetch_max(left, Relaxed);
        }
        if freed > 0 {
            self.changed();
        }
        Ok(freed)
    }
}

#[cfg(test)]
#[path = "sync_words_tests.rs"]
mod tests;
