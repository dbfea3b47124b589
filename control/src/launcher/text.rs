//! Bytes as text, for exchanges that carry text only.
//!
//! Base64 with `-` and `_` and without padding: PMI-1 separates fields by spaces and `=`, PMI-2 by
//! `;` and `=`.

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let mut bits = [0; 4];
        bits[1..=group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes(bits);
        for digit in 0..=group.len() {
            let value = bits >> (18 - 6 * digit) & 63;
            text.push(char::from(DIGITS[value as usize]));
        }
    }
    text
}

/// The bytes of a text; None if it is not the result of [`encode`].
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let value = |digit: u8| match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'-' => Some(62),
        b'_' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3 + 2);
    for group in text.as_bytes().chunks(4) {
        let mut bits = 0;
        for (at, digit) in group.iter().enumerate() {
            bits |= u32::from(value(*digit)?) << (18 - 6 * at);
        }
        let [_, rest @ ..] = bits.to_be_bytes();
        let length = group.len() - 1;
        // One digit is no byte, and the bits behind the last byte are zero.
        if length == 0 || rest[length..].iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend(&rest[..length]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bytes_are_restored_from_their_text(bytes: Vec<u8>) {
            let text = encode(&bytes);
            prop_assert!(text.bytes().all(|digit| DIGITS.contains(&digit)));
            prop_assert_eq!(decode(&text), Some(bytes));
        }

        #[test]
        fn other_texts_are_refused_or_canonical(text in "[A-Za-z0-9_=-]{0,12}") {
            if let Some(bytes) = decode(&text) {
                prop_assert_eq!(encode(&bytes), text);
            }
        }
    }
}
