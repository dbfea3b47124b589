//! Where everything lies in the allocator's words.
//!
//! ```text
//! 0  what this is: LAYOUT            8  free granules        16  log: number of pairs
//! 1  most blocks                     9  granules in all      17  log: pairs (word, value)
//! 2  bytes of a granule, as a power 10  blocks taken
//! 3  lock: three words              11  blocks made          56  whose turn it is of those at hand
//!                                   12  repairs made         57  free blocks at hand: seven
//!                                   13  first unused block   64  bitmap of levels
//!                                                            65  bitmap of parts, a word a level
//!                                                            96  first free block of each class
//!                                                            then  four words a block
//! ```
//!
//! A block's words: place and size; physical neighbours; neighbours in its list;
//! generation, kind and owner. The first, second and fourth, and the number of blocks
//! made, are the truth, and change by way of the log (or by one single store); all
//! else can be told from them, and is told again when a holder of the lock has died.

use super::classes::{CLASSES, LEVELS};
use crate::lock;

/// Says that this is an allocator, of this version of the layout.
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
/// Pairs that the log has room for; an aligned allocation needs 11.
pub(super) const LOG_ROOM: usize = (CACHE_NEXT - LOG) / 2;
pub(super) const CACHE_NEXT: usize = 56;
pub(super) const FREE_CACHE: usize = 57;
/// Free blocks that are at hand at most: with the turn they have one cache line.
pub(super) const MAX_CACHED: usize = LEVEL_BITS - FREE_CACHE;
pub(super) const LEVEL_BITS: usize = 64;
pub(super) const PART_BITS: usize = 65;
pub(super) const HEADS: usize = 96;
pub(super) const BLOCKS: usize = HEADS + CLASSES;

// In the line of its words nothing changes but the lock: others look at it all the time.
const _: () = assert!(LOCK + lock::WORDS <= FREE);
const _: () = assert!(PART_BITS + LEVELS <= HEADS && LOG_ROOM >= 16);
const _: () = assert!(CACHE_NEXT.is_multiple_of(8) && MAX_CACHED == 7);

/// Words of a block.
pub(super) const BLOCK: usize = 4;
/// Where and how large: granules, 32 bits each.
pub(super) const EXTENT: usize = 0;
/// The blocks right before and right after, in the same extent.
pub(super) const NEIGHBORS: usize = 1;
/// The blocks before and after in the same list.
pub(super) const LIST_LINKS: usize = 2;
/// Generation, kind, owner.
pub(super) const STATE: usize = 3;

/// No block.
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

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A place for a block, and none.
    Unused,
    Free,
    Allocated,
}

/// The fourth word, taken apart.
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
        let kind = match self.kind {
            Kind::Unused => 0,
            Kind::Free => 1,
            Kind::Allocated => 2_u32,
        };
        pair(self.generation, kind << OWNER_BITS | (self.owner & OWNER))
    }
}
