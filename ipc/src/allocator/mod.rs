//! A memory allocator whose metadata is in shared memory, separate from the managed memory.
//!
//! Two-level segregated fit: free blocks are in lists by size class, and bitmaps mark the
//! non-empty lists. So allocating and freeing take the same short time for any number of
//! blocks. The metadata contains only offsets. So the managed memory may be inaccessible to the
//! processor, such as device memory, and every process may map metadata and memory at any
//! address.
//!
//! Any process that maps the metadata may call; a [robust lock](crate::lock) serialises the
//! calls. A call first writes its changes to a log, so that the next lock owner can finish the
//! transaction of a dead process. Blocks of a dead process are found by their owner, and freed
//! with [`reclaim`](Allocator::reclaim).
//!
//! ```
//! use ipc::{Allocator, Caller, AlwaysAlive, LocalWords, Owner, Participant};
//! let words = LocalWords::zeroed(Allocator::<LocalWords>::required_words(1024));
//! let allocator = Allocator::format(words, 1024, 256)?;
//! let me = Participant::new(0, 1).unwrap();
//! let caller = Caller::new(me, &AlwaysAlive);
//! allocator.extend(&caller, 0, 1 << 20)?; // a mebibyte of memory
//!
//! let (block, range) = allocator.allocate(&caller, Owner::participant(me), 5000, 4096)?;
//! assert_eq!(range.offset % 4096, 0);
//! assert!(range.length >= 5000);
//! allocator.free(&caller, block, Owner::participant(me))?;
//! assert!(allocator.free(&caller, block, Owner::participant(me)).is_err(), "only once");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod classes;
mod layout;
mod locked;
mod repair;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use threads::ForkGeneration;

use self::layout::{BLOCKS, Kind, State, high, low, word_of};
use crate::lock::LockTimeout;
use crate::participant::{Caller, Participant};
use crate::words::Words;

pub use self::repair::AuditError;

/// The metadata of an allocator. See the [module](self).
#[derive(Debug)]
pub struct Allocator<W> {
    words: W,
    max_blocks: u32,
    /// Granule size in bytes, as a power of two.
    granule: u32,
    fork_generation: ForkGeneration,
}

/// Names one allocation. The name is stale after the block is freed: another allocation at the
/// same offset has another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    number: u32,
    generation: u32,
}

impl Block {
    /// Encodes the block as one word, for entries of queues, for example.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        layout::pair(self.generation, self.number)
    }

    /// Index of the block record: no other allocation has the same index at the same time, but
    /// a later one may. It can index a table of allocations.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// From such a word, which may have any value: invalid names are refused when they are
    /// used.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self { number: low(bits), generation: high(bits) }
    }
}

/// The owner of a block: a participant, or another object that the users number (a queue, a
/// topic).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(u32);

impl Owner {
    const OTHERS: u32 = 1 << 29;

    /// A process.
    #[must_use]
    pub fn participant(participant: Participant) -> Self {
        Self(participant.number())
    }

    /// Another owner; None from 2²⁹ on.
    #[must_use]
    pub const fn other(number: u32) -> Option<Self> {
        if number < Self::OTHERS { Some(Self(Self::OTHERS | number)) } else { None }
    }

    /// The participant, if it is one.
    #[must_use]
    pub fn as_participant(self) -> Option<Participant> {
        (self.0 < Self::OTHERS).then(|| Participant::from_number(self.0))?
    }
}

/// The range of an allocation, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// Offset from the beginning of the memory.
    pub offset: u64,
    /// Length; at least the requested size.
    pub length: u64,
}

/// A block, as [`Allocator::blocks`] lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// The block's name.
    pub block: Block,
    /// The block's range.
    pub range: BlockRange,
    /// The block's owner; None if it is free.
    pub owner: Option<Owner>,
}

/// Usage of the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Total bytes.
    pub total: u64,
    /// Free bytes.
    pub free: u64,
    /// The largest size that can be allocated.
    pub largest_free: u64,
    /// Allocations.
    pub blocks_allocated: u64,
    /// How often a lock owner died and the metadata was repaired.
    pub repairs: u64,
}

