//! What those who use the peers are told.

use std::net::SocketAddr;

use super::close_reason::CloseReason;
use super::identity::{NodeId, ServiceInstance, SessionId};
use super::interests::InterestChange;

/// What happened. Of one session, `Connected` comes first, and `Disconnected` last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerEvent {
    /// A session with a node began; as both call it, and as the node calls itself. `run` is one start
    /// of its service. What moves the payloads binds to the address of our end of the connection.
    Connected {
        node: NodeId,
        session: SessionId,
        run: ServiceInstance,
        label: String,
        local_address: SocketAddr,
    },
    /// What the node publishes and subscribes has changed, in order. A session begins without any
    /// interests, and soon has such an event, be it without changes.
    Interests { node: NodeId, session: SessionId, changes: Vec<InterestChange> },
    /// Bytes that the node has for us. What they are about is for those to know who write letters.
    ControlMessage { node: NodeId, session: SessionId, bytes: Vec<u8> },
    /// The session is over. What was told and did not arrive is lost.
    Disconnected { node: NodeId, session: SessionId, reason: CloseReason },
}

impl PeerEvent {
    /// About how much memory it takes.
    pub(super) fn weight(&self) -> usize {
        let own = size_of::<Self>();
        match self {
            Self::Connected { label, .. } => own + label.len(),
            Self::Interests { changes, .. } => {
                own + changes.len() * (size_of::<InterestChange>() + 64)
            }
            Self::ControlMessage { bytes, .. } => own + bytes.len(),
            Self::Disconnected { .. } => own,
        }
    }
}
