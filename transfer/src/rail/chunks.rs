//! A transfer, cut into chunks, and what is done with each: without a clock, a fabric or a device.

use gpu::Block;

use crate::blocks::BlockQueue;
use crate::path::Operation;

/// What is done with a chunk, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A device here copies it into a slot of ours.
    FillSlot,
    /// The fabric writes it to the peer: to its region, or to a slot of its.
    Write,
    /// The peer copies it from its slot to its region.
    RequestDrain,
    /// The peer copies it from its region to its slot.
    RequestFill,
    /// The fabric reads it from the peer.
    Read,
    /// A device here copies it out of a slot of ours.
    DrainSlot,
}

/// Which way a transfer goes, and which of its ends the fabric cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pipeline {
    pub(super) operation: Operation,
    pub(super) stages_locally: bool,
    pub(super) stages_remotely: bool,
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

    /// What comes behind a stage; None behind the last.
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

/// A part of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkRange {
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) length: u64,
}

/// What is left of a transfer, and what of it is under way.
#[derive(Debug)]
pub(super) struct TransferChunks {
    pub(super) pipeline: Pipeline,
    blocks: BlockQueue,
    longest: u64,
    in_flight: u32,
    is_given_up: bool,
}

impl TransferChunks {
    pub(super) fn new(pipeline: Pipeline, blocks: BlockQueue, longest: u64) -> Self {
        Self { pipeline, blocks, longest, in_flight: 0, is_given_up: false }
    }

    /// Is there a part that has not begun?
    pub(super) fn has_more(&self) -> bool {
        !self.is_given_up && !self.blocks.is_empty()
    }

    /// The next part, which is under way from now on.
    pub(super) fn begin(&mut self) -> Option<ChunkRange> {
        if self.is_given_up {
            return None;
        }
        let block = self.blocks.front_mut()?;
        let length = block.length.min(self.longest);
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

    /// A part is through with its last stage, or failed.
    pub(super) fn end(&mut self) {
        self.in_flight -= 1;
    }

    /// A part came to nothing, and what was begun of it can do no harm: it belongs to the
    /// [rest](Self::take_rest).
    pub(super) fn give_back(&mut self, part: ChunkRange) {
        let ChunkRange { local, remote, length } = part;
        let block = match self.pipeline.operation {
            Operation::Put => Block { from: local, to: remote, length },
            Operation::Get => Block { from: remote, to: local, length },
        };
        self.blocks.push(block);
    }

    /// What was not moved, of one that is over.
    pub(super) fn take_rest(&mut self) -> BlockQueue {
        std::mem::take(&mut self.blocks)
    }

    /// Nothing more of it is begun.
    pub(super) fn give_up(&mut self) {
        self.is_given_up = true;
    }

    pub(super) fn is_over(&self) -> bool {
        self.in_flight == 0 && !self.has_more()
    }
}

#[cfg(test)]
mod tests {
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
    fn only_what_the_fabric_does_not_reach_is_copied() {
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
    fn what_is_given_up_begins_nothing_more_and_is_over_when_the_rest_is() {
        let blocks = BlockQueue::from_iter([Block { to: 0, from: 0, length: 10 }]);
        let mut chunks = TransferChunks::new(pipeline(Operation::Put, false, false), blocks, 4);
        chunks.begin().unwrap();
        chunks.begin().unwrap();
        chunks.give_up();
        assert!(chunks.begin().is_none() && !chunks.has_more() && !chunks.is_over());
        chunks.end();
        assert!(!chunks.is_over());
        chunks.end();
        assert!(chunks.is_over());
    }

    proptest! {
        /// Whatever became of the parts, what is left are the bytes that none of them moved.
        #[test]
        fn what_is_left_is_what_was_not_moved(
            lengths in proptest::collection::vec(0_u64..50, 0..20),
            longest in 1_u64..20,
            outcomes in proptest::collection::vec(any::<bool>(), 0..60),
            is_get: bool,
        ) {
            let mut at = 0;
            let mut blocks = BlockQueue::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + at, from: 1000 + at, length: *length });
                at += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut chunks = TransferChunks::new(pipeline(operation, true, true), blocks, longest);
            let mut moved = vec![0; at as usize];
            let mut count = |to: u64, from: u64, length: u64| {
                assert_eq!(from - 1000, to - 7);
                moved[(to - 7) as usize..][..length as usize].iter_mut().for_each(|n| *n += 1);
            };
            for is_moved in outcomes {
                let Some(part) = chunks.begin() else { break };
                let (to, from) = if is_get { (part.local, part.remote) } else { (part.remote, part.local) };
                match is_moved {
                    true => count(to, from, part.length),
                    false => chunks.give_back(part),
                }
                chunks.end();
            }
            chunks.give_up();
            prop_assert!(chunks.is_over());
            for block in chunks.take_rest() {
                count(block.to, block.from, block.length);
            }
            prop_assert!(moved.iter().all(|times| *times == 1), "{moved:?}");
        }

        #[test]
        fn every_byte_is_in_one_part(
            lengths in proptest::collection::vec(0_u64..50, 0..20),
            longest in 1_u64..20,
            is_get: bool,
        ) {
            let mut at = 0;
            let mut blocks = BlockQueue::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + at, from: 1000 + at, length: *length });
                at += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut chunks = TransferChunks::new(pipeline(operation, true, true), blocks, longest);
            let mut next = 0;
            while let Some(part) = chunks.begin() {
                prop_assert!(part.length > 0 && part.length <= longest);
                let (to, from) = if is_get { (part.local, part.remote) } else { (part.remote, part.local) };
                prop_assert_eq!((to, from), (7 + next, 1000 + next));
                next += part.length;
                chunks.end();
            }
            prop_assert_eq!(next, at);
            prop_assert!(chunks.is_over());
        }
    }
}
