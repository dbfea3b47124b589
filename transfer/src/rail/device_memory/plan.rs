//! The steps of a probe, and the patterns of its bytes.
//!
//! Both ends know the steps, so messages name them by their numbers. Single operations of many
//! lengths and alignments come first; then many at once, because a provider that only starts a copy
//! falls behind when it gets more of them than it copies.

use std::sync::LazyLock;

/// The longest operation, as of real transfers.
pub(in crate::rail) const MAX_PART_LENGTH: u64 = 4 << 20;
/// The length of the scratch memory at each end: as many bytes as are in flight at once.
pub(in crate::rail) const SCRATCH_LENGTH: u64 = 4 * MAX_PART_LENGTH;

/// A range of the scratch memory, at the same offset at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rail) struct Part {
    offset: u64,
    length: u64,
}

impl Part {
    pub(in crate::rail) fn offset(self) -> u64 {
        self.offset
    }

    pub(in crate::rail) fn length(self) -> u64 {
        self.length
    }

    /// Its pieces of at most this length.
    pub(in crate::rail) fn pieces(self, longest: u64) -> impl Iterator<Item = Self> {
        let end = self.offset + self.length;
        (self.offset..end)
            .step_by(longest.max(1) as usize)
            .map(move |offset| Self { offset, length: longest.min(end - offset) })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::rail) enum Direction {
    /// From the initiator to the target, which looks at it after the notice.
    Write,
    /// From the target to the initiator, which looks at it after the completion.
    Read,
}

/// Operations that are posted at once, and then announced.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::rail) struct Step {
    direction: Direction,
    parts: Vec<Part>,
}

/// Single operations: aligned and not, within a page, across pages, up to the longest.
const SINGLE: [(u64, u64); 12] = [
    (0, 8),
    (9, 1),
    (40, 16),
    (4092, 8),
    (1001, 100),
    (8192, 4096),
    (12_289, 4095),
    (65_536, 65_536),
    (200_003, 65_537),
    (1 << 20, 1 << 20),
    ((2 << 20) + 7, (1 << 20) + 1),
    (0, MAX_PART_LENGTH),
];
/// Many at once: their number, their length, and their distance.
const BURSTS: [(u64, u64, u64); 6] = [
    (16, 64, 64),
    (16, 1, 33),
    (16, 4097, 5000),
    (16, 65_536, 65_536),
    (4, MAX_PART_LENGTH, MAX_PART_LENGTH),
    (4, MAX_PART_LENGTH, MAX_PART_LENGTH),
];

/// All steps: writes, then reads.
pub(in crate::rail) fn steps() -> &'static [Step] {
    static STEPS: LazyLock<Vec<Step>> = LazyLock::new(|| {
        let single = SINGLE.into_iter().map(|(offset, length)| vec![Part { offset, length }]);
        let burst = BURSTS.into_iter().map(|(count, length, distance)| {
            (0..count).map(|number| Part { offset: number * distance, length }).collect()
        });
        let all: Vec<Vec<Part>> = single.chain(burst).collect();
        let step = |direction| move |parts: &Vec<Part>| Step { direction, parts: parts.clone() };
        let writes = all.iter().map(step(Direction::Write));
        writes.chain(all.iter().map(step(Direction::Read))).collect()
    });
    &STEPS
}

impl Step {
    pub(in crate::rail) fn direction(&self) -> Direction {
        self.direction
    }

    pub(in crate::rail) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The end of the last part: the bytes that arrive last, if anything is late.
    pub(in crate::rail) fn tail(&self) -> Part {
        const LENGTH: u64 = 4096;
        let last = self.parts.last().copied().unwrap_or(Part { offset: 0, length: 0 });
        let length = last.length.min(LENGTH);
        Part { offset: last.offset + last.length - length, length }
    }

    /// The sum of all lengths.
    pub(in crate::rail) fn length(&self) -> u64 {
        self.parts.iter().map(|part| part.length).sum()
    }
}

/// The bytes of the scratch memory in one step: every word differs from all others, and from those
/// of other steps and probes.
#[derive(Debug, Clone, Copy)]
pub(in crate::rail) struct Pattern(u64);

const WORD: usize = size_of::<u64>();

impl Pattern {
    pub(in crate::rail) fn of(probe: u64, step: usize) -> Self {
        Self(probe.wrapping_add((step as u64 + 1).wrapping_mul(0xd134_2543_de82_ef95)))
    }

