//! A pool's control segment: its layout in shared memory.
//!
//! ```text
//!  0 maximum of blocks  4 memory location      8 doorbell
//!  1 limit              5 its device          16 used by streams
//!  2 direction          6   (two words)       17 count of stream-owned blocks
//!  3 admitted pieces    7 changes             24 lengths of admitted pieces
//!                                                their names
//!                                                allocator
//!                                                sample info of each block
//!                                                sync words of each block, page-aligned
//!                                                topic of each 64 KiB of memory
//! ```

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Instant;

use ipc::{
    Allocator, AllocatorError, Block, BlockRange, Caller, Doorbell, Owner, Participant, Statistics,
    WaitStrategy, WordRange, Words,
};

use super::sample_info::{self, SampleInfo};
use super::{Direction, PoolControl, PoolId};
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::settings::SharedLocation;

const MAX_BLOCKS: usize = 0;
const LIMIT: usize = 1;
const DIRECTION: usize = 2;
const ADMITTED: usize = 3;
const PLACE: usize = 4;
const UUID: usize = 5;
const CHANGES: usize = 7;
const BELL: usize = 8;
pub(super) const STREAMS: usize = 16;
pub(super) const STREAM_OWNED: usize = 17;
const LENGTHS: usize = 24;
pub(crate) const MAX_PIECES: usize = 1024;
const NAMES: usize = LENGTHS + MAX_PIECES;
pub(super) const ALLOCATOR: usize = NAMES + MAX_PIECES;

/// Sync words of each block.
pub(super) const SYNC_WORDS: usize = 4;

/// Unit of memory whose topic is known.
const REGION: u64 = 64 << 10;
/// Topic of a region: none had a block there yet, or several had. Otherwise its number plus one.
const NO_TOPIC: u64 = 0;
const SEVERAL_TOPICS: u64 = u64::MAX;

/// Alignment of every block: suits any type, also on devices.
pub(crate) const GRANULE: u64 = 256;

pub(super) type AllocResult<T> = std::result::Result<T, AllocatorError>;

fn malformed(detail: &'static str) -> Error {
    Error::new("open pool", ErrorKind::Malformed, detail)
}

/// Words of a system page: devices register whole pages.
fn page() -> usize {
    ipc::page_size() / size_of::<u64>()
}

/// Page-aligned range for the sync words, after all words before.
pub(super) fn page_aligned_sync_words(max_blocks: u32, before: usize, page: usize) -> Range<usize> {
    let first = before.next_multiple_of(page);
    first..first + (max_blocks as usize * SYNC_WORDS).next_multiple_of(page)
}

fn part<W: Words>(words: W, first: usize, count: usize) -> Result<WordRange<W>> {
    WordRange::new(words, first, count).ok_or_else(|| malformed("the control segment is truncated"))
}

impl<W: Words + Clone> PoolControl<W> {
    pub(crate) fn required_words(max_blocks: u32, limit: u64) -> usize {
        let regions = usize::try_from(limit.div_ceil(REGION)).unwrap_or(usize::MAX);
        Self::sync_words(max_blocks).end.saturating_add(regions)
    }

    fn first_sample_info(max_blocks: u32) -> usize {
        ALLOCATOR + Allocator::<W>::required_words(max_blocks).next_multiple_of(8)
    }

    fn sync_words(max_blocks: u32) -> Range<usize> {
        let notes = max_blocks as usize * sample_info::WORDS;
        let before = Self::first_sample_info(max_blocks) + notes;
        page_aligned_sync_words(max_blocks, before, page())
    }

    /// Formats zeroed words.
    pub(crate) fn format(words: W, id: PoolId, limit: u64, max_blocks: u32) -> Result<Self> {
        let [place, low, high] = id.place.words();
        let count = Allocator::<W>::required_words(max_blocks);
        let allocator = part(words.clone(), ALLOCATOR, count)?;
        Allocator::format_zeroed(allocator, max_blocks, GRANULE).during("create pool").on(id)?;
        words.store(MAX_BLOCKS, u64::from(max_blocks), Relaxed);
        words.store(LIMIT, limit, Relaxed);
        words.store(DIRECTION, id.direction as u64, Relaxed);
        words.store(UUID, low, Relaxed);
        words.store(UUID + 1, high, Relaxed);
        words.store(PLACE, place, Release);
        Self::attach(words)
    }

