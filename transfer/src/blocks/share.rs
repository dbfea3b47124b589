//! What one rail carries of a request.

use std::collections::VecDeque;

use gpu::Block;

use super::Rows;

/// Blocks that one rail carries. None is empty. Rows of a description are counted off, one after the
/// other, and not listed: there may be more of them than memory has room for.
#[derive(Debug, Clone, Default)]
pub(crate) struct Share {
    list: VecDeque<Block>,
    /// Those behind the list.
    rows: Option<Rows>,
}

impl Share {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.rows.as_ref().is_none_or(|rows| rows.size_hint().0 == 0)
    }

    /// One more, which comes before rows that are not counted off yet.
    pub(crate) fn push(&mut self, block: Block) {
        if block.length > 0 {
            self.list.push_back(block);
        }
    }

    /// The next one, to be cut.
    pub(crate) fn front_mut(&mut self) -> Option<&mut Block> {
        if self.list.is_empty() {
            let row = self.rows.as_mut()?.next()?;
            self.list.push_back(row);
        }
        self.list.front_mut()
    }

    pub(crate) fn pop_front(&mut self) -> Option<Block> {
        self.list.pop_front().or_else(|| self.rows.as_mut()?.next())
    }
}

impl From<Rows> for Share {
    fn from(rows: Rows) -> Self {
        Self { list: VecDeque::new(), rows: Some(rows) }
    }
}

impl FromIterator<Block> for Share {
    fn from_iter<I: IntoIterator<Item = Block>>(blocks: I) -> Self {
        let mut share = Self::default();
        blocks.into_iter().for_each(|block| share.push(block));
        share
    }
}

impl Iterator for Share {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        self.pop_front()
    }
}
