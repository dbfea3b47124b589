//! Repairing the metadata after a lock owner has died, and auditing it.

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::classes::{CLASSES, Class, LEVELS};
use super::layout::{self, Kind, NONE, high, low, word_of};
use super::locked::Locked;
use crate::words::Words;

/// The first inconsistency that an audit found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuditError {
    /// The inconsistency.
    pub what: &'static str,
    /// The affected block, if any.
    pub block: Option<u32>,
}

impl fmt::Display for AuditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.block {
            Some(block) => write!(f, "block {block}: {}", self.what),
            None => f.write_str(self.what),
        }
    }
}

impl std::error::Error for AuditError {}

fn flaw(what: &'static str, block: impl Into<Option<u32>>) -> Result<(), AuditError> {
    Err(AuditError { what, block: block.into() })
}

impl<W: Words> Locked<'_, W> {
    /// Finishes the transaction of a dead lock owner, then rebuilds the derived state. May be
    /// interrupted at any point, and repeated by the next owner.
    #[cold]
    pub(super) fn repair(&self) {
        let words = self.words();
        let length = words.load(layout::LOG_LENGTH, Acquire);
        if length <= layout::LOG_ROOM as u64 {
            for pair in 0..length as usize {
                let at = self.load(layout::LOG + 2 * pair) as usize;
                // Changes go only to the words of blocks or to their number.
                if at == layout::BLOCKS_CREATED || at >= layout::BLOCKS {
                    words.store(at, self.load(layout::LOG + 2 * pair + 1), Release);
                }
            }
        }
        words.store(layout::LOG_LENGTH, 0, Release);
        for class in 0..CLASSES {
            words.store(layout::HEADS + class, u64::from(NONE), Relaxed);
        }
        for level in 0..LEVELS {
            words.store(layout::PART_BITS + level, 0, Relaxed);
        }
        words.store(layout::LEVEL_BITS, 0, Relaxed);
        words.store(layout::FIRST_UNUSED, u64::from(NONE), Relaxed);
        for slot in layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED {
            words.store(slot, 0, Relaxed);
        }
        let (mut free, mut total, mut taken) = (0, 0, 0);
        // From the last to the first, so that the first are found first again.
        for block in (0..self.blocks_created()).rev() {
            let (_, size) = self.extent(block);
            match self.state(block).kind {
                Kind::Unused => {
                    self.insert_unused(block);
                    continue;
                }
                Kind::Free => {
                    self.insert_free(block, size);
                    free += u64::from(size);
                }
                Kind::Allocated => taken += 1,
            }
            total += u64::from(size);
        }
        words.store(layout::FREE, free, Relaxed);
        words.store(layout::TOTAL, total, Relaxed);
        words.store(layout::BLOCKS_ALLOCATED, taken, Relaxed);
        self.coalesce_all();
        words.store(layout::REPAIRS, self.load(layout::REPAIRS).wrapping_add(1), Relaxed);
    }

    /// Checks all structures against each other.
    pub(super) fn audit(&self) -> Result<(), AuditError> {
        let made = self.blocks_created();
        let at_hand = layout::FREE_CACHE..layout::FREE_CACHE + layout::MAX_CACHED;
        for word in at_hand.map(|slot| self.load(slot)).filter(|word| *word != 0) {
            let (block, size) = (high(word), low(word));
            let is_one = block < made && self.state(block).kind == Kind::Free;
            if !is_one || self.extent(block).1 != size {
                return flaw("the cached block is not free, or has another size", block);
            }
        }
        self.flush_cache();
        let (mut free, mut total, mut taken, mut unused) = (0_u64, 0_u64, 0_u64, 0_u32);
        let mut by_place = Vec::new();
        for block in 0..made {
            let (at, size) = self.extent(block);
            let (before, after) = self.neighbors(block);
            let kind = self.state(block).kind;
            match kind {
                Kind::Unused => {
                    unused += 1;
                    continue;
                }
                Kind::Free => free += u64::from(size),
                Kind::Allocated => taken += 1,
            }
            total += u64::from(size);
            if size == 0 {
                return flaw("the block is empty", block);
            }
            by_place.push((at, size, block));
            for (neighbour, is_after) in [(before, false), (after, true)] {
                if neighbour == NONE {
                    continue;
                }
                if neighbour >= made || self.state(neighbour).kind == Kind::Unused {
                    return flaw("the neighbour does not exist", block);
                }
                let (there, its_size) = self.extent(neighbour);
                let (back_before, back_after) = self.neighbors(neighbour);
                let meets = if is_after {
                    u64::from(at) + u64::from(size) == u64::from(there) && back_before == block
                } else {
                    u64::from(there) + u64::from(its_size) == u64::from(at) && back_after == block
                };
                if !meets {
                    return flaw("the neighbour is not adjacent", block);
                }
                if kind == Kind::Free && self.state(neighbour).kind == Kind::Free {
                    return flaw("the block and its neighbour are free and not coalesced", block);
                }
            }
        }
        by_place.sort_unstable();
        for two in by_place.windows(2) {
            if u64::from(two[0].0) + u64::from(two[0].1) > u64::from(two[1].0) {
                return flaw("the block overlaps the next", two[0].2);
            }
        }
        self.audit_lists(made, free, unused)?;
        let counters =
            [layout::FREE, layout::TOTAL, layout::BLOCKS_ALLOCATED].map(|at| self.load(at));
        if counters != [free, total, taken] {
            return flaw("a counter is wrong", None);
        }
        if self.load(layout::LOG_LENGTH) != 0 {
            return flaw("a transaction is incomplete", None);
        }
        Ok(())
    }

    fn audit_lists(&self, made: u32, free: u64, unused: u32) -> Result<(), AuditError> {
        let (mut listed, mut steps) = (0_u64, 0_u32);
        for level in 0..LEVELS {
            let parts = self.load(layout::PART_BITS + level);
            let level_is_marked = self.load(layout::LEVEL_BITS) >> level & 1 == 1;
            if level_is_marked != (parts != 0) {
                return flaw("a level is marked wrong", None);
            }
            for part in 0..super::classes::PARTS {
                let class = Class { level, part };
                let mut block = low(self.load(layout::HEADS + class.index()));
                if (parts >> part & 1 == 1) != (block != NONE) {
                    return flaw("a class is marked wrong", None);
                }
                let mut before = NONE;
                while block != NONE {
                    steps += 1;
                    if steps > made || block >= made {
                        return flaw("the free list is corrupt", block);
                    }
                    if self.state(block).kind != Kind::Free {
                        return flaw("the block is listed and not free", block);
                    }
                    let size = self.extent(block).1;
                    if Class::of(size) != class {
                        return flaw("the block is listed in another class", block);
                    }
                    let word = self.load(word_of(block, layout::LIST_LINKS));
                    if high(word) != before {
                        return flaw("the back link is wrong", block);
                    }
                    listed += u64::from(size);
                    (before, block) = (block, low(word));
                }
            }
        }
        if listed != free {
            return flaw("not all free blocks are listed", None);
        }
        let (mut block, mut count) = (low(self.load(layout::FIRST_UNUSED)), 0);
        while block != NONE {
            count += 1;
            if count > unused || block >= made {
                return flaw("the list of unused block records is corrupt", block);
            }
            block = low(self.load(word_of(block, layout::LIST_LINKS)));
        }
        if count != unused {
            return flaw("not all unused block records are listed", None);
        }
        Ok(())
    }
}
