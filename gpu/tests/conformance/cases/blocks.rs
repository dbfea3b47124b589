//! Many blocks in one request: every byte where it belongs, and no other touched.

use std::time::Duration;

use gpu::{Block, BlocksBy, ErrorKind, Memory, PATIENCE};

use super::streams::{Pages, slow};
use super::{Skip, second};
use crate::house::{House, pattern};

const ALL: [BlocksBy; 3] = [BlocksBy::Best, BlocksBy::Kernel, BlocksBy::Loop];

/// Numbers that look like chance, and are the same each time.
struct Numbers(u64);

impl Numbers {
    /// Below a limit.
    fn next(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Two memories, and what the host knows of them.
struct Pair {
    to: Memory,
    from: Memory,
    there: Vec<u8>,
    here: Vec<u8>,
}

impl Pair {
    fn new(house: &House, to: u64, from: u64) -> Self {
        let device = &house.first;
        Self::of(house, device.allocate(to).unwrap(), device.allocate_shared(from, &[]).unwrap())
    }

    fn of(house: &House, to: Memory, from: Memory) -> Self {
        house.fill(&to.whole(), 1);
        house.fill(&from.whole(), 2);
        let there = pattern(to.length() as usize, 1);
        let here = pattern(from.length() as usize, 2);
        Self { to, from, there, here }
    }

    /// Copies, on the device and here, and compares all bytes.
    #[track_caller]
    fn copy(&mut self, house: &House, blocks: &[Block], by: BlocksBy) {
        let (to, from) = (self.to.whole(), self.from.whole());
        house.stream.copy_blocks(&to, &from, blocks, by).unwrap();
        for block in blocks {
            let length = block.length as usize;
            let (to, from) = (block.to as usize, block.from as usize);
            self.there[to..to + length].copy_from_slice(&self.here[from..from + length]);
        }
        self.check(house, by);
    }

    #[track_caller]
    fn check(&self, house: &House, by: BlocksBy) {
        let mut bytes = vec![0; self.there.len()];
        house.stream.download(&self.to.whole(), &mut bytes, PATIENCE).unwrap();
        let wrong = bytes.iter().zip(&self.there).position(|(is, should)| is != should);
        assert_eq!(wrong, None, "{by:?}: another byte is there");
    }
}

/// Blocks one behind the other in the range to copy to, with gaps, of any places of the other.
fn scattered(numbers: &mut Numbers, count: usize, longest: u64, from: u64) -> (Vec<Block>, u64) {
    let mut at = 0;
    let blocks = (0..count).map(|_| {
        let length = numbers.next(longest + 1);
        let to = at + numbers.next(40);
        at = to + length;
        Block { to, from: numbers.next(from - length), length }
    });
    (blocks.collect(), at)
}

pub fn blocks_arrive_however_they_lie(house: &House) -> Result<(), Skip> {
    // Every place of 32 to copy to, with every place of 32 to copy from, with lengths around
    // what is moved at once: by a thread, by a team, by a team in one go.
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
        Pair::new(house, length, length).copy(house, &blocks, BlocksBy::Kernel);
    }
    // Each length below 70, at each place of 16, of sources that lie as they do, and one and
    // four bytes farther on.
    for farther in [0, 1, 4] {
        let blocks: Vec<_> = (0..16 * 70)
            .map(|number| {
                let (place, length) = (number % 16, number / 16);
                let at = 128 * number + place;
                Block { to: at, from: at + farther, length }
            })
            .collect();
        Pair::new(house, 128 * 16 * 70, 128 * 16 * 70).copy(house, &blocks, BlocksBy::Kernel);
    }
    Ok(())
}

pub fn blocks_arrive_however_long_they_are(house: &House) -> Result<(), Skip> {
    let mut numbers = Numbers(1);
    let from = 4 << 20;
    for longest in [60, 3000, 20_000, 70 << 10] {
        let (blocks, to) = scattered(&mut numbers, 300, longest, from);
        for by in ALL {
            Pair::new(house, to + 100, from).copy(house, &blocks, by);
        }
    }
    // Around the length of a piece, and that from which on the copy engine is taken; long ones
    // among short ones; none, one and two.
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
            Pair::new(house, at, at).copy(house, part, by);
        }
    }
    Ok(())
}

pub fn ten_thousand_blocks_arrive(house: &House) -> Result<(), Skip> {
    let mut numbers = Numbers(2);
    let from = 16 << 20;
    let (blocks, to) = scattered(&mut numbers, 10_000, 3000, from);
    for by in ALL {
        Pair::new(house, to, from).copy(house, &blocks, by);
    }
    // On one stream, in order, all of them begun before the first is done: the later request is
    // what stays, and none finds another's list in place of its own.
    let mut pair = Pair::new(house, to, from);
    slow(house, Duration::from_millis(2));
    for shift in 0..4 {
        let other = blocks.iter().map(|block| Block {
            from: (block.from + 4099 * shift).min(from - block.length),
            ..*block
        });
        let other: Vec<_> = other.collect();
        let (to, from) = (pair.to.whole(), pair.from.whole());
        house.stream.copy_blocks(&to, &from, &other, BlocksBy::Best).unwrap();
        for block in &other {
            let length = block.length as usize;
            let (to, from) = (block.to as usize, block.from as usize);
            let bytes = &pair.here[from..from + length];
            pair.there[to..to + length].copy_from_slice(bytes);
        }
    }
    slow(house, Duration::ZERO);
    pair.check(house, BlocksBy::Best);
    Ok(())
}