/// Why an allocator call failed.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocatorError {
    /// No free block is large enough.
    OutOfMemory {
        /// Requested bytes, including the cost of the alignment.
        wanted: u64,
        /// Total free bytes.
        free: u64,
        /// The largest free block.
        largest_free: u64,
    },
    /// There is memory, but no block record left.
    OutOfBlocks {
        /// The capacity of block records.
        most: u32,
    },
    /// Zero bytes, or more than can be represented, or an alignment that is not a power of two.
    InvalidSize {
        /// Bytes.
        bytes: u64,
        /// Alignment.
        alignment: u64,
    },
    /// The name is invalid, or its allocation was freed.
    Stale(Block),
    /// The block has another owner.
    NotOwner {
        /// The named block.
        block: Block,
        /// The block's owner.
        owner: Owner,
    },
    /// The new extent overlaps an existing one, or is not a whole number of granules.
    InvalidExtent {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// A living process holds the lock.
    LockTimeout(LockTimeout),
    /// The words are not an allocator, have another version, or are truncated.
    NotAnAllocator {
        /// The reason.
        why: &'static str,
    },
    /// The metadata is inconsistent, and could not be repaired.
    Corrupt,
    /// The process forked after it attached: two processes under one participant would undo
    /// each other's changes. A child must join and attach itself.
    Forked,
}

impl fmt::Display for AllocatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory { wanted, free, largest_free } => write!(
                f,
                "out of memory: {wanted} bytes requested, {free} are free, {largest_free} in one block"
            ),
            Self::OutOfBlocks { most } => write!(f, "all {most} blocks are in use"),
            Self::InvalidSize { bytes, alignment } => {
                write!(f, "{bytes} bytes aligned to {alignment} cannot be allocated")
            }
            Self::Stale(block) => write!(f, "{block:?} is not allocated"),
            Self::NotOwner { block, owner } => write!(f, "{block:?} belongs to {owner:?}"),
            Self::InvalidExtent { offset, length } => {
                write!(f, "{length} bytes at {offset} overlap an extent, or are not whole granules")
            }
            Self::LockTimeout(held) => held.fmt(f),
            Self::NotAnAllocator { why } => write!(f, "not an allocator: {why}"),
            Self::Corrupt => f.write_str("the metadata of the allocator is corrupt"),
            Self::Forked => f.write_str(
                "the allocator was attached before a fork. Attach it again in the child",
            ),
        }
    }
}

crate::debug::debug_for_people!(AllocatorError {
    OutOfMemory { wanted, free, largest_free },
    OutOfBlocks { most },
    InvalidSize { bytes, alignment },
    Stale(block),
    NotOwner { block, owner },
    InvalidExtent { offset, length },
    LockTimeout(by),
    NotAnAllocator { why },
    Corrupt,
    Forked,
});

impl std::error::Error for AllocatorError {}

impl From<LockTimeout> for AllocatorError {
    fn from(held: LockTimeout) -> Self {
        Self::LockTimeout(held)
    }
}

/// The result of allocator calls.
pub type Result<T> = std::result::Result<T, AllocatorError>;

impl<W: Words> Allocator<W> {
    /// Number of words for this many blocks.
    #[must_use]
    pub const fn required_words(max_blocks: u32) -> usize {
        BLOCKS + max_blocks as usize * layout::BLOCK
    }

    /// Initialises metadata for at most this many blocks, in granules of this many bytes (a
    /// power of two; every block is a whole number of them), without memory.
    ///
    /// No other thread may use the words before this returns.
    ///
    /// # Errors
    /// `NotAnAllocator` if there are too few words or the numbers are invalid.
    pub fn format(words: W, max_blocks: u32, granule: u64) -> Result<Self> {
        let needed = Self::required_words(max_blocks).min(words.count());
        (layout::KIND..needed).for_each(|at| words.store(at, 0, Release));
        Self::format_zeroed(words, max_blocks, granule)
    }

    /// Like [`format`](Self::format), for words that are all 0, as in a new segment: unused
    /// pages are not touched, and take no memory.
    ///
    /// # Errors
    /// As `format`.
    pub fn format_zeroed(words: W, max_blocks: u32, granule: u64) -> Result<Self> {
        let refuse = |why| Err(AllocatorError::NotAnAllocator { why });
        if !granule.is_power_of_two() || granule > 1 << 30 {
            return refuse("the granule size must be a power of two, at most 2^30 bytes");
        }
        if max_blocks == 0 || max_blocks == layout::NONE {
            return refuse("the number of blocks must be from 1 to 2^32 - 2");
        }
        let needed = Self::required_words(max_blocks);
        if words.count() < needed {
            return refuse("too few words for so many blocks");
        }
        for at in layout::HEADS..BLOCKS {
            words.store(at, u64::from(layout::NONE), Relaxed);
        }
        words.store(layout::FIRST_UNUSED, u64::from(layout::NONE), Relaxed);
        words.store(layout::MAX_BLOCKS, u64::from(max_blocks), Relaxed);
        words.store(layout::GRANULE, u64::from(granule.trailing_zeros()), Relaxed);
        words.store(layout::KIND, layout::LAYOUT, Release);
        Self::attach(words)
    }

