//! Why a peer refuses a request.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::{Error, ErrorKind};

pub(crate) const MAX_REASON_LENGTH: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    #[serde(serialize_with = "write_kind", deserialize_with = "read_kind")]
    pub(crate) kind: ErrorKind,
    pub(crate) cause: String,
}

/// The kinds of refusals and failures by their codes.
const KINDS: [ErrorKind; 13] = [
    ErrorKind::Failed,
    ErrorKind::Malformed,
    ErrorKind::VersionMismatch,
    ErrorKind::Denied,
    ErrorKind::Stale,
    ErrorKind::NotAllowed,
    ErrorKind::OutOfBounds,
    ErrorKind::TooMany,
    ErrorKind::Unknown,
    ErrorKind::NoPath,
    ErrorKind::Closed,
    ErrorKind::NoPeerAccess,
    ErrorKind::Cancelled,
];

/// The code of a kind; any other kind is sent as a failure.
pub(crate) fn code_of(kind: ErrorKind) -> u8 {
    KINDS.iter().position(|known| *known == kind).unwrap_or_default() as u8
}

/// The kind with this code, if there is one.
pub(crate) fn kind_of(code: u8) -> Option<ErrorKind> {
    KINDS.get(usize::from(code)).copied()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn write_kind<S: Serializer>(kind: &ErrorKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u8(code_of(*kind))
}

fn read_kind<'de, D: Deserializer<'de>>(from: D) -> Result<ErrorKind, D::Error> {
    kind_of(u8::deserialize(from)?).ok_or_else(|| D::Error::custom("unknown kind of refusal"))
}

impl Refusal {
    /// Truncates a cause that is too long.
    pub(crate) fn new(kind: ErrorKind, cause: impl Into<String>) -> Self {
        let mut cause = cause.into();
        let mut end = cause.len().min(MAX_REASON_LENGTH);
        while !cause.is_char_boundary(end) {
            end -= 1;
        }
        cause.truncate(end);
        Self { kind, cause }
    }

    pub(crate) fn of(error: &Error) -> Self {
        Self::new(error.kind(), error.to_string())
    }

    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        Error::new(operation, self.kind, self.cause)
    }

    pub(crate) fn is_short(&self) -> bool {
        self.cause.len() <= MAX_REASON_LENGTH
    }
}
