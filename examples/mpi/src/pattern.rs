//! Bytes that a receiver can check: different for each number.

/// The word at this index of the pattern of this number.
fn word(number: u64, index: u64) -> u64 {
    let mut value =
        number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index.wrapping_mul(0xd134_2543_de82_ef95);
    value ^= value >> 32;
    value.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Fills bytes with the pattern of a number.
pub fn fill(bytes: &mut [u8], number: u64) {
    for (part, index) in bytes.chunks_mut(8).zip(0..) {
        part.copy_from_slice(&word(number, index).to_le_bytes()[..part.len()]);
    }
}

/// The number of wrong words.
#[must_use]
pub fn mistakes(bytes: &[u8], number: u64) -> u64 {
    let is_wrong =
        |(part, index): &(&[u8], u64)| **part != word(number, *index).to_le_bytes()[..part.len()];
    bytes.chunks(8).zip(0..).filter(is_wrong).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wrong_byte_is_found() {
        for length in [1, 7, 8, 9, 1000] {
            let mut bytes = vec![0; length];
            fill(&mut bytes, 7);
            assert_eq!(mistakes(&bytes, 7), 0);
            assert!(mistakes(&bytes, 8) > 0);
            for at in [0, length / 2, length - 1] {
                bytes[at] ^= 1;
                assert_eq!(mistakes(&bytes, 7), 1);
                bytes[at] ^= 1;
            }
        }
    }
}
