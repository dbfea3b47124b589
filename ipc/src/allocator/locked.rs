//! Changes to the metadata, by the lock owner.
//!
//! Each change to primary state (see the layout) is one store, or a transaction of the redo
//! log. First all new values are written to the log, then their number, and only then are they
//! applied. An owner that dies before it stores the number has changed nothing. After it, the
//! next owner applies the values again, which is idempotent.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::classes::Class;
use super::layout::{self, Kind, NONE, State, high, low, pair, word_of};
use super::{Allocator, AllocatorError, Block, Owner, Result};
use crate::lock::{Acquired, Guard};
use crate::participant::Caller;
use crate::words::Words;

/// How many blocks of the requested size's own class to check, after all larger classes were
/// empty.
const MAX_PROBES: usize = 32;

pub(super) struct Locked<'a, W: Words> {
    allocator: &'a Allocator<W>,
    _guard: Guard<'a, W>,
}

/// A transaction that is being written to the log.
struct Transaction<'a, W: Words> {
    words: &'a W,
    pairs: [(usize, u64); layout::LOG_ROOM],
    length: usize,
}

impl<W: Words> Transaction<'_, W> {
    #[inline]
    fn set(&mut self, at: usize, value: u64) {
        let range = layout::LOG + 2 * self.length;
        self.words.store(range, at as u64, Relaxed);
        self.words.store(range + 1, value, Relaxed);
        self.pairs[self.length] = (at, value);
        self.length += 1;
    }

    /// From the first of these stores on the transaction is committed: a later owner finishes
    /// it.
    #[inline]
    fn commit(self) {
        self.words.store(layout::LOG_LENGTH, self.length as u64, Release);
        for (at, value) in &self.pairs[..self.length] {
            self.words.store(*at, *value, Release);
        }
        self.words.store(layout::LOG_LENGTH, 0, Release);
    }
}

impl<W: Words> Allocator<W> {
    /// Takes the lock, and repairs the metadata if the last owner died.
    #[inline(always)]
    pub(super) fn lock<'a>(&'a self, caller: &'a Caller<'a>) -> Result<Locked<'a, W>> {
        self.check_fork()?;
        let (guard, taken) = Guard::take(&self.words, layout::LOCK, caller)?;
        let allocator = Locked { allocator: self, _guard: guard };
        if taken == Acquired::OwnerDied {
            allocator.repair();
        }
        Ok(allocator)
    }
}

