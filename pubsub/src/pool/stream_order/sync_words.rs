//! Sync words: streams report their progress with a message there, and blocks that a stream still
//! uses are freed later. Four words for each block:
//!
//! ```text
//!  0 sync point and phase of the message, written by the publisher's stream
//!  1 generation; publisher; whether the block is retained until its death
//!  2 generation; subscription indices whose stream reads are pending
//!  3 generation; topic of these subscriptions
//! ```
//!
//! The first word counts up. A *sync point* is one message that a stream writes: it is pending,
//! then ready or poisoned. All later sync points of the block compare greater, so a stream that
//! waits for an old one continues.
//!
//! No block is allocated again while a stream uses it, or a late write would hit another message.
//! Instead of freeing it, a process transfers it to an owner that stands for all streams. Any
//! process [collects](PoolControl::collect) it afterwards.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use ipc::{AllocatorError, Block, Caller, Owner, Participant, Words};

use crate::pool::PoolControl;
use crate::pool::control::{AllocResult, STREAM_OWNED, STREAMS, SYNC_WORDS};

const STATE: usize = 0;
const WRITER: usize = 1;
const READS_PENDING: usize = 2;
const READS_TOPIC: usize = 3;

const PENDING: u32 = 1;
const READY: u32 = 2;
const POISONED: u32 = 3;
const PHASE: u32 = 3;
const PHASE_BITS: u32 = 2;

/// A flag above the publisher's number, which has fewer bits: a stream of that publisher may use
/// the block as long as its process lives.
const RETAINED: u32 = 1 << 31;

/// Owner of the stream-owned blocks: no participant, so it never dies.
pub(crate) const OWNED_BY_STREAMS: Owner = match Owner::other((1 << 29) - 1) {
    Some(owner) => owner,
    None => panic!("a number that an owner can have"),
};

/// State of a message that was published in stream order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Readiness {
    /// The stream has not written it yet.
    Pending,
    /// The message is complete, like all messages that were published without a stream.
    Ready,
    /// The message will never be complete: its publisher died, or its device failed, before it was
    /// written.
    Poisoned,
}

/// One message that a stream writes, among all messages of the same block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SyncPoint(u32);

impl SyncPoint {
    const BITS: u32 = u32::BITS - PHASE_BITS;

    pub(crate) fn to_bits(self) -> u32 {
        self.0
    }

    /// Masks any bits.
    pub(crate) fn from_bits(bits: u32) -> Self {
        Self(bits & (u32::MAX >> PHASE_BITS))
    }

    fn after(word: u32) -> Self {
        Self::from_bits((word >> PHASE_BITS).wrapping_add(1))
    }

    fn word(self, phase: u32) -> u32 {
        self.0 << PHASE_BITS | phase
    }

    /// The value that the writing stream stores; reading streams wait until the word is at least
    /// this, with wrap-around.
    pub(crate) fn ready(self) -> u32 {
        self.word(READY)
    }

