//! A memory allocator whose books lie in shared memory, apart from the memory.
//!
//! Two-level segregated fit: free blocks are kept in lists by size class, bitmaps
//! tell which lists are not empty, so allocating and freeing take the same short
//! time however many blocks there are. The books speak of offsets only. So they can
//! keep memory that no processor reads, as that of a device, and every process may
//! map books and memory wherever it likes.
//!
//! Any process that maps the books may call; a [robust lock](crate::lock) keeps them
//! apart. What a call changes is written to a log first, so that whoever takes the
//! lock from a dead process finishes what that one had begun, and makes the lists
//! anew. A block that was given to a dead process is known by its owner, and taken
//! back with [`reclaim`](Allocator::reclaim).
//!
//! ```
//! use ipc::{Allocator, Caller, AlwaysAlive, LocalWords, Owner, Participant};
//! let words = LocalWords::zeroed(Allocator::<LocalWords>::required_words(1024));
//! let allocator = Allocator::format(words, 1024, 256)?;
//! let me = Participant::new(0, 1).unwrap();
//! let caller = Caller::new(me, &AlwaysAlive);
//! allocator.extend(&caller, 0, 1 << 20)?; // a mebibyte to give away
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

use self::layout::{BLOCKS, Kind, State, high, low, word_of};
use crate::lock::LockTimeout;
use crate::participant::{Caller, Participant};
use crate::pidfd::ForkGeneration;
use crate::words::Words;

pub use self::repair::AuditError;

/// The books of an allocator. See the [module](self).
#[derive(Debug)]
pub struct Allocator<W> {
    words: W,
    max_blocks: u32,
    /// Bytes of a granule, as a power of two.
    granule: u32,
    fork_generation: ForkGeneration,
}

/// Names one allocation. It goes stale when the block is freed: another allocation
/// at the same place has another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    number: u32,
    generation: u32,
}

impl Block {
    /// As one word, for entries of queues and the like.
    #[must_use]
    pub fn to_bits(self) -> u64 {
        layout::pair(self.generation, self.number)
    }

    /// Which of the blocks that the books can keep: no other allocation has the same number at
    /// the same time, but later ones have. What is noted of allocations can be found by it.
    #[must_use]
    pub fn number(self) -> u32 {
        self.number
    }

    /// From such a word. It may be anything: a name of nothing is refused in use.
    #[must_use]
    pub fn from_bits(bits: u64) -> Self {
        Self { number: low(bits), generation: high(bits) }
    }
}

/// To whom a block belongs: a participant, or something else that its users number
/// (a queue, a topic).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(u32);

impl Owner {
    const OTHERS: u32 = 1 << 29;

    /// A process.
    #[must_use]
    pub fn participant(participant: Participant) -> Self {
        Self(participant.number())
    }

    /// Anything else; None from 2²⁹ on.
    #[must_use]
    pub const fn other(number: u32) -> Option<Self> {
        if number < Self::OTHERS { Some(Self(Self::OTHERS | number)) } else { None }
    }

    /// The process, if it is one.
    #[must_use]
    pub fn as_participant(self) -> Option<Participant> {
        (self.0 < Self::OTHERS).then(|| Participant::from_number(self.0))?
    }
}

/// Where an allocation lies, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// From the beginning of the memory.
    pub offset: u64,
    /// At least what was asked for.
    pub length: u64,
}

/// What one block is, as [`Allocator::blocks`] lists them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// Its name.
    pub block: Block,
    /// Where it lies.
    pub range: BlockRange,
    /// Whose it is; None if it is free.
    pub owner: Option<Owner>,
}

/// How full it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that are free.
    pub free: u64,
    /// The largest that can be allocated.
    pub largest_free: u64,
    /// Allocations.
    pub blocks_allocated: u64,
    /// Blocks that could be kept books of.
    pub max_blocks: u64,
    /// How often a holder of the lock died and the books were put right.
    pub repairs: u64,
}

/// Why the allocator did not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum AllocatorError {
    /// No free block is large enough.
    OutOfMemory {
        /// Bytes asked for, with what the alignment may cost.
        wanted: u64,
        /// Bytes free in all.
        free: u64,
        /// The largest free block.
        largest_free: u64,
    },
    /// There is room, but the books have no line left for another block.
    OutOfBlocks {
        /// How many they have.
        most: u32,
    },
    /// Zero bytes, or more than can be counted, or an alignment that is no power of two.
    InvalidSize {
        /// Bytes.
        bytes: u64,
        /// Alignment.
        alignment: u64,
    },
    /// The name is that of no allocation, or of one that was freed.
    Stale(Block),
    /// It belongs to somebody else.
    NotOwner {
        /// What was named.
        block: Block,
        /// Whose it is.
        owner: Owner,
    },
    /// The memory to add overlaps what is there, or is not a whole number of granules.
    InvalidExtent {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// A living process holds the lock.
    LockTimeout(LockTimeout),
    /// What is said to be an allocator is none, or of another version, or cut off.
    NotAnAllocator {
        /// What is wrong.
        why: &'static str,
    },
    /// The books contradict themselves, and could not be put right.
    Corrupt,
    /// The process forked since it opened the books: two under one name would undo each
    /// other's doing. A child joins and attaches by itself.
    Forked,
}