    /// Attaches to initialised metadata.
    ///
    /// # Errors
    /// `NotAnAllocator`, with the reason.
    pub fn attach(words: W) -> Result<Self> {
        let refuse = |why| Err(AllocatorError::NotAnAllocator { why });
        match words.load(layout::KIND, Acquire) {
            layout::LAYOUT => {}
            other if other >> 16 == layout::LAYOUT >> 16 => return refuse("another version"),
            _ => return refuse("not initialised, or of another kind"),
        }
        let max_blocks = words.load(layout::MAX_BLOCKS, Relaxed);
        let granule = words.load(layout::GRANULE, Relaxed);
        let Ok(max_blocks) = u32::try_from(max_blocks) else {
            return refuse("too many blocks");
        };
        if max_blocks == 0 || max_blocks == layout::NONE || granule > 30 {
            return refuse("its header is inconsistent");
        }
        if words.count() < Self::required_words(max_blocks) {
            return refuse("it is truncated");
        }
        Ok(Self {
            words,
            max_blocks,
            granule: granule as u32,
            fork_generation: ForkGeneration::current(),
        })
    }

    /// Granule size in bytes.
    #[must_use]
    pub fn granule(&self) -> u64 {
        1 << self.granule
    }

    /// Adds an extent to the allocator, which must not overlap existing ones. Blocks never
    /// cross extents, even adjacent ones, so an extent may be a separate object.
    ///
    /// # Errors
    /// `InvalidExtent`, `OutOfBlocks`, `LockTimeout`.
    pub fn extend(&self, caller: &Caller<'_>, offset: u64, length: u64) -> Result<()> {
        let invalid = AllocatorError::InvalidExtent { offset, length };
        let mask = self.granule() - 1;
        let end = offset.checked_add(length).ok_or(invalid)?;
        if length == 0 || (offset | length) & mask != 0 || end >> self.granule > u64::from(u32::MAX)
        {
            return Err(invalid);
        }
        let first = (offset >> self.granule) as u32;
        let size = (length >> self.granule) as u32;
        let allocator = self.lock(caller)?;
        if allocator.overlaps(first, size) {
            return Err(invalid);
        }
        allocator.extend(first, size)
    }

    /// Allocates a block for an owner.
    ///
    /// # Errors
    /// `OutOfMemory`, with the figures; `OutOfBlocks`, `InvalidSize`, `LockTimeout`.
    #[inline]
    pub fn allocate(
        &self,
        caller: &Caller<'_>,
        owner: Owner,
        bytes: u64,
        alignment: u64,
    ) -> Result<(Block, BlockRange)> {
        let invalid = AllocatorError::InvalidSize { bytes, alignment };
        if bytes == 0 || !alignment.is_power_of_two() {
            return Err(invalid);
        }
        let mask = self.granule() - 1;
        let size = bytes.checked_add(mask).ok_or(invalid)? >> self.granule;
        let alignment = (alignment.saturating_add(mask) >> self.granule).max(1);
        let (Ok(size), Ok(alignment)) = (u32::try_from(size), u32::try_from(alignment)) else {
            return Err(invalid);
        };
        let allocator = self.lock(caller)?;
        let block = allocator.allocate(owner, size, alignment)?;
        Ok((block, self.range(block.number)))
    }

    /// Frees an allocation of this owner.
    ///
    /// # Errors
    /// `Stale` if it was freed before: so freeing twice is harmless. `NotOwner`, `LockTimeout`.
    #[inline]
    pub fn free(&self, caller: &Caller<'_>, block: Block, owner: Owner) -> Result<()> {
        let allocator = self.lock(caller)?;
        allocator.prefetch_cache();
        allocator.check(block, owner)?;
        allocator.free(block.number);
        Ok(())
    }

    /// Transfers an allocation to another owner, at once and without a lock.
    ///
    /// # Errors
    /// `Stale`, `NotOwner`.
    pub fn transfer(&self, block: Block, from: Owner, to: Owner) -> Result<()> {
        self.check_fork()?;
        let at = self.state_at(block)?;
        let state = |owner: Owner| State {
            generation: block.generation,
            kind: Kind::Allocated,
            owner: owner.0,
        };
        match self.words.compare_exchange(at, state(from).word(), state(to).word()) {
            Ok(_) => Ok(()),
            Err(found) => Err(Self::refusal(block, State::from_word(found))),
        }
    }

    #[inline]
    fn check_fork(&self) -> Result<()> {
        if self.fork_generation.is_current() { Ok(()) } else { Err(AllocatorError::Forked) }
    }