    pub(crate) fn attach(words: W) -> Result<Self> {
        let max_blocks = u32::try_from(words.load(MAX_BLOCKS, Relaxed));
        let max_blocks =
            max_blocks.map_err(|_| malformed("the control segment has invalid sizes"))?;
        let sync_words = Self::sync_words(max_blocks);
        if words.count() < Self::required_words(max_blocks, words.load(LIMIT, Relaxed)) {
            return Err(malformed("the control segment is truncated"));
        }
        let count = Allocator::<W>::required_words(max_blocks);
        let allocator =
            Allocator::attach(part(words.clone(), ALLOCATOR, count)?).during("open pool")?;
        let bell = part(words.clone(), BELL, Doorbell::<W>::WORDS)?;
        let bell = Doorbell::new(bell).ok_or_else(|| malformed("the doorbell is truncated"))?;
        let mut control = Self {
            words,
            allocator,
            bell,
            max_blocks,
            sync_words,
            is_stream_ordered: false,
            stream_owned_seen: AtomicU64::new(0),
        };
        control.is_stream_ordered = control.id()?.place != SharedLocation::Host;
        Ok(control)
    }

    pub(crate) fn id(&self) -> Result<PoolId> {
        let direction = match self.words.load(DIRECTION, Relaxed) {
            0 => Direction::Local,
            1 => Direction::Inbound,
            _ => return Err(malformed("invalid direction")),
        };
        let place = [PLACE, UUID, UUID + 1].map(|at| self.words.load(at, Acquire));
        let place = SharedLocation::from_words(place);
        let place = place.ok_or_else(|| malformed("invalid memory location"))?;
        Ok(PoolId { place, direction })
    }

    /// The words of the topics of a block's regions, each with whether the block covers the region.
    fn regions(&self, range: BlockRange) -> impl Iterator<Item = (usize, bool)> {
        let end = range.offset.saturating_add(range.length);
        let first = self.sync_words.end;
        (range.offset / REGION..end.div_ceil(REGION)).map(move |region| {
            let is_covered = region * REGION >= range.offset && (region + 1) * REGION <= end;
            (first + region as usize, is_covered)
        })
    }

    /// May this block, of a topic that will not write all of it, have bytes of another topic? If not,
    /// its regions belong to the topic from now on.
    pub(crate) fn may_show_others(&self, range: BlockRange, topic: u32) -> bool {
        let own = u64::from(topic) + 1;
        !self.regions(range).all(|(at, _)| {
            let found = self.words.load(at, Acquire);
            // Each piece is zero at first.
            let is_new = || self.words.compare_exchange(at, NO_TOPIC, own).is_ok();
            found == own || found == NO_TOPIC && is_new()
        })
    }

    /// The topic writes all of a block, or it was cleared: then the regions that it covers have no
    /// bytes of others.
    pub(crate) fn pass_to(&self, range: BlockRange, topic: u32, is_cleared: bool) {
        let own = u64::from(topic) + 1;
        for (at, is_covered) in self.regions(range) {
            let found = self.words.load(at, Acquire);
            if found == own {
                continue;
            }
            let topic = if is_covered && is_cleared { own } else { SEVERAL_TOPICS };
            if found != topic {
                self.words.store(at, topic, Release);
            }
        }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.words.load(LIMIT, Relaxed)
    }

    pub(crate) fn admitted(&self) -> usize {
        (self.words.load(ADMITTED, Acquire) as usize).min(MAX_PIECES)
    }

    /// Total length of the first pieces.
    fn length_of(&self, pieces: usize) -> u64 {
        let lengths = (0..pieces).map(|at| self.words.load(LENGTHS + at, Acquire));
        lengths.fold(0, u64::saturating_add)
    }

    pub(crate) fn length(&self) -> u64 {
        self.length_of(self.admitted())
    }

    /// The name of the piece with this number, if messages may lie in it.
    pub(crate) fn name_of(&self, number: usize) -> Option<u64> {
        let word = (number < MAX_PIECES).then(|| self.words.load(NAMES + number, Acquire));
        word.filter(|name| *name != 0)
    }

    /// The end of the named pieces.
    pub(crate) fn end(&self) -> u64 {
        let named = (0..MAX_PIECES).take_while(|number| self.name_of(*number).is_some());
        self.length_of(named.count())
    }

