//! Blocks of a request that are queued for processing.

use std::collections::VecDeque;

use gpu::Block;

use super::{Blocks, Rows, Run};

/// Blocks of one stripe or of a queued request. Strided rows are generated on demand, not listed:
/// there may be more than fit into memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockQueue {
    pub(crate) list: VecDeque<Block>,
    /// Rows after the list.
    rows: Option<Rows>,
}

impl BlockQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty() && self.rows.as_ref().is_none_or(|rows| rows.size_hint().0 == 0)
    }

    /// All blocks, before the first one is taken.
    pub(crate) fn all(&mut self) -> Blocks<'_> {
        match &self.rows {
            Some(rows) => (&rows.of).into(),
            None => (&*self.list.make_contiguous()).into(),
        }
    }

    /// Adds a block in front of the rows.
    pub(crate) fn push(&mut self, block: Block) {
        if block.length > 0 {
            self.list.push_back(block);
        }
    }

    /// The next block, which the caller may shorten.
    pub(crate) fn front_mut(&mut self) -> Option<&mut Block> {
        if self.list.is_empty() {
            let row = self.rows.as_mut()?.next()?;
            self.list.push_back(row);
        }
        self.list.front_mut()
    }

    /// The next block, or rows with a common stride of at most this number of bytes together, but at
    /// least one.
    pub(crate) fn next_run(&mut self, most_bytes: u64) -> Option<Run> {
        if let Some(block) = self.list.pop_front() {
            return Some(block.into());
        }
        let rows = self.rows.as_mut()?;
        rows.next_run(most_bytes / rows.of.row)
    }

    pub(crate) fn pop_front(&mut self) -> Option<Block> {
        self.list.pop_front().or_else(|| self.rows.as_mut()?.next())
    }
}

impl From<Rows> for BlockQueue {
    fn from(rows: Rows) -> Self {
        Self { list: VecDeque::new(), rows: Some(rows) }
    }
}

impl From<VecDeque<Block>> for BlockQueue {
    fn from(list: VecDeque<Block>) -> Self {
        Self { list, rows: None }
    }
}

impl Iterator for BlockQueue {
    type Item = Block;

    fn next(&mut self) -> Option<Block> {
        self.pop_front()
    }
}
