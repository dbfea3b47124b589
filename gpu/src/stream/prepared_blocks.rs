//! Lists of blocks that are copied several times.
//!
//! A request that is made again, such as that for the pages of a cache, is checked once, and its list
//! for the kernel stays in memory that the device reads: the host starts kernels, and writes
//! nothing for them.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use super::Stream;
use super::copy_blocks::{Block, BlockCounts, CopyMethod, LIST_ENTRIES, Pieces, pieces_of};
use crate::device_name::DeviceName;
use crate::driver::{CopyEntry, PinnedBuffer};
use crate::error::{ErrorKind, Result};
use crate::memory::Slice;

/// Blocks between two ranges, checked and prepared for a device. Clones are the same list.
///
/// ```
/// use gpu::{Block, Device};
/// # let device = Device::open("emulated:0".parse()?)?;
/// # let (pages, cache) = (device.allocate(1 << 20)?, device.allocate(1 << 20)?);
/// let stream = device.stream()?;
/// let blocks = (0..64).map(|n| Block { to: n * 4096, from: 4 * n * 4096, length: 4096 }).collect();
/// let prepared = stream.prepare_blocks(&cache.whole(), &pages.whole(), blocks)?;
/// for _ in 0..3 {
///     stream.copy_prepared(&prepared)?; // all of them
/// }
/// stream.copy_selected(&prepared, &[5, 6, 63])?;
/// stream.synchronize(gpu::DEFAULT_TIMEOUT)?;
/// # Ok::<(), gpu::Error>(())
/// ```
#[derive(Clone)]
pub struct PreparedBlocks(Arc<Inner>);

struct Inner {
    device: DeviceName,
    to: Slice,
    from: Slice,
    blocks: Box<[Block]>,
    bytes: u64,
    counts: BlockCounts,
    /// Lists for the kernel: entries and bytes of each.
    lists: Vec<(Arc<dyn PinnedBuffer>, u32, u64)>,
}

impl fmt::Debug for PreparedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PreparedBlocks({} blocks, {} bytes)", self.blocks().len(), self.bytes())
    }
}

impl PreparedBlocks {
    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[Block] {
        &self.0.blocks
    }

    /// Bytes of all blocks together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

impl Stream {
    /// Prepares blocks between two ranges for streams of this device. The memory is kept as long as
    /// the prepared list exists.
    ///
    /// # Errors
    /// As for [`copy_blocks`](Self::copy_blocks).
    pub fn prepare_blocks(
        &self,
        to: &Slice,
        from: &Slice,
        blocks: Vec<Block>,
    ) -> Result<PreparedBlocks> {
        let operation = "prepare blocks";
        self.check_writable(operation, to)?;
        self.check_reach(operation, from)?;
        let counts = self.check_blocks(operation, to, from, &blocks)?;
        let (below, by_kernel, _) = counts.split(CopyMethod::Best);
        let mut lists = Vec::new();
        if by_kernel {
            let meant = blocks.iter().copied();
            let meant = meant.filter(|block| block.length > 0 && block.length < below);
            let mut left: u64 = meant.clone().map(pieces_of).sum();
            let mut pieces = Pieces::new(meant, to.address(), from.address());
            while left > 0 {
                let entries = left.min(LIST_ENTRIES as u64) as usize;
                let length = entries * size_of::<CopyEntry>();
                let list: Arc<dyn PinnedBuffer> =
                    self.device().call(operation, |driver| driver.pinned_buffer(length))?.into();
                let (count, bytes) = pieces.write(&*list, entries);
                lists.push((list, count, bytes));
                left -= entries as u64;
            }
        }
        let bytes = blocks.iter().map(|block| block.length).sum();
        let (to, from, blocks) = (to.clone(), from.clone(), blocks.into());
        let device = self.device().name();
        Ok(PreparedBlocks(Arc::new(Inner { device, to, from, blocks, bytes, counts, lists })))
    }

    /// Copies all prepared blocks, in unspecified order.
    ///
    /// # Errors
    /// As for [`copy_blocks`](Self::copy_blocks); [`InvalidArgument`](ErrorKind::InvalidArgument) for
    /// blocks that were prepared for another device.
    pub fn copy_prepared(&self, prepared: &PreparedBlocks) -> Result<()> {
        let operation = "copy prepared blocks";
        let inner = &*prepared.0;
        self.check_device_of(operation, inner)?;
        let (below, _, by_engine) = inner.counts.split(CopyMethod::Best);
        if by_engine {
            let large = || inner.blocks.iter().copied().filter(|it| it.length >= below.max(1));
            let (to, from, by) = (&inner.to, &inner.from, CopyMethod::CopyEngine);
            // SAFETY: all blocks were checked when they were prepared.
            unsafe { self.copy_inside(to, from, large, inner.counts, by)? };
        }
        for (list, count, bytes) in &inner.lists {
            self.begin(operation, &[&inner.to, &inner.from], Some(list), |raw| {
                // SAFETY: checked when it was prepared; the ranges and the list, which does not
                // change, are kept until an event behind it is done.
                unsafe { raw.copy_list(list.address(), *count, *bytes) }
            })?;
        }
        Ok(())
    }

