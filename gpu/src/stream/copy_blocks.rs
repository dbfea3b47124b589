//! Many blocks in one request: by the copy engine if they are large or few, otherwise by a
//! kernel.
//!
//! A copy engine takes microseconds for each copy, however small. A kernel reads a list of
//! copies from host memory, and has hundreds in flight at once; `docs/internals/devices.md` has the
//! measurements. Blocks are cut into pieces for the kernel, so that its threads have equal
//! work.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::Arc;

use threads::lock;

use super::Stream;
use crate::driver::{CopyEntry, PinnedBuffer};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Slice;

/// The longest piece: one team of threads copies it. A multiple of 16, so that all pieces of a
/// block have the same alignment to a thread's unit.
const MAX_PIECE: u64 = 64 << 10;
/// From this length on the copy engine is as fast as a kernel, and uses no multiprocessors: it takes
/// 2.7 µs for a copy besides its bytes.
const COPY_ENGINE_MIN: u64 = 8 << 20;
/// Up to this many blocks, starting copies is as fast as starting a kernel.
const COPY_ENGINE_MAX_BLOCKS: usize = 2;
/// Entries of a list. A longer request takes several, so that the device copies the first while
/// the host writes the second.
pub(super) const LIST_ENTRIES: usize = 4096;
/// Entries of the first list, for which the device waits. Each further one has twice as many.
const FIRST_LIST_ENTRIES: usize = 512;
/// Copies that are started under one lock: other threads may need the stream, too.
const COPIES_PER_LOCK: usize = 64;

/// A block: a length and two offsets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Block {
    /// The offset in the destination range.
    pub to: u64,
    /// The offset in the source range.
    pub from: u64,
    /// The block's length in bytes; 0 is allowed.
    pub length: u64,
}

/// How [many blocks](Stream::copy_blocks) are copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum CopyMethod {
    /// The method that was fastest in measurements. Blocks of 8 MiB or more use the copy engine, and
    /// the others, too, if there are no more than two; otherwise a kernel.
    #[default]
    Best,
    /// All by a kernel. It uses some of the device's multiprocessors while it runs, and leaves
    /// the copy engine free.
    Kernel,
    /// Each by a separate copy of the copy engine.
    CopyEngine,
}

/// The number of blocks of a request by length; empty ones are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct BlockCounts {
    small: usize,
    large: usize,
}

impl BlockCounts {
    #[inline]
    pub(super) fn count(&mut self, block: &Block) {
        self.large += usize::from(block.length >= COPY_ENGINE_MIN);
        self.small += usize::from((1..COPY_ENGINE_MIN).contains(&block.length));
    }

    /// Blocks shorter than the first value use a kernel. The flags tell whether there are such
    /// blocks, and whether there are others, which use the copy engine.
    pub(super) fn split(self, by: CopyMethod) -> (u64, bool, bool) {
        let Self { small, large } = self;
        match by {
            CopyMethod::Kernel => (u64::MAX, small + large > 0, false),
            CopyMethod::Best if small > COPY_ENGINE_MAX_BLOCKS => {
                (COPY_ENGINE_MIN, true, large > 0)
            }
            CopyMethod::CopyEngine | CopyMethod::Best => (0, false, small + large > 0),
        }
    }
}

