//! Letters between the services of two nodes that are no [terms](crate::bridge::Terms) of a topic.
//!
//! Each begins with a byte of its own, as no terms do.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};

/// What a letter tells of, and how it begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Publishers that died.
    Obituary = 129,
    /// What carries messages.
    Provider = 130,
    /// What was published before anything was kept.
    Beginning = 131,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Obituary, Self::Provider, Self::Beginning];

    /// None of terms.
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| bytes.first() == Some(&(*kind as u8)))
    }
}

/// What such a letter says.
pub(super) trait Note: Serialize + DeserializeOwned {
    const KIND: Kind;
    /// What fails if it cannot be read.
    const READ: &'static str;

    /// Whether it could have been written here, and why not.
    fn check(&self) -> std::result::Result<(), &'static str>;

    /// The bytes that travel.
    fn encode(&self) -> Vec<u8> {
        // Writing to memory does not fail.
        postcard::to_extend(self, vec![Self::KIND as u8]).unwrap_or_default()
    }

    /// Reads a letter of another node. What is accepted has one encoding only.
    fn decode(bytes: &[u8]) -> Result<Self> {
        let refuse = |detail| Error::new(Self::READ, ErrorKind::Malformed, detail);
        let body =
            bytes.strip_prefix(&[Self::KIND as u8]).ok_or_else(|| refuse("another letter"))?;
        let (read, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|cause| Error::because(Self::READ, ErrorKind::Malformed, cause))?;
        read.check().map_err(refuse)?;
        if !rest.is_empty() || read.encode() != bytes {
            return Err(refuse("written otherwise than it would be here"));
        }
        Ok(read)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::fmt::Debug;

    use super::*;

    /// It is read as it was written, and as nothing else.
    pub(in crate::carrier) fn is_read_as_written<N: Note + PartialEq + Debug>(note: &N) {
        let bytes = note.encode();
        assert_eq!(Kind::of(&bytes), Some(N::KIND));
        assert!(crate::bridge::Terms::decode(&bytes).is_err());
        assert_eq!(N::decode(&bytes).unwrap(), *note);
        let longer = [&bytes[..], &[0]].concat();
        for bytes in [&[][..], &bytes[..1], &bytes[1..], &bytes[..bytes.len() - 1], &longer] {
            is_refused::<N>(bytes);
        }
    }

    #[track_caller]
    pub(in crate::carrier) fn is_refused<N: Note + Debug>(bytes: &[u8]) {
        assert_eq!(N::decode(bytes).unwrap_err().kind(), ErrorKind::Malformed, "{bytes:?}");
    }

    /// Whatever is there is read or refused.
    pub(in crate::carrier) fn is_read_or_refused<N: Note>(bytes: &[u8]) {
        let letter = [&[N::KIND as u8], bytes].concat();
        if let Ok(read) = N::decode(&letter) {
            assert_eq!(read.encode(), letter);
        }
    }

    #[test]
    fn terms_are_none() {
        assert!(
            [&[][..], &[1], &[2], &[128], &[132]].iter().all(|bytes| Kind::of(bytes).is_none())
        );
    }
}
