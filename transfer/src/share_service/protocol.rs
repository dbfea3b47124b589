//! Messages between a client and a service: a name, and a reply.

use control::codec;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::wire;

/// Maximum length of a name in bytes.
pub const MAX_NAME_LENGTH: usize = 255;

const VERSION: u8 = 1;

/// A reply of the service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The bytes of a [handle](crate::Handle), whose descriptors are sent with the message.
    Handle(Vec<u8>),
    /// No memory is shared under this name.
    Unknown,
    /// The memory cannot be exported now.
    Failed,
    /// The request is invalid. The service closes the connection after this reply.
    Malformed,
    /// This user is not admitted.
    Denied,
}

/// Is this a valid name?
pub(super) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME_LENGTH).contains(&name.len())
}

pub(super) fn request(name: &str) -> Vec<u8> {
    codec::encode(VERSION, name)
}

/// The name in a request.
pub(super) fn read_request(bytes: &[u8]) -> Option<String> {
    codec::decode(VERSION, bytes).ok().filter(|name: &String| is_name(name))
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
    fn only_a_valid_name_is_a_request() {
        let decoded = |name: &str| read_request(&request(name));
        assert_eq!(decoded("weights").as_deref(), Some("weights"));
        assert_eq!(request("weights"), b"\x01\x07weights");
        assert_eq!(decoded(""), None);
        assert_eq!(decoded(&"x".repeat(MAX_NAME_LENGTH + 1)), None);
        assert_eq!(read_request(b"\x01\x02\xff\xfe"), None, "not UTF-8");
        assert_eq!(read_request(b"\x02\x07weights"), None, "another version");
        assert_eq!(read_request(b"\x01\x07weight"), None, "truncated");
        assert_eq!(read_request(b"\x01\x07weights."), None, "trailing bytes");
        assert_eq!(read_request(b"GET / HTTP/1.1"), None);
    }

    #[test]
    fn replies_of_other_versions_and_kinds_are_refused() {
        let read = |bytes: &[u8]| Reply::decode("test", bytes).map_err(|error| error.kind());
        for reply in [Reply::Handle(vec![7; 90]), Reply::Unknown, Reply::Denied] {
            assert_eq!(read(&reply.encode()), Ok(reply));
        }
        assert_eq!(read(&[VERSION + 1, 1]), Err(ErrorKind::VersionMismatch));
        assert_eq!(read(&[VERSION, 5]), Err(ErrorKind::Malformed));
        assert_eq!(read(&[VERSION]), Err(ErrorKind::Malformed));
    }
}