    /// The state of this sync point in a word; None after a later sync point.
    fn seen_in(self, word: u32) -> Option<Readiness> {
        // A word of an earlier sync point: not written yet.
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
            true => self.sync_words.start + number as usize * SYNC_WORDS + which,
            // An invalid number: stores have no effect.
            false => self.words.count(),
        }
    }

    /// Byte offset of the word of a block that streams write and wait for.
    pub(crate) fn sync_word_offset(&self, block: Block) -> u64 {
        (self.at(block.number(), STATE) * size_of::<u64>()) as u64
    }

    pub(crate) fn sync_words_range(&self) -> Range<u64> {
        let bytes = |words: usize| (words * size_of::<u64>()) as u64;
        bytes(self.sync_words.start)..bytes(self.sync_words.end)
    }

    /// Returns true if messages of this pool are published in stream order.
    #[inline]
    pub(crate) fn is_stream_ordered(&self) -> bool {
        self.is_stream_ordered
    }

    /// Returns true if any stream ever used this pool.
    #[inline]
    fn is_used(&self) -> bool {
        self.words.load(STREAMS, Acquire) != 0
    }

    fn mark_used(&self) {
        if self.words.load(STREAMS, Relaxed) == 0 {
            self.words.store(STREAMS, 1, Release);
        }
    }

    /// A stream will write the message in this block, a loan of `participant`.
    pub(crate) fn begin_write(&self, block: Block, participant: Participant) -> SyncPoint {
        self.mark_used();
        let number = block.number();
        let at = self.at(number, STATE);
        let sync_point = SyncPoint::after(self.words.load(at, Relaxed) as u32);
        let writer = u64::from(generation(block)) << 32 | u64::from(participant.number());
        // First: a reader of the pending state then sees this publisher, and not the previous one.
        self.words.store(self.at(number, WRITER), writer, Release);
        self.words.store(at, sync_point.word(PENDING).into(), Release);
        sync_point
    }

    /// Ends a write: the message was not published, or the processor has seen that its stream
    /// finished.
    pub(crate) fn end_write(&self, block: Block, sync_point: SyncPoint) {
        let (at, pending) = (self.at(block.number(), STATE), sync_point.word(PENDING).into());
        let _ = self.words.compare_exchange(at, pending, sync_point.ready().into());
    }

    /// State of a message; None if the block was reused, or holds no such message.
    pub(crate) fn readiness(&self, block: Block, sync_point: SyncPoint) -> Option<Readiness> {
        if !self.is_stream_ordered || self.owner(block).is_err() {
            return None;
        }
        sync_point.seen_in(self.words.load(self.at(block.number(), STATE), Acquire) as u32)
    }

    /// Marks a message that will never be written: its publisher is dead, or its device failed.
    pub(crate) fn poison(&self, block: Block, sync_point: SyncPoint) {
        self.poison_word(block.number(), sync_point.word(PENDING).into());
    }

    /// Marks a message whose completion is unknown: readers continue, and the block stays reserved
    /// until its publisher is dead.
    pub(crate) fn poison_and_retain(&self, block: Block, sync_point: SyncPoint) {
        let at = self.at(block.number(), WRITER);
        let writer = self.words.load(at, Acquire);
        if (writer >> 32) as u32 == generation(block) {
            // First: a reader of the poisoned state sees the flag, too.
            let _ = self.words.compare_exchange(at, writer, writer | u64::from(RETAINED));
        }
        self.poison(block, sync_point);
    }

    fn poison_word(&self, number: u32, pending: u64) {
        let at = self.at(number, STATE);
        let poisoned = pending & !u64::from(PHASE) | u64::from(POISONED);
        let _ = self.words.compare_exchange(at, pending, poisoned);
    }

    /// Poisons all unwritten messages of a dead participant.
    pub(in crate::pool) fn poison_all(&self, participant: Participant) {
        if !self.is_used() {
            return;
        }
        for number in 0..self.allocator.blocks_created() {
            let word = self.words.load(self.at(number, STATE), Acquire);
            let at = self.at(number, WRITER);
            let writer = self.words.load(at, Acquire);
            if writer as u32 & !RETAINED != participant.number() {
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

    /// A stream of this subscriber reads the message: its block is not reused in the meantime. If
    /// the subscriber was evicted before, the block may hold another message already, and this has
    /// no effect on it.
    pub(crate) fn begin_stream_read(&self, block: Block, topic: u32, place: u32) {
        if block.number() >= self.max_blocks {
            return;
        }
        self.mark_used();
        // First: a reader of the index sees its topic.
        self.update_tagged(block, READS_TOPIC, |_| topic);
        self.update_tagged(block, READS_PENDING, |places| {
            places | 1_u32.checked_shl(place).unwrap_or(0)
        });
        // Either the process that removes the message sees this, or its subscriber sees the
        // removal.
        self.words.fence();
    }

    pub(crate) fn end_stream_read(&self, block: Block, place: u32) {
        self.clear_readers(block, 1_u32.checked_shl(place).unwrap_or(0));
    }

    /// Updates the lower half of one of a block's words, taken as 0 if it belongs to an older
    /// generation. No effect if the block was freed.
    fn update_tagged(&self, block: Block, which: usize, change: impl Fn(u32) -> u32) {
        let at = self.at(block.number(), which);
        let mut was = self.words.load(at, Acquire);
        loop {
            // Checked after the load, so that a word of a later generation is not overwritten.
            let value = match (was >> 32) as u32 == generation(block) {
                true => was as u32,
                false if self.owner(block).is_ok() => 0,
                false => return,
            };
            let now = u64::from(generation(block)) << 32 | u64::from(change(value));
            match self.words.compare_exchange(at, was, now) {
                Ok(_) => return,
                Err(found) => was = found,
            }
        }
    }

    /// Streams of these subscriptions do not use this block any more.
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

    /// Ends all pending reads of these subscriptions of a topic, whose process is dead.
    pub(crate) fn end_all_stream_reads(&self, topic: u32, places: u32) {
        if places == 0 || !self.is_used() {
            return;
        }
        for number in 0..self.allocator.blocks_created() {
            let word = |which| self.words.load(self.at(number, which), Acquire);
            let readers = word(READS_PENDING);
            let of_block = readers & !u64::from(u32::MAX);
            if readers as u32 & places != 0 && word(READS_TOPIC) == of_block | u64::from(topic) {
                self.clear_readers(Block::from_bits(of_block | u64::from(number)), places);
            }
        }
    }

    /// Returns true if a stream still uses this block.
    fn is_busy(&self, block: Block) -> bool {
        let word = |which| self.words.load(self.at(block.number(), which), Acquire);
        let is_of_block = |word: u64| (word >> 32) as u32 == generation(block);
        // Read before the writer: the retained flag is set before the state is poisoned.
        let (readers, is_pending) = (word(READS_PENDING), word(STATE) as u32 & PHASE == PENDING);
        let writer = word(WRITER);
        let is_written = is_pending || writer as u32 & RETAINED != 0;
        is_written && is_of_block(writer) || readers as u32 != 0 && is_of_block(readers)
    }

    /// Returns true if a stream may use this block until its publisher is dead.
    fn is_retained(&self, block: Block) -> bool {
        let writer = self.words.load(self.at(block.number(), WRITER), Acquire);
        writer as u32 & RETAINED != 0 && (writer >> 32) as u32 == generation(block)
    }

    /// Frees a topic's block, unless that was done before, or transfers it to the streams that use
    /// it. False if that was not possible now.
    ///
    /// No fence is needed to see pending streams. A publisher stores its mark before it publishes.
    /// A reader that stores its mark and is not evicted afterwards is seen by a later eviction, and
    /// by the process that releases the message last: an [eviction](ipc::Queue::evict) has a fence
    /// between the subscription and the first mark.
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
            // It was freed before, or belongs to no topic.
            Err(_) => return true,
        }
        // Check once more: the stream may have finished in the meantime.
        self.free_if_idle(caller, block)
    }

    /// Frees a stream-owned block if its streams have finished.
    pub(crate) fn free_if_idle(&self, caller: &Caller<'_>, block: Block) -> bool {
        self.words.fence();
        let is_left = self.owner(block) == Ok(OWNED_BY_STREAMS);
        !is_left || self.is_busy(block) || self.dispose(caller, block, OWNED_BY_STREAMS)
    }

    /// Returns true if there may be stream-owned blocks, as far as this process knows.
    pub(crate) fn has_stream_owned(&self) -> bool {
        self.words.load(STREAM_OWNED, Acquire) != self.stream_owned_seen.load(Relaxed)
    }

    /// Frees stream-owned blocks whose streams have finished; returns their number.
    pub(crate) fn collect(&self, caller: &Caller<'_>) -> AllocResult<usize> {
        if !self.is_used() {
            return Ok(0);
        }
        let left = self.words.load(STREAM_OWNED, Acquire);
        let mut is_any_busy = false;
        let freed = self.allocator.reclaim(caller, OWNED_BY_STREAMS, |block| {
            let is_busy = self.is_busy(block);
            // The reclaim of its publisher collects it.
            is_any_busy |= is_busy && !self.is_retained(block);
            is_busy
        })?;
        if !is_any_busy {
            // A transfer that happens now is counted afterwards.
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
