//! Lists of blocks that are used again, so that nothing is allocated for a request.

use gpu::Block;

/// Room for so many blocks is kept for later, in all: 1.5 MiB.
const KEPT: usize = 1 << 16;

/// Lists that nobody needs any more.
#[derive(Debug, Default)]
pub(super) struct Lists {
    free: Vec<Vec<Block>>,
    /// The blocks that they have room for.
    room: usize,
}

impl Lists {
    /// The same blocks, in a list of their own.
    pub(super) fn copy_of(&mut self, blocks: &[Block]) -> Vec<Block> {
        let mut list = self.free.pop().unwrap_or_default();
        self.room -= list.capacity();
        list.extend_from_slice(blocks);
        list
    }

    /// Takes back what is not needed any more.
    pub(super) fn keep(&mut self, mut list: Vec<Block>) {
        if self.room + list.capacity() <= KEPT {
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
        let list = lists.copy_of(&[block; 5]);
        let place = list.as_ptr();
        lists.keep(list);
        let again = lists.copy_of(&[block; 2]);
        assert_eq!((again.as_ptr(), again.as_slice()), (place, &[block; 2][..]));
        lists.keep(vec![block; KEPT + 1]);
        assert!(lists.free.is_empty());
        (0..100).for_each(|_| lists.keep(vec![block; KEPT / 10]));
        assert_eq!((lists.free.len(), lists.room), (10, KEPT / 10 * 10));
        (0..10).for_each(|_| drop(lists.copy_of(&[block])));
        assert_eq!((lists.free.len(), lists.room), (0, 0));
    }
}
