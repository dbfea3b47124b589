//! Transfers between two vectors of bytes, in simulated time.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::error::ErrorKind;

/// What takes time.
#[derive(Debug, Clone, Copy)]
enum Work {
    Local(usize),
    Target(usize),
}

/// Both sides, and the slots between them.
struct Machine {
    pipeline: ChunkPipeline<usize>,
    local: Vec<u8>,
    remote: Vec<u8>,
    slots: Vec<u8>,
    /// By the moment at which it ends.
    work: BTreeMap<(u64, usize), Work>,
    now: u64,
    count: usize,
    /// Answers so many requests, and refuses the rest.
    grants: usize,
}

impl Machine {
    fn new(length: usize) -> Self {
        Self {
            pipeline: ChunkPipeline::default(),
            local: (0..length).map(|at| (at * 7 + at / 251) as u8).collect(),
            remote: vec![0xee; length],
            slots: vec![0; super::super::slot_layout::SLOT_BYTES as usize],
            work: BTreeMap::new(),
            now: 0,
            count: 0,
            grants: usize::MAX,
        }
    }

    fn push(&mut self, number: usize, operation: Operation, blocks: &[Block], chunk: u64) {
        let bytes = blocks.iter().map(|block| block.length).sum();
        let blocks = VecDeque::from(blocks.to_vec()).into();
        let request = StagedRequest::new(operation, 1, blocks).with_length(bytes, chunk);
        self.pipeline.push(number, request);
    }

    fn start(&mut self, step: Step, delay: u64) {
        let work = match step {
            Step::Copy(slot) => Work::Local(slot),
            Step::Post(slot) => Work::Target(slot),
        };
        self.count += 1;
        self.work.insert((self.now + delay, self.count), work);
    }

    fn move_local(&mut self, slot: usize) {
        let chunk = self.pipeline.chunk(slot);
        for Block { to, from, length } in chunk.blocks.clone() {
            let (to, from, length) = (to as usize, from as usize, length as usize);
            let (into, of) = match chunk.is_get {
                true => (&mut self.local, &self.slots),
                false => (&mut self.slots, &self.local),
            };
            into[to..to + length].copy_from_slice(&of[from..from + length]);
        }
    }

    fn move_remote(&mut self, slot: usize) {
        let chunk = self.pipeline.chunk(slot);
        let mut at = slot_start(slot) as usize;
        let end = at + SlotSize::of_slot(slot).length() as usize;
        for range in &chunk.ranges {
            let (offset, length) = (range.offset() as usize, range.length() as usize);
            let (slots, remote) = (at..at + length, offset..offset + length);
            match chunk.is_get {
                true => self.slots[slots].copy_from_slice(&self.remote[remote]),
                false => self.remote[remote].copy_from_slice(&self.slots[slots]),
            }
            at += length;
        }
        assert!(at <= end, "a chunk exceeds its slot");
    }

    /// Runs until nothing is left to do. Returns the outcomes, and when they were known.
    fn run(&mut self, mut delay: impl FnMut(Step, u64) -> u64) -> Vec<(usize, bool, u64)> {
        let mut outcomes = Vec::new();
        loop {
            while let Some(step) = self.pipeline.next_step() {
                self.start(step, delay(step, self.now));
            }
            while let Some((number, outcome)) = self.pipeline.take_done() {
                outcomes.push((number, outcome.is_ok(), self.now));
            }
            let Some(((at, _), work)) = self.work.pop_first() else { break };
            self.now = at;
            let next = match work {
                Work::Local(slot) => {
                    self.move_local(slot);
                    self.pipeline.copied(slot, Ok(()))
                }
                Work::Target(slot) if self.grants == 0 => {
                    let refused = Error::new("put", ErrorKind::Stale, "refused");
                    self.pipeline.answered(slot, Err(refused))
                }
                Work::Target(slot) => {
                    self.grants -= 1;
                    self.move_remote(slot);
                    self.pipeline.answered(slot, Ok(()))
                }
            };
            if let Some(step) = next {
                self.start(step, delay(step, self.now));
            }
        }
        assert!(self.pipeline.is_idle());
        outcomes
    }
}

fn whole(length: u64) -> [Block; 1] {
    [Block { to: 0, from: 0, length }]
}

#[test]
fn small_transfer_does_not_wait_for_chunks_of_a_large_one() {
    let length = 64 << 20;
    let mut machine = Machine::new(length);
    machine.push(0, Operation::Put, &whole(length as u64), 1 << 20);
    machine.push(1, Operation::Put, &whole(4096), 1 << 20);
    let outcomes = machine.run(|step, _| match step {
        Step::Copy(slot) | Step::Post(slot) if slot < 8 => 100,
        _ => 1,
    });
    assert_eq!(outcomes[0], (1, true, 2));
    assert!(machine.local == machine.remote);
}

