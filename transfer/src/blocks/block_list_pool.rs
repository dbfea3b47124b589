//! Reuse of lists of blocks, so that requests do not allocate.

use std::collections::VecDeque;

use gpu::Block;

use super::{BlockQueue, Blocks};

/// Capacity in blocks that is kept for reuse: 1.5 MiB.
const MAX_POOLED_BLOCKS: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct BlockListPool {
    free: Vec<VecDeque<Block>>,
    /// Total capacity of the free lists, in blocks.
    pooled_blocks: usize,
}

impl BlockListPool {
    /// The blocks of a request in a list of their own; strided rows need none.
    pub(crate) fn copy_blocks(&mut self, blocks: Blocks<'_>) -> BlockQueue {
        if let Some(rows) = blocks.rows() {
            return rows.iter().into();
        }
        let mut list = self.free.pop().unwrap_or_default();
        self.pooled_blocks -= list.capacity();
        list.extend(blocks.list());
        list.into()
    }

    /// Keeps a list for reuse, unless that exceeds the limit.
    pub(crate) fn recycle(&mut self, blocks: BlockQueue) {
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
    fn lists_are_reused_up_to_the_limit() {
        let block = Block { to: 1, from: 2, length: 3 };
        let mut block_lists = BlockListPool::default();
        let list_of = |queue: &BlockQueue| (queue.list.as_slices().0.as_ptr(), queue.list.clone());
        let list = block_lists.copy_blocks((&[block; 5]).into());
        let address = list_of(&list).0;
        block_lists.recycle(list);
        let again = block_lists.copy_blocks((&[block; 2]).into());
        assert_eq!(list_of(&again), (address, vec![block; 2].into()));
        block_lists.recycle(VecDeque::from(vec![block; MAX_POOLED_BLOCKS + 1]).into());
        assert!(block_lists.free.is_empty());
        (0..100).for_each(|_| {
            block_lists.recycle(VecDeque::from(vec![block; MAX_POOLED_BLOCKS / 10]).into())
        });
        assert_eq!(
            (block_lists.free.len(), block_lists.pooled_blocks),
            (10, MAX_POOLED_BLOCKS / 10 * 10)
        );
        // Strided rows need no list.
        let rows = crate::Strided::rows(3, 1, 2, 2).unwrap();
        let strided = block_lists.copy_blocks((&rows).into());
        assert_eq!(block_lists.free.len(), 10);
        block_lists.recycle(strided);
        (0..10).for_each(|_| drop(block_lists.copy_blocks((&[block]).into())));
        assert_eq!((block_lists.free.len(), block_lists.pooled_blocks), (0, 0));
    }
}
