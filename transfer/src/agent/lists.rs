//! Lists of blocks that are used again, so that nothing is allocated for a request.

use std::collections::VecDeque;

use gpu::Block;

use crate::blocks::{Blocks, Share};

/// Room for so many blocks is kept for later, in all: 1.5 MiB.
const KEPT: usize = 1 << 16;

/// Lists that nobody needs any more.
#[derive(Debug, Default)]
pub(super) struct Lists {
    free: Vec<VecDeque<Block>>,
    /// The blocks that they have room for.
    room: usize,
}

impl Lists {
    /// The same blocks, in a list of their own if they were in one.
    pub(super) fn copy_of(&mut self, blocks: Blocks<'_>) -> Share {
        if let Some(rows) = blocks.rows() {
            return rows.iter().into();
        }
        let mut list = self.free.pop().unwrap_or_default();
        self.room -= list.capacity();
        list.extend(blocks.list());
        list.into()
    }

    /// Takes back what is not needed any more.
    pub(super) fn keep(&mut self, blocks: Share) {
        let mut list = blocks.list;
        if list.capacity() > 0 && self.room + list.capacity() <= KEPT {
            list.clear();
            self.room += list.capacity();
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
        let mut lists = Lists::default();
        let list_of = |kept: &Share| (kept.list.as_slices().0.as_ptr(), kept.list.clone());
        let list = lists.copy_of((&[block; 5]).into());
        let place = list_of(&list).0;
        lists.keep(list);
        let again = lists.copy_of((&[block; 2]).into());
        assert_eq!(list_of(&again), (place, vec![block; 2].into()));
        lists.keep(VecDeque::from(vec![block; KEPT + 1]).into());
        assert!(lists.free.is_empty());
        (0..100).for_each(|_| lists.keep(VecDeque::from(vec![block; KEPT / 10]).into()));
        assert_eq!((lists.free.len(), lists.room), (10, KEPT / 10 * 10));
        // What is described needs none.
        let rows = crate::Strided::rows(3, 1, 2, 2).unwrap();
        let described = lists.copy_of((&rows).into());
        assert_eq!(lists.free.len(), 10);
        lists.keep(described);
        (0..10).for_each(|_| drop(lists.copy_of((&[block]).into())));
        assert_eq!((lists.free.len(), lists.room), (0, 0));
    }
}
