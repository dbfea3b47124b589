//! Messages between agents of one machine at the socket.
//!
//! | from | message | descriptors |
//! |---|---|---|
//! | initiator | hello | pidfd |
//! | target | welcome | pidfd, region table, doorbell, session segment |
//! | initiator | describe | |
//! | target | described | |
//! | initiator | open | |
//! | target | pieces | one for each length |
//! | target | refused | |
//! | initiator | open staged | |
//! | target | staged | for the first region: requests, slots, doorbell |
//!
//! The copy service asks for the description of a region, which it does not take from its clients.
//! The reply to `open` is one or more messages of pieces, in order, or a refusal. Regions exported
//! by legacy handle have no pieces: their reply is one empty message. The reply to `open staged` is
//! `staged` or a refusal: the target itself copies to and from the region, whose memory is not
//! passed.

use std::os::fd::OwnedFd;

use control::codec;
use ipc::Message;
use serde::{Deserialize, Serialize};

use super::host_staged::STAGING_DESCRIPTORS;
use crate::error::Result;
use crate::refusal::Refusal;
use crate::region::{MAX_PIECES, RegionDescriptor};
use crate::wire::{self, MAX_LABEL_LENGTH};

const VERSION: u8 = 2;
/// Pieces in one message, limited by its descriptors.
pub(super) const MAX_PIECES_PER_MESSAGE: usize = ipc::channel::MAX_DESCRIPTORS;
pub(super) const WELCOME_DESCRIPTORS: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    Hello(Introduction),
    /// The copy service of the machine, whose sessions are no events for the application.
    HelloOfCopyService(Introduction),
    /// A region with its number and ticket.
    Open(u64, u64),
    /// The description of a region with its number and ticket.
    Describe(u64, u64),
    /// A region with its number and ticket, whose bytes the target copies.
    OpenStaged(u64, u64),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome(Introduction),
    Pieces(Pieces),
    Refused(Refusal),
    /// An encoded region descriptor, without fabric keys.
    Described(Vec<u8>),
    Staged,
}

/// The sender of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Introduction {
    pub(super) identity: [u8; 16],
    pub(super) label: String,
}

