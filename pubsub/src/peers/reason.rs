//! Why a session ended, or a connection never became one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a session ended, or a connection never became one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The other node's service ended in order.
    Left,
    /// The connection broke, or was closed without a word; the text says how.
    Broken(String),
    /// Nothing was heard for as long as is waited.
    Silent,
    /// The same two nodes have another connection.
    Duplicate,
    /// Another connection took its place: the other side had lost this one.
    Replaced,
    /// A service of the same node that started later took its place.
    Superseded,
    /// It was this node itself that answered.
    Oneself,
    /// Another service has the identity of this node.
    Twin,
    /// It did not say in time who it is.
    Late,
    /// There are connections enough.
    Crowded,
    /// More waits to be sent than may wait.
    Backlog,
    /// The other side broke the rules of the protocol.
    Malformed(String),
    /// The other side speaks this version, and not ours.
    Version(u16),
    /// The other side ended it.
    Refused {
        /// Why, in short.
        why: Parting,
        /// Why, in its words.
        detail: String,
    },
}

/// What one tells the other at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Parting {
    /// The service ends.
    Leaving,
    /// There is another connection already.
    Duplicate,
    /// Another connection took its place.
    Replaced,
    /// Another service of the same node started later.
    Superseded,
    /// Both are the same service.
    Oneself,
    /// Both have the same identity, and are not the same service.
    Twin,
    /// The introduction took too long.
    Late,
    /// There are connections enough.
    Crowded,
    /// More waited to be sent than may wait.
    Backlog,
    /// The other broke the rules.
    Malformed,
    /// The other was not heard for too long.
    Silent,
}

impl Reason {
    /// What the other side is told, if it can still be told anything.
    pub(super) fn parting(&self) -> Option<Parting> {
        Some(match self {
            Self::Silent => Parting::Silent,
            Self::Duplicate => Parting::Duplicate,
            Self::Replaced => Parting::Replaced,
            Self::Superseded => Parting::Superseded,
            Self::Oneself => Parting::Oneself,
            Self::Twin => Parting::Twin,
            Self::Late => Parting::Late,
            Self::Crowded => Parting::Crowded,
            Self::Backlog => Parting::Backlog,
            Self::Malformed(_) => Parting::Malformed,
            // It has gone, or it sees by our hello which version is spoken here.
            Self::Left | Self::Broken(_) | Self::Version(_) | Self::Refused { .. } => return None,
        })
    }

    /// What a goodbye of the other side means here.
    pub(super) fn of_goodbye(why: Parting, detail: String) -> Self {
        match why {
            Parting::Leaving => Self::Left,
            Parting::Duplicate => Self::Duplicate,
            Parting::Oneself => Self::Oneself,
            Parting::Twin => Self::Twin,
            _ => Self::Refused { why, detail },
        }
    }

    /// Will it be the same at the next attempt, most likely?
    pub(super) fn is_lasting(&self) -> bool {
        match self {
            Self::Version(_) | Self::Superseded | Self::Twin | Self::Malformed(_) => true,
            Self::Refused { why, .. } => {
                matches!(why, Parting::Superseded | Parting::Malformed | Parting::Crowded)
            }
            _ => false,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Left => f.write_str("it left"),
            Self::Broken(how) => write!(f, "the connection broke: {how}"),
            Self::Silent => f.write_str("it was not heard for too long"),
            Self::Duplicate => f.write_str("there is another connection with this node"),
            Self::Replaced => f.write_str("another connection took its place"),
            Self::Superseded => f.write_str("another service of the same node started later"),
            Self::Oneself => f.write_str("it is this node itself"),
            Self::Twin => f.write_str("another service has the identity of this node"),
            Self::Late => f.write_str("it did not introduce itself in time"),
            Self::Crowded => f.write_str("there are connections enough"),
            Self::Backlog => f.write_str("more waits to be sent to it than may wait"),
            Self::Malformed(what) => write!(f, "it broke the rules: {what}"),
            Self::Version(version) => {
                let ours = super::protocol::VERSION;
                write!(f, "it speaks version {version}, where this build speaks {ours}")
            }
            Self::Refused { why, detail } => {
                write!(f, "the other side ended it: {why:?}: {detail}")
            }
        }
    }
}
