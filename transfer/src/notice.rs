//! Notices to a peer after a transfer.

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// Maximum length of a notice's data, in bytes.
pub const MAX_NOTICE_LENGTH: usize = 4096;
/// Shorter data is in the notice itself, without an allocation.
const INLINE: usize = 64;

/// A notice to a peer after the data of a transfer is visible: a tag and up to
/// [`MAX_NOTICE_LENGTH`] bytes. Up to 64 bytes are sent at once, more in parts.
///
/// ```
/// use transfer::{MAX_NOTICE_LENGTH, Notice};
/// let notice = Notice::new(7, b"layer 12")?;
/// assert_eq!((notice.tag, notice.data()), (7, &b"layer 12"[..]));
/// assert!(Notice::new(7, &[0; MAX_NOTICE_LENGTH + 1]).is_err());
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SentNotice", into = "SentNotice")]
pub struct Notice {
    /// Defined by the application.
    pub tag: u64,
    data: Data,
}

#[derive(Debug, Clone)]
enum Data {
    Inline(u8, [u8; INLINE]),
    Long(Box<[u8]>),
}

impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Data {}

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Inline(length, bytes) => &bytes[..usize::from(*length).min(INLINE)],
            Self::Long(bytes) => bytes,
        }
    }
}

impl Notice {
    /// A notice with a tag and data.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds) if the data is too long.
    pub fn new(tag: u64, data: &[u8]) -> Result<Self> {
        if data.len() > MAX_NOTICE_LENGTH {
            let detail = format!("{} bytes, {MAX_NOTICE_LENGTH} is the maximum", data.len());
            return Err(Error::new("make notice", ErrorKind::OutOfBounds, detail));
        }
        let mut bytes = [0; INLINE];
        let data = match bytes.get_mut(..data.len()) {
            Some(target) => {
                target.copy_from_slice(data);
                Data::Inline(data.len() as u8, bytes)
            }
            None => Data::Long(data.into()),
        };
        Ok(Self { tag, data })
    }

    /// The data.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.data.bytes()
    }
}

/// A notice as it is sent over a fabric.
#[derive(Serialize, Deserialize)]
struct SentNotice {
    tag: u64,
    data: Vec<u8>,
}

impl From<Notice> for SentNotice {
    fn from(notice: Notice) -> Self {
        Self { tag: notice.tag, data: notice.data().to_vec() }
    }
}

/// A notice that a peer sent: its length is checked.
impl TryFrom<SentNotice> for Notice {
    type Error = Error;

    fn try_from(sent: SentNotice) -> Result<Self> {
        Self::new(sent.tag, &sent.data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notice_has_its_data_and_too_long_data_is_refused() {
        for length in [0, 1, INLINE - 1, INLINE, INLINE + 1, MAX_NOTICE_LENGTH] {
            let data: Vec<_> = (0..length).map(|at| (at * 7) as u8).collect();
            let notice = Notice::new(u64::MAX, &data).unwrap();
            assert_eq!((notice.tag, notice.data()), (u64::MAX, &data[..]));
            assert_eq!(Notice::try_from(SentNotice::from(notice.clone())).unwrap(), notice);
        }
        let sent = SentNotice { tag: 1, data: vec![0; MAX_NOTICE_LENGTH + 1] };
        let error = Notice::try_from(sent).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds);
    }
}
