//! Bytes for tests that verify what they move.
//!
//! Tests of other packages are compiled without optimization, and a loop over each byte of some
//! MiB takes ten times as long there. This package is optimized, and none of these is generic.

/// Bytes that differ by offset and by seed.
#[must_use]
pub fn pattern(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Consecutive numbers of four bytes each, starting with `first`.
#[must_use]
pub fn numbers(length: usize, first: u32) -> Vec<u8> {
    let mut bytes = vec![0; length / 4 * 4];
    for (word, number) in bytes.as_chunks_mut().0.iter_mut().zip(first..) {
        *word = number.to_le_bytes();
    }
    bytes
}

/// Where two byte strings differ first, or where the shorter one ends.
#[must_use]
pub fn first_difference(actual: &[u8], expected: &[u8]) -> Option<usize> {
    let both = actual.len().min(expected.len());
    let differs = actual.iter().zip(expected).position(|(is, should)| is != should);
    differs.or((actual.len() != expected.len()).then_some(both))
}

/// True if all bytes have this value.
#[must_use]
pub fn all_are(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}
