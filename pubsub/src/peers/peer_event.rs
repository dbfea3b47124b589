//! Events of peers.

use std::net::SocketAddr;

use super::ServiceInstance;
use super::close_reason::CloseReason;
use super::identity::SessionId;
use super::interests::InterestChange;
use crate::ids::NodeId;

/// An event. `Connected` is the first of a session, and `Disconnected` the last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PeerEvent {
    /// A session with a node began, with its id, its label, and its service instance. Workers bind
    /// to the local address of the connection.
    Connected {
        node: NodeId,
        session: SessionId,
        instance: ServiceInstance,
        label: String,
        local_address: SocketAddr,
    },
    /// Changes of a node's interests, in order. A session begins without interests, and soon has
    /// such an event, even if it is empty.
    Interests { node: NodeId, session: SessionId, changes: Vec<InterestChange> },
    /// Bytes of a control message of the node.
    ControlMessage { node: NodeId, session: SessionId, bytes: Vec<u8> },
    /// The session ended. Messages sent and not received are lost.
    Disconnected { node: NodeId, session: SessionId, reason: CloseReason },
}

impl PeerEvent {
    /// Approximate memory of the event.
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
