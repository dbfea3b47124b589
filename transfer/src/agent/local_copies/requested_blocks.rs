//! The blocks of a request: a list that is given with it, or one that was prepared before.

use std::sync::Arc;

use gpu::{Block, CopyMethod, PreparedBlocks, Slice};

use crate::blocks::{BlockListPool, BlockQueue, Blocks};
use crate::copy_queue::CopyRequest;

/// Blocks that were checked before, and are used several times. Clones are the same list.
#[derive(Debug, Clone)]
pub(in crate::agent) struct PreparedList {
    blocks: Arc<[Block]>,
    /// The list as a device reads it, where one of this process copies.
    device: Option<PreparedBlocks>,
}

/// The blocks of a request.
#[derive(Debug, Clone, Copy)]
pub(in crate::agent) enum RequestedBlocks<'a> {
    Given(Blocks<'a>, CopyMethod),
    /// Prepared blocks: those with these indices, or all.
    Prepared(&'a PreparedList, Option<&'a [u32]>),
}

/// The blocks of a request that has to wait.
#[derive(Debug)]
pub(in crate::agent) enum DeferredBlocks {
    Given(BlockQueue, CopyMethod),
    Prepared(PreparedList, Option<Vec<u32>>),
}

impl PreparedList {
    pub(in crate::agent) fn new(blocks: Vec<Block>, device: Option<PreparedBlocks>) -> Self {
        Self { blocks: blocks.into(), device }
    }

    pub(in crate::agent) fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Bytes of the blocks with these indices, or the first index that no block has.
    pub(in crate::agent) fn bytes_of(&self, indices: &[u32]) -> Result<u64, u32> {
        let mut bytes = 0;
        for index in indices {
            bytes += self.blocks.get(*index as usize).ok_or(*index)?.length;
        }
        Ok(bytes)
    }
}

impl RequestedBlocks<'_> {
    /// The blocks as a list, of which selected ones are stored.
    pub(in crate::agent) fn list<'b>(&'b self, store: &'b mut Vec<Block>) -> Blocks<'b> {
        match self {
            Self::Given(blocks, _) => *blocks,
            Self::Prepared(prepared, None) => prepared.blocks().into(),
            Self::Prepared(prepared, Some(indices)) => {
                let of = |index: &u32| prepared.blocks.get(*index as usize).copied();
                store.clear();
                store.extend(indices.iter().filter_map(of));
                (&*store).into()
            }
        }
    }

    /// Number of blocks, at most.
    pub(in crate::agent) fn count(&self) -> usize {
        match self {
            Self::Given(blocks, _) => blocks.count(),
            Self::Prepared(prepared, None) => prepared.blocks().len(),
            Self::Prepared(_, Some(indices)) => indices.len(),
        }
    }

    /// The copy of a device between two ranges, with a store for selected blocks.
    pub(super) fn copy_request<'b>(
        &'b self,
        to: &'b Slice,
        from: &'b Slice,
        store: &'b mut Vec<Block>,
    ) -> CopyRequest<'b> {
        match self {
            Self::Given(blocks, by) => CopyRequest::new(to, from, *blocks, *by),
            Self::Prepared(PreparedList { device: Some(prepared), .. }, indices) => {
                CopyRequest::prepared(prepared, *indices)
            }
            Self::Prepared(..) => CopyRequest::new(to, from, self.list(store), CopyMethod::Best),
        }
    }

    pub(in crate::agent) fn defer(self, block_lists: &mut BlockListPool) -> DeferredBlocks {
        match self {
            Self::Given(blocks, by) => DeferredBlocks::Given(block_lists.copy_blocks(blocks), by),
            Self::Prepared(prepared, indices) => {
                DeferredBlocks::Prepared(prepared.clone(), indices.map(<[u32]>::to_vec))
            }
        }
    }
}

impl DeferredBlocks {
    pub(in crate::agent) fn requested(&mut self) -> RequestedBlocks<'_> {
        match self {
            Self::Given(blocks, by) => RequestedBlocks::Given(blocks.all(), *by),
            Self::Prepared(prepared, indices) => {
                RequestedBlocks::Prepared(prepared, indices.as_deref())
            }
        }
    }

    pub(in crate::agent) fn recycle(self, block_lists: &mut BlockListPool) {
        if let Self::Given(blocks, _) = self {
            block_lists.recycle(blocks);
        }
    }
}