/// Some of the pieces of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pieces {
    pub(super) number: u64,
    pub(super) total: u32,
    pub(super) first: u32,
    /// Bytes of all pieces of the region: needed to map the first one.
    pub(super) bytes: u64,
    pub(super) lengths: Vec<u64>,
}

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    /// The hello, its pidfd, and whether it is of the copy service.
    pub(super) fn read_hello(mut message: Message) -> Result<(Introduction, OwnedFd, bool)> {
        const OPERATION: &str = "read hello";
        let (introduction, is_copy_service) =
            match wire::decode(OPERATION, VERSION, &message.bytes)? {
                Self::Hello(introduction) => (introduction, false),
                Self::HelloOfCopyService(introduction) => (introduction, true),
                _ => return Err(wire::malformed(OPERATION, "expected a hello")),
            };
        introduction.check(OPERATION)?;
        match (message.descriptors.pop(), message.descriptors.is_empty()) {
            (Some(pidfd), true) => Ok((introduction, pidfd, is_copy_service)),
            _ => Err(wire::malformed(OPERATION, "expected one descriptor")),
        }
    }

    /// A request of a connected initiator.
    pub(super) fn read(bytes: &[u8]) -> Result<Self> {
        const OPERATION: &str = "read request";
        match wire::decode(OPERATION, VERSION, bytes)? {
            Self::Hello(_) | Self::HelloOfCopyService(_) => {
                Err(wire::malformed(OPERATION, "second hello"))
            }
            request => Ok(request),
        }
    }
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(VERSION, self)
    }

    /// A refusal becomes an error of this operation.
    fn read(operation: &'static str, bytes: &[u8]) -> Result<Self> {
        match wire::decode(operation, VERSION, bytes)? {
            Self::Refused(refusal) if !refusal.is_short() => {
                Err(wire::malformed(operation, "refusal text too long"))
            }
            Self::Refused(refusal) => Err(refusal.into_error(operation)),
            reply => Ok(reply),
        }
    }

    /// Is it a refusal, after which no pieces follow?
    pub(super) fn is_refusal(bytes: &[u8]) -> bool {
        let read = wire::decode("read reply", VERSION, bytes);
        matches!(read, Ok(Self::Refused(refusal)) if refusal.is_short())
    }

    pub(super) fn read_welcome(
        operation: &'static str,
        message: Message,
    ) -> Result<(Introduction, [OwnedFd; WELCOME_DESCRIPTORS])> {
        let Self::Welcome(introduction) = Self::read(operation, &message.bytes)? else {
            return Err(wire::malformed(operation, "expected a welcome"));
        };
        introduction.check(operation)?;
        match message.descriptors.try_into() {
            Ok(descriptors) => Ok((introduction, descriptors)),
            Err(_) => {
                let detail = format!("expected {WELCOME_DESCRIPTORS} descriptors");
                Err(wire::malformed(operation, detail))
            }
        }
    }

    pub(super) fn read_described(
        operation: &'static str,
        bytes: &[u8],
    ) -> Result<RegionDescriptor> {
        match Self::read(operation, bytes)? {
            Self::Described(region) => RegionDescriptor::decode(&region),
            _ => Err(wire::malformed(operation, "expected a description")),
        }
    }

    /// The descriptors of a session's staging memory; None if the initiator has them.
    pub(super) fn read_staged(
        operation: &'static str,
        message: Message,
    ) -> Result<Option<[OwnedFd; STAGING_DESCRIPTORS]>> {
        let Self::Staged = Self::read(operation, &message.bytes)? else {
            return Err(wire::malformed(operation, "expected an opened region"));
        };
        if message.descriptors.is_empty() {
            return Ok(None);
        }
        let expected = || {
            let detail = format!("expected {STAGING_DESCRIPTORS} descriptors");
            wire::malformed(operation, detail)
        };
        message.descriptors.try_into().map(Some).map_err(|_| expected())
    }

    /// The pieces, whose descriptors are in the message.
    pub(super) fn read_pieces(operation: &'static str, message: &Message) -> Result<Pieces> {
        let Self::Pieces(pieces) = Self::read(operation, &message.bytes)? else {
            return Err(wire::malformed(operation, "expected pieces"));
        };
        let Pieces { total, first, ref lengths, .. } = pieces;
        let count = message.descriptors.len();
        let end = (count as u64).saturating_add(u64::from(first));
        let fits = total <= MAX_PIECES && end <= u64::from(total) && lengths.len() == count;
        if !fits || lengths.contains(&0) {
            let detail = format!("pieces {first} + {count} of {total}, lengths {lengths:?}");
            return Err(wire::malformed(operation, detail));
        }
        Ok(pieces)
    }
}

