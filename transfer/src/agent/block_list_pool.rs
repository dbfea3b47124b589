//! Lists of blocks that are used again, so that nothing is allocated for a request.

use std::collections::VecDeque;

use gpu::Block;

use crate::blocks::{BlockQueue, Blocks};

/// Room for so many blocks is kept for later, in all: 1.5 MiB.
const MAX_POOLED_BLOCKS: usize = 1 << 16;

/// Lists that nobody needs any more.
#[derive(Debug, Default)]
pub(super) struct BlockListPool {
    free: Vec<VecDeque<Block>>,
    /// The blocks that they have room for.
    pooled_blocks: usize,
}

impl BlockListPool {
    /// The same blocks, in a list of their own if they were in one.
    pub(super) fn copy_blocks(&mut self, blocks: Blocks<'_>) -> BlockQueue {
        if let Some(rows) = blocks.rows() {
            return rows.iter().into();
        }
        let mut list = self.free.pop().unwrap_or_default();
        self.pooled_blocks -= list.capacity();
        list.extend(blocks.list());
        list.into()
    }

    /// Takes back what is not needed any more.
    pub(super) fn recycle(&mut self, blocks: BlockQueue) {
        let mut list = blocks.list;
        if list.capacity() > 0 && self.pooled_blocks + list.capacity() <= MAX_POOLED_BLOCKS {
            list.clear();
            self.pooled_blocks += list.capacity();
            self.free.push(list);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_used_again_unless_there_is_too_much_of_them() {
        let block = Block { to: 1, from: 2, length: 3 };
        let mut block_lists = BlockListPool::default();
        let list_of = |kept: &BlockQueue| (kept.list.as_slices().0.as_ptr(), kept.list.clone());
        let list = block_lists.copy_blocks((&[block; 5]).into());
        let place = list_of(&list).0;
        block_lists.recycle(list);
        let again = block_lists.copy_blocks((&[block; 2]).into());
        assert_eq!(list_of(&again), (place, vec![block; 2].into()));
        block_lists.recycle(VecDeque::from(vec![block; MAX_POOLED_BLOCKS + 1]).into());
        assert!(block_lists.free.is_empty());
        (0..100).for_each(|_| {
            block_lists.recycle(VecDeque::from(vec![block; MAX_POOLED_BLOCKS / 10]).into())
        });
        assert_eq!(
            (block_lists.free.len(), block_lists.pooled_blocks),
            (10, MAX_POOLED_BLOCKS / 10 * 10)
        );
        // What is described needs none.
        let rows = crate::Strided::rows(3, 1, 2, 2).unwrap();
        let described = block_lists.copy_blocks((&rows).into());
        assert_eq!(block_lists.free.len(), 10);
        block_lists.recycle(described);
        (0..10).for_each(|_| drop(block_lists.copy_blocks((&[block]).into())));
        assert_eq!((block_lists.free.len(), block_lists.pooled_blocks), (0, 0));
    }
}
