//! Many blocks in one request: every byte at its destination, and no other byte changed.

use std::time::Duration;

use gpu::{Block, CopyMethod, DEFAULT_TIMEOUT, ErrorKind, Memory};

use super::streams::{Pages, slow};
use super::{Skip, second};
use testkit::bytes::pattern;

use crate::fixture::Fixture;

const ALL: [CopyMethod; 3] = [CopyMethod::Best, CopyMethod::Kernel, CopyMethod::CopyEngine];

/// Pseudo-random numbers, the same in each run.
struct Random(u64);

impl Random {
    /// A number below a limit.
    fn next(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Two memories, and their expected bytes on the host.
struct Pair {
    to: Memory,
    from: Memory,
    there: Vec<u8>,
    here: Vec<u8>,
}

impl Pair {
    fn new(fixture: &Fixture, to: u64, from: u64) -> Self {
        let device = &fixture.first;
        Self::of(fixture, device.allocate(to).unwrap(), device.allocate_shared(from, &[]).unwrap())
    }

    fn of(fixture: &Fixture, to: Memory, from: Memory) -> Self {
        fixture.fill(&to.whole(), 1);
        fixture.fill(&from.whole(), 2);
        let there = pattern(to.length() as usize, 1);
        let here = pattern(from.length() as usize, 2);
        Self { to, from, there, here }
    }

    /// Copies on the device and on the host, and compares all bytes.
    #[track_caller]
    fn copy(&mut self, fixture: &Fixture, blocks: &[Block], by: CopyMethod) {
        let (to, from) = (self.to.whole(), self.from.whole());
        fixture.stream.copy_blocks(&to, &from, blocks, by).unwrap();
        for block in blocks {
            let length = block.length as usize;
            let (to, from) = (block.to as usize, block.from as usize);
            self.there[to..to + length].copy_from_slice(&self.here[from..from + length]);
        }
        self.check(fixture, by);
    }

    #[track_caller]
    fn check(&self, fixture: &Fixture, by: CopyMethod) {
        let mut bytes = vec![0; self.there.len()];
        fixture.stream.download(&self.to.whole(), &mut bytes, DEFAULT_TIMEOUT).unwrap();
        let wrong = testkit::bytes::first_difference(&bytes, &self.there);
        assert_eq!(wrong, None, "{by:?}: a byte differs");
    }
}

/// Blocks one behind the other in the destination range, with gaps, from arbitrary offsets of
/// the source.
fn scattered(random: &mut Random, count: usize, longest: u64, from: u64) -> (Vec<Block>, u64) {
    let mut at = 0;
    let blocks = (0..count).map(|_| {
        let length = random.next(longest + 1);
        let to = at + random.next(40);
        at = to + length;
        Block { to, from: random.next(from - length), length }
    });
    (blocks.collect(), at)
}

pub fn blocks_arrive_at_any_alignment(fixture: &Fixture) -> Result<(), Skip> {
    // Every destination offset of 32, with every source offset of 32, with lengths around the
    // units: of a thread, of a team, of a team at once.
    for (round, longest) in [31, 100, 700, 2100, 9000].into_iter().enumerate() {
        let room = (longest + 32_u64).next_multiple_of(32) + 32;
        let mut blocks = Vec::new();
        for to in 0..32 {
            for from in 0..32 {
                let number = blocks.len() as u64;
                let length = longest - (7 * to + 3 * from + round as u64) % 32;
                blocks.push(Block { to: number * room + to, from: number * room + from, length });
            }
        }
        let length = blocks.len() as u64 * room;
        Pair::new(fixture, length, length).copy(fixture, &blocks, CopyMethod::Kernel);
    }
    // Each length below 70, at each offset of 16, of sources with the same alignment, and
    // shifted by one and four bytes.
    for farther in [0, 1, 4] {
        let blocks: Vec<_> = (0..16 * 70)
            .map(|number| {
                let (source_offset, length) = (number % 16, number / 16);
                let at = 128 * number + source_offset;
                Block { to: at, from: at + farther, length }
            })
            .collect();
        Pair::new(fixture, 128 * 16 * 70, 128 * 16 * 70).copy(fixture, &blocks, CopyMethod::Kernel);
    }
    Ok(())
}

pub fn blocks_arrive_at_any_length(fixture: &Fixture) -> Result<(), Skip> {
    let mut random = Random(1);
    let from = 4 << 20;
    for longest in [60, 3000, 20_000, 70 << 10] {
        let (blocks, to) = scattered(&mut random, 300, longest, from);
        for by in ALL {
            Pair::new(fixture, to + 100, from).copy(fixture, &blocks, by);
        }
    }
    // Around the length of a piece, and the length from which the copy engine is used; long
    // ones among short ones; none, one and two.
    let (kib, mib) = (1_u64 << 10, 1_u64 << 20);
    let lengths = [
        64 * kib - 1,
        64 * kib,
        64 * kib + 1,
        0,
        mib - 1,
        mib,
        mib + 1,
        2 * mib + 5,
        1,
        128 * kib,
        3,
    ];
    let mut at = 0;
    let mut blocks = Vec::new();
    for length in lengths {
        blocks.push(Block { to: at + 3, from: at + 19, length });
        at += length + 32;
    }
    for part in [&blocks[..], &blocks[..2], &blocks[..1], &blocks[3..4], &[]] {
        for by in ALL {
            Pair::new(fixture, at, at).copy(fixture, part, by);
        }
    }
    Ok(())
}

pub fn ten_thousand_blocks_arrive(fixture: &Fixture) -> Result<(), Skip> {
    let mut random = Random(2);
    let from = 16 << 20;
    let (blocks, to) = scattered(&mut random, 10_000, 3000, from);
    for by in ALL {
        Pair::new(fixture, to, from).copy(fixture, &blocks, by);
    }
    // On one stream, in order, all started before the first is done: the later request must
    // win, and none may read another's list.
    let mut pair = Pair::new(fixture, to, from);
    slow(fixture, Duration::from_millis(2));
    for shift in 0..4 {
        let other = blocks.iter().map(|block| Block {
            from: (block.from + 4099 * shift).min(from - block.length),
            ..*block
        });
        let other: Vec<_> = other.collect();
        let (to, from) = (pair.to.whole(), pair.from.whole());
        fixture.stream.copy_blocks(&to, &from, &other, CopyMethod::Best).unwrap();
        for block in &other {
            let length = block.length as usize;
            let (to, from) = (block.to as usize, block.from as usize);
            let bytes = &pair.here[from..from + length];
            pair.there[to..to + length].copy_from_slice(bytes);
        }
    }
    slow(fixture, Duration::ZERO);
    pair.check(fixture, CopyMethod::Best);
    Ok(())
}

pub fn out_of_bounds_blocks_are_refused_before_any_copy(fixture: &Fixture) -> Result<(), Skip> {
    let mut pair = Pair::new(fixture, 10_000, 20_000);
    let good = Block { to: 0, from: 0, length: 1000 };
    let bad = [
        Block { to: 9001, ..good },
        Block { from: 19_001, ..good },
        Block { length: 10_001, ..good },
        Block { to: u64::MAX, ..good },
        Block { from: u64::MAX - 1, ..good },
        Block { to: 1, length: u64::MAX, ..good },
        // An empty block at an invalid offset.
        Block { from: 20_001, to: 0, length: 0 },
    ];
    for block in bad {
        for by in ALL {
            let blocks = [good, Block { to: 2000, ..good }, block, good];
            let (to, from) = (pair.to.whole(), pair.from.whole());
            let error = fixture.stream.copy_blocks(&to, &from, &blocks, by).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
            assert_eq!(error.device(), Some(fixture.first.name()));
            assert!(error.to_string().contains("block 2:"), "{error}");
        }
    }
    pair.check(fixture, CopyMethod::Best);
    // Slices of memory: offsets count from the start of the slice.
    let (to, from) = (pair.to.slice(5000, 100).unwrap(), pair.from.slice(777, 100).unwrap());
    let block = Block { to: 10, from: 20, length: 80 };
    for by in ALL {
        fixture.stream.copy_blocks(&to, &from, &[block], by).unwrap();
        let beyond = Block { length: 81, ..block };
        let error = fixture.stream.copy_blocks(&to, &from, &[beyond], by).unwrap_err();
        assert!(error.to_string().contains("block 0:"), "{error}");
    }
    pair.there[5010..5090].copy_from_slice(&pair.here[797..877]);
    pair.check(fixture, CopyMethod::Best);
    Ok(())
}

pub fn memory_outlives_its_block_copies(fixture: &Fixture) -> Result<(), Skip> {
    let length = 16 << 20;
    let to = fixture.first.allocate(length).unwrap();
    let stream = fixture.first.stream().unwrap();
    let (_, used) = fixture.first.budget();
    let part = 64 << 10;
    let blocks: Vec<_> = (0..length / part)
        .map(|number| Block { to: part * number, from: part * number, length: part })
        .collect();
    for by in ALL {
        let from = fixture.first.allocate_shared(length, &[]).unwrap();
        fixture.fill(&from.whole(), 3);
        let delay = if by == CopyMethod::CopyEngine { 100 } else { 20_000 };
        slow(fixture, Duration::from_micros(delay));
        for _ in 0..3 {
            stream.copy_blocks(&to.whole(), &from.whole(), &blocks, by).unwrap();
        }
        // Only the stream still holds it.
        drop(from);
        stream.synchronize(DEFAULT_TIMEOUT).unwrap();
        assert_eq!(fixture.first.budget().1, used, "{by:?}: released when the copies are done");
        slow(fixture, Duration::ZERO);
        fixture.check(&to.whole(), 3);
        fixture.stream.fill(&to.whole(), 0).unwrap();
        fixture.stream.synchronize(DEFAULT_TIMEOUT).unwrap();
    }
    Ok(())
}

pub fn blocks_are_copied_to_peers_and_the_host(fixture: &Fixture) -> Result<(), Skip> {
    let mut random = Random(3);
    let from = 2 << 20;
    let (blocks, to) = scattered(&mut random, 500, 9000, from);
    let to = to.next_multiple_of(8);
    let device = &fixture.first;
    for by in ALL {
        let host = device.register(Pages::new(to as usize)).unwrap();
        Pair::of(fixture, host, device.allocate(from).unwrap()).copy(fixture, &blocks, by);
        let host = device.register(Pages::new(from as usize)).unwrap();
        Pair::of(fixture, device.allocate(to).unwrap(), host).copy(fixture, &blocks, by);
    }
    let other = second(fixture)?;
    device.enable_peer(other).unwrap();
    for by in ALL {
        let there = other.allocate(to).unwrap();
        Pair::of(fixture, there, device.allocate(from).unwrap()).copy(fixture, &blocks, by);
        let there = other.allocate_shared(from, &[device.name()]).unwrap();
        Pair::of(fixture, device.allocate(to).unwrap(), there).copy(fixture, &blocks, by);
        // Access cannot be withdrawn, so this uses the other direction, which no case enables.
        let (here, there) = (device.allocate(4096).unwrap(), other.allocate(4096).unwrap());
        let stream = other.stream().unwrap();
        let error = stream.copy_blocks(&there.whole(), &here.whole(), &[], by).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoPeerAccess, "{error}");
    }
    Ok(())
}
