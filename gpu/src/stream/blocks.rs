//! Many blocks in one request: by the copy engine if they are large or few, by a kernel
//! otherwise.
//!
//! A copy engine takes microseconds for each copy, however small. A kernel reads a list of
//! them from memory of the host, and has hundreds on their way at once; `devices.md` has what
//! was measured. What a kernel is given is cut into pieces, so that its threads have evenly
//! much to do.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::sync::{Arc, PoisonError};

use super::Stream;
use crate::driver::{Entry, HostBlock};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Slice;

/// The longest piece: one team of threads copies it. A multiple of 16, so that all pieces of a
/// block lie as it does to what a thread moves at once.
const PIECE: u64 = 64 << 10;
/// From here on the copy engine is as fast as a kernel, and takes no processors.
const LARGE: u64 = 1 << 20;
/// So few blocks are begun as copies as fast as a kernel is.
const FEW: usize = 2;
/// Entries of a list. A longer request takes several, so that the device is at the first while
/// the host still writes the second.
const ENTRIES: usize = 4096;
/// Copies that are begun under one lock: others may want the stream, too.
const COPIES: usize = 64;

/// A block: so many bytes from one place to another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Block {
    /// Where it goes, as an offset into the range to copy to.
    pub to: u64,
    /// Where it is, as an offset into the range to copy from.
    pub from: u64,
    /// Its length in bytes; 0 is allowed.
    pub length: u64,
}

/// By what [many blocks](Stream::copy_blocks) are copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum BlocksBy {
    /// By what was fastest when it was measured: blocks of a mebibyte or more by the copy
    /// engine, and the others, too, if there are no more than two; by a kernel otherwise.
    #[default]
    Best,
    /// All by a kernel. It takes some of the device's processors while it runs, and leaves the
    /// copy engine to others.
    Kernel,
    /// Each by a copy of its own, by the copy engine.
    Loop,
}

impl BlocksBy {
    /// Blocks shorter than this go by a kernel.
    fn kernel_below(self, blocks: impl Iterator<Item = Block>) -> u64 {
        let small = blocks.filter(|block| (1..LARGE).contains(&block.length));
        match self {
            Self::Kernel => u64::MAX,
            Self::Loop => 0,
            Self::Best if small.take(FEW + 1).count() <= FEW => 0,
            Self::Best => LARGE,
        }
    }
}

impl Stream {
    /// Copies many blocks of one range to places in another. In which order is not said: where
    /// a block goes, no other may go, nor come from. What follows on this stream finds all of
    /// them done.
    ///
    /// ```
    /// use gpu::{Block, BlocksBy};
    /// # let device = gpu::Device::open("stand-in:0".parse()?)?;
    /// # let (pages, cache) = (device.allocate(1 << 20)?, device.allocate(1 << 20)?);
    /// let stream = device.stream()?;
    /// // Every fourth page of 4 KiB, one behind the other.
    /// let blocks: Vec<_> =
    ///     (0..64).map(|n| Block { to: n * 4096, from: 4 * n * 4096, length: 4096 }).collect();
    /// stream.copy_blocks(&cache.whole(), &pages.whole(), &blocks, BlocksBy::Best)?;
    /// stream.synchronize(gpu::PATIENCE)?;
    /// # Ok::<(), gpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds), with the number of the block, if one reaches
    /// beyond a range: then nothing is begun. [`NoPeerAccess`](ErrorKind::NoPeerAccess) as for
    /// [copying](Self::copy). If the driver refuses, some blocks may have been begun.
    pub fn copy_blocks(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: &[Block],
        by: BlocksBy,
    ) -> Result<()> {
        self.copy_each(to, from, blocks.iter().copied(), by)
    }