impl Stream {
    /// Copies many blocks of one range to offsets in another, in unspecified order. The
    /// destination of a block must not overlap another block's source or destination. Later
    /// operations on this stream see all of them done.
    ///
    /// ```
    /// use gpu::{Block, CopyMethod};
    /// # let device = gpu::Device::open("emulated:0".parse()?)?;
    /// # let (pages, cache) = (device.allocate(1 << 20)?, device.allocate(1 << 20)?);
    /// let stream = device.stream()?;
    /// // Every fourth page of 4 KiB, one behind the other.
    /// let blocks: Vec<_> =
    ///     (0..64).map(|n| Block { to: n * 4096, from: 4 * n * 4096, length: 4096 }).collect();
    /// stream.copy_blocks(&cache.whole(), &pages.whole(), &blocks, CopyMethod::Best)?;
    /// stream.synchronize(gpu::DEFAULT_TIMEOUT)?;
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds), with the index of the block, if one exceeds a
    /// range: then nothing is started. [`NoPeerAccess`](ErrorKind::NoPeerAccess) as for
    /// [copying](Self::copy). If the driver refuses, some blocks may have been started.
    pub fn copy_blocks(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: &[Block],
        by: CopyMethod,
    ) -> Result<()> {
        let operation = "copy blocks";
        self.check_writable(operation, to)?;
        self.check_reach(operation, from)?;
        let counts = self.check_blocks(operation, to, from, blocks)?;
        // SAFETY: all blocks are inside of the ranges, and the list does not change.
        unsafe { self.copy_inside(to, from, || blocks.iter().copied(), counts, by) }
    }

    /// Fails with the first block that exceeds a range.
    pub(super) fn check_blocks(
        &self,
        operation: &'static str,
        to: &Slice,
        from: &Slice,
        blocks: &[Block],
    ) -> Result<BlockCounts> {
        let limits = (to.length(), from.length());
        let (mut counts, mut are_inside) = (BlockCounts::default(), true);
        for block in blocks {
            are_inside &= is_inside(limits, block);
            counts.count(block);
        }
        if are_inside {
            return Ok(counts);
        }
        let mut numbered = blocks.iter().enumerate();
        match numbered.find(|(_, block)| !is_inside(limits, block)) {
            Some((number, block)) => Err(self.beyond(operation, limits, number, *block)),
            None => Ok(counts),
        }
    }

    /// Like [`copy_blocks`](Self::copy_blocks), for blocks from an iterator: it is used several
    /// times, and must return the same blocks each time.
    ///
    /// # Errors
    /// As for [`copy_blocks`](Self::copy_blocks).
    pub fn copy_each(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: impl Iterator<Item = Block> + Clone,
        by: CopyMethod,
    ) -> Result<()> {
        let operation = "copy blocks";
        self.check_writable(operation, to)?;
        self.check_reach(operation, from)?;
        let limits = (to.length(), from.length());
        let mut census = BlockCounts::default();
        for (number, block) in blocks.clone().enumerate() {
            if !is_inside(limits, &block) {
                return Err(self.beyond(operation, limits, number, block));
            }
            census.count(&block);
        }
        let is_consistent = Cell::new(true);
        let again =
            || CheckedBlocks { blocks: blocks.clone(), limits, is_consistent: &is_consistent };
        // SAFETY: the adapter ends at the first block that is not inside of the ranges.
        unsafe { self.copy_inside(to, from, again, census, by)? };
        if is_consistent.get() {
            return Ok(());
        }
        let detail = "the iterator of blocks returned different blocks in its second pass";
        Err(self.refuse(operation, ErrorKind::OutOfBounds, detail.to_owned()))
    }

    /// Copies blocks, given twice.
    ///
    /// # Safety
    /// All blocks are inside of the ranges, which this device may write to and read from.
    pub(super) unsafe fn copy_inside<I: Iterator<Item = Block>>(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: impl Fn() -> I,
        counts: BlockCounts,
        by: CopyMethod,
    ) -> Result<()> {
        let operation = "copy blocks";
        let (below, by_kernel, by_engine) = counts.split(by);
        let bases = (to.address(), from.address());
        // These first: the device copies them while the host writes lists.
        if by_engine {
            let mut copies = blocks().filter(|block| block.length >= below.max(1));
            let mut next = copies.next();
            while next.is_some() {
                self.begin(operation, &[to, from], None, |raw| {
                    for _ in 0..COPIES_PER_LOCK {
                        let Some(block) = next else { break };
                        // SAFETY: inside of the ranges, as the caller promises. They are kept alive
                        // until an event behind the copies is done.
                        unsafe {
                            raw.copy(bases.0 + block.to, bases.1 + block.from, block.length)?;
                        }
                        next = copies.next();
                    }
                    Ok(())
                })?;
            }
        }
        if by_kernel {
            let meant = blocks().filter(|block| block.length > 0 && block.length < below);
            let mut pieces = Pieces::new(meant, bases.0, bases.1);
            let mut most = FIRST_LIST_ENTRIES;
            loop {
                let list = self.list()?;
                let (count, bytes) = pieces.write(&*list, most);
                if count == 0 {
                    break;
                }
                self.begin(operation, &[to, from], Some(&list), |raw| {
                    // SAFETY: inside of the ranges, as the caller promises; they and the list, which
                    // has no other user, are kept until an event behind it is done.
                    unsafe { raw.copy_list(list.address(), count, bytes) }
                })?;
                if (count as usize) < most {
                    break;
                }
                most = (2 * most).min(LIST_ENTRIES);
            }
        }
        Ok(())
    }

    #[cold]
    fn beyond(
        &self,
        operation: &'static str,
        limits: (u64, u64),
        number: usize,
        block: Block,
    ) -> Error {
        let (side, offset, limit) = match ends_inside(block.to, block.length, limits.0) {
            true => ("from", block.from, limits.1),
            false => ("to", block.to, limits.0),
        };
        let length = block.length;
        let detail = format!(
            "block {number}: {length} bytes, {side} offset {offset}, of a range of {limit} bytes"
        );
        self.refuse(operation, ErrorKind::OutOfBounds, detail)
    }

    /// A list buffer, which is reserved until its operation is done: as many are allocated as
    /// are ever in use at once.
    fn list(&self) -> Result<Arc<dyn PinnedBuffer>> {
        let driver = self.device.driver("copy blocks")?;
        driver.check_context("copy blocks")?;
        let free = || lock(&self.lists).take(|_| true);
        if let Some(list) = free() {
            return Ok(list);
        }
        // The events may not have been queried since the lists became free.
        let mut in_flight = lock(&self.in_flight);
        if in_flight.since_last > 0 {
            self.mark(driver, &mut in_flight)?;
        }
        self.sweep(driver, in_flight);
        if let Some(list) = free() {
            return Ok(list);
        }
        let length = LIST_ENTRIES * size_of::<CopyEntry>();
        let made = self.device.call("copy blocks", |driver| driver.pinned_buffer(length))?;
        let made = Arc::from(made);
        lock(&self.lists).keep(&made);
        Ok(made)
    }
}