impl Introduction {
    fn check(&self, operation: &'static str) -> Result<()> {
        match self.label.len() <= MAX_LABEL_LENGTH {
            true => Ok(()),
            false => Err(wire::malformed(operation, "label too long")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;
    use crate::refusal::MAX_REASON_LENGTH;

    const TEST: &str = "test";

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    fn message(bytes: Vec<u8>, descriptors: usize) -> Message {
        Message { bytes, descriptors: (0..descriptors).map(|_| file()).collect() }
    }

    fn introduction(label: &str) -> Introduction {
        Introduction { identity: [1; 16], label: label.to_owned() }
    }

    fn pieces() -> Pieces {
        Pieces { number: 3, total: 5, first: 2, bytes: 40, lengths: vec![7, 8, 9] }
    }

    #[test]
    fn encoded_messages_are_decoded() {
        let sender = introduction("me");
        let hello = Request::Hello(sender.clone()).encode();
        assert_eq!(Request::read_hello(message(hello, 1)).unwrap().0, sender);
        let welcome = message(Reply::Welcome(sender.clone()).encode(), WELCOME_DESCRIPTORS);
        assert_eq!(Reply::read_welcome(TEST, welcome).unwrap().0, sender);
        for request in [Request::Open(3, 4), Request::Describe(3, 4), Request::OpenStaged(3, 4)] {
            assert_eq!(Request::read(&request.encode()).unwrap(), request);
        }
        let hello = Request::HelloOfCopyService(sender.clone()).encode();
        assert!(Request::read_hello(message(hello, 1)).unwrap().2);
        for (count, expected) in [(0, Some(0)), (STAGING_DESCRIPTORS, Some(3)), (1, None)] {
            let read = Reply::read_staged(TEST, message(Reply::Staged.encode(), count));
            let found = read.ok().map(|files| files.map_or(0, |files| files.len()));
            assert_eq!(found, expected, "{count} descriptors");
        }
        let read = Reply::read_pieces(TEST, &message(Reply::Pieces(pieces()).encode(), 3));
        assert_eq!(read.unwrap(), pieces());
        let refused = Reply::Refused(Refusal::new(ErrorKind::Stale, "the peer is lost")).encode();
        for error in [
            Reply::read_pieces(TEST, &message(refused.clone(), 0)).unwrap_err(),
            Reply::read_welcome(TEST, message(refused, 0)).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Stale);
            assert!(error.to_string().contains("the peer is lost"), "{error}");
        }
    }

    #[test]
    fn wrong_counts_of_descriptors_and_lengths_are_refused() {
        let hello = |label, count| {
            Request::read_hello(message(Request::Hello(introduction(label)).encode(), count))
        };
        let long = "x".repeat(MAX_LABEL_LENGTH + 1);
        assert!(hello("", 0).is_err() && hello("", 2).is_err() && hello(&long, 1).is_err());
        let welcome = |label, count| {
            let bytes = Reply::Welcome(introduction(label)).encode();
            Reply::read_welcome(TEST, message(bytes, count))
        };
        assert!(welcome("", 3).is_err() && welcome(&long, WELCOME_DESCRIPTORS).is_err());
        let read = |pieces, count| {
            Reply::read_pieces(TEST, &message(Reply::Pieces(pieces).encode(), count))
        };
        assert!(read(pieces(), 2).is_err() && read(pieces(), 4).is_err());
        assert!(read(Pieces { first: 3, ..pieces() }, 3).is_err());
        assert!(read(Pieces { lengths: vec![7, 0, 9], ..pieces() }, 3).is_err());
        let open = Request::Open(1, 2).encode();
        assert!(Request::read_hello(message(open, 1)).is_err());
    }

    #[test]
    fn long_cause_is_truncated_and_other_kinds_are_failures() {
        let refusal = Refusal::new(ErrorKind::WrongMemory, "ä".repeat(MAX_REASON_LENGTH));
        assert_eq!(refusal.cause, "ä".repeat(MAX_REASON_LENGTH / 2));
        let error = Reply::read(TEST, &Reply::Refused(refusal).encode()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Failed);
        let long = Refusal { kind: ErrorKind::Stale, cause: "x".repeat(MAX_REASON_LENGTH + 1) };
        let error = Reply::read(TEST, &Reply::Refused(long).encode()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
        let error = Reply::read(TEST, &[VERSION, 2, 13, 0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "unknown kind");
        let error = Reply::read(TEST, &[VERSION + 1, 2, 4, 0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
    }

    proptest! {
        #[test]
        fn garbage_with_a_good_head_never_panics(
            which in 0..6_u8,
            body in proptest::collection::vec(any::<u8>(), 0..200),
            descriptors in 0..5_usize,
        ) {
            let bytes = [&[VERSION, which][..], &body].concat();
            let _ = Request::read_hello(message(bytes.clone(), descriptors));
            let _ = Reply::read_welcome(TEST, message(bytes.clone(), descriptors));
            let _ = Reply::read_pieces(TEST, &message(bytes.clone(), descriptors));
            let _ = Request::read(&bytes);
            let _ = Reply::read_described(TEST, &bytes);
            let _ = Reply::read_staged(TEST, message(bytes.clone(), descriptors));
        }
    }
}
