//! Notices to a peer after a transfer.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// Maximum length of a notice's data, in bytes.
pub const MAX_NOTICE_LENGTH: usize = 64;
const WORDS: usize = 2 + MAX_NOTICE_LENGTH / 8;

/// A notice to a peer after the data of a transfer is visible: a tag and up to
/// [`MAX_NOTICE_LENGTH`] bytes.
///
/// ```
/// use transfer::Notice;
/// let notice = Notice::new(7, b"layer 12")?;
/// assert_eq!((notice.tag, notice.data()), (7, &b"layer 12"[..]));
/// assert!(Notice::new(7, &[0; 65]).is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u64; WORDS]", into = "[u64; WORDS]")]
pub struct Notice {
    /// Defined by the application.
    pub tag: u64,
    length: u8,
    bytes: [u8; MAX_NOTICE_LENGTH],
}

impl Notice {
    /// A notice with a tag and data.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the data is too long.
    pub fn new(tag: u64, data: &[u8]) -> Result<Self> {
        let mut bytes = [0; MAX_NOTICE_LENGTH];
        let Some(target) = bytes.get_mut(..data.len()) else {
            let detail = format!("{} bytes, {MAX_NOTICE_LENGTH} is the maximum", data.len());
            return Err(Error::new("make notice", ErrorKind::OutOfBounds, detail));
        };
        target.copy_from_slice(data);
        Ok(Self { tag, length: data.len() as u8, bytes })
    }

    /// The data.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

impl From<Notice> for [u64; WORDS] {
    fn from(notice: Notice) -> Self {
        let mut words = [0; WORDS];
        words[0] = notice.tag;
        words[1] = u64::from(notice.length);
        for (word, bytes) in words[2..].iter_mut().zip(notice.bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }
}

/// Words that a peer wrote: the length is limited.
impl From<[u64; WORDS]> for Notice {
    fn from(words: [u64; WORDS]) -> Self {
        let mut bytes = [0; MAX_NOTICE_LENGTH];
        for (target, word) in bytes.as_chunks_mut().0.iter_mut().zip(&words[2..]) {
            *target = word.to_le_bytes();
        }
        let length = words[1].min(MAX_NOTICE_LENGTH as u64) as u8;
        Self { tag: words[0], length, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notice_is_decoded_and_an_invalid_length_limited() {
        for length in 0..=MAX_NOTICE_LENGTH {
            let data: Vec<_> = (0..length as u8).collect();
            let notice = Notice::new(u64::MAX, &data).unwrap();
            let words = <[u64; WORDS]>::from(notice);
            assert_eq!(Notice::from(words), notice);
            assert_eq!(notice.data(), data);
        }
        let mut words = <[u64; WORDS]>::from(Notice::new(1, &[]).unwrap());
        words[1] = u64::MAX;
        assert_eq!(Notice::from(words).data().len(), MAX_NOTICE_LENGTH);
    }
}
