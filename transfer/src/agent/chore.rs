//! Copies that the processor makes, a share at a time.

use gpu::Block;

use super::lane::Ticket;
use crate::blocks::Share;
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
    /// Those that were not begun.
    pub(super) blocks: Share,
    /// What is left of the one that was.
    pub(super) block: Block,
}

impl Chore {
    /// Copies a share. True if that was the last.
    pub(super) fn go_on(&mut self) -> Result<bool> {
        let mut left = SHARE;
        while left > 0 {
            if self.block.length == 0 {
                match self.blocks.next() {
                    Some(block) => self.block = block,
                    None => return Ok(true),
                }
            }
            let Block { to, from, length } = &mut self.block;
            let share = left.min(*length);
            self.to.copy(*to, &self.from, *from, share)?;
            *to += share;
            *from += share;
            *length -= share;
            left -= share;
        }
        Ok(false)
    }
}