    /// As [`copy_blocks`](Self::copy_blocks), where the blocks are in no list: they are gone
    /// through several times, and must be the same each time.
    ///
    /// # Errors
    /// As for [`copy_blocks`](Self::copy_blocks).
    pub fn copy_each(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: impl Iterator<Item = Block> + Clone,
        by: BlocksBy,
    ) -> Result<()> {
        let operation = "copy blocks";
        self.check_reach(operation, to)?;
        self.check_reach(operation, from)?;
        let limits = (to.length(), from.length());
        self.check_blocks(operation, limits, blocks.clone())?;
        let below = by.kernel_below(blocks.clone());
        let bases = (to.address(), from.address());
        // What is safe may not depend on an iterator that gives the same blocks each time.
        let are_same = Cell::new(true);
        let fits = |block: &Block| {
            are_same.set(are_same.get() && outside(limits, block).is_none());
            are_same.get()
        };
        // These first: the device is at them while the host writes lists.
        let large = blocks.clone().take_while(fits).filter(|block| block.length >= below.max(1));
        let mut copies = large.peekable();
        while copies.peek().is_some() {
            self.begin_with(operation, &[to, from], None, |raw| {
                copies.by_ref().take(COPIES).try_for_each(|block| {
                    // SAFETY: inside of the ranges, which are kept alive until an event behind
                    // the copies is done.
                    unsafe { raw.copy(bases.0 + block.to, bases.1 + block.from, block.length) }
                })
            })?;
        }
        let small = blocks.take_while(fits).filter(|block| block.length < below);
        let mut entries = small.flat_map(|block| pieces(block, bases)).peekable();
        while entries.peek().is_some() {
            let list = self.list()?;
            let (count, bytes) = write(&*list, entries.by_ref().take(ENTRIES));
            self.begin_with(operation, &[to, from], Some(&list), |raw| {
                // SAFETY: inside of the ranges; they and the list, which nobody else has, are
                // kept until an event behind it is done.
                unsafe { raw.copy_list(list.address(), count, bytes) }
            })?;
        }
        if are_same.get() {
            return Ok(());
        }
        let detail = "other blocks came when they were gone through again";
        Err(self.refuse(operation, ErrorKind::OutOfBounds, detail.to_owned()))
    }

    fn check_blocks(
        &self,
        operation: &'static str,
        limits: (u64, u64),
        blocks: impl Iterator<Item = Block>,
    ) -> Result<()> {
        for (number, block) in blocks.enumerate() {
            if let Some((side, offset, limit)) = outside(limits, &block) {
                let detail = format!(
                    "block {number}: {} bytes, {side} {offset} on, of a range of {limit} bytes",
                    block.length
                );
                return Err(self.refuse(operation, ErrorKind::OutOfBounds, detail));
            }
        }
        Ok(())
    }

    /// Room for a list, which is the caller's until what uses it is done: as many are made as
    /// are ever in use at once.
    fn list(&self) -> Result<Arc<dyn HostBlock>> {
        let free = || self.lists.lock().unwrap_or_else(PoisonError::into_inner).take(|_| true);
        if let Some(list) = free() {
            return Ok(list);
        }
        // Nobody may have asked since those that were begun with are done.
        let mut in_flight = self.in_flight();
        if in_flight.since_last > 0 {
            self.mark(&mut in_flight)?;
        }
        self.sweep(in_flight);
        if let Some(list) = free() {
            return Ok(list);
        }
        let driver = self.device.driver("allocate host memory")?;
        let made = driver.host_block(ENTRIES * size_of::<Entry>());
        let made = Arc::from(made.map_err(|error: Error| error.on(self.device.name()))?);
        self.lists.lock().unwrap_or_else(PoisonError::into_inner).keep(&made);
        Ok(made)
    }
}

/// The side on which a block reaches beyond its range, where it begins, and how long the range is.
fn outside((to, from): (u64, u64), block: &Block) -> Option<(&'static str, u64, u64)> {
    let sides = [("to", block.to, to), ("from", block.from, from)];
    sides
        .into_iter()
        .find(|(_, offset, limit)| offset.checked_add(block.length).is_none_or(|end| end > *limit))
}

/// A block in pieces, as entries of a list.
fn pieces(block: Block, (to, from): (u64, u64)) -> impl Iterator<Item = Entry> {
    (0..block.length).step_by(PIECE as usize).map(move |at| Entry {
        to: to + block.to + at,
        from: from + block.from + at,
        length: PIECE.min(block.length - at),
    })
}

