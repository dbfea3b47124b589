//! What those who use the peers are told.

use std::net::SocketAddr;

use super::directory::Change;
use super::identity::{NodeIdentity, SessionNumber};
use super::reason::Reason;

/// What happened. Of one session, `Appeared` comes first, and `Vanished` last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Event {
    /// A session with a node began.
    Appeared {
        /// With whom.
        node: NodeIdentity,
        /// As both call it.
        session: SessionNumber,
        /// What the node calls itself.
        label: String,
        /// Our end of the connection. What moves the payloads binds to this address.
        ours: SocketAddr,
        /// Its end.
        theirs: SocketAddr,
    },
    /// What the node publishes and subscribes has changed. A session begins without any
    /// interests, and soon has such an event, be it without changes.
    Interests {
        /// Whose.
        node: NodeIdentity,
        /// In which session.
        session: SessionNumber,
        /// What is different from before, in order.
        changes: Vec<Change>,
    },
    /// Bytes that the node has for us.
    Letter {
        /// From whom.
        node: NodeIdentity,
        /// In which session.
        session: SessionNumber,
        /// What it is about is for those to know who write letters.
        bytes: Vec<u8>,
    },
    /// The session is over. What was told and did not arrive is lost.
    Vanished {
        /// With whom it was.
        node: NodeIdentity,
        /// As both called it.
        session: SessionNumber,
        /// Why.
        reason: Reason,
    },
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
