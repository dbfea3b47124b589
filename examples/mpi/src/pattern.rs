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
    let (words, rest) = bytes.as_chunks_mut();
    let mut index = 0;
    for to in words {
        *to = word(number, index).to_le_bytes();
        index += 1;
    }
    rest.copy_from_slice(&word(number, index).to_le_bytes()[..rest.len()]);
}

/// The number of wrong words.
#[must_use]
pub fn mistakes(bytes: &[u8], number: u64) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let (mut wrong, mut index) = (0, 0);
    for found in words {
        wrong += u64::from(u64::from_le_bytes(*found) != word(number, index));
        index += 1;
    }
    wrong + u64::from(*rest != word(number, index).to_le_bytes()[..rest.len()])
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
