//! The layout of the allocator's words.
//!
//! ```text
//! 0  identification: LAYOUT          8  free granules        16  log: number of pairs
//! 1  capacity of block records       9  granules in all      17  log: pairs (word, value)
//! 2  granule size, as a power of 2  10  allocated blocks
//! 3  lock: three words              11  block records        56  free cache: next index
//!                                   12  repairs              57  free cache: seven blocks
//!                                   13  first unused block   64  bitmap of levels
//!                                                            65  bitmap of parts, a word a level
//!                                                            96  first free block of each class
//!                                                            then  four words a block
//! ```
//!
//! A block's words: offset and size; physical neighbours; neighbours in its list; generation,
//! kind and owner. The first, second and fourth, and the number of block records, are primary
//! state. They change by the redo log, or by a single store. All other words are derived from
//! them, and rebuilt when a lock owner has died.

use super::classes::{CLASSES, LEVELS};
use crate::lock;

/// Identifies an allocator of this layout version.
pub(super) const LAYOUT: u64 = 0x6661_6272_746c_0003;

pub(super) const KIND: usize = 0;
pub(super) const MAX_BLOCKS: usize = 1;
pub(super) const GRANULE: usize = 2;
pub(super) const LOCK: usize = 3;
pub(super) const FREE: usize = 8;
pub(super) const TOTAL: usize = 9;
pub(super) const BLOCKS_ALLOCATED: usize = 10;
pub(super) const BLOCKS_CREATED: usize = 11;
pub(super) const REPAIRS: usize = 12;
pub(super) const FIRST_UNUSED: usize = 13;
pub(super) const LOG_LENGTH: usize = 16;
pub(super) const LOG: usize = 17;
/// Capacity of the log in pairs; an aligned allocation needs 11.
pub(super) const LOG_ROOM: usize = (CACHE_NEXT - LOG) / 2;
pub(super) const CACHE_NEXT: usize = 56;
pub(super) const FREE_CACHE: usize = 57;
/// Capacity of the free cache: with its next index it fills one cache line.
pub(super) const MAX_CACHED: usize = LEVEL_BITS - FREE_CACHE;
pub(super) const LEVEL_BITS: usize = 64;
pub(super) const PART_BITS: usize = 65;
pub(super) const HEADS: usize = 96;
pub(super) const BLOCKS: usize = HEADS + CLASSES;

// In its cache line only the lock changes, because other processes read the rest of the line
// often.
const _: () = assert!(LOCK + lock::WORDS <= FREE);
const _: () = assert!(PART_BITS + LEVELS <= HEADS && LOG_ROOM >= 16);
const _: () = assert!(CACHE_NEXT.is_multiple_of(8) && MAX_CACHED == 7);

/// Words of a block.
pub(super) const BLOCK: usize = 4;
/// Offset and size: granules, 32 bits each.
pub(super) const EXTENT: usize = 0;
/// The blocks directly before and after, in the same extent.
pub(super) const NEIGHBORS: usize = 1;
/// The blocks before and after in the same list.
pub(super) const LIST_LINKS: usize = 2;
/// Generation, kind, owner.
pub(super) const STATE: usize = 3;

pub(super) const NONE: u32 = u32::MAX;

#[inline]
pub(super) fn word_of(block: u32, which: usize) -> usize {
    BLOCKS + block as usize * BLOCK + which
}

#[inline]
pub(super) fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

#[inline]
pub(super) fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

#[inline]
pub(super) fn low(word: u64) -> u32 {
    word as u32
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An unused block record.
    Unused = 0,
    Free = 1,
    Allocated = 2,
}

/// The decoded fourth word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    pub(super) generation: u32,
    pub(super) kind: Kind,
    /// 30 bits.
    pub(super) owner: u32,
}

pub(super) const OWNER_BITS: u32 = 30;
const OWNER: u32 = (1 << OWNER_BITS) - 1;

impl State {
    #[inline]
    pub(super) fn free(generation: u32) -> Self {
        Self { generation, kind: Kind::Free, owner: 0 }
    }

    #[inline]
    pub(super) fn from_word(word: u64) -> Self {
        let kind = match low(word) >> OWNER_BITS {
            1 => Kind::Free,
            2 => Kind::Allocated,
            _ => Kind::Unused,
        };
        Self { generation: high(word), kind, owner: low(word) & OWNER }
    }

    #[inline]
    pub(super) fn word(self) -> u64 {
        pair(self.generation, (self.kind as u32) << OWNER_BITS | (self.owner & OWNER))
    }
}
