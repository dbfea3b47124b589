//! Messages between a client and a service.
//!
//! ```text
//! client                                service
//! Open(name)                       ►
//!                                  ◄    Handle, with the first descriptors
//! Pieces(identity, first piece)    ►                                          for each further message
//!                                  ◄    Pieces, with descriptors
//!   … uses the memory …                                                       the service holds it
//! Release(identity)                ►
//! ```
//!
//! The end of a connection releases all that was opened by it.

use control::codec;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::wire;

/// Maximum length of a name in bytes.
pub const MAX_NAME_LENGTH: usize = 255;

const VERSION: u8 = 2;

/// A request of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// The handle of the memory with this name.
    Open(String),
    /// Further descriptors of opened memory, from this piece on.
    Pieces([u8; 16], u32),
    /// Opened memory is not used any more. There is no reply.
    Release([u8; 16]),
}

/// A reply of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The bytes of a [handle](crate::Handle), whose first descriptors are sent with the message.
    Handle(Vec<u8>),
    /// Further descriptors are sent with the message.
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

/// Is this a valid name?
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_LENGTH).contains(&name.len())
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let is_valid = |request: &Self| match request {
            Self::Open(name) => is_name(name),
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
        let open = |name: &str| Request::Open(name.to_owned()).encode();
        let decoded = |name: &str| Request::decode(&open(name));
        assert_eq!(decoded("weights"), Some(Request::Open("weights".to_owned())));
        assert_eq!(open("weights"), b"\x02\x00\x07weights");
        assert_eq!(decoded(""), None);
        assert_eq!(decoded(&"x".repeat(MAX_NAME_LENGTH + 1)), None);
        assert_eq!(Request::decode(b"\x02\x00\x02\xff\xfe"), None, "not UTF-8");
        assert_eq!(Request::decode(b"\x01\x00\x07weights"), None, "another version");
        assert_eq!(Request::decode(b"\x02\x00\x07weight"), None, "truncated");
        assert_eq!(Request::decode(b"\x02\x00\x07weights."), None, "trailing bytes");
        assert_eq!(Request::decode(b"GET / HTTP/1.1"), None);
        for request in [Request::Pieces([7; 16], 64), Request::Release([9; 16])] {
            assert_eq!(Request::decode(&request.encode()), Some(request));
        }
    }

    #[test]
    fn replies_of_other_versions_and_kinds_are_refused() {
        let read = |bytes: &[u8]| Reply::decode("test", bytes).map_err(|error| error.kind());
        for reply in [Reply::Handle(vec![7; 90]), Reply::Pieces, Reply::Unknown, Reply::Denied] {
            assert_eq!(read(&reply.encode()), Ok(reply));
        }
        assert_eq!(read(&[VERSION + 1, 2]), Err(ErrorKind::VersionMismatch));
        assert_eq!(read(&[VERSION, 6]), Err(ErrorKind::Malformed));
        assert_eq!(read(&[VERSION]), Err(ErrorKind::Malformed));
    }
}
