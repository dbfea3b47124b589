//! Why a session ended, or a connection never became one.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::protocol_limits::VERSION;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// One side closed it for this reason.
    Closed(GoodbyeReason),
    /// The connection broke, or was closed without a goodbye; with the cause.
    Broken(String),
    Malformed(String),
    /// The peer uses this other version of the protocol.
    VersionMismatch(u16),
    /// The peer closed it.
    Refused {
        why: GoodbyeReason,
        detail: String,
    },
}

/// The reason that one side sends at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GoodbyeReason {
    /// The service ends in order.
    Leaving,
    /// The two nodes have another connection.
    Duplicate,
    /// Another connection replaced this one, which the peer had lost.
    Replaced,
    /// A later service of the same node replaced this one.
    Superseded,
    SelfConnection,
    /// Both have the same node id, and are not the same service.
    IdentityConflict,
    HandshakeTimeout,
    TooManyConnections,
    SendQueueFull,
    Malformed,
    HeartbeatTimeout,
    /// The node has a live session with another service of the same node id.
    SessionExists,
}

impl CloseReason {
    /// Returns true if this side refused a connection that is not a node's.
    pub(super) fn is_refusal(&self) -> bool {
        use GoodbyeReason::{HandshakeTimeout, Malformed, TooManyConnections};
        match self {
            Self::Malformed(_) | Self::VersionMismatch(_) => true,
            Self::Closed(why) => matches!(why, HandshakeTimeout | TooManyConnections | Malformed),
            Self::Broken(_) | Self::Refused { .. } => false,
        }
    }

    /// The reason to send to the peer, if it can still be sent.
    pub(super) fn goodbye_reason(&self) -> Option<GoodbyeReason> {
        match self {
            Self::Closed(why) => Some(*why),
            Self::Malformed(_) => Some(GoodbyeReason::Malformed),
            // It is gone, or it sees our version in our hello.
            Self::Broken(_) | Self::VersionMismatch(_) | Self::Refused { .. } => None,
        }
    }

    /// The local reason for a goodbye of the peer.
    pub(super) fn of_goodbye(why: GoodbyeReason, detail: String) -> Self {
        match why {
            GoodbyeReason::Leaving
            | GoodbyeReason::Duplicate
            | GoodbyeReason::SelfConnection
            | GoodbyeReason::IdentityConflict => Self::Closed(why),
            _ => Self::Refused { why, detail },
        }
    }

    /// Returns true if one side has a session with another service of the same node id.
    pub(super) fn is_session_conflict(&self) -> bool {
        matches!(self, Self::Closed(why) | Self::Refused { why, .. } if *why == GoodbyeReason::SessionExists)
    }

    /// Returns true if the next attempt will most likely fail, too.
    pub(super) fn is_permanent(&self) -> bool {
        use GoodbyeReason::{IdentityConflict, Malformed, Superseded, TooManyConnections};
        match self {
            Self::VersionMismatch(_) | Self::Malformed(_) => true,
            Self::Closed(why) => matches!(why, Superseded | IdentityConflict),
            Self::Refused { why, .. } => matches!(why, Superseded | Malformed | TooManyConnections),
            Self::Broken(_) => false,
        }
    }
}

pub(super) fn malformed(what: impl Into<String>) -> CloseReason {
    CloseReason::Malformed(what.into())
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(why) => why.fmt(f),
            Self::Broken(how) => write!(f, "the connection broke: {how}"),
            Self::Malformed(what) => write!(f, "{}: {what}", GoodbyeReason::Malformed),
            Self::VersionMismatch(version) => {
                write!(f, "protocol version {version} of the peer differs from ")?;
                write!(f, "version {} of this build", VERSION)
            }
            Self::Refused { why, detail } => {
                write!(f, "the peer closed the connection: {why:?}: {detail}")
            }
        }
    }
}

impl fmt::Display for GoodbyeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leaving => "it closed the session",
            Self::Duplicate => "duplicate connection",
            Self::Replaced => "replaced by another connection",
            Self::Superseded => "a later service of the same node took over",
            Self::SelfConnection => "the address is this node's own",
            Self::IdentityConflict => "another service has the same node id",
            Self::HandshakeTimeout => "the handshake was not completed within the timeout",
            Self::TooManyConnections => "too many connections",
            Self::SendQueueFull => "send queue full",
            Self::Malformed => "protocol violation",
            Self::HeartbeatTimeout => "no message from it within the timeout",
            Self::SessionExists => "another service with the same node id has a session",
        })
    }
}