    /// Copies some of the prepared blocks, by their indices, in unspecified order. Each is given
    /// once.
    ///
    /// # Errors
    /// As for [`copy_prepared`](Self::copy_prepared); [`OutOfBounds`](ErrorKind::OutOfBounds) for an
    /// index that no block has: then nothing is started.
    pub fn copy_selected(&self, prepared: &PreparedBlocks, indices: &[u32]) -> Result<()> {
        let operation = "copy prepared blocks";
        let inner = &*prepared.0;
        self.check_device_of(operation, inner)?;
        let mut counts = BlockCounts::default();
        for index in indices {
            let Some(block) = inner.blocks.get(*index as usize) else {
                let detail = format!("index {index} of {} blocks", inner.blocks.len());
                return Err(self.refuse(operation, ErrorKind::OutOfBounds, detail));
            };
            counts.count(block);
        }
        let selected = || indices.iter().map(|index| inner.blocks[*index as usize]);
        // SAFETY: all blocks were checked when they were prepared.
        unsafe { self.copy_inside(&inner.to, &inner.from, selected, counts, CopyMethod::Best) }
    }

    fn check_device_of(&self, operation: &'static str, inner: &Inner) -> Result<()> {
        if inner.device == self.device().name() {
            return Ok(());
        }
        let detail = format!("the blocks were prepared for {}", inner.device);
        Err(self.refuse(operation, ErrorKind::InvalidArgument, detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DEFAULT_TIMEOUT, Device};

    #[test]
    fn prepared_blocks_are_copied_whole_and_by_index() {
        let device = Device::open("emulated:1".parse().unwrap()).unwrap();
        let length = 24 << 20;
        let (to, from) = (device.allocate(length).unwrap(), device.allocate(length).unwrap());
        let stream = device.stream().unwrap();
        let bytes: Vec<u8> = (0..length as usize).map(|at| (at * 7 + at / 251) as u8).collect();
        stream.upload(&from.whole(), &bytes, DEFAULT_TIMEOUT).unwrap();
        // Large ones and thousands of small ones, some empty.
        let mut blocks = vec![Block { to: 0, from: 1 << 20, length: 9 << 20 }];
        let start = 10 << 20;
        blocks.extend((0..9000_u64).map(|at| {
            let from = (at * 37) % 1000 * 1024;
            Block { to: start + at * 1024, from, length: at % 1024 }
        }));
        let prepared = stream.prepare_blocks(&to.whole(), &from.whole(), blocks.clone()).unwrap();
        assert_eq!(prepared.blocks(), blocks);
        assert_eq!(prepared.bytes(), blocks.iter().map(|block| block.length).sum::<u64>());
        let check = |indices: &[u32], copy: &dyn Fn()| {
            stream.fill(&to.whole(), 0).unwrap();
            copy();
            let mut expected = vec![0; length as usize];
            for index in indices {
                let Block { to, from, length } = blocks[*index as usize];
                let (to, from, length) = (to as usize, from as usize, length as usize);
                expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
            }
            let mut found = vec![0; length as usize];
            stream.download(&to.whole(), &mut found, DEFAULT_TIMEOUT).unwrap();
            assert!(found == expected, "{} of the blocks", indices.len());
        };
        let all: Vec<u32> = (0..blocks.len() as u32).collect();
        for _ in 0..2 {
            check(&all, &|| stream.copy_prepared(&prepared).unwrap());
        }
        let some: Vec<u32> = (0..blocks.len() as u32).step_by(3).collect();
        check(&some, &|| stream.copy_selected(&prepared, &some).unwrap());
        check(&[], &|| stream.copy_selected(&prepared, &[]).unwrap());
        check(&[1025], &|| stream.copy_selected(&prepared, &[1025]).unwrap());
        let error = stream.copy_selected(&prepared, &[0, 9001]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let outside = vec![Block { to: length, from: 0, length: 1 }];
        let error = stream.prepare_blocks(&to.whole(), &from.whole(), outside).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
        let empty = stream.prepare_blocks(&to.whole(), &from.whole(), Vec::new()).unwrap();
        stream.copy_prepared(&empty).unwrap();
    }
}
