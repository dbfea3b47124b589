//! Copies by the CPU, one step at a time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use gpu::{Block, Device, Slice, Stream};

use super::block_list_pool::BlockListPool;
use crate::agent::operations::OperationContext;
use crate::blocks::BlockQueue;
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;

/// Bytes copied between two polls of everything else.
const COPY_STEP: u64 = 1 << 20;
/// A step takes a device tens of microseconds.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(2);
const COPY: &str = "copy by the CPU";

/// The memory at one end of a copy.
#[derive(Debug, Clone)]
pub(in crate::agent) enum CopyBuffer {
    Host(HostBuffer),
    /// Device memory that receives what the device itself cannot read.
    Device(Slice, Arc<Stream>),
}

impl CopyBuffer {
    pub(in crate::agent) fn device(memory: Slice, device: &Device) -> Result<Self> {
        let stream = device.stream().map_err(|error| Error::of_device(COPY, error))?;
        Ok(Self::Device(memory, Arc::new(stream)))
    }

    fn copy(&self, to: u64, from: &Self, at: u64, length: u64) -> Result<()> {
        match (self, from) {
            (Self::Host(buffer), Self::Host(from)) => buffer.copy(to, from, at, length),
            (Self::Device(memory, stream), Self::Host(from)) => {
                let mut bytes = vec![0; length as usize];
                from.read(at, &mut bytes)?;
                let part = memory.slice(to, length);
                part.and_then(|part| stream.upload(&part, &bytes, UPLOAD_TIMEOUT))
                    .map_err(|error| Error::of_device(COPY, error))
            }
            (_, Self::Device(..)) => {
                let detail = "the host memory is read-only";
                Err(Error::new(COPY, ErrorKind::NotAllowed, detail))
            }
        }
    }
}

/// A copy by the CPU.
#[derive(Debug)]
struct CpuCopy {
    context: OperationContext,
    to: CopyBuffer,
    from: CopyBuffer,
    /// Blocks that were not started.
    blocks: BlockQueue,
    /// The rest of the current block.
    block: Block,
}

/// All copies by the CPU, in order.
#[derive(Debug, Default)]
pub(super) struct CpuCopies {
    queue: VecDeque<CpuCopy>,
}

impl CpuCopies {
    pub(super) fn push(
        &mut self,
        context: OperationContext,
        (to, from): (CopyBuffer, CopyBuffer),
        blocks: BlockQueue,
    ) {
        self.queue.push_back(CpuCopy { context, to, from, blocks, block: Block::default() });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn is_busy_with(&self, peer: u32) -> bool {
        self.queue.iter().any(|copy| copy.context.peer == peer)
    }

    /// Copies one step. Passes a completed copy to `done`. False if there is none.
    pub(super) fn progress(
        &mut self,
        block_lists: &mut BlockListPool,
        done: impl FnOnce(OperationContext, Result<()>),
    ) -> bool {
        let Some(copy) = self.queue.front_mut() else { return false };
        let outcome = copy.copy_some();
        if !matches!(outcome, Ok(false))
            && let Some(copy) = self.queue.pop_front()
        {
            block_lists.recycle(copy.blocks);
            done(copy.context, outcome.map(drop));
        }
        true
    }

    /// Removes all copies of a peer.
    pub(super) fn cancel(&mut self, peer: u32, cancelled: &mut Vec<OperationContext>) {
        self.queue.retain_mut(|copy| {
            let is_of_peer = copy.context.peer == peer;
            if is_of_peer {
                cancelled.push(copy.context.clone());
            }
            !is_of_peer
        });
    }
}

impl CpuCopy {
    /// Copies one step. True if the copy is complete.
    fn copy_some(&mut self) -> Result<bool> {
        let mut left = COPY_STEP;
        while left > 0 {
            if self.block.length == 0 {
                match self.blocks.next() {
                    Some(block) => self.block = block,
                    None => return Ok(true),
                }
            }
            let Block { to, from, length } = &mut self.block;
            let step = left.min(*length);
            self.to.copy(*to, &self.from, *from, step)?;
            *to += step;
            *from += step;
            *length -= step;
            left -= step;
        }
        Ok(false)
    }
}