#[inline]
fn ends_inside(offset: u64, length: u64, limit: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= limit)
}

#[inline]
fn is_inside((to, from): (u64, u64), block: &Block) -> bool {
    ends_inside(block.to, block.length, to) && ends_inside(block.from, block.length, from)
}

/// Blocks in a second pass. Safety must not depend on an iterator that returns the same blocks
/// each time: each block is checked again, and the pass ends at a wrong one.
struct CheckedBlocks<'a, I> {
    blocks: I,
    limits: (u64, u64),
    is_consistent: &'a Cell<bool>,
}

impl<I: Iterator<Item = Block>> Iterator for CheckedBlocks<'_, I> {
    type Item = Block;

    #[inline]
    fn next(&mut self) -> Option<Block> {
        let block = self.blocks.next().filter(|_| self.is_consistent.get())?;
        if is_inside(self.limits, &block) {
            return Some(block);
        }
        self.is_consistent.set(false);
        None
    }
}

/// Number of the pieces of a block.
pub(super) fn pieces_of(block: Block) -> u64 {
    block.length.div_ceil(MAX_PIECE)
}

/// Blocks cut into pieces, as entries of lists.
pub(super) struct Pieces<I> {
    /// Without empty ones.
    blocks: I,
    /// The addresses of the ranges, destination and source.
    bases: (u64, u64),
    /// The rest of the last block.
    rest: Block,
}

impl<I: Iterator<Item = Block>> Pieces<I> {
    pub(super) fn new(blocks: I, to: u64, from: u64) -> Self {
        Self { blocks, bases: (to, from), rest: Block::default() }
    }

    #[inline]
    fn next(&mut self) -> Option<CopyEntry> {
        if self.rest.length == 0 {
            self.rest = self.blocks.next()?;
        }
        let Block { to, from, length } = self.rest;
        let piece = length.min(MAX_PIECE);
        self.rest = Block { to: to + piece, from: from + piece, length: length - piece };
        Some(CopyEntry { to: self.bases.0 + to, from: self.bases.1 + from, length: piece })
    }