    /// Adds the next piece to the allocator. Idempotent, also after an interrupted attempt.
    pub(crate) fn admit(
        &self,
        caller: &Caller<'_>,
        number: usize,
        length: u64,
        name: u64,
    ) -> Result<()> {
        let operation = "admit piece to pool";
        let admitted = self.admitted();
        if number < admitted {
            return Ok(());
        }
        if number > admitted || number >= MAX_PIECES || name == 0 {
            let detail = format!("piece {number} out of range: {admitted} are admitted");
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        let first = self.length_of(number);
        // The allocator holds the admitted pieces, and perhaps this one: then messages may lie in
        // it, and no other memory may replace it.
        if self.allocator.statistics(caller).during(operation)?.total <= first {
            // First: from then on any process may allocate from it.
            self.words.store(LENGTHS + number, length, Release);
            self.words.store(NAMES + number, name, Release);
            self.allocator.extend(caller, first, length).during(operation)?;
        } else if self.name_of(number) != Some(name) {
            let detail = format!("the control segment has another piece {number}");
            return Err(Error::new(operation, ErrorKind::Failed, detail));
        }
        self.words.store(ADMITTED, number as u64 + 1, Release);
        self.changed();
        Ok(())
    }

    /// Wakes waiting processes unconditionally.
    pub(crate) fn wake(&self) {
        self.words.fetch_add(CHANGES, 1);
        self.bell.ring_unconditionally();
    }

    /// Allocates, and initialises the block's sample info.
    #[inline]
    pub(crate) fn allocate(
        &self,
        caller: &Caller<'_>,
        owner: Owner,
        bytes: u64,
    ) -> AllocResult<(Block, BlockRange)> {
        let (block, place) = self.allocator.allocate(caller, owner, bytes.max(1), GRANULE)?;
        let sample_info = self.sample_info(block);
        sample_info.prefetch_for_write();
        sample_info.begin(block, clock::now());
        Ok((block, place))
    }

    #[inline]
    pub(crate) fn free(&self, caller: &Caller<'_>, block: Block, owner: Owner) -> AllocResult<()> {
        self.allocator.free(caller, block, owner)?;
        self.changed();
        Ok(())
    }

    /// Frees the block, unless it is free already. False if that was not possible now.
    #[inline]
    pub(crate) fn dispose(&self, caller: &Caller<'_>, block: Block, owner: Owner) -> bool {
        match self.free(caller, block, owner) {
            Ok(()) | Err(AllocatorError::Stale(_) | AllocatorError::NotOwner { .. }) => true,
            Err(error) => {
                tracing::warn!(?block, %error, "a block could not be freed");
                false
            }
        }
    }

    pub(crate) fn transfer(&self, block: Block, from: Owner, to: Owner) -> AllocResult<()> {
        self.allocator.transfer(block, from, to)
    }

    pub(crate) fn owner(&self, block: Block) -> AllocResult<Owner> {
        self.allocator.owner(block)
    }

    #[inline]
    pub(crate) fn find(&self, block: Block) -> AllocResult<BlockRange> {
        self.allocator.find(block)
    }

    /// Frees all blocks of a dead participant, poisons its unwritten messages, and wakes processes
    /// that it left waiting.
    pub(crate) fn reclaim(&self, caller: &Caller<'_>, dead: Participant) -> AllocResult<usize> {
        let owner = Owner::participant(dead);
        self.poison_all(dead);
        let freed = self.allocator.reclaim(caller, owner, |_| false)?;
        self.collect(caller)?;
        self.wake();
        Ok(freed)
    }

    pub(crate) fn statistics(&self, caller: &Caller<'_>) -> AllocResult<Statistics> {
        self.allocator.statistics(caller)
    }

    pub(crate) fn max_blocks(&self) -> u32 {
        self.max_blocks
    }

    pub(crate) fn owners(&self, caller: &Caller<'_>) -> AllocResult<BTreeSet<Participant>> {
        let blocks = self.allocator.blocks(caller)?;
        Ok(blocks.into_iter().filter_map(|block| block.owner?.as_participant()).collect())
    }

    #[inline]
    pub(crate) fn sample_info(&self, block: Block) -> SampleInfo<'_, W> {
        let first = match block.number() {
            number if number < self.max_blocks => {
                Self::first_sample_info(self.max_blocks) + number as usize * sample_info::WORDS
            }
            // An invalid block number refers to no words: loads give 0, and stores have no effect.
            _ => self.words.count(),
        };
        SampleInfo::new(&self.words, first)
    }

    /// Signals freed or added memory.
    #[inline]
    pub(super) fn changed(&self) {
        self.words.fetch_add(CHANGES, 1);
        self.bell.ring();
    }

    /// Changes whenever memory was freed or added.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.words.load(CHANGES, Acquire)
    }

    /// Waits until `look` returns a result; it is called after each change.
    pub(crate) fn wait<T>(
        &self,
        spin: &mut WaitStrategy,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(spin, deadline, look)
    }
}
