//! Encoding of control messages: one tag byte, then the value in [postcard].
//!
//! The tag is the version of a protocol or the kind of a message. Each message has exactly one
//! encoding: [`decode`] refuses truncated messages, trailing bytes, and values that [`encode`]
//! would encode differently. So an accepted message can be compared and forwarded by its bytes.
//!
//! ```
//! use control::codec::{self, DecodeError};
//!
//! let bytes = codec::encode(3, &(7_u32, "camera"));
//! assert_eq!(codec::decode(3, &bytes), Ok((7_u32, "camera".to_owned())));
//! let refused = codec::decode::<(u32, String)>(4, &bytes);
//! assert_eq!(refused, Err(DecodeError::Tag { found: 3, expected: 4 }));
//! ```

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// The message is empty.
    Empty,
    /// The first byte is another version or kind.
    Tag {
        /// The first byte.
        found: u8,
        /// What it must be.
        expected: u8,
    },
    /// The bytes end too early, or a field has a value that its type does not have.
    Value(String),
    /// Bytes follow the value.
    Trailing(usize),
    /// The value has a shorter or another encoding.
    NotCanonical,
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "the message is empty"),
            Self::Tag { found, expected } => {
                write!(f, "the message begins with {found}, this build expects {expected}")
            }
            Self::Value(why) => write!(f, "the message cannot be decoded: {why}"),
            Self::Trailing(count) => write!(f, "{count} bytes follow the message"),
            Self::NotCanonical => write!(f, "the message is not in its only valid encoding"),
        }
    }
}

impl std::error::Error for DecodeError {}

/// The bytes of a message.
///
/// # Panics
///
/// If the value's own `Serialize` reports an error, which derived implementations never do.
#[must_use]
pub fn encode<T: Serialize + ?Sized>(tag: u8, value: &T) -> Vec<u8> {
    postcard::to_extend(value, vec![tag]).expect("a derived Serialize reports no error")
}

/// Decodes a message. Memory is allocated for the bytes that are present, not for the lengths
/// that the message claims.
///
/// # Errors
///
/// If the bytes are not exactly what [`encode`] makes of some value with this tag.
pub fn decode<T: Serialize + DeserializeOwned>(tag: u8, bytes: &[u8]) -> Result<T, DecodeError> {
    let (found, body) = bytes.split_first().ok_or(DecodeError::Empty)?;
    if *found != tag {
        return Err(DecodeError::Tag { found: *found, expected: tag });
    }
    let (value, rest) = postcard::take_from_bytes::<T>(body)
        .map_err(|error| DecodeError::Value(error.to_string()))?;
    if !rest.is_empty() {
        return Err(DecodeError::Trailing(rest.len()));
    }
    if encode(tag, &value) != bytes {
        return Err(DecodeError::NotCanonical);
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Value = (u32, String, Option<bool>);

    #[test]
    fn message_round_trips_and_truncations_are_refused() {
        let value: Value = (300, "camera".into(), Some(true));
        let bytes = encode(9, &value);
        assert_eq!(decode::<Value>(9, &bytes), Ok(value));
        assert_eq!(decode::<Value>(9, &[]), Err(DecodeError::Empty));
        for end in 1..bytes.len() {
            assert!(matches!(decode::<Value>(9, &bytes[..end]), Err(DecodeError::Value(_))));
        }
    }

    #[test]
    fn other_tag_and_trailing_bytes_are_refused() {
        let mut bytes = encode(9, &1_u32);
        let other = DecodeError::Tag { found: 9, expected: 8 };
        assert_eq!(decode::<u32>(8, &bytes), Err(other));
        bytes.push(0);
        assert_eq!(decode::<u32>(9, &bytes), Err(DecodeError::Trailing(1)));
    }

    #[test]
    fn second_encoding_of_a_value_is_refused() {
        // A varint with a superfluous continuation byte.
        assert_eq!(decode::<u32>(9, &[9, 0x81, 0x00]), Err(DecodeError::NotCanonical));
        assert_eq!(decode::<u32>(9, &[9, 0x01]), Ok(1));
    }

    #[test]
    fn claimed_length_allocates_nothing() {
        // A list that claims 2^35 entries.
        let bytes = [9, 0xff, 0xff, 0xff, 0xff, 0x7f];
        assert!(matches!(decode::<Vec<u64>>(9, &bytes), Err(DecodeError::Value(_))));
    }
}