    /// Writes a list of at most this many entries. Returns the number of its entries, and of their
    /// bytes.
    pub(super) fn write(&mut self, list: &dyn PinnedBuffer, most: usize) -> (u32, u64) {
        let entries_start = list.address() as *mut CopyEntry;
        let (mut count, mut bytes) = (0, 0);
        while count < most.min(LIST_ENTRIES) {
            let Some(entry) = self.next() else { break };
            // SAFETY: there is space for this many; only the caller uses the list.
            unsafe { entries_start.add(count).write(entry) };
            count += 1;
            bytes += entry.length;
        }
        (count as u32, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DEFAULT_TIMEOUT, Device};

    fn blocks(lengths: &[u64]) -> Vec<Block> {
        lengths.iter().map(|length| Block { to: 0, from: 0, length: *length }).collect()
    }

    #[test]
    fn pieces_cover_exactly_the_blocks() {
        let lengths =
            [0, 1, 15, MAX_PIECE - 1, MAX_PIECE, MAX_PIECE + 1, 3 * MAX_PIECE, 5 * MAX_PIECE + 77];
        let list: Vec<_> =
            lengths.iter().map(|length| Block { to: 1003, from: 7, length: *length }).collect();
        for below in [u64::MAX, MAX_PIECE] {
            let blocks = list.iter().copied();
            let blocks = blocks.filter(|block| block.length > 0 && block.length < below);
            let mut pieces = Pieces::new(blocks, 1 << 40, 1 << 41);
            for length in lengths.into_iter().filter(|length| *length < below) {
                let mut at = 0;
                for _ in 0..length.div_ceil(MAX_PIECE) {
                    let piece = pieces.next().unwrap();
                    assert_eq!(piece.to, (1 << 40) + 1003 + at);
                    assert_eq!(piece.from, (1 << 41) + 7 + at);
                    assert!((1..=MAX_PIECE).contains(&piece.length));
                    at += piece.length;
                }
                assert_eq!(at, length);
            }
            assert!(pieces.next().is_none());
            let counts: Vec<_> = list.iter().map(|block| pieces_of(*block)).collect();
            assert_eq!(counts, [0, 1, 1, 1, 1, 2, 3, 6]);
        }
    }

    #[test]
    fn short_and_many_blocks_use_a_kernel() {
        let many = blocks(&[100, COPY_ENGINE_MIN - 1, COPY_ENGINE_MIN, 5 * COPY_ENGINE_MIN, 1, 0]);
        let split = |by: CopyMethod, blocks: &[Block]| {
            let mut census = BlockCounts::default();
            blocks.iter().for_each(|block| census.count(block));
            census.split(by)
        };
        assert_eq!(split(CopyMethod::Best, &many), (COPY_ENGINE_MIN, true, true));
        assert_eq!(split(CopyMethod::Best, &many[1..5]), (0, false, true), "two of them are small");
        assert_eq!(split(CopyMethod::Best, &many[..2]), (0, false, true));
        assert_eq!(split(CopyMethod::Best, &blocks(&[1, 2, 3])), (COPY_ENGINE_MIN, true, false));
        assert_eq!(split(CopyMethod::Best, &blocks(&[0, 0, 0])), (0, false, false));
        assert_eq!(split(CopyMethod::Best, &[]), (0, false, false));
        assert_eq!(split(CopyMethod::Kernel, &many[..1]), (u64::MAX, true, false));
        assert_eq!(split(CopyMethod::Kernel, &many[5..]), (u64::MAX, false, false));
        assert_eq!(split(CopyMethod::CopyEngine, &many), (0, false, true));
    }

    /// An iterator that returns other blocks each time is wrong, but safe code.
    #[test]
    fn blocks_that_change_between_passes_are_refused() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let memory = device.allocate(1 << 20).unwrap();
        let (whole, stream) = (memory.whole(), device.stream().unwrap());
        for (good, by) in
            [(300, CopyMethod::CopyEngine), (450, CopyMethod::Kernel), (300, CopyMethod::Best)]
        {
            let given = Cell::new(0);
            let liar = (0..300).map(|_| {
                given.set(given.get() + 1);
                let to = if given.get() <= good { 0 } else { u64::MAX / 2 };
                Block { to, from: 1 << 19, length: 16 }
            });
            let copied = stream.copy_each(&whole, &whole, liar, by);
            assert_eq!(copied.unwrap_err().kind(), ErrorKind::OutOfBounds, "{by:?}");
        }
        stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    }

    /// Requests that wait return their lists to later ones; requests without a wait reuse lists
    /// whose operations are done.
    #[test]
    fn lists_are_reused() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let (to, from) = (device.allocate(1 << 20).unwrap(), device.allocate(1 << 20).unwrap());
        let stream = device.stream().unwrap();
        let many: Vec<_> = (0..2 * LIST_ENTRIES as u64 + 1)
            .map(|number| Block { to: number, from: number, length: 1 })
            .collect();
        let lists = || stream.lists.lock().unwrap().len();
        for _ in 0..50 {
            stream.copy_blocks(&to.whole(), &from.whole(), &many, CopyMethod::Best).unwrap();
            stream.synchronize(DEFAULT_TIMEOUT).unwrap();
        }
        assert!(lists() <= 5, "{} lists", lists());
        for _ in 0..50 {
            let few = &many[..10];
            stream.copy_blocks(&to.whole(), &from.whole(), few, CopyMethod::Best).unwrap();
            stream.point().unwrap().wait(DEFAULT_TIMEOUT).unwrap();
        }
        assert!(lists() <= 5, "{} lists", lists());
    }
}
