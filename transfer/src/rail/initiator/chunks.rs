//! Splitting transfers into chunks, and the stages of each: without clocks, fabrics and devices.

use gpu::Block;

use super::{ChunkRange, Pipeline};
use crate::blocks::BlockQueue;
use crate::path::Operation;

/// The stages of a chunk, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A local device copies it into a local slot.
    FillSlot,
    /// The fabric writes it to the peer: to its region, or to a slot.
    Write,
    /// The peer copies it from the slot to its region.
    RequestDrain,
    /// The peer copies it from its region to the slot.
    RequestFill,
    /// The fabric reads it from the peer.
    Read,
    /// A local device copies it out of a local slot.
    DrainSlot,
}

impl Pipeline {
    pub(super) fn first(self) -> Stage {
        match self.operation {
            Operation::Put if self.stages_locally => Stage::FillSlot,
            Operation::Put => Stage::Write,
            Operation::Get if self.stages_remotely => Stage::RequestFill,
            Operation::Get => Stage::Read,
        }
    }

    /// The stage after this one; None after the last.
    pub(super) fn after(self, stage: Stage) -> Option<Stage> {
        match stage {
            Stage::FillSlot => Some(Stage::Write),
            Stage::Write => self.stages_remotely.then_some(Stage::RequestDrain),
            Stage::RequestFill => Some(Stage::Read),
            Stage::Read => self.stages_locally.then_some(Stage::DrainSlot),
            Stage::RequestDrain | Stage::DrainSlot => None,
        }
    }
}

/// The rest of a transfer, and its chunks in flight.
#[derive(Debug)]
pub(super) struct TransferChunks {
    pipeline: Pipeline,
    blocks: BlockQueue,
    max_length: u64,
    in_flight: u32,
    is_cancelled: bool,
}

impl TransferChunks {
    pub(super) fn new(pipeline: Pipeline, blocks: BlockQueue, max_length: u64) -> Self {
        Self { pipeline, blocks, max_length, in_flight: 0, is_cancelled: false }
    }

    pub(super) fn pipeline(&self) -> Pipeline {
        self.pipeline
    }

    /// Are there chunks that were not started?
    pub(super) fn has_more(&self) -> bool {
        !self.is_cancelled && !self.blocks.is_empty()
    }

    /// Starts the next chunk.
    pub(super) fn begin(&mut self) -> Option<ChunkRange> {
        if self.is_cancelled {
            return None;
        }
        let block = self.blocks.front_mut()?;
        let length = block.length.min(self.max_length);
        let (local, remote) = match self.pipeline.operation {
            Operation::Put => (block.from, block.to),
            Operation::Get => (block.to, block.from),
        };
        block.from += length;
        block.to += length;
        block.length -= length;
        if block.length == 0 {
            self.blocks.pop_front();
        }
        self.in_flight += 1;
        Some(ChunkRange { local, remote, length })
    }

    /// A chunk completed its last stage, or failed.
    pub(super) fn end(&mut self) {
        self.in_flight -= 1;
    }

    /// Returns a chunk that was not transferred and is not in flight to the
    /// [rest](Self::take_rest).
    pub(super) fn give_back(&mut self, part: ChunkRange) {
        let (to, from) = self.pipeline.operation.to_and_from(part.local, part.remote);
        self.blocks.push(Block { to, from, length: part.length });
    }

    /// The bytes that a finished transfer did not copy.
    pub(super) fn take_rest(&mut self) -> BlockQueue {
        std::mem::take(&mut self.blocks)
    }

    /// Starts no more chunks.
    pub(super) fn cancel(&mut self) {
        self.is_cancelled = true;
    }

    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && !self.has_more()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn pipeline(operation: Operation, local: bool, remote: bool) -> Pipeline {
        Pipeline { operation, stages_locally: local, stages_remotely: remote }
    }

