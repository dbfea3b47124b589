//! The protocol between a process and the service of its node, over a Unix socket.
//!
//! Each message is a version and one value, in the encoding of [`control::codec`]. Descriptors are
//! attached in the order in which the value refers to them. The channel limits the length.

use std::os::fd::OwnedFd;

use control::codec::{self, DecodeError};
use ipc::{Participant, PidFd};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::pool::{GrowthRequest, PoolId};
use crate::report::Row;
use crate::settings::SharedSettings;
use crate::text::shortened;

pub(crate) const VERSION: u8 = 10;
pub(crate) const MAX_LABEL: usize = 64;
/// Pidfds in one message, with room for other descriptors.
pub(crate) const MAX_PIDFDS_PER_MESSAGE: usize = 32;

/// A message of a process to the service.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// First message: the process joins. With its pidfd.
    Hello { label: String },
    /// First message: the process was a member under an earlier service. With its pidfd and the
    /// node segment; [`Pidfds`](Self::Pidfds), [`Pool`](Self::Pool)s, [`Topic`](Self::Topic)s and
    /// [`RejoinDone`](Self::RejoinDone) follow.
    Rejoin { label: String, participant: u32 },
    /// Participants that it knows. With their pidfds.
    Pidfds { participants: Vec<u32> },
    /// A pool that it uses. With the control segment.
    Pool { pool: PoolId },
    /// Pieces of the pool, from `first` on: length and name of each. With their memory.
    Pieces { pool: PoolId, first: u32, pieces: Vec<(u64, u64)> },
    /// A topic that it uses. With its segment.
    Topic { number: u32 },
    /// Ends the objects that it returns.
    RejoinDone,
    /// Opens a topic, or creates it if settings are given.
    Open { request: u64, name: String, settings: Option<SharedSettings> },
    /// Ends `granted` uses of a topic.
    CloseTopic { number: u32, granted: u64 },
    /// A loan did not fit into a pool.
    Grow(GrowthRequest),
    /// The process's publishers or subscribers of a topic joined or left.
    ParticipantsChanged { number: u32 },
    /// The process has received all pieces up to this ticket.
    AcknowledgePieces { ticket: u64 },
    /// Requests a report; allowed without joining.
    Report { request: u64 },
    /// The process leaves, and uses nothing any more.
    Leave,
    /// A publisher of a topic waits for room, or found none.
    PublisherBlocked { number: u32 },
    /// The process is a dedicated service, and holds the [priority
    /// lock](super::election::PriorityLock): an embedded service is to hand over.
    TakeOver,
    /// The process has claimed a publisher slot of a topic: reserve memory for its loans.
    AdmitPublisher { request: u64, number: u32, publisher: u64 },
    /// The process sees the device with this UUID and this many bytes of memory: it can make pieces
    /// of pools there. Sent before a topic of the device is opened.
    SeesDevice { device: [u8; 16], memory: u64 },
    /// The process did not make the [requested](Notice::MakePiece) piece of a pool. A piece that was
    /// made is sent as [`Pieces`](Self::Pieces).
    PieceRefused { pool: PoolId, reason: Refusal },
}

/// A message of the service to a process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Notice {
    /// The process is a member, and has received the pidfds of all others. With the node segment
    /// and the service's pidfd.
    Welcome { participant: u32 },
    /// Participants. With their pidfds.
    Pidfds { participants: Vec<u32> },
    /// A pool. With its control segment.
    Pool { pool: PoolId },
    /// A piece of a pool, to be stored and acknowledged. With the memory.
    Piece { pool: PoolId, number: u32, length: u64, name: u64, ticket: u64 },
    /// All pieces that were sent are in use now.
    PoolGrown { pool: PoolId },
    /// A topic; its pools were sent before. With its segment.
    Topic { request: u64, number: u32 },
    /// A request failed.
    Refused { request: u64, reason: Refusal },
    /// Rows of a report.
    Rows { request: u64, rows: Vec<Row>, is_last: bool },
    /// The service ends the connection, with the reason.
    Rejected { reason: Refusal },
    /// The process has left.
    Left,
    /// A publisher may publish.
    Admitted { request: u64 },
    /// The process is to make a piece of a pool of a device that it sees, and the service does not.
    MakePiece { pool: PoolId, number: u32, length: u64 },
}

/// The error of a failed request, as it is sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Refusal {
    kind: ErrorKind,
    detail: String,
}

impl Refusal {
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

    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        Error::new(operation, self.kind, self.detail)
    }
}

pub(crate) fn encode(value: &impl Serialize) -> Vec<u8> {
    codec::encode(VERSION, value)
}

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

/// The descriptors of a message that has this many.
pub(crate) fn exactly<const N: usize>(
    operation: &'static str,
    descriptors: Vec<OwnedFd>,
) -> Result<[OwnedFd; N]> {
    descriptors
        .try_into()
        .map_err(|_| Error::new(operation, ErrorKind::Malformed, "wrong number of descriptors"))
}

/// The pidfds of a message with their participants; invalid numbers are skipped.
pub(crate) fn pidfds(
    participants: &[u32],
    descriptors: Vec<OwnedFd>,
) -> Result<Vec<(Participant, PidFd)>> {
    let operation = "receive pidfds of node";
    if participants.len() != descriptors.len() {
        return Err(Error::new(operation, ErrorKind::Malformed, "wrong number of descriptors"));
    }
    let mut pidfds = Vec::with_capacity(participants.len());
    for (number, descriptor) in participants.iter().zip(descriptors) {
        let pidfd = PidFd::from_fd(descriptor)
            .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
        pidfds.extend(Participant::from_number(*number).map(|participant| (participant, pidfd)));
    }
    Ok(pidfds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_exactly_one_value() {
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
    fn refusal_is_received_as_the_original_error() {
        let error = Error::new("open topic", ErrorKind::OverBudget, "1 of 2 bytes");
        let received = Refusal::of(&error).into_error("open topic");
        assert_eq!(received.to_string(), error.to_string());
        let long = Refusal::new(ErrorKind::Failed, "é".repeat(4000));
        assert!(long.detail.len() <= Refusal::MAX_DETAIL);
    }
}