impl fmt::Display for AllocatorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfMemory { wanted, free, largest_free } => write!(
                f,
                "out of memory: {wanted} bytes wanted, {free} are free, {largest_free} in one piece"
            ),
            Self::OutOfBlocks { most } => write!(f, "all {most} blocks are in use"),
            Self::InvalidSize { bytes, alignment } => {
                write!(f, "{bytes} bytes aligned to {alignment} cannot be allocated")
            }
            Self::Stale(block) => write!(f, "{block:?} is not allocated"),
            Self::NotOwner { block, owner } => write!(f, "{block:?} belongs to {owner:?}"),
            Self::InvalidExtent { offset, length } => {
                write!(f, "{length} bytes at {offset} overlap others, or are no whole granules")
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

/// What allocator calls give.
pub type Result<T> = std::result::Result<T, AllocatorError>;

impl<W: Words> Allocator<W> {
    /// Words that the books of so many blocks take.
    #[must_use]
    pub const fn required_words(max_blocks: u32) -> usize {
        BLOCKS + max_blocks as usize * layout::BLOCK
    }

    /// Makes books for at most so many blocks, in granules of so many bytes (a power
    /// of two; every block is a whole number of them), over no memory yet.
    ///
    /// The words must be nobody else's until this is done.
    ///
    /// # Errors
    /// `NotAnAllocator` if there are too few words or the numbers do not fit.
    pub fn format(words: W, max_blocks: u32, granule: u64) -> Result<Self> {
        let needed = Self::required_words(max_blocks).min(words.count());
        (layout::KIND..needed).for_each(|at| words.store(at, 0, Release));
        Self::format_zeroed(words, max_blocks, granule)
    }

    /// As [`format`](Self::format), in words that are all 0, as those of a new segment: what
    /// is not needed yet is not touched, and takes no memory.
    ///
    /// # Errors
    /// As `format`.
    pub fn format_zeroed(words: W, max_blocks: u32, granule: u64) -> Result<Self> {
        let refuse = |why| Err(AllocatorError::NotAnAllocator { why });
        if !granule.is_power_of_two() || granule > 1 << 30 {
            return refuse("a granule is a power of two, at most 2^30 bytes");
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

    /// Opens books that somebody made.
    ///
    /// # Errors
    /// `NotAnAllocator`, with what is wrong.
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

    /// Bytes of a granule.
    #[must_use]
    pub fn granule(&self) -> u64 {
        1 << self.granule
    }

    /// Gives the allocator more memory: these bytes, which must be new to it. Blocks
    /// never reach from one extent into another, even if they lie side by side, so an
    /// extent may be an object of its own.
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

    /// Allocates, in somebody's name.
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
        Ok((block, allocator.range(block.number)))
    }

    /// Frees an allocation, of the one who owns it.
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

    /// Hands an allocation on, at once and without a lock.
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

    /// Whose an allocation is.
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

    /// Where an allocation lies. Holds for as long as it is not freed.
    ///
    /// # Errors
    /// `Stale`.
    pub fn find(&self, block: Block) -> Result<BlockRange> {
        let range = self.range(block.number);
        // Looked at afterwards: a block that is still there did not move meanwhile.
        self.owner(block)?;
        Ok(range)
    }

    /// Frees all that somebody owns, who is dead or wants nothing any more; gives how
    /// many allocations that were. `spare` is asked first, and keeps what it says
    /// is true of: for what was handed on and not yet noted down.
    ///
    /// May be called again if it was cut short, and by several at once.
    ///
    /// # Errors
    /// `LockTimeout`: some may be freed already.
    pub fn reclaim(
        &self,
        caller: &Caller<'_>,
        owner: Owner,
        mut spare: impl FnMut(Block) -> bool,
    ) -> Result<usize> {
        // A dead owner may have died holding the lock: then its last change comes first.
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
                // Somebody else was faster.
                Err(AllocatorError::Stale(_) | AllocatorError::NotOwner { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(freed)
    }

    /// All blocks, free ones too, by place.
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

    /// How full it is.
    ///
    /// # Errors
    /// `LockTimeout`.
    pub fn statistics(&self, caller: &Caller<'_>) -> Result<Statistics> {
        let allocator = self.lock(caller)?;
        // What is free in one piece is wanted, whoever it was split for.
        allocator.flush_cache();
        let word = |at| self.words.load(at, Relaxed);
        Ok(Statistics {
            total: word(layout::TOTAL) << self.granule,
            free: word(layout::FREE) << self.granule,
            largest_free: u64::from(allocator.largest_free()) << self.granule,
            blocks_allocated: word(layout::BLOCKS_ALLOCATED),
            max_blocks: u64::from(self.max_blocks),
            repairs: word(layout::REPAIRS),
        })
    }

    /// Looks whether the books are consistent: for tests, and for the suspicious.
    ///
    /// # Errors
    /// `LockTimeout`; inside, the first flaw that was found.
    pub fn audit(&self, caller: &Caller<'_>) -> Result<std::result::Result<(), AuditError>> {
        Ok(self.lock(caller)?.audit())
    }

    /// Numbers that blocks have, or had: all below this.
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

    /// Why what is in this state is not what was named.
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
