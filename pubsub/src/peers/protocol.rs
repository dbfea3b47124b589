//! What nodes say to each other.
//!
//! ```text
//! on the wire: length of the body (4, little endian), body, length, body, …
//! first body:  "FcPeers\n" (8), version (2, little endian), Hello
//! then:        Frame, Frame, …
//! ```
//!
//! `Hello` and `Frame` are encoded with postcard; no byte may follow them. Both sides say
//! hello at once. What comes after is told by [`arbitration`](super::pair): the two agree on one
//! connection, and from then on each says on it what it likes.
//!
//! The order of variants and fields is part of the version.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::close_reason::{CloseReason, GoodbyeReason};
use super::identity::{MAX_LABEL_LENGTH, NodeId, ServiceInstance, SessionId};
use super::interests::InterestChange;

/// How a connection begins.
pub(super) const MAGIC: [u8; 8] = *b"FcPeers\n";
/// What this build speaks. It is the version of all that two nodes say to each other, letters
/// and notices of rings included: a node of another version is refused at its hello.
pub(crate) const VERSION: u16 = 4;
/// The longest body of a frame.
pub(super) const MAX_FRAME_LENGTH: usize = 1 << 20;
/// The longest body of one that is no letter: what it is decoded to is larger.
pub(super) const MAX_PROTOCOL_FRAME_LENGTH: usize = 1 << 16;
/// The longest body while it is not agreed that this is a session.
pub(super) const MAX_HANDSHAKE_FRAME_LENGTH: usize = 1 << 12;
/// The longest letter.
pub(super) const MAX_CONTROL_MESSAGE_LENGTH: usize = MAX_FRAME_LENGTH - 64;
/// The longest text of a goodbye.
pub(super) const MAX_DETAIL_LENGTH: usize = 200;
/// Nobody may ask to be heard from more often than a quarter of this.
pub(super) const MIN_LOST_AFTER: u32 = 100;

/// What a node can do for others, one bit each. Unknown bits are no error.
pub(super) mod capability {
    /// It tells those who ask the addresses of others.
    pub(in super::super) const RENDEZVOUS: u64 = 1;
}

/// Who speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) identity: NodeId,
    pub(super) run: ServiceInstance,
    pub(super) label: String,
    pub(super) capabilities: u64,
    /// It holds us for lost when it has heard nothing for so many milliseconds.
    pub(super) lost_after: u32,
    /// Where it listens, if it does. An unspecified address stands for the one seen.
    pub(super) listens: Option<SocketAddr>,
}

/// A node, and where it can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerAddress {
    pub(super) node: NodeId,
    pub(super) address: SocketAddr,
}

/// What is said after the hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// From the asker: let this be our session. It has this one, as far as it knows.
    Claim { instead_of: Option<SessionId> },
    /// From the decider: so be it, and it has this number.
    Accept { session: SessionId },
    /// The last frame.
    Goodbye { why: GoodbyeReason, detail: String },
    /// Still here.
    Heartbeat,
    /// What changed in what the node publishes and subscribes. The first begins with nothing.
    Interests { number: u64, changes: Vec<InterestChange> },
    /// For those above.
    ControlMessage(Vec<u8>),
    /// Tell me whom you know, now and later.
    RequestPeers,
    /// Whom it knows, beside those that it told of before.
    PeerList { others: Vec<PeerAddress> },
}

/// The one way in which frames are written.
pub(super) fn encode(frame: &Frame) -> Vec<u8> {
    // Writing to memory does not fail, and neither do these types.
    postcard::to_allocvec(frame).unwrap_or_default()
}

/// The one way in which frames are read.
pub(super) fn decode(body: &[u8]) -> Result<Frame, CloseReason> {
    /// The place of [`Frame::ControlMessage`] among the variants.
    const CONTROL_MESSAGE: u8 = 5;
    if body.len() > MAX_PROTOCOL_FRAME_LENGTH && body.first() != Some(&CONTROL_MESSAGE) {
        return Err(malformed(format!("{} bytes that are no letter", body.len())));
    }
    let mut frame = strictly(body)?;
    match &mut frame {
        Frame::Goodbye { detail, .. } if detail.len() > MAX_DETAIL_LENGTH => {
            Err(malformed("goodbye text too long"))
        }
        Frame::Goodbye { detail, .. } => {
            *detail = super::identity::printable(detail);
            Ok(frame)
        }
        Frame::ControlMessage(letter) if letter.len() > MAX_CONTROL_MESSAGE_LENGTH => {
            Err(malformed(format!("a letter of {} bytes", letter.len())))
        }
        _ => Ok(frame),
    }
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = MAGIC.to_vec();
        body.extend(VERSION.to_le_bytes());
        body.extend(postcard::to_allocvec(self).unwrap_or_default());
        body
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, CloseReason> {
        let Some((magic, rest)) = body.split_first_chunk::<8>() else {
            return Err(malformed("not a hello"));
        };
        if *magic != MAGIC {
            return Err(malformed("not a hello"));
        }
        let Some((version, rest)) = rest.split_first_chunk() else {
            return Err(malformed("not a hello"));
        };
        match u16::from_le_bytes(*version) {
            VERSION => {}
            other => return Err(CloseReason::VersionMismatch(other)),
        }
        let mut hello: Self = strictly(rest)?;
        if hello.label.len() > MAX_LABEL_LENGTH {
            return Err(malformed("label too long"));
        }
        if hello.lost_after < MIN_LOST_AFTER {
            return Err(malformed(format!("it waits for {} ms only", hello.lost_after)));
        }
        hello.label = super::identity::printable(&hello.label);
        Ok(hello)
    }
}

pub(super) fn malformed(what: impl Into<String>) -> CloseReason {
    CloseReason::Malformed(what.into())
}

fn strictly<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, CloseReason> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(malformed(format!("{} bytes behind a frame", rest.len()))),
        Err(error) => Err(malformed(format!("a frame that cannot be read: {error}"))),
    }
}
