//! A transfer, cut into chunks, and what is done with each: without a clock, a fabric or a device.

use gpu::Block;

use crate::blocks::Share;
use crate::path::Operation;

/// What is done with a chunk, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A device here copies it into a slot of ours.
    Fetch,
    /// The fabric writes it to the peer: to its region, or to a slot of its.
    Write,
    /// The peer copies it from its slot to its region.
    Deliver,
    /// The peer copies it from its region to its slot.
    Ask,
    /// The fabric reads it from the peer.
    Read,
    /// A device here copies it out of a slot of ours.
    Store,
}

/// Which way a transfer goes, and which of its ends the fabric cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Course {
    pub(super) operation: Operation,
    pub(super) stages_here: bool,
    pub(super) stages_there: bool,
}

impl Course {
    pub(super) fn first(self) -> Stage {
        match self.operation {
            Operation::Put if self.stages_here => Stage::Fetch,
            Operation::Put => Stage::Write,
            Operation::Get if self.stages_there => Stage::Ask,
            Operation::Get => Stage::Read,
        }
    }

    /// What comes behind a stage; None behind the last.
    pub(super) fn after(self, stage: Stage) -> Option<Stage> {
        match stage {
            Stage::Fetch => Some(Stage::Write),
            Stage::Write => self.stages_there.then_some(Stage::Deliver),
            Stage::Ask => Some(Stage::Read),
            Stage::Read => self.stages_here.then_some(Stage::Store),
            Stage::Deliver | Stage::Store => None,
        }
    }
}

/// A part of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) here: u64,
    pub(super) there: u64,
    pub(super) length: u64,
}

/// What is left of a transfer, and what of it is under way.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) course: Course,
    blocks: Share,
    longest: u64,
    under_way: u32,
    is_given_up: bool,
}

impl Flow {
    pub(super) fn new(course: Course, blocks: Share, longest: u64) -> Self {
        Self { course, blocks, longest, under_way: 0, is_given_up: false }
    }

    /// Is there a part that has not begun?
    pub(super) fn has_more(&self) -> bool {
        !self.is_given_up && !self.blocks.is_empty()
    }

    /// The next part, which is under way from now on.
    pub(super) fn begin(&mut self) -> Option<Part> {
        if self.is_given_up {
            return None;
        }
        let block = self.blocks.front_mut()?;
        let length = block.length.min(self.longest);
        let (here, there) = match self.course.operation {
            Operation::Put => (block.from, block.to),
            Operation::Get => (block.to, block.from),
        };
        block.from += length;
        block.to += length;
        block.length -= length;
        if block.length == 0 {
            self.blocks.pop_front();
        }
        self.under_way += 1;
        Some(Part { here, there, length })
    }

    /// A part is through with its last stage, or failed.
    pub(super) fn end(&mut self) {
        self.under_way -= 1;
    }

    /// A part came to nothing, and what was begun of it can do no harm: it belongs to the
    /// [rest](Self::take_rest).
    pub(super) fn give_back(&mut self, part: Part) {
        let Part { here, there, length } = part;
        let block = match self.course.operation {
            Operation::Put => Block { from: here, to: there, length },
            Operation::Get => Block { from: there, to: here, length },
        };
        self.blocks.push(block);
    }

    /// What was not moved, of one that is over.
    pub(super) fn take_rest(&mut self) -> Share {
        std::mem::take(&mut self.blocks)
    }

    /// Nothing more of it is begun.
    pub(super) fn give_up(&mut self) {
        self.is_given_up = true;
    }

    pub(super) fn is_over(&self) -> bool {
        self.under_way == 0 && !self.has_more()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn course(operation: Operation, here: bool, there: bool) -> Course {
        Course { operation, stages_here: here, stages_there: there }
    }

    fn stages(course: Course) -> Vec<Stage> {
        let mut all = vec![course.first()];
        while let Some(next) = course.after(all[all.len() - 1]) {
            all.push(next);
        }
        all
    }

    #[test]
    fn only_what_the_fabric_does_not_reach_is_copied() {
        use Stage::{Ask, Deliver, Fetch, Read, Store, Write};
        let put = |here, there| stages(course(Operation::Put, here, there));
        let get = |here, there| stages(course(Operation::Get, here, there));
        assert_eq!(put(false, false), [Write]);
        assert_eq!(put(true, false), [Fetch, Write]);
        assert_eq!(put(false, true), [Write, Deliver]);
        assert_eq!(put(true, true), [Fetch, Write, Deliver]);
        assert_eq!(get(false, false), [Read]);
        assert_eq!(get(true, false), [Read, Store]);
        assert_eq!(get(false, true), [Ask, Read]);
        assert_eq!(get(true, true), [Ask, Read, Store]);
    }

    #[test]
    fn what_is_given_up_begins_nothing_more_and_is_over_when_the_rest_is() {
        let blocks = Share::from_iter([Block { to: 0, from: 0, length: 10 }]);
        let mut flow = Flow::new(course(Operation::Put, false, false), blocks, 4);
        flow.begin().unwrap();
        flow.begin().unwrap();
        flow.give_up();
        assert!(flow.begin().is_none() && !flow.has_more() && !flow.is_over());
        flow.end();
        assert!(!flow.is_over());
        flow.end();
        assert!(flow.is_over());
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
            let mut blocks = Share::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + at, from: 1000 + at, length: *length });
                at += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut flow = Flow::new(course(operation, true, true), blocks, longest);
            let mut moved = vec![0; at as usize];
            let mut count = |to: u64, from: u64, length: u64| {
                assert_eq!(from - 1000, to - 7);
                moved[(to - 7) as usize..][..length as usize].iter_mut().for_each(|n| *n += 1);
            };
            for is_moved in outcomes {
                let Some(part) = flow.begin() else { break };
                let (to, from) = if is_get { (part.here, part.there) } else { (part.there, part.here) };
                match is_moved {
                    true => count(to, from, part.length),
                    false => flow.give_back(part),
                }
                flow.end();
            }
            flow.give_up();
            prop_assert!(flow.is_over());
            for block in flow.take_rest() {
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
            let mut blocks = Share::default();
            for length in &lengths {
                blocks.push(Block { to: 7 + at, from: 1000 + at, length: *length });
                at += length;
            }
            let operation = if is_get { Operation::Get } else { Operation::Put };
            let mut flow = Flow::new(course(operation, true, true), blocks, longest);
            let mut next = 0;
            while let Some(part) = flow.begin() {
                prop_assert!(part.length > 0 && part.length <= longest);
                let (to, from) = if is_get { (part.here, part.there) } else { (part.there, part.here) };
                prop_assert_eq!((to, from), (7 + next, 1000 + next));
                next += part.length;
                flow.end();
            }
            prop_assert_eq!(next, at);
            prop_assert!(flow.is_over());
        }
    }
}
