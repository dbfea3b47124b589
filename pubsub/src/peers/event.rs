//! What those who use the peers are told.

use std::net::SocketAddr;

use super::directory::Change;
use super::identity::{NodeIdentity, Run, SessionNumber};
use super::reason::Reason;

/// What happened. Of one session, `Appeared` comes first, and `Vanished` last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A session with a node began; as both call it, and as the node calls itself. `run` is one start
    /// of its service. What moves the payloads binds to the address of our end of the connection.
    Appeared {
        node: NodeIdentity,
        session: SessionNumber,
        run: Run,
        label: String,
        ours: SocketAddr,
    },
    /// What the node publishes and subscribes has changed, in order. A session begins without any
    /// interests, and soon has such an event, be it without changes.
    Interests { node: NodeIdentity, session: SessionNumber, changes: Vec<Change> },
    /// Bytes that the node has for us. What they are about is for those to know who write letters.
    Letter { node: NodeIdentity, session: SessionNumber, bytes: Vec<u8> },
    /// The session is over. What was told and did not arrive is lost.
    Vanished { node: NodeIdentity, session: SessionNumber, reason: Reason },
}

impl Event {
    /// About how much memory it takes.
    pub(super) fn weight(&self) -> usize {
        let own = size_of::<Self>();
        match self {
            Self::Appeared { label, .. } => own + label.len(),
            Self::Interests { changes, .. } => own + changes.len() * (size_of::<Change>() + 64),
            Self::Letter { bytes, .. } => own + bytes.len(),
            Self::Vanished { .. } => own,
        }
    }
}
