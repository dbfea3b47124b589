//! What can be told to a peer behind a transfer.

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, ErrorKind, Result};

/// Bytes that a notice carries, at most.
pub const LONGEST_NOTICE: usize = 64;
const WORDS: usize = 2 + LONGEST_NOTICE / 8;

/// What a peer is told when the data before it can be seen: a tag, and up to
/// [`LONGEST_NOTICE`] bytes.
///
/// ```
/// use transfer::Notice;
/// let notice = Notice::new(7, b"layer 12")?;
/// assert_eq!((notice.tag, notice.data()), (7, &b"layer 12"[..]));
/// assert!(Notice::new(7, &[0; 65]).is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// What it means is up to those who talk.
    pub tag: u64,
    length: u8,
    bytes: [u8; LONGEST_NOTICE],
}

impl fmt::Debug for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Notice({:#x}, {} bytes)", self.tag, self.length)
    }
}

impl Notice {
    /// With a tag and some bytes.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if there are too many.
    pub fn new(tag: u64, data: &[u8]) -> Result<Self> {
        let mut bytes = [0; LONGEST_NOTICE];
        let Some(place) = bytes.get_mut(..data.len()) else {
            let detail = format!("{} bytes, {LONGEST_NOTICE} at most", data.len());
            return Err(Error::new("make a notice", ErrorKind::OutOfBounds, detail));
        };
        place.copy_from_slice(data);
        Ok(Self { tag, length: data.len() as u8, bytes })
    }

    /// What came with the tag.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    pub(super) fn to_words(self) -> [u64; WORDS] {
        let mut words = [0; WORDS];
        words[0] = self.tag;
        words[1] = u64::from(self.length);
        for (word, bytes) in words[2..].iter_mut().zip(self.bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    /// What a peer wrote, cut to what can be.
    pub(super) fn from_words(words: &[u64; WORDS]) -> Self {
        let mut bytes = [0; LONGEST_NOTICE];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(&words[2..]) {
            *place = word.to_le_bytes();
        }
        let length = words[1].min(LONGEST_NOTICE as u64) as u8;
        Self { tag: words[0], length, bytes }
    }
}

/// The bytes of a notice, which are copied as a whole: one by one takes serde longer than the rest of
/// a message.
struct Data(Notice);

impl Serialize for Data {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0.data())
    }
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Taken;
        impl Visitor<'_> for Taken {
            type Value = Data;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{LONGEST_NOTICE} bytes at most")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> std::result::Result<Data, E> {
                Notice::new(0, bytes).map(Data).map_err(E::custom)
            }
        }
        from.deserialize_bytes(Taken)
    }
}

impl Serialize for Notice {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        (self.tag, Data(*self)).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Notice {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let (tag, Data(notice)) = Deserialize::deserialize(from)?;
        Ok(Self { tag, ..notice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out_and_a_scribbled_length_is_cut() {
        for length in 0..=LONGEST_NOTICE {
            let data: Vec<_> = (0..length as u8).collect();
            let notice = Notice::new(u64::MAX, &data).unwrap();
            let words = notice.to_words();
            assert_eq!(Notice::from_words(&words), notice);
            assert_eq!(notice.data(), data);
        }
        let mut words = Notice::new(1, &[]).unwrap().to_words();
        words[1] = u64::MAX;
        assert_eq!(Notice::from_words(&words).data().len(), LONGEST_NOTICE);
    }
}