#[test]
fn copies_of_both_sides_overlap() {
    let length = 32 << 20;
    let mut machine = Machine::new(length);
    machine.push(0, Operation::Put, &whole(length as u64), 1 << 20);
    // Each side copies one chunk at a time.
    let mut free = [0_u64; 2];
    let outcomes = machine.run(|step, now| {
        let side = &mut free[usize::from(matches!(step, Step::Post(_)))];
        *side = now.max(*side) + 10;
        *side - now
    });
    let (_, is_ok, end) = outcomes[0];
    assert!(is_ok && machine.local == machine.remote);
    assert_eq!(end, 330, "32 chunks, and the last one's second copy");
}

#[test]
fn refused_chunk_fails_its_transfer_and_no_other() {
    let length = 4 << 20;
    let mut machine = Machine::new(length);
    machine.grants = 2;
    machine.push(0, Operation::Put, &whole(length as u64), 256 << 10);
    assert_eq!(machine.run(|_, _| 1).iter().map(|it| it.1).collect::<Vec<_>>(), [false]);
    machine.grants = usize::MAX;
    machine.push(1, Operation::Put, &whole(length as u64), 256 << 10);
    assert_eq!(machine.run(|_, _| 1).iter().map(|it| it.1).collect::<Vec<_>>(), [true]);
    assert!(machine.local == machine.remote);
}

#[test]
fn ended_session_fails_transfers_after_their_local_copies() {
    let mut pipeline = ChunkPipeline::default();
    for (number, operation) in [(0, Operation::Put), (1, Operation::Get)] {
        let blocks = VecDeque::from(whole(8 << 20).to_vec()).into();
        let request = StagedRequest::new(operation, 1, blocks).with_length(8 << 20, 4 << 20);
        pipeline.push(number, request);
    }
    let steps: Vec<_> = std::iter::from_fn(|| pipeline.next_step()).collect();
    use Step::{Copy, Post};
    assert_eq!(steps, [Copy(0), Copy(1), Post(2), Post(3)]);
    let ended = |_, _, _| Error::new("put", ErrorKind::Closed, "ended");
    pipeline.fail_all(ended);
    assert_eq!(pipeline.take_done().map(|(number, _)| number), Some(1));
    assert!(pipeline.take_done().is_none(), "a device still copies");
    assert_eq!([pipeline.copied(0, Ok(())), pipeline.copied(1, Ok(()))], [None, None]);
    let (number, outcome) = pipeline.take_done().unwrap();
    assert_eq!((number, outcome.unwrap_err().kind()), (0, ErrorKind::Closed));
    assert!(pipeline.is_idle());
    // A late answer changes nothing.
    assert_eq!(pipeline.answered(2, Ok(())), None);
}

fn blocks() -> impl Strategy<Value = Vec<Block>> {
    // Gaps and lengths, so that blocks do not overlap at either end.
    proptest::collection::vec((0..500_u64, 0..3000_u64, 0..500_u64), 1..60).prop_map(|all| {
        let (mut to, mut from) = (0, 0);
        let block = |(gap, length, other): (u64, u64, u64)| {
            (to, from) = (to + gap * u64::from(gap > 250), from + other * u64::from(other > 250));
            let block = Block { to, from, length };
            (to, from) = (to + length, from + length);
            block
        };
        all.into_iter().map(block).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Every byte of all blocks arrives, none beside them, whatever takes how long.
    #[test]
    fn all_bytes_arrive_whatever_takes_how_long(
        lists in proptest::collection::vec((blocks(), any::<bool>(), 1..9000_u64), 1..4),
        delays in proptest::collection::vec(1..50_u64, 1..40),
    ) {
        const PART: usize = 64 * 3500;
        let mut machine = Machine::new(4 * PART);
        let mut expected = (machine.local.clone(), machine.remote.clone());
        for (number, (blocks, is_get, chunk)) in lists.iter().enumerate() {
            let start = (number * PART) as u64;
            let moved = |block: &Block| {
                Block { to: block.to + start, from: block.from + start, length: block.length }
            };
            let blocks: Vec<_> = blocks.iter().map(moved).collect();
            for block in &blocks {
                let (to, from) = (block.to as usize, block.from as usize);
                let length = block.length as usize;
                let (into, of) = match is_get {
                    true => (&mut expected.0, &machine.remote),
                    false => (&mut expected.1, &machine.local),
                };
                into[to..to + length].copy_from_slice(&of[from..from + length]);
            }
            let operation = if *is_get { Operation::Get } else { Operation::Put };
            machine.push(number, operation, &blocks, *chunk);
        }
        let mut delays = delays.into_iter().cycle();
        let mut done = machine.run(|_, _| delays.next().unwrap());
        done.sort_unstable();
        let numbers: Vec<_> = done.iter().map(|it| (it.0, it.1)).collect();
        prop_assert_eq!(numbers, (0..lists.len()).map(|at| (at, true)).collect::<Vec<_>>());
        prop_assert!(machine.local == expected.0 && machine.remote == expected.1);
    }
}