    fn word(self, index: u64) -> [u8; WORD] {
        let mut mixed = self.0.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).to_le_bytes()
    }

    /// The bytes from this offset on.
    fn fill(self, offset: u64, bytes: &mut [u8]) {
        let (mut index, first) = (offset / WORD as u64, offset as usize % WORD);
        let (head, bytes) = bytes.split_at_mut(((WORD - first) % WORD).min(bytes.len()));
        if !head.is_empty() {
            head.copy_from_slice(&self.word(index)[first..first + head.len()]);
            index += 1;
        }
        let (words, rest) = bytes.as_chunks_mut::<WORD>();
        for word in words {
            *word = self.word(index);
            index += 1;
        }
        rest.copy_from_slice(&self.word(index)[..rest.len()]);
    }

    /// The bytes of a part.
    pub(in crate::rail) fn bytes(self, part: Part) -> Vec<u8> {
        let mut bytes = vec![0; part.length as usize];
        self.fill(part.offset, &mut bytes);
        bytes
    }

    /// How many bytes are right from the start on, if not all.
    pub(in crate::rail) fn right_bytes(self, part: Part, bytes: &[u8]) -> Option<usize> {
        let mut expected = [0; 4096];
        let blocks = bytes.chunks(expected.len());
        for (at, block) in (0..).step_by(expected.len()).zip(blocks) {
            let expected = &mut expected[..block.len()];
            self.fill(part.offset + at as u64, expected);
            if expected != block {
                let right = expected.iter().zip(block).take_while(|(should, is)| should == is);
                return Some(at + right.count());
            }
        }
        None
    }
}

/// As `64 KiB`, or `65537 bytes`.
pub(in crate::rail) fn size_text(bytes: u64) -> String {
    match bytes {
        0 => "0 bytes".to_owned(),
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        1 => "1 byte".to_owned(),
        _ => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_stay_inside_the_scratch_memory_without_overlaps() {
        let (mut writes, mut reads) = (0, 0);
        for step in steps() {
            match step.direction {
                Direction::Write => writes += 1,
                Direction::Read => reads += 1,
            }
            let mut end = 0;
            for part in &step.parts {
                assert!(part.length > 0 && part.length <= MAX_PART_LENGTH, "{part:?}");
                assert!(part.offset >= end, "{part:?} overlaps");
                end = part.offset + part.length;
            }
            assert!(end <= SCRATCH_LENGTH, "{step:?}");
            let tail = step.tail();
            assert_eq!(tail.offset + tail.length, end);
        }
        assert_eq!((writes, reads), (18, 18));
        let lengths = || steps().iter().flat_map(|step| &step.parts).map(|part| part.length);
        assert_eq!((lengths().min(), lengths().max()), (Some(1), Some(MAX_PART_LENGTH)));
    }

    #[test]
    fn pieces_cover_a_part_once() {
        let part = Part { offset: 9, length: 10 };
        let pieces: Vec<_> = part.pieces(4).map(|piece| (piece.offset, piece.length)).collect();
        assert_eq!(pieces, [(9, 4), (13, 4), (17, 2)]);
        assert!(part.pieces(10).eq([part]) && part.pieces(u64::from(u32::MAX)).eq([part]));
    }

    #[test]
    fn patterns_of_parts_are_those_of_the_whole() {
        let pattern = Pattern::of(7, 3);
        let whole = pattern.bytes(Part { offset: 0, length: 4096 });
        for (offset, length) in [(0, 4096), (1, 1), (7, 2), (13, 900), (4095, 1), (80, 0), (83, 0)]
        {
            let part = Part { offset, length };
            let expected = &whole[offset as usize..(offset + length) as usize];
            assert_eq!(pattern.bytes(part), expected);
            assert_eq!(pattern.right_bytes(part, expected), None);
        }
    }

    #[test]
    fn every_wrong_byte_is_found() {
        let (pattern, part) = (Pattern::of(7, 3), Part { offset: 5, length: 50 });
        for at in 0..50 {
            let mut bytes = pattern.bytes(part);
            bytes[at] ^= 0x40;
            assert_eq!(pattern.right_bytes(part, &bytes), Some(at));
        }
        // The bytes of another step or probe are wrong from the start on.
        for other in [Pattern::of(7, 4), Pattern::of(8, 3)] {
            assert!(pattern.right_bytes(part, &other.bytes(part)).is_some_and(|right| right < 8));
        }
    }

    #[test]
    fn sizes_are_named_in_their_largest_unit() {
        let sizes = [(1, "1 byte"), (8, "8 bytes"), (4096, "4 KiB"), (4 << 20, "4 MiB")];
        for (bytes, text) in sizes {
            assert_eq!(size_text(bytes), text);
        }
        assert_eq!((size_text(65_537), size_text(0)), ("65537 bytes".into(), "0 bytes".into()));
    }
}