/// Writes a list. Gives the number of its entries, and of their bytes.
fn write(list: &dyn HostBlock, entries: impl Iterator<Item = Entry>) -> (u32, u64) {
    let place = list.address() as *mut Entry;
    let (mut count, mut bytes) = (0, 0);
    for entry in entries.take(ENTRIES) {
        // SAFETY: there is room for so many; nobody but the caller has the list.
        unsafe { place.add(count).write(entry) };
        count += 1;
        bytes += entry.length;
    }
    (count as u32, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, PATIENCE};

    fn blocks(lengths: &[u64]) -> Vec<Block> {
        lengths.iter().map(|length| Block { to: 0, from: 0, length: *length }).collect()
    }

    #[test]
    fn pieces_are_the_block() {
        for length in [0, 1, 15, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 77] {
            let block = Block { to: 1003, from: 7, length };
            let found: Vec<_> = pieces(block, (1 << 40, 1 << 41)).collect();
            assert_eq!(found.len() as u64, length.div_ceil(PIECE));
            let mut at = 0;
            for piece in found {
                assert_eq!(piece.to, (1 << 40) + 1003 + at);
                assert_eq!(piece.from, (1 << 41) + 7 + at);
                assert!((1..=PIECE).contains(&piece.length));
                at += piece.length;
            }
            assert_eq!(at, length);
        }
    }

    #[test]
    fn what_goes_by_a_kernel() {
        let many = blocks(&[100, LARGE - 1, LARGE, 5 * LARGE, 1, 0]);
        let below = |by: BlocksBy, blocks: &[Block]| by.kernel_below(blocks.iter().copied());
        assert_eq!(below(BlocksBy::Best, &many), LARGE);
        assert_eq!(below(BlocksBy::Best, &many[1..5]), 0, "two of them are small");
        assert_eq!(below(BlocksBy::Best, &many[..2]), 0);
        assert_eq!(below(BlocksBy::Best, &[]), 0);
        assert_eq!(below(BlocksBy::Kernel, &many[..1]), u64::MAX);
        assert_eq!(below(BlocksBy::Loop, &many), 0);
    }

    /// An iterator that gives other blocks each time is wrong, but safe code.
    #[test]
    fn blocks_that_change_meanwhile_are_refused_again() {
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        let memory = device.allocate(1 << 20).unwrap();
        let (whole, stream) = (memory.whole(), device.stream().unwrap());
        for (good, by) in [(300, BlocksBy::Loop), (600, BlocksBy::Kernel), (300, BlocksBy::Best)] {
            let given = Cell::new(0);
            let liar = (0..300).map(|_| {
                given.set(given.get() + 1);
                let to = if given.get() <= good { 0 } else { u64::MAX / 2 };
                Block { to, from: 1 << 19, length: 16 }
            });
            let copied = stream.copy_each(&whole, &whole, liar, by);
            assert_eq!(copied.unwrap_err().kind(), ErrorKind::OutOfBounds, "{by:?}");
        }
        stream.synchronize(PATIENCE).unwrap();
    }

    /// What is waited for leaves its lists to the next, and requests that nobody waits for
    /// take those that are done.
    #[test]
    fn lists_are_used_again() {
        let device = Device::open("stand-in:1".parse().unwrap()).unwrap();
        let (to, from) = (device.allocate(1 << 20).unwrap(), device.allocate(1 << 20).unwrap());
        let stream = device.stream().unwrap();
        let many: Vec<_> = (0..2 * ENTRIES as u64 + 1)
            .map(|number| Block { to: number, from: number, length: 1 })
            .collect();
        let lists = || stream.lists.lock().unwrap().len();
        for _ in 0..50 {
            stream.copy_blocks(&to.whole(), &from.whole(), &many, BlocksBy::Best).unwrap();
            stream.synchronize(PATIENCE).unwrap();
        }
        assert!(lists() <= 3, "{} lists", lists());
        for _ in 0..50 {
            let few = &many[..10];
            stream.copy_blocks(&to.whole(), &from.whole(), few, BlocksBy::Best).unwrap();
            stream.point().unwrap().wait(PATIENCE).unwrap();
        }
        assert!(lists() <= 3, "{} lists", lists());
    }
}