    /// The owner of an allocation.
    ///
    /// # Errors
    /// `Stale`.
    pub fn owner(&self, block: Block) -> Result<Owner> {
        let state = State::from_word(self.words.load(self.state_at(block)?, Acquire));
        match Self::refusal(block, state) {
            AllocatorError::NotOwner { owner, .. } => Ok(owner),
            stale => Err(stale),
        }
    }

    /// The range of an allocation, valid until it is freed.
    ///
    /// # Errors
    /// `Stale`.
    pub fn find(&self, block: Block) -> Result<BlockRange> {
        let range = self.range(block.number);
        // Checked afterwards: a block that still exists has not moved in the meantime.
        self.owner(block)?;
        Ok(range)
    }

    /// Frees all allocations of an owner that is dead or needs none any more; returns their
    /// number. Allocations for which `spare` returns true are kept: they were transferred, but
    /// the transfer is not recorded yet.
    ///
    /// May be repeated after an interruption, and called by several threads at once.
    ///
    /// # Errors
    /// `LockTimeout`: some allocations may be freed already.
    pub fn reclaim(
        &self,
        caller: &Caller<'_>,
        owner: Owner,
        mut spare: impl FnMut(Block) -> bool,
    ) -> Result<usize> {
        // A dead owner may have died with the lock: its last transaction is finished first.
        drop(self.lock(caller)?);
        let mut freed = 0;
        for number in 0..self.blocks_created() {
            let state = State::from_word(self.words.load(word_of(number, layout::STATE), Acquire));
            if state.kind != Kind::Allocated || state.owner != owner.0 {
                continue;
            }
            let block = Block { number, generation: state.generation };
            if spare(block) {
                continue;
            }
            match self.free(caller, block, owner) {
                Ok(()) => freed += 1,
                // Another process freed it first.
                Err(AllocatorError::Stale(_) | AllocatorError::NotOwner { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(freed)
    }

    /// All blocks, including free ones, by offset.
    ///
    /// # Errors
    /// `LockTimeout`.
    pub fn blocks(&self, caller: &Caller<'_>) -> Result<Vec<BlockInfo>> {
        let allocator = self.lock(caller)?;
        allocator.flush_cache();
        let mut blocks: Vec<_> = (0..self.blocks_created())
            .filter_map(|number| {
                let state = allocator.state(number);
                let block = Block { number, generation: state.generation };
                let owner = (state.kind == Kind::Allocated).then_some(Owner(state.owner));
                let range = self.range(number);
                (state.kind != Kind::Unused).then_some(BlockInfo { block, range, owner })
            })
            .collect();
        drop(allocator);
        blocks.sort_by_key(|listed| listed.range.offset);
        Ok(blocks)
    }

    /// Usage of the allocator.
    ///
    /// # Errors
    /// `LockTimeout`.
    pub fn statistics(&self, caller: &Caller<'_>) -> Result<Statistics> {
        let allocator = self.lock(caller)?;
        // Coalesce first, so that the largest free block is reported.
        allocator.flush_cache();
        let word = |at| self.words.load(at, Relaxed);
        Ok(Statistics {
            total: word(layout::TOTAL) << self.granule,
            free: word(layout::FREE) << self.granule,
            largest_free: u64::from(allocator.largest_free()) << self.granule,
            blocks_allocated: word(layout::BLOCKS_ALLOCATED),
            repairs: word(layout::REPAIRS),
        })
    }

    /// Checks the consistency of the metadata: for tests and diagnostics.
    ///
    /// # Errors
    /// `LockTimeout`; inside, the first flaw that was found.
    pub fn audit(&self, caller: &Caller<'_>) -> Result<std::result::Result<(), AuditError>> {
        Ok(self.lock(caller)?.audit())
    }

    /// The number of block records that were ever used: all indices are below this.
    #[must_use]
    pub fn blocks_created(&self) -> u32 {
        self.words.load(layout::BLOCKS_CREATED, Acquire).min(u64::from(self.max_blocks)) as u32
    }

    fn state_at(&self, block: Block) -> Result<usize> {
        if block.number >= self.max_blocks {
            return Err(AllocatorError::Stale(block));
        }
        Ok(word_of(block.number, layout::STATE))
    }

    /// The error for a block in this state that does not match its name.
    fn refusal(block: Block, state: State) -> AllocatorError {
        if state.kind == Kind::Allocated && state.generation == block.generation {
            AllocatorError::NotOwner { block, owner: Owner(state.owner) }
        } else {
            AllocatorError::Stale(block)
        }
    }

    fn range(&self, number: u32) -> BlockRange {
        let extent = self.words.load(word_of(number, layout::EXTENT), Acquire);
        BlockRange {
            offset: u64::from(high(extent)) << self.granule,
            length: u64::from(low(extent)) << self.granule,
        }
    }
}