pub fn blocks_that_reach_beyond_are_refused_before_any_moves(house: &House) -> Result<(), Skip> {
    let mut pair = Pair::new(house, 10_000, 20_000);
    let good = Block { to: 0, from: 0, length: 1000 };
    let bad = [
        Block { to: 9001, ..good },
        Block { from: 19_001, ..good },
        Block { length: 10_001, ..good },
        Block { to: u64::MAX, ..good },
        Block { from: u64::MAX - 1, ..good },
        Block { to: 1, length: u64::MAX, ..good },
        // Nothing, but from nowhere.
        Block { from: 20_001, to: 0, length: 0 },
    ];
    for block in bad {
        for by in ALL {
            let blocks = [good, Block { to: 2000, ..good }, block, good];
            let (to, from) = (pair.to.whole(), pair.from.whole());
            let error = house.stream.copy_blocks(&to, &from, &blocks, by).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{error}");
            assert_eq!(error.device(), Some(house.first.name()));
            assert!(error.to_string().contains("block 2:"), "{error}");
        }
    }
    pair.check(house, BlocksBy::Best);
    // Ranges of their own memories: offsets count from where they begin.
    let (to, from) = (pair.to.slice(5000, 100).unwrap(), pair.from.slice(777, 100).unwrap());
    let block = Block { to: 10, from: 20, length: 80 };
    for by in ALL {
        house.stream.copy_blocks(&to, &from, &[block], by).unwrap();
        let beyond = Block { length: 81, ..block };
        let error = house.stream.copy_blocks(&to, &from, &[beyond], by).unwrap_err();
        assert!(error.to_string().contains("block 0:"), "{error}");
    }
    pair.there[5010..5090].copy_from_slice(&pair.here[797..877]);
    pair.check(house, BlocksBy::Best);
    Ok(())
}

pub fn memory_lives_as_long_as_its_blocks(house: &House) -> Result<(), Skip> {
    let length = 16 << 20;
    let to = house.first.allocate(length).unwrap();
    let stream = house.first.stream().unwrap();
    let (_, used) = house.first.budget();
    let part = 64 << 10;
    let blocks: Vec<_> = (0..length / part)
        .map(|number| Block { to: part * number, from: part * number, length: part })
        .collect();
    for by in ALL {
        let from = house.first.allocate_shared(length, &[]).unwrap();
        house.fill(&from.whole(), 3);
        let delay = if by == BlocksBy::Loop { 100 } else { 20_000 };
        slow(house, Duration::from_micros(delay));
        for _ in 0..3 {
            stream.copy_blocks(&to.whole(), &from.whole(), &blocks, by).unwrap();
        }
        // Nobody holds it any more but the stream.
        drop(from);
        stream.synchronize(PATIENCE).unwrap();
        assert_eq!(house.first.budget().1, used, "{by:?}: when they are done it goes");
        slow(house, Duration::ZERO);
        house.check(&to.whole(), 3);
        house.stream.fill(&to.whole(), 0).unwrap();
        house.stream.synchronize(PATIENCE).unwrap();
    }
    Ok(())
}

pub fn blocks_go_to_peers_and_to_the_host(house: &House) -> Result<(), Skip> {
    let mut numbers = Numbers(3);
    let from = 2 << 20;
    let (blocks, to) = scattered(&mut numbers, 500, 9000, from);
    let to = to.next_multiple_of(8);
    let device = &house.first;
    for by in ALL {
        let host = device.register(Pages::new(to as usize)).unwrap();
        Pair::of(house, host, device.allocate(from).unwrap()).copy(house, &blocks, by);
        let host = device.register(Pages::new(from as usize)).unwrap();
        Pair::of(house, device.allocate(to).unwrap(), host).copy(house, &blocks, by);
    }
    let other = second(house)?;
    device.enable_peer(other).unwrap();
    for by in ALL {
        let there = other.allocate(to).unwrap();
        Pair::of(house, there, device.allocate(from).unwrap()).copy(house, &blocks, by);
        let there = other.allocate_shared(from, &[device]).unwrap();
        Pair::of(house, device.allocate(to).unwrap(), there).copy(house, &blocks, by);
        // Leave is given for good: so without it from the other side, where no case gives it.
        let (here, there) = (device.allocate(4096).unwrap(), other.allocate(4096).unwrap());
        let stream = other.stream().unwrap();
        let error = stream.copy_blocks(&there.whole(), &here.whole(), &[], by).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoPeerAccess, "{error}");
    }
    Ok(())
}
