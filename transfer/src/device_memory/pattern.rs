//! Bytes by which a probe knows what has arrived, without clocks, fabrics and devices.

/// A range of the scratch memory, at the same offset at both ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    offset: u64,
    length: u64,
}

impl Part {
    pub fn new(offset: u64, length: u64) -> Self {
        Self { offset, length }
    }

    pub fn offset(self) -> u64 {
        self.offset
    }

    pub fn length(self) -> u64 {
        self.length
    }

    pub fn end(self) -> u64 {
        self.offset + self.length
    }

    /// Splits the part into pieces of at most this length.
    pub fn pieces(self, longest: u64) -> impl Iterator<Item = Self> {
        let end = self.offset + self.length;
        (self.offset..end)
            .step_by(longest.max(1) as usize)
            .map(move |offset| Self { offset, length: longest.min(end - offset) })
    }
}

/// The bytes of the scratch memory in one step: every word differs from all others, and from those
/// of other steps and probes.
#[derive(Debug, Clone, Copy)]
pub struct Pattern(u64);

const WORD: usize = size_of::<u64>();

impl Pattern {
    /// The bytes of one step of a probe.
    pub fn of(probe: u64, step: usize) -> Self {
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
    pub fn bytes(self, part: Part) -> Vec<u8> {
        let mut bytes = vec![0; part.length as usize];
        self.fill(part.offset, &mut bytes);
        bytes
    }

    /// How many bytes are right from the start on, if not all.
    pub fn right_bytes(self, part: Part, bytes: &[u8]) -> Option<usize> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
