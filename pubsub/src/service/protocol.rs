//! What a process and the service of its node say to each other, by a Unix socket.
//!
//! Each message is a version and then one value, in the encoding of [`control::codec`]; descriptors
//! come along in the order in which the value speaks of them. What comes is bounded by the channel.

use std::os::fd::OwnedFd;

use control::codec::{self, DecodeError};
use ipc::{Participant, PidFd};
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
pub(crate) const MAX_LABEL: usize = 64;
/// Lives in one message, with room for what else it may carry.
pub(crate) const MAX_PIDFDS_PER_MESSAGE: usize = 32;

/// What a process says to the service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first: it joins. With its life.
    Hello { label: String },
    /// The first: it was a member of the node that another service served. With its life and
    /// the hall; [`Pidfds`](Self::Lives), [`Pool`](Self::Pool)s, [`Topic`](Self::Topic)s and
    /// [`RejoinDone`](Self::Returned) follow.
    Rejoin { label: String, participant: u32 },
    /// Whom it knows. With their lives.
    Pidfds { participants: Vec<u32> },
    /// A pool that it uses. With the books.
    Pool { pool: PoolId },
    /// Its pieces, from one on: length and name of each. With their memory.
    Pieces { pool: PoolId, first: u32, pieces: Vec<(u64, u64)> },
    /// A topic that it uses. With its segment.
    Topic { number: u32 },
    /// That was all that it has.
    RejoinDone,
    /// It wants to use a topic, and made it if settings are given.
    Open { request: u64, name: String, settings: Option<SharedSettings> },
    /// It needs a topic so many times less than it was given to it.
    CloseTopic { number: u32, granted: u64 },
    /// A loan did not fit into a pool.
    Grow { pool: PoolId, bytes: u64 },
    /// Its publishers or subscribers of a topic came or went.
    ParticipantsChanged { number: u32 },
    /// It has all that was sent up to this.
    AcknowledgePieces { ticket: u64 },
    /// Who is there? May be asked by who has not joined.
    Report { request: u64 },
    /// It leaves, and uses nothing any more.
    Leave,
    /// A publisher of a topic waits for room, or found none.
    PublisherBlocked { number: u32 },
    /// It is to serve the node for as long as it is there, and has the
    /// [claim](super::election::Claim): who serves in passing is to give the office up.
    TakeOver,
    /// It has made a publisher of a topic, by this line: memory for its loans is to be reserved.
    AdmitPublisher { request: u64, number: u32, publisher: u64 },
}

/// What the service says to a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// It is one of us, and knows the lives of all others by now. With the hall, and with the
    /// service's life.
    Welcome { participant: u32 },
    /// Who is there. With their lives.
    Pidfds { participants: Vec<u32> },
    /// A pool. With its books.
    Pool { pool: PoolId },
    /// A piece of it, to be kept and acknowledged. With the memory.
    Piece { pool: PoolId, number: u32, length: u64, name: u64, ticket: u64 },
    /// All pieces that were sent are in use now.
    PoolGrown { pool: PoolId },
    /// A topic; its pools were sent before. With its segment.
    Topic { request: u64, number: u32 },
    /// A request cannot be fulfilled.
    Refused { request: u64, reason: Refusal },
    /// Rows of a report; the last ones say so.
    Rows { request: u64, rows: Vec<Row>, is_last: bool },
    /// The node's service ends the connection, and why.
    Rejected { reason: Refusal },
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
    const MAX_DETAIL: usize = 1000;

    pub(crate) fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        detail.truncate(shortened(&detail, Self::MAX_DETAIL).len());
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
            let detail = format!("protocol version {found}, this build has {expected}");
            Error::new(operation, ErrorKind::VersionMismatch, detail)
        }
        other => Error::new(operation, ErrorKind::Malformed, other.to_string()),
    })
}

/// The lives that came with the names of whose they are. Names of nobody are passed over.
pub(crate) fn pidfds(
    participants: &[u32],
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(Participant, PidFd)>> {
    let operation = "receive pidfds of participants";
    if participants.len() != descriptors.len() {
        let detail = "wrong number of descriptors";
        return Err(Error::new(operation, ErrorKind::Malformed, detail));
    }
    let mut pidfds = Vec::with_capacity(participants.len());
    for (number, descriptor) in participants.iter().zip(descriptors) {
        let pidfd = PidFd::from_fd(descriptor)
            .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
        pidfds.extend(Participant::from_number(*number).map(|who| (who, pidfd)));
    }
    Ok(pidfds)
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
        assert!(long.detail.len() <= Refusal::MAX_DETAIL);
    }
}
