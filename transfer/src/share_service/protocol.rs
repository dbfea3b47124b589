//! Messages between a client and a service.
//!
//! ```text
//! client                                service
//! Open(name, number)               ►
//!                                  ◄    Handle, with descriptors              the service holds it
//! Pieces(number, first piece)      ►                                          of a pool, and of more
//!                                  ◄    Pieces, with descriptors              pieces than a message has
//!   … uses the memory …
//! Release(number, was it used)     ►
//! ```
//!
//! Memory for one receiver is not found by its name after the handle was sent; a release without a
//! use makes it available again. The end of a connection releases all that was opened by it.

use control::codec;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::wire;

/// Maximum length of a name in bytes.
pub const MAX_NAME_LENGTH: usize = 255;

const VERSION: u8 = 3;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The handle of the memory with this name, which the client gives a number.
    Open(String, u64),
    /// Descriptors of opened memory, from this piece on.
    Pieces(u64, u32),
    /// Opened memory is not used any more. It was never used if it could not be mapped. There is no
    /// reply.
    Release(u64, bool),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The bytes of a [handle](crate::Handle), and whether the memory is for one receiver. The first
    /// descriptors are sent with it, except those of a pool.
    Handle { bytes: Vec<u8>, is_for_one: bool },
    /// Descriptors are sent with the message.
    Pieces,
    /// No memory is shared under this name.
    Unknown,
    /// The memory cannot be exported now, for this reason.
    Failed(String),
    /// The request is invalid. The service closes the connection after this reply.
    Malformed,
    /// This user is not admitted.
    Denied,
}

pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_LENGTH).contains(&name.len())
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let is_valid = |request: &Self| match request {
            Self::Open(name, _) => is_name(name),
            _ => true,
        };
        codec::decode(VERSION, bytes).ok().filter(is_valid)
    }
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    pub(super) fn decode(operation: &'static str, bytes: &[u8]) -> Result<Self> {
        wire::decode(operation, VERSION, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn only_a_valid_name_is_requested() {
        let open = |name: &str| Request::Open(name.to_owned(), 5).encode();
        let decoded = |name: &str| Request::decode(&open(name));
        assert_eq!(decoded("weights"), Some(Request::Open("weights".to_owned(), 5)));
        assert_eq!(open("weights"), b"\x03\x00\x07weights\x05");
        assert_eq!(decoded(""), None);
        assert_eq!(decoded(&"x".repeat(MAX_NAME_LENGTH + 1)), None);
        assert_eq!(Request::decode(b"\x03\x00\x02\xff\xfe\x05"), None, "not UTF-8");
        assert_eq!(Request::decode(b"\x02\x00\x07weights\x05"), None, "another version");
        assert_eq!(Request::decode(b"\x03\x00\x07weights"), None, "truncated");
        assert_eq!(Request::decode(b"\x03\x00\x07weights\x05."), None, "trailing bytes");
        assert_eq!(Request::decode(b"GET / HTTP/1.1"), None);
        for request in
            [Request::Pieces(7, 64), Request::Release(9, true), Request::Release(9, false)]
        {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn replies_of_other_versions_and_kinds_are_refused() {
        let read = |bytes: &[u8]| Reply::decode("test", bytes).map_err(|error| error.kind());
        for reply in [
            Reply::Handle { bytes: vec![7; 90], is_for_one: true },
            Reply::Pieces,
            Reply::Unknown,
            Reply::Denied,
        ] {
            assert_eq!(read(&reply.encode()), Ok(reply));
        }
        assert_eq!(read(&[VERSION + 1, 2]), Err(ErrorKind::VersionMismatch));
        assert_eq!(read(&[VERSION, 6]), Err(ErrorKind::Malformed));
        assert_eq!(read(&[VERSION]), Err(ErrorKind::Malformed));
    }
}
