//! The probe of a ring in device memory: the first messages of a new ring have known bytes, and the
//! reader looks at each as soon as its notice arrives.
//!
//! They use the ring, its lanes and its notices, so they are what messages of the topic are. Both
//! sides know their lengths. A message of the topic counts only after all of them were right.

use transfer::device_memory::{Part, Pattern};

const MAX_LENGTH: u64 = 4 << 20;
/// Lengths within a granule, across granules and pages, and up to the longest chunk and beyond; then
/// many of one length, because a provider that only starts a copy falls behind when it gets more of
/// them than it copies.
const LENGTHS: [(u64, usize); 16] = [
    (8, 1),
    (1, 1),
    (16, 1),
    (100, 1),
    (4095, 1),
    (4096, 1),
    (65_536, 1),
    (65_537, 1),
    (1 << 20, 1),
    ((1 << 20) + 1, 1),
    (MAX_LENGTH, 1),
    (64, 16),
    (4097, 12),
    (65_536, 8),
    (512 << 10, 4),
    (MAX_LENGTH, 4),
];
/// Distance of the messages in the memory that they are written from. Its remainder by a granule
/// differs for each of them: bytes that one of them left in the ring are not those of another.
const DISTANCE: u64 = 4099;
/// Messages of a probe.
const COUNT: usize = 55;

/// A probe: its bytes, and how far it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingProbe {
    pattern: Pattern,
    longest: u64,
    next: usize,
}

impl RingProbe {
    /// The probe with this number of a ring with this capacity.
    pub(super) fn new(number: u64, capacity: u64) -> Self {
        Self { pattern: Pattern::of(number, 0), longest: MAX_LENGTH.min(capacity / 4), next: 0 }
    }

    /// The bytes that its messages are written from.
    pub(super) fn source(&self) -> Part {
        Part::new(0, self.longest + COUNT as u64 * DISTANCE)
    }

    /// The contents of a part of the source.
    pub(super) fn bytes(&self, part: Part) -> Vec<u8> {
        self.pattern.bytes(part)
    }

    /// The next message, as a part of the source; None after the last one.
    pub(super) fn message(&self) -> Option<Part> {
        let lengths = LENGTHS.into_iter().flat_map(|(length, count)| vec![length; count]);
        let length = lengths.into_iter().nth(self.next)?.min(self.longest);
        Some(Part::new(self.next as u64 * DISTANCE, length))
    }

    /// The next message was completely written, or received.
    pub(super) fn advance(&mut self) {
        self.next += 1;
    }

    /// What is wrong with the bytes of a chunk that arrived, if anything.
    pub(super) fn fault(&self, part: Part, bytes: &[u8]) -> Option<String> {
        let right = self.pattern.right_bytes(part, bytes)?;
        let length = bytes.len();
        Some(format!(
            "a chunk of {length} bytes was incomplete when its notice arrived: the first {right} bytes are right"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lie_in_the_source_and_fit_the_ring() {
        for capacity in [64 << 10, 1 << 20, 8 << 20, 64 << 20] {
            let mut probe = RingProbe::new(7, capacity);
            let (mut count, mut total) = (0, 0);
            while let Some(part) = probe.message() {
                assert!(part.length() > 0 && part.length() <= (capacity / 4).min(MAX_LENGTH));
                assert!(part.end() <= probe.source().length());
                probe.advance();
                (count, total) = (count + 1, total + part.length());
            }
            assert_eq!(count, COUNT);
            assert!(total > capacity.min(16 << 20), "{total} bytes in a ring of {capacity}");
        }
        let remainders: std::collections::BTreeSet<_> =
            (0..COUNT as u64).map(|number| number * DISTANCE % 64).collect();
        assert_eq!(remainders.len(), COUNT);
    }

    #[test]
    fn late_bytes_and_bytes_of_other_messages_are_found() {
        let (probe, other) = (RingProbe::new(7, 1 << 20), RingProbe::new(8, 1 << 20));
        let part = Part::new(4099, 300);
        let mut bytes = probe.bytes(part);
        assert_eq!(probe.fault(part, &bytes), None);
        assert!(other.fault(part, &bytes).is_some());
        bytes[299] ^= 1;
        let text = "a chunk of 300 bytes was incomplete when its notice arrived: the first 299 \
                    bytes are right";
        assert_eq!(probe.fault(part, &bytes).as_deref(), Some(text));
    }
}
