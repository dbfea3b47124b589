//! Copies that the processor makes, a share at a time.

use gpu::Block;

use super::lane::Ticket;
use crate::error::Result;
use crate::host::HostBuffer;

/// What is copied between two looks at everything else.
const SHARE: u64 = 1 << 20;

/// A copy that the processor makes.
#[derive(Debug)]
pub(super) struct Chore {
    pub(super) ticket: Ticket,
    pub(super) to: HostBuffer,
    pub(super) from: HostBuffer,
    pub(super) blocks: Vec<Block>,
    /// How many of them are done.
    pub(super) done: usize,
}

impl Chore {
    /// Copies a share. True if that was the last.
    pub(super) fn go_on(&mut self) -> Result<bool> {
        let mut left = SHARE;
        while let Some(block) = self.blocks.get_mut(self.done) {
            let length = block.length.min(left);
            self.to.copy(block.to, &self.from, block.from, length)?;
            block.to += length;
            block.from += length;
            block.length -= length;
            left -= length;
            if block.length == 0 {
                self.done += 1;
            }
            if left == 0 {
                break;
            }
        }
        Ok(self.done == self.blocks.len())
    }
}
