//! The steps of a probe.
//!
//! Both ends know the steps, so messages name them by their numbers. Single operations of many
//! lengths and alignments come first; then many at once, because a provider that only starts a copy
//! falls behind when it gets more of them than it copies.

use std::sync::LazyLock;

use crate::device_memory::Part;
use crate::path::Operation;

/// The longest operation, as of real transfers.
pub(in crate::rail) const MAX_PART_LENGTH: u64 = 4 << 20;
/// The length of the scratch memory at each end: as many bytes as are in flight at once.
pub(in crate::rail) const SCRATCH_LENGTH: u64 = 4 * MAX_PART_LENGTH;

/// Operations that are posted at once, and then announced.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::rail) struct Step {
    /// Of a put, the target looks at the bytes after the notice; of a get, the initiator after the
    /// completion.
    operation: Operation,
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
        let single = SINGLE.into_iter().map(|(offset, length)| vec![Part::new(offset, length)]);
        let burst = BURSTS.into_iter().map(|(count, length, distance)| {
            (0..count).map(|number| Part::new(number * distance, length)).collect()
        });
        let all: Vec<Vec<Part>> = single.chain(burst).collect();
        let step = |operation| move |parts: &Vec<Part>| Step { operation, parts: parts.clone() };
        let writes = all.iter().map(step(Operation::Put));
        writes.chain(all.iter().map(step(Operation::Get))).collect()
    });
    &STEPS
}

impl Step {
    pub(in crate::rail) fn operation(&self) -> Operation {
        self.operation
    }

    pub(in crate::rail) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The end of the last part: the bytes that arrive last, if anything is late.
    pub(in crate::rail) fn tail(&self) -> Part {
        const LENGTH: u64 = 4096;
        let last = self.parts.last().copied().unwrap_or(Part::new(0, 0));
        let length = last.length().min(LENGTH);
        Part::new(last.end() - length, length)
    }

    /// The sum of all lengths.
    pub(in crate::rail) fn length(&self) -> u64 {
        self.parts.iter().map(|part| part.length()).sum()
    }
}

/// Formats a size, such as `64 KiB` or `65537 bytes`.
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
            match step.operation {
                Operation::Put => writes += 1,
                Operation::Get => reads += 1,
            }
            let mut end = 0;
            for part in &step.parts {
                assert!(part.length() > 0 && part.length() <= MAX_PART_LENGTH, "{part:?}");
                assert!(part.offset() >= end, "{part:?} overlaps");
                end = part.end();
            }
            assert!(end <= SCRATCH_LENGTH, "{step:?}");
            let tail = step.tail();
            assert_eq!(tail.end(), end);
        }
        assert_eq!((writes, reads), (18, 18));
        let lengths = || steps().iter().flat_map(|step| &step.parts).map(|part| part.length());
        assert_eq!((lengths().min(), lengths().max()), (Some(1), Some(MAX_PART_LENGTH)));
    }

    #[test]
    fn pieces_cover_a_part_once() {
        let part = Part::new(9, 10);
        let pieces: Vec<_> = part.pieces(4).map(|piece| (piece.offset(), piece.length())).collect();
        assert_eq!(pieces, [(9, 4), (13, 4), (17, 2)]);
        assert!(part.pieces(10).eq([part]) && part.pieces(u64::from(u32::MAX)).eq([part]));
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
