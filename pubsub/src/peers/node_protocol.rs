//! The protocol between nodes.
//!
//! ```text
//! on the wire: length of the body (4, little endian), body, length, body, …
//! first body:  "FcPeers\n" (8), version (2, little endian), Hello
//! then:        Frame, Frame, …
//! ```
//!
//! `Hello` and `Frame` are encoded with postcard; no byte may follow them. Both sides send their
//! hello at once. Then [arbitration](super::session_arbitration) selects one connection as the
//! session, on which each side sends as it likes.
//!
//! The order of variants and fields is part of the version.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::close_reason::{CloseReason, GoodbyeReason, malformed};
use super::identity::{MAX_LABEL_LENGTH, SessionId};
use super::interests::InterestChange;
use super::protocol_limits::{
    MAGIC, MAX_CONTROL_MESSAGE_LENGTH, MAX_DETAIL_LENGTH, MAX_PROTOCOL_FRAME_LENGTH,
    MIN_LOST_AFTER, VERSION,
};
use super::{Hello, PeerAddress, ServiceInstance};
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;

/// Capability of a node that sends the addresses of its peers on request. Unknown ones are no error.
pub(super) const RENDEZVOUS: u64 = 1;

/// A frame after the hello.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// From the claimant: make this connection our session, instead of this one, if any.
    Claim { instead_of: Option<SessionId> },
    /// From the acceptor: the claim is accepted, with this session number.
    Accept { session: SessionId },
    /// The last frame.
    Goodbye { why: GoodbyeReason, detail: String },
    /// Keeps the session alive.
    Heartbeat,
    /// Changes of the node's interests. The first frame starts with none.
    Interests { number: u64, changes: Vec<InterestChange> },
    /// A control message.
    ControlMessage(Vec<u8>),
    /// Requests the addresses of peers, now and later.
    RequestPeers,
    /// Addresses of peers beyond those sent before.
    PeerList { others: Vec<PeerAddress> },
}

/// The only encoding of frames.
pub(super) fn encode(frame: &Frame) -> Vec<u8> {
    // Encoding these types into memory cannot fail.
    postcard::to_allocvec(frame).unwrap_or_default()
}

/// The only decoding of frames.
pub(super) fn decode(body: &[u8]) -> Result<Frame, CloseReason> {
    /// The index of [`Frame::ControlMessage`] among the variants.
    const CONTROL_MESSAGE: u8 = 5;
    if body.len() > MAX_PROTOCOL_FRAME_LENGTH && body.first() != Some(&CONTROL_MESSAGE) {
        return Err(malformed(format!("frame of {} bytes is too long", body.len())));
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
        Frame::ControlMessage(message) if message.len() > MAX_CONTROL_MESSAGE_LENGTH => {
            Err(malformed(format!("control message of {} bytes is too long", message.len())))
        }
        _ => Ok(frame),
    }
}

impl Hello {
    pub(super) fn new(
        identity: NodeId,
        instance: ServiceInstance,
        label: &str,
        listens: Option<SocketAddr>,
        network: &NetworkOptions,
    ) -> Self {
        Self {
            identity,
            instance,
            label: label.to_owned(),
            capabilities: if listens.is_some() { RENDEZVOUS } else { 0 },
            lost_after: u32::try_from(network.lost_after.as_millis()).unwrap_or(u32::MAX),
            listens,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut body = MAGIC.to_vec();
        body.extend(VERSION.to_le_bytes());
        body.extend(postcard::to_allocvec(self).unwrap_or_default());
        body
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, CloseReason> {
        let parts = body.strip_prefix(&MAGIC).and_then(|rest| rest.split_first_chunk());
        let Some((version, rest)) = parts else { return Err(malformed("not a hello")) };
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            return Err(CloseReason::VersionMismatch(version));
        }
        let mut hello: Self = strictly(rest)?;
        if hello.label.len() > MAX_LABEL_LENGTH {
            return Err(malformed("label too long"));
        }
        if hello.lost_after < MIN_LOST_AFTER {
            return Err(malformed(format!("timeout of {} ms is too short", hello.lost_after)));
        }
        hello.label = super::identity::printable(&hello.label);
        Ok(hello)
    }
}

fn strictly<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, CloseReason> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(malformed(format!("{} bytes after a frame", rest.len()))),
        Err(error) => Err(malformed(format!("decoding a frame failed: {error}"))),
    }
}