    fn stages(pipeline: Pipeline) -> Vec<Stage> {
        let mut all = vec![pipeline.first()];
        while let Some(next) = pipeline.after(all[all.len() - 1]) {
            all.push(next);
        }
        all
    }

    #[test]
    fn only_unregistered_ends_are_staged() {
        use Stage::{DrainSlot, FillSlot, Read, RequestDrain, RequestFill, Write};
        let put = |local, remote| stages(pipeline(Operation::Put, local, remote));
        let get = |local, remote| stages(pipeline(Operation::Get, local, remote));
        assert_eq!(put(false, false), [Write]);
        assert_eq!(put(true, false), [FillSlot, Write]);
        assert_eq!(put(false, true), [Write, RequestDrain]);
        assert_eq!(put(true, true), [FillSlot, Write, RequestDrain]);
        assert_eq!(get(false, false), [Read]);
        assert_eq!(get(true, false), [Read, DrainSlot]);
        assert_eq!(get(false, true), [RequestFill, Read]);
        assert_eq!(get(true, true), [RequestFill, Read, DrainSlot]);
    }

    #[test]
    fn cancelled_transfer_ends_with_its_chunks_in_flight() {
        let blocks = VecDeque::from([Block { to: 0, from: 0, length: 10 }]).into();
        let mut chunks = TransferChunks::new(pipeline(Operation::Put, false, false), blocks, 4);
        chunks.begin().unwrap();
        chunks.begin().unwrap();
        chunks.cancel();
        assert!(chunks.begin().is_none() && !chunks.has_more() && !chunks.is_over());
        chunks.end();
        assert!(!chunks.is_over());
        chunks.end();
        assert!(chunks.is_over());
    }

    proptest! {
        /// The rest has exactly the bytes that no chunk copied.
        #[test]
        fn rest_has_the_bytes_that_were_not_copied(
            lengths in proptest::collection::vec(0_u64..50, 0..20),
            max in 1_u64..20,
            outcomes in proptest::collection::vec(any::<bool>(), 0..60),
            is_get: bool,
        ) {
            let mut offset = 0;
            let mut blocks = BlockQueue::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + offset, from: 1000 + offset, length: *length });
                offset += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut chunks = TransferChunks::new(pipeline(operation, true, true), blocks, max);
            let mut copied = vec![0; offset as usize];
            let mut count = |to: u64, from: u64, length: u64| {
                assert_eq!(from - 1000, to - 7);
                copied[(to - 7) as usize..][..length as usize].iter_mut().for_each(|n| *n += 1);
            };
            for is_copied in outcomes {
                let Some(part) = chunks.begin() else { break };
                let (to, from) = if is_get { (part.local, part.remote) } else { (part.remote, part.local) };
                match is_copied {
                    true => count(to, from, part.length),
                    false => chunks.give_back(part),
                }
                chunks.end();
            }
            chunks.cancel();
            prop_assert!(chunks.is_over());
            for block in chunks.take_rest() {
                count(block.to, block.from, block.length);
            }
            prop_assert!(copied.iter().all(|times| *times == 1), "{copied:?}");
        }

        #[test]
        fn every_byte_is_in_exactly_one_chunk(
            lengths in proptest::collection::vec(0_u64..50, 0..20),
            max in 1_u64..20,
            is_get: bool,
        ) {
            let mut offset = 0;
            let mut blocks = BlockQueue::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + offset, from: 1000 + offset, length: *length });
                offset += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut chunks = TransferChunks::new(pipeline(operation, true, true), blocks, max);
            let mut next = 0;
            while let Some(part) = chunks.begin() {
                prop_assert!(part.length > 0 && part.length <= max);
                let (to, from) = if is_get { (part.local, part.remote) } else { (part.remote, part.local) };
                prop_assert_eq!((to, from), (7 + next, 1000 + next));
                next += part.length;
                chunks.end();
            }
            prop_assert_eq!(next, offset);
            prop_assert!(chunks.is_over());
        }
    }
}
