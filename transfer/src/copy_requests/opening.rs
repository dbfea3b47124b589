//! Messages between a client and the copy service.
//!
//! ```text
//! client                              service
//! Hello, with pidfd and doorbell   ►
//!                                  ◄  Welcome, with pidfd and request ring
//! Open(pair, local memory, region) ►
//! Pieces, with descriptors         ►  unless the service has the local memory already; then those of
//!                                     the other memory, if the client offers that, too
//!                                  ◄  Opened or Refused
//!   … requests in the ring …
//! Close(pair)                      ►
//! ```
//!
//! A client opens one pair at a time. The end of its connection closes all its pairs.

use std::os::fd::OwnedFd;

use control::codec;
use ipc::Message;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::refusal::Refusal;
use crate::region::{MAX_PIECES, RegionDescriptor};
use crate::wire::{self, MAX_LABEL_LENGTH};

const VERSION: u8 = 1;
/// Pieces in one message, limited by its descriptors.
pub(crate) const MAX_PIECES_PER_MESSAGE: usize = ipc::channel::MAX_DESCRIPTORS;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The agent of a client: its identity and its label.
    Hello([u8; 16], String),
    Open(Opening),
    Pieces(OfferedPieces),
    /// There is no reply.
    Close(u32),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Welcome,
    /// The pair with this number is open.
    Opened(u32),
    /// The pair with this number, or the hello, is refused.
    Refused(u32, Refusal),
}

/// A pair of memory to copy between.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opening {
    /// Chosen by the client, and not used again.
    pair: u32,
    /// The number of the client's memory at the client.
    memory: u64,
    /// The encoded description of the client's memory, whose pieces follow. None if the service has
    /// it from another pair.
    local: Option<Vec<u8>>,
    remote: Remote,
}

/// The other memory of a pair.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Remote {
    Region(RegionName),
    /// The encoded description of memory whose descriptors the client has, and sends: their holder
    /// may read and write it.
    Offered(Vec<u8>),
}

/// A region of another agent, as its owner knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionName {
    agent: [u8; 16],
    number: u64,
    ticket: u64,
}

/// The next pieces of the client's memory, whose descriptors are in the message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OfferedPieces {
    total: u32,
    /// Bytes of all pieces together.
    bytes: u64,
    lengths: Vec<u64>,
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    /// The request, and the descriptors that belong to it.
    pub(crate) fn read(message: Message) -> Result<(Self, Vec<OwnedFd>)> {
        const OPERATION: &str = "read request";
        let Message { bytes, descriptors } = message;
        let request: Self = wire::decode(OPERATION, VERSION, &bytes)?;
        let count = descriptors.len();
        let is_valid = match &request {
            Self::Hello(_, label) => count == 2 && label.len() <= MAX_LABEL_LENGTH,
            Self::Pieces(pieces) => {
                let OfferedPieces { total, lengths, .. } = pieces;
                count == lengths.len()
                    && (1..=MAX_PIECES_PER_MESSAGE).contains(&count)
                    && *total <= MAX_PIECES
                    && !lengths.contains(&0)
            }
            Self::Open(_) | Self::Close(_) => count == 0,
        };
        match is_valid {
            true => Ok((request, descriptors)),
            false => {
                let detail = format!("{count} descriptors do not belong to the request");
                Err(wire::malformed(OPERATION, detail))
            }
        }
    }
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    pub(crate) fn refused(pair: u32, refusal: Refusal) -> Self {
        Self::Refused(pair, refusal)
    }

    /// The reply; a refusal becomes an error of this operation.
    pub(crate) fn read(operation: &'static str, bytes: &[u8]) -> Result<Self> {
        match wire::decode(operation, VERSION, bytes)? {
            Self::Refused(_, refusal) if !refusal.is_short() => {
                Err(wire::malformed(operation, "refusal text too long"))
            }
            reply => Ok(reply),
        }
    }
}

impl Opening {
    /// A pair with this number, of the client's memory with its number and, unless the service has
    /// it, its encoded description.
    pub(crate) fn new(pair: u32, memory: u64, local: Option<Vec<u8>>, remote: Remote) -> Self {
        Self { pair, memory, local, remote }
    }

    pub(crate) fn pair(&self) -> u32 {
        self.pair
    }

    pub(crate) fn memory(&self) -> u64 {
        self.memory
    }

    pub(crate) fn local(&self) -> Option<&[u8]> {
        self.local.as_deref()
    }

    pub(crate) fn remote(&self) -> &Remote {
        &self.remote
    }
}

impl RegionName {
    pub(crate) fn new(agent: [u8; 16], number: u64, ticket: u64) -> Self {
        Self { agent, number, ticket }
    }

    pub(crate) fn of(region: &RegionDescriptor) -> Self {
        Self::new(region.agent, region.number, region.ticket)
    }

    pub(crate) fn agent(&self) -> [u8; 16] {
        self.agent
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }
}

impl OfferedPieces {
    /// The next pieces, with these lengths, of a number of pieces with so many bytes together.
    pub(crate) fn new(total: u32, bytes: u64, lengths: Vec<u64>) -> Self {
        Self { total, bytes, lengths }
    }

    pub(crate) fn total(&self) -> u32 {
        self.total
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn lengths(&self) -> &[u64] {
        &self.lengths
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn message(bytes: Vec<u8>, descriptors: usize) -> Message {
        let file = || std::fs::File::open("/dev/null").unwrap().into();
        Message { bytes, descriptors: (0..descriptors).map(|_| file()).collect() }
    }

    fn hello(label: &str) -> Request {
        Request::Hello([1; 16], label.to_owned())
    }

    fn pieces(lengths: &[u64]) -> Request {
        Request::Pieces(OfferedPieces { total: 5, bytes: 40, lengths: lengths.to_vec() })
    }

    #[test]
    fn requests_have_the_descriptors_that_belong_to_them() {
        let remote = Remote::Region(RegionName { agent: [2; 16], number: 3, ticket: 4 });
        let open = Request::Open(Opening { pair: 1, memory: 2, local: None, remote });
        let all = [(hello("me"), 2), (open, 0), (pieces(&[1, 2, 3]), 3), (Request::Close(7), 0)];
        for (request, descriptors) in all {
            for count in 0..5 {
                let read = Request::read(message(request.encode(), count));
                assert_eq!(read.is_ok(), count == descriptors, "{request:?} {count}");
                if let Ok((read, received)) = read {
                    assert_eq!((read, received.len()), (request.clone(), count));
                }
            }
        }
        let long = hello(&"x".repeat(MAX_LABEL_LENGTH + 1));
        assert!(Request::read(message(long.encode(), 2)).is_err());
        assert!(Request::read(message(pieces(&[1, 0]).encode(), 2)).is_err());
        let error = Reply::read("test", &[VERSION + 1, 0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    }

    proptest! {
        #[test]
        fn garbage_with_a_good_head_never_panics(
            which in 0..5_u8,
            body in proptest::collection::vec(any::<u8>(), 0..200),
            descriptors in 0..5_usize,
        ) {
            let bytes = [&[VERSION, which][..], &body].concat();
            let _ = Request::read(message(bytes.clone(), descriptors));
            let _ = Reply::read("test", &bytes);
        }
    }
}
