//! What a process and the service of its node say to each other, by a Unix socket.
//!
//! Each message is a version and then one value, in the encoding of [`control::codec`]; descriptors
//! come along in the order in which the value speaks of them. What comes is bounded by the channel.

use std::os::fd::OwnedFd;

use control::codec::{self, DecodeError};
use ipc::{Life, Participant};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::pool::PoolId;
use crate::report::Row;
use crate::settings::SharedSettings;
use crate::text::shortened;

/// The version of these messages.
pub(crate) const VERSION: u8 = 8;
/// The longest label.
pub(crate) const LONGEST_LABEL: usize = 64;
/// Lives in one message, with room for what else it may carry.
pub(crate) const LIVES_AT_ONCE: usize = 32;

/// What a process says to the service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first: it joins. With its life.
    Hello { label: String },
    /// The first: it was a member of the node that another service served. With its life and
    /// the hall; [`Lives`](Self::Lives), [`Pool`](Self::Pool)s, [`Topic`](Self::Topic)s and
    /// [`Returned`](Self::Returned) follow.
    Again { label: String, participant: u32 },
    /// Whom it knows. With their lives.
    Lives { participants: Vec<u32> },
    /// A pool that it uses. With the books.
    Pool { pool: PoolId },
    /// Its pieces, from one on: length and name of each. With their memory.
    Pieces { pool: PoolId, first: u32, pieces: Vec<(u64, u64)> },
    /// A topic that it uses. With its segment.
    Topic { number: u32 },
    /// That was all that it has.
    Returned,
    /// It wants to use a topic, and made it if settings are given.
    Open { request: u64, name: String, settings: Option<SharedSettings> },
    /// It needs a topic so many times less than it was given to it.
    Forget { number: u32, given: u64 },
    /// A loan did not fit into a pool.
    Grow { pool: PoolId, bytes: u64 },
    /// Its publishers or subscribers of a topic came or went.
    Changed { number: u32 },
    /// It has all that was sent up to this.
    Mapped { ticket: u64 },
    /// Who is there? May be asked by who has not joined.
    Report { request: u64 },
    /// It leaves, and uses nothing any more.
    Leave,
    /// A publisher of a topic waits for room, or found none.
    Waits { number: u32 },
    /// It is to serve the node for as long as it is there, and has the
    /// [claim](super::election::Claim): who serves in passing is to give the office up.
    TakeOver,
    /// It has made a publisher of a topic, by this line: memory for its loans is to be reserved.
    Publish { request: u64, number: u32, publisher: u64 },
}

/// What the service says to a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// It is one of us, and knows the lives of all others by now. With the hall, and with the
    /// service's life.
    Welcome { participant: u32 },
    /// Who is there. With their lives.
    Lives { participants: Vec<u32> },
    /// A pool. With its books.
    Pool { pool: PoolId },
    /// A piece of it, to be kept and acknowledged. With the memory.
    Piece { pool: PoolId, number: u32, length: u64, name: u64, ticket: u64 },
    /// All pieces that were sent are in use now.
    Grown { pool: PoolId },
    /// A topic; its pools were sent before. With its segment.
    Topic { request: u64, number: u32 },
    /// A request cannot be fulfilled.
    Refused { request: u64, why: Refusal },
    /// Rows of a report; the last ones say so.
    Rows { request: u64, rows: Vec<Row>, is_last: bool },
    /// The node's service ends the connection, and why.
    SeenOff { why: Refusal },
    /// It may go.
    Left,
    /// A publisher may publish.
    Admitted { request: u64 },
}

/// Why something was refused, as it travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    kind: ErrorKind,
    detail: String,
}

impl Refusal {
    /// The longest explanation, in bytes.
    const LONGEST: usize = 1000;

    pub(crate) fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        detail.truncate(shortened(&detail, Self::LONGEST).len());
        Self { kind, detail }
    }

    pub(crate) fn of(error: &Error) -> Self {
        let mut detail = error.detail().to_owned();
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            let separator = if detail.is_empty() { "" } else { ": " };
            detail = format!("{detail}{separator}{error}");
            cause = error.source();
        }
        Self::new(error.kind(), detail)
    }

    /// The explanation.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// As the error of who asked.
    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        Error::new(operation, self.kind, self.detail)
    }
}

/// A value as a message.
pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    codec::encode(VERSION, value)
}

/// The value of a message.
pub(crate) fn decode<T: Serialize + DeserializeOwned>(
    operation: &'static str,
    bytes: &[u8],
) -> Result<T> {
    codec::decode(VERSION, bytes).map_err(|error| match error {
        DecodeError::Tag { found, expected } => {
            let detail = format!("version {found}, where this build speaks {expected}");
            Error::new(operation, ErrorKind::VersionMismatch, detail)
        }
        other => Error::new(operation, ErrorKind::Malformed, other.to_string()),
    })
}

/// The lives that came with the names of whose they are. Names of nobody are passed over.
pub(crate) fn lives(
    participants: &[u32],
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(Participant, Life)>> {
    let operation = "learn of the lives of others";
    if participants.len() != descriptors.len() {
        let detail = "another number of descriptors than it speaks of";
        return Err(Error::new(operation, ErrorKind::Malformed, detail));
    }
    let mut lives = Vec::with_capacity(participants.len());
    for (number, descriptor) in participants.iter().zip(descriptors) {
        let life = Life::from_fd(descriptor)
            .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
        lives.extend(Participant::from_number(*number).map(|who| (who, life)));
    }
    Ok(lives)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_value_and_nothing_else() {
        let request = Request::Open { request: 7, name: "camera".into(), settings: None };
        let mut bytes = encode(&request);
        assert_eq!(decode::<Request>("test", &bytes).unwrap(), request);
        for end in 0..bytes.len() {
            decode::<Request>("test", &bytes[..end]).unwrap_err();
        }
        bytes.push(0);
        assert_eq!(decode::<Request>("test", &bytes).unwrap_err().kind(), ErrorKind::Malformed);
        bytes[0] = VERSION + 1;
        let error = decode::<Request>("test", &bytes).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    }

    #[test]
    fn a_refusal_arrives_as_the_error_that_it_was() {
        let error = Error::new("open a topic", ErrorKind::OverBudget, "1 of 2 bytes");
        let there = Refusal::of(&error).into_error("open a topic");
        assert_eq!(there.to_string(), error.to_string());
        let long = Refusal::new(ErrorKind::Failed, "é".repeat(4000));
        assert!(long.detail.len() <= Refusal::LONGEST);
    }
}
