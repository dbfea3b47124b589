//! The checksum that devices compute over their memory.
//!
//! A sum over 64-bit words, each mixed with its index. So it can be computed in any order and
//! by any number of threads, and still detects swapped words. It detects errors, not
//! manipulation.

/// Mixed with a word's index.
pub(crate) const INDEX_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
/// Multipliers of the mixing.
pub(crate) const MIX_1: u64 = 0xbf58_476d_1ce4_e5b9;
pub(crate) const MIX_2: u64 = 0x94d0_49bb_1331_11eb;

/// The contribution of one word to the sum.
#[inline]
fn word_term(number: u64, word: u64) -> u64 {
    let mut mixed = word ^ number.wrapping_add(1).wrapping_mul(INDEX_MULTIPLIER);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(MIX_1);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(MIX_2);
    mixed ^ mixed >> 31
}

/// The checksum of these bytes, as [a stream](crate::Stream::checksum) computes it on its
/// device. An incomplete last word is padded with zeros.
///
/// ```
/// let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 9];
/// let swapped = [9, 2, 3, 4, 5, 6, 7, 8, 1];
/// assert_ne!(gpu::checksum(&bytes), gpu::checksum(&swapped));
/// assert_eq!(gpu::checksum(&[]), 0);
/// ```
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    checksum_from(0, bytes)
}

/// The contribution of these bytes to the checksum of a longer range, in which their first word
/// has this index.
pub(crate) fn checksum_from(first: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let mut sum = 0_u64;
    let mut number = first;
    for word in words {
        sum = sum.wrapping_add(word_term(number, u64::from_le_bytes(*word)));
        number += 1;
    }
    if !rest.is_empty() {
        let mut word = [0; 8];
        word[..rest.len()].copy_from_slice(rest);
        sum = sum.wrapping_add(word_term(number, u64::from_le_bytes(word)));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_depends_on_every_byte_and_its_offset() {
        let bytes: Vec<u8> = (0..100).map(|at| (at * 7) as u8).collect();
        let sum = checksum(&bytes);
        for at in 0..bytes.len() {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(checksum(&other), sum, "byte {at}");
        }
        // Swapped words.
        let mut other = bytes.clone();
        other.rotate_left(8);
        assert_ne!(checksum(&other), sum);
        // A shorter range that differs only by zeros: the length is not part of the sum.
        assert_eq!(checksum(&[1, 0, 0]), checksum(&[1]));
        let (front, back) = bytes.split_at(48);
        assert_eq!(checksum_from(0, front).wrapping_add(checksum_from(6, back)), sum);
    }
}
