//! Why a session ended, or a connection never became one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a session ended, or a connection never became one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CloseReason {
    /// For what one side tells the other.
    Closed(GoodbyeReason),
    /// The connection broke, or was closed without a word; the text says how.
    Broken(String),
    /// The other side broke the rules of the protocol.
    Malformed(String),
    /// The other side speaks this version, and not ours.
    VersionMismatch(u16),
    /// The other side ended it.
    Refused {
        /// Why, in short.
        why: GoodbyeReason,
        /// Why, in its words.
        detail: String,
    },
}

/// What one tells the other at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum GoodbyeReason {
    /// The service ends in order.
    Leaving,
    /// The same two nodes have another connection.
    Duplicate,
    /// Another connection took its place: the other side had lost this one.
    Replaced,
    /// Another service of the same node, which started later, took its place.
    Superseded,
    /// Both are the same service.
    SelfConnection,
    /// Both have the same identity, and are not the same service.
    IdentityConflict,
    /// The introduction took too long.
    HandshakeTimeout,
    /// There are connections enough.
    TooManyConnections,
    /// More waited to be sent than may wait.
    SendQueueFull,
    /// The other broke the rules.
    Malformed,
    /// The other was not heard for too long.
    HeartbeatTimeout,
    /// The node has a session with another service of the same identity, which is not over.
    SessionExists,
}

impl CloseReason {
    /// Did this side refuse what came, which is none of a node's?
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Malformed(_) | Self::VersionMismatch(_) => true,
            Self::Closed(goodbye_reason) => {
                matches!(
                    goodbye_reason,
                    GoodbyeReason::HandshakeTimeout
                        | GoodbyeReason::TooManyConnections
                        | GoodbyeReason::Malformed
                )
            }
            Self::Broken(_) | Self::Refused { .. } => false,
        }
    }

    /// What the other side is told, if it can still be told anything.
    pub(super) fn goodbye_reason(&self) -> Option<GoodbyeReason> {
        match self {
            Self::Closed(why) => Some(*why),
            Self::Malformed(_) => Some(GoodbyeReason::Malformed),
            // It has gone, or it sees by our hello which version is spoken here.
            Self::Broken(_) | Self::VersionMismatch(_) | Self::Refused { .. } => None,
        }
    }

    /// What a goodbye of the other side means here.
    pub(super) fn of_goodbye(why: GoodbyeReason, detail: String) -> Self {
        match why {
            GoodbyeReason::Leaving
            | GoodbyeReason::Duplicate
            | GoodbyeReason::SelfConnection
            | GoodbyeReason::IdentityConflict => Self::Closed(why),
            _ => Self::Refused { why, detail },
        }
    }

    /// Has one side a session with another service that says it is the same node?
    pub(super) fn is_session_conflict(&self) -> bool {
        matches!(self, Self::Closed(why) | Self::Refused { why, .. } if *why == GoodbyeReason::SessionExists)
    }

    /// Will it be the same at the next attempt, most likely?
    pub(super) fn is_permanent(&self) -> bool {
        match self {
            Self::VersionMismatch(_) | Self::Malformed(_) => true,
            Self::Closed(why) => {
                matches!(why, GoodbyeReason::Superseded | GoodbyeReason::IdentityConflict)
            }
            Self::Refused { why, .. } => {
                matches!(
                    why,
                    GoodbyeReason::Superseded
                        | GoodbyeReason::Malformed
                        | GoodbyeReason::TooManyConnections
                )
            }
            Self::Broken(_) => false,
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(why) => why.fmt(f),
            Self::Broken(how) => write!(f, "the connection broke: {how}"),
            Self::Malformed(what) => write!(f, "{}: {what}", GoodbyeReason::Malformed),
            Self::VersionMismatch(version) => {
                let ours = super::protocol::VERSION;
                write!(f, "it speaks version {version}, where this build speaks {ours}")
            }
            Self::Refused { why, detail } => {
                write!(f, "the other side ended it: {why:?}: {detail}")
            }
        }
    }
}

impl fmt::Display for GoodbyeReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leaving => "it left",
            Self::Duplicate => "duplicate connection",
            Self::Replaced => "replaced by another connection",
            Self::Superseded => "a later service of the same node took over",
            Self::SelfConnection => "it is this node itself",
            Self::IdentityConflict => "another service has the identity of this node",
            Self::HandshakeTimeout => "it did not complete the handshake in time",
            Self::TooManyConnections => "too many connections",
            Self::SendQueueFull => "send queue full",
            Self::Malformed => "protocol violation",
            Self::HeartbeatTimeout => "it was not heard for too long",
            Self::SessionExists => "another service with the same identity has a session",
        })
    }
}