impl<W: Words> Locked<'_, W> {
    #[inline]
    pub(super) fn words(&self) -> &W {
        &self.allocator.words
    }

    #[inline]
    pub(super) fn load(&self, at: usize) -> u64 {
        self.words().load(at, Relaxed)
    }

    #[inline]
    pub(super) fn state(&self, block: u32) -> State {
        State::from_word(self.load(word_of(block, layout::STATE)))
    }

    #[inline]
    pub(super) fn extent(&self, block: u32) -> (u32, u32) {
        let word = self.load(word_of(block, layout::EXTENT));
        (high(word), low(word))
    }

    #[inline]
    pub(super) fn neighbors(&self, block: u32) -> (u32, u32) {
        let word = self.load(word_of(block, layout::NEIGHBORS));
        (high(word), low(word))
    }

    pub(super) fn blocks_created(&self) -> u32 {
        self.allocator.blocks_created()
    }

    #[inline]
    fn transaction(&self) -> Transaction<'_, W> {
        Transaction { words: self.words(), pairs: [(0, 0); layout::LOG_ROOM], length: 0 }
    }

    #[inline]
    fn add(&self, counter: usize, by: u64) {
        self.words().store(counter, self.load(counter).wrapping_add(by), Relaxed);
    }

    // -------------------------------------------------------------- lists

    /// Puts a free block at the front of its class.
    #[inline]
    pub(super) fn insert_free(&self, block: u32, size: u32) {
        let class = Class::of(size);
        let head = layout::HEADS + class.index();
        let first = low(self.load(head));
        let words = self.words();
        words.store(word_of(block, layout::LIST_LINKS), pair(NONE, first), Relaxed);
        if first == NONE {
            let parts = layout::PART_BITS + class.level;
            words.store(parts, self.load(parts) | 1 << class.part, Relaxed);
            let levels = self.load(layout::LEVEL_BITS) | 1 << class.level;
            words.store(layout::LEVEL_BITS, levels, Relaxed);
        } else {
            let at = word_of(first, layout::LIST_LINKS);
            words.store(at, pair(block, low(self.load(at))), Relaxed);
        }
        words.store(head, u64::from(block), Relaxed);
    }

    /// Takes a free block out of its class.
    #[inline]
    fn remove_free(&self, block: u32, size: u32) {
        let word = self.load(word_of(block, layout::LIST_LINKS));
        let (before, after) = (high(word), low(word));
        let words = self.words();
        if after != NONE {
            let at = word_of(after, layout::LIST_LINKS);
            words.store(at, pair(before, low(self.load(at))), Relaxed);
        }
        if before != NONE {
            let at = word_of(before, layout::LIST_LINKS);
            words.store(at, pair(high(self.load(at)), after), Relaxed);
            return;
        }
        let class = Class::of(size);
        words.store(layout::HEADS + class.index(), u64::from(after), Relaxed);
        if after == NONE {
            let at = layout::PART_BITS + class.level;
            let parts = self.load(at) & !(1 << class.part);
            words.store(at, parts, Relaxed);
            if parts == 0 {
                let levels = self.load(layout::LEVEL_BITS) & !(1 << class.level);
                words.store(layout::LEVEL_BITS, levels, Relaxed);
            }
        }
    }

    /// Returns a block record to the list of unused ones.
    pub(super) fn insert_unused(&self, block: u32) {
        let first = self.load(layout::FIRST_UNUSED);
        self.words().store(word_of(block, layout::LIST_LINKS), first, Relaxed);
        self.words().store(layout::FIRST_UNUSED, u64::from(block), Relaxed);
    }

    /// An unused block record, its next generation, and the new number of records.
    #[inline]
    fn unused(&self, made: u32) -> Option<(u32, u32)> {
        let first = low(self.load(layout::FIRST_UNUSED));
        if first != NONE {
            let next = self.load(word_of(first, layout::LIST_LINKS));
            self.words().store(layout::FIRST_UNUSED, u64::from(low(next)), Relaxed);
            return Some((first, made));
        }
        (made < self.allocator.max_blocks).then_some((made, made + 1))
    }

    // --------------------------------------------------------- free cache

    /// Prefetches the cache lines that change with every block, because another process usually
    /// wrote them last.
    #[inline]
    pub(super) fn prefetch_cache(&self) {
        self.words().prefetch_for_write(layout::FREE_CACHE);
        self.words().prefetch_for_write(layout::FREE);
    }

    /// Puts a free block, which is in no list, into the free cache, where the next request of
    /// this size finds it. The block that it replaces goes to its list.
    #[inline]
    fn cache_free(&self, block: u32, size: u32) {
        let slots = layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED;
        let mut empty = slots.clone().filter(|slot| self.load(*slot) == 0);
        let slot = empty.next().unwrap_or_else(|| {
            let turn = self.load(layout::CACHE_NEXT);
            self.words().store(layout::CACHE_NEXT, turn.wrapping_add(1), Relaxed);
            slots.start + turn as usize % layout::MAX_CACHED
        });
        let before = self.load(slot);
        self.words().store(slot, pair(block, size), Relaxed);
        if before != 0 {
            self.coalesce(high(before));
        }
    }

    /// Takes a block of exactly this size from the free cache, if there is one.
    #[inline]
    fn take_cached(&self, owner: Owner, size: u32) -> Option<Result<Block>> {
        let slots = layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED;
        let slot = slots.into_iter().find(|slot| low(self.load(*slot)) == size)?;
        let number = high(self.load(slot));
        self.words().prefetch_for_write(word_of(number, layout::STATE));
        self.words().store(slot, 0, Relaxed);
        // Only memory corruption by another process leads here.
        if !self.is_free(number) || self.extent(number).1 != size {
            return Some(Err(AllocatorError::Corrupt));
        }
        let generation = self.state(number).generation;
        let state = State { generation, kind: Kind::Allocated, owner: owner.0 };
        // The transaction is this single store.
        self.words().store(word_of(number, layout::STATE), state.word(), Release);
        Some(Ok(self.count_allocated(Block { number, generation }, size)))
    }

    #[inline]
    fn is_cached(&self, block: u32) -> bool {
        let mut slots = layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED;
        slots.any(|slot| {
            let word = self.load(slot);
            word != 0 && high(word) == block
        })
    }

    /// Empties the free cache: coalesces all of its blocks with their neighbours. Returns
    /// whether there were any.
    #[cold]
    pub(super) fn flush_cache(&self) -> bool {
        let mut had_some = false;
        for slot in layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED {
            let word = self.load(slot);
            if word != 0 {
                self.words().store(slot, 0, Relaxed);
                self.coalesce(high(word));
                had_some = true;
            }
        }
        had_some
    }

    /// Does such a block exist, and is it free?
    #[inline]
    fn is_free(&self, block: u32) -> bool {
        block < self.allocator.max_blocks && self.state(block).kind == Kind::Free
    }

    /// Coalesces a free block, which is neither listed nor cached, with its listed neighbours,
    /// and lists the result.
    pub(super) fn coalesce(&self, block: u32) {
        // Only memory corruption by another process leads here.
        if !self.is_free(block) {
            return;
        }
        let (at, size) = self.extent(block);
        let (before, after) = self.neighbors(block);
        let joins = |block: u32| self.is_free(block) && !self.is_cached(block);
        let (joins_before, joins_after) = (joins(before), joins(after));
        let (mut first, mut start, mut length) = (block, at, size);
        let (mut in_front, mut behind) = (before, after);
        let mut transaction = self.transaction();
        let unused_state = |block| {
            let generation = self.state(block).generation.wrapping_add(1);
            State { generation, kind: Kind::Unused, owner: 0 }.word()
        };
        if joins_after {
            let (_, more) = self.extent(after);
            self.remove_free(after, more);
            length = length.wrapping_add(more);
            behind = self.neighbors(after).1;
            transaction.set(word_of(after, layout::STATE), unused_state(after));
        }
        if joins_before {
            let (earlier, more) = self.extent(before);
            self.remove_free(before, more);
            (first, start, length) = (before, earlier, length.wrapping_add(more));
            in_front = self.neighbors(before).0;
            transaction.set(word_of(block, layout::STATE), unused_state(block));
        }
        if joins_before || joins_after {
            transaction.set(word_of(first, layout::EXTENT), pair(start, length));
            transaction.set(word_of(first, layout::NEIGHBORS), pair(in_front, behind));
            if behind != NONE {
                transaction
                    .set(word_of(behind, layout::NEIGHBORS), pair(first, self.neighbors(behind).1));
            }
            transaction.commit();
        }
        if joins_after {
            self.insert_unused(after);
        }
        if joins_before {
            self.insert_unused(block);
        }
        self.insert_free(first, length);
    }

    /// Coalesces neighbouring free blocks, all of them listed: some were not coalesced yet when
    /// a lock owner died.
    pub(super) fn coalesce_all(&self) {
        for block in 0..self.blocks_created() {
            let (before, after) = self.neighbors(block);
            if self.is_free(block) && (self.is_free(before) || self.is_free(after)) {
                self.remove_free(block, self.extent(block).1);
                self.coalesce(block);
            }
        }
    }

    // ------------------------------------------------------------- finding

    /// A free block of at least this size.
    #[inline]
    fn find(&self, size: u32) -> Option<u32> {
        if let Some(mut class) = Class::fitting(size) {
            let parts = self.load(layout::PART_BITS + class.level) & (u64::MAX << class.part);
            if parts != 0 {
                class.part = parts.trailing_zeros() as usize;
                return Some(low(self.load(layout::HEADS + class.index())));
            }
            let levels = self.load(layout::LEVEL_BITS) & (u64::MAX << (class.level + 1));
            if levels != 0 {
                class.level = levels.trailing_zeros() as usize;
                let parts = self.load(layout::PART_BITS + class.level);
                class.part = (parts.trailing_zeros() as usize).min(super::classes::PARTS - 1);
                return Some(low(self.load(layout::HEADS + class.index())));
            }
        }
        self.find_in_own_class(size)
    }

    /// The class of the requested size also holds smaller blocks: checks a few.
    #[cold]
    fn find_in_own_class(&self, size: u32) -> Option<u32> {
        let mut block = low(self.load(layout::HEADS + Class::of(size).index()));
        for _ in 0..MAX_PROBES {
            if block == NONE {
                return None;
            }
            if self.extent(block).1 >= size {
                return Some(block);
            }
            block = low(self.load(word_of(block, layout::LIST_LINKS)));
        }
        None
    }

    pub(super) fn largest_free(&self) -> u32 {
        let levels = self.load(layout::LEVEL_BITS);
        if levels == 0 {
            return 0;
        }
        let level = (u64::BITS - 1 - levels.leading_zeros()) as usize;
        let parts = self.load(layout::PART_BITS + level.min(super::classes::LEVELS - 1));
        let part = (u64::BITS - 1 - parts.max(1).leading_zeros()) as usize;
        let mut block = low(self.load(layout::HEADS + Class { level, part }.index()));
        let mut largest = 0;
        for _ in 0..4096 {
            if block == NONE {
                break;
            }
            largest = largest.max(self.extent(block).1);
            block = low(self.load(word_of(block, layout::LIST_LINKS)));
        }
        largest
    }

    // ------------------------------------------------------------- changing

    /// Does any of these bytes overlap a known extent?
    pub(super) fn overlaps(&self, first: u32, size: u32) -> bool {
        let end = u64::from(first) + u64::from(size);
        (0..self.blocks_created()).any(|block| {
            let (at, length) = self.extent(block);
            self.state(block).kind != Kind::Unused
                && u64::from(at) < end
                && u64::from(first) < u64::from(at) + u64::from(length)
        })
    }

    pub(super) fn extend(&self, first: u32, size: u32) -> Result<()> {
        let made = self.blocks_created();
        let (block, made_then) = self.unused(made).ok_or_else(|| self.out_of_blocks())?;
        let generation = self.state(block).generation;
        let mut transaction = self.transaction();
        transaction.set(word_of(block, layout::EXTENT), pair(first, size));
        transaction.set(word_of(block, layout::NEIGHBORS), pair(NONE, NONE));
        transaction.set(word_of(block, layout::STATE), State::free(generation).word());
        transaction.set(layout::BLOCKS_CREATED, u64::from(made_then));
        transaction.commit();
        self.insert_free(block, size);
        self.add(layout::TOTAL, u64::from(size));
        self.add(layout::FREE, u64::from(size));
        Ok(())
    }

    #[inline]
    pub(super) fn allocate(&self, owner: Owner, size: u32, alignment: u32) -> Result<Block> {
        self.prefetch_cache();
        if alignment == 1
            && let Some(block) = self.take_cached(owner, size)
        {
            return block;
        }
        match self.allocate_listed(owner, size, alignment) {
            Err(AllocatorError::OutOfMemory { .. } | AllocatorError::OutOfBlocks { .. })
                if self.flush_cache() =>
            {
                self.allocate_listed(owner, size, alignment)
            }
            found => found,
        }
    }

    /// Allocates from a listed block.
    #[inline]
    fn allocate_listed(&self, owner: Owner, size: u32, alignment: u32) -> Result<Block> {
        let with_alignment =
            size.checked_add(alignment - 1).ok_or_else(|| self.out_of_memory(u32::MAX))?;
        let mut found = self.find(with_alignment);
        if found.is_none() && alignment > 1 {
            // A block with a suitable alignment by chance may be smaller.
            found = self.find(size).filter(|block| {
                let (at, length) = self.extent(*block);
                aligned(at, alignment).is_some_and(|skip| skip + u64::from(size) <= length.into())
            });
        }
        let Some(block) = found else {
            return Err(self.out_of_memory(with_alignment));
        };
        let (at, length) = self.extent(block);
        let skip = aligned(at, alignment).ok_or_else(|| self.out_of_memory(with_alignment))?;
        let old = self.state(block);
        // Only memory corruption by another process leads here; nothing was changed.
        if old.kind != Kind::Free || skip + u64::from(size) > u64::from(length) {
            return Err(AllocatorError::Corrupt);
        }
        let skip = skip as u32;
        let taken = |generation| State { generation, kind: Kind::Allocated, owner: owner.0 };
        let rest = length - skip - size;
        if rest == 0 && skip == 0 {
            self.remove_free(block, length);
            // The transaction is this single store.
            let state = taken(old.generation).word();
            self.words().store(word_of(block, layout::STATE), state, Release);
            return Ok(
                self.count_allocated(Block { number: block, generation: old.generation }, size)
            );
        }
        let (before, after) = self.neighbors(block);
        let mut made = self.blocks_created();
        // The skipped part stays with the old block; the allocated part becomes a new one.
        let mut number = block;
        let mut generation = old.generation;
        if skip > 0 {
            (number, made) = self.unused(made).ok_or_else(|| self.out_of_blocks())?;
            generation = self.state(number).generation;
        }
        let mut behind = after;
        if rest > 0 {
            match self.unused(made) {
                Some(range) => (behind, made) = range,
                None => {
                    if skip > 0 && u64::from(number) < self.load(layout::BLOCKS_CREATED) {
                        self.insert_unused(number);
                    }
                    return Err(self.out_of_blocks());
                }
            }
        }
        self.remove_free(block, length);
        let mut transaction = self.transaction();
        let in_front = if skip > 0 { block } else { before };
        if skip > 0 {
            transaction.set(word_of(block, layout::EXTENT), pair(at, skip));
            transaction.set(word_of(block, layout::NEIGHBORS), pair(before, number));
        }
        transaction.set(word_of(number, layout::EXTENT), pair(at.wrapping_add(skip), size));
        transaction.set(word_of(number, layout::NEIGHBORS), pair(in_front, behind));
        transaction.set(word_of(number, layout::STATE), taken(generation).word());
        if rest > 0 {
            transaction.set(
                word_of(behind, layout::EXTENT),
                pair(at.wrapping_add(skip).wrapping_add(size), rest),
            );
            transaction.set(word_of(behind, layout::NEIGHBORS), pair(number, after));
            let state = State::free(self.state(behind).generation);
            transaction.set(word_of(behind, layout::STATE), state.word());
        }
        if after != NONE {
            let last = if rest > 0 { behind } else { number };
            transaction.set(word_of(after, layout::NEIGHBORS), pair(last, self.neighbors(after).1));
        }
        transaction.set(layout::BLOCKS_CREATED, u64::from(made));
        transaction.commit();
        if skip > 0 {
            self.insert_free(block, skip);
        }
        if rest > 0 {
            self.insert_free(behind, rest);
        }
        Ok(self.count_allocated(Block { number, generation }, size))
    }

    #[inline]
    fn count_allocated(&self, block: Block, size: u32) -> Block {
        self.add(layout::BLOCKS_ALLOCATED, 1);
        self.add(layout::FREE, u64::from(size).wrapping_neg());
        block
    }

    /// Is this block allocated, and owned by `owner`?
    #[inline]
    pub(super) fn check(&self, block: Block, owner: Owner) -> Result<()> {
        let at = self.allocator.state_at(block)?;
        let found = self.words().load(at, Acquire);
        let state = State { generation: block.generation, kind: Kind::Allocated, owner: owner.0 };
        if found == state.word() {
            Ok(())
        } else {
            Err(Allocator::<W>::refusal(block, State::from_word(found)))
        }
    }

    /// Frees an allocated block. It goes to the free cache unchanged, because the next request
    /// often has the same size, and only few cache lines change.
    #[inline]
    pub(super) fn free(&self, block: u32) {
        let (_, size) = self.extent(block);
        self.add(layout::BLOCKS_ALLOCATED, 1_u64.wrapping_neg());
        self.add(layout::FREE, u64::from(size));
        let state = State::free(self.state(block).generation.wrapping_add(1));
        // The transaction is this single store.
        self.words().store(word_of(block, layout::STATE), state.word(), Release);
        self.cache_free(block, size);
    }

    #[cold]
    fn out_of_blocks(&self) -> AllocatorError {
        AllocatorError::OutOfBlocks { most: self.allocator.max_blocks }
    }

    #[cold]
    fn out_of_memory(&self, wanted: u32) -> AllocatorError {
        let bytes = |granules: u64| granules << self.allocator.granule;
        AllocatorError::OutOfMemory {
            wanted: bytes(wanted.into()),
            free: bytes(self.load(layout::FREE)),
            largest_free: bytes(self.largest_free().into()),
        }
    }
}

/// Granules to skip from here to the next multiple.
#[inline]
fn aligned(at: u32, alignment: u32) -> Option<u64> {
    let next = u64::from(at).checked_next_multiple_of(alignment.into())?;
    Some(next - u64::from(at))
}
