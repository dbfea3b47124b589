//! Why a session ended, or a connection never became one.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Why a session ended, or a connection never became one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reason {
    /// For what one side tells the other.
    Ended(Parting),
    /// The connection broke, or was closed without a word; the text says how.
    Broken(String),
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
    /// The service ends in order.
    Leaving,
    /// The same two nodes have another connection.
    Duplicate,
    /// Another connection took its place: the other side had lost this one.
    Replaced,
    /// Another service of the same node, which started later, took its place.
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
    /// The node has a session with another service of the same identity, which is not over.
    Occupied,
}

impl Reason {
    /// Did this side refuse what came, which is none of a node's?
    pub(super) fn is_refusal(&self) -> bool {
        match self {
            Self::Malformed(_) | Self::Version(_) => true,
            Self::Ended(parting) => {
                matches!(parting, Parting::Late | Parting::Crowded | Parting::Malformed)
            }
            Self::Broken(_) | Self::Refused { .. } => false,
        }
    }

    /// What the other side is told, if it can still be told anything.
    pub(super) fn parting(&self) -> Option<Parting> {
        match self {
            Self::Ended(why) => Some(*why),
            Self::Malformed(_) => Some(Parting::Malformed),
            // It has gone, or it sees by our hello which version is spoken here.
            Self::Broken(_) | Self::Version(_) | Self::Refused { .. } => None,
        }
    }

    /// What a goodbye of the other side means here.
    pub(super) fn of_goodbye(why: Parting, detail: String) -> Self {
        match why {
            Parting::Leaving | Parting::Duplicate | Parting::Oneself | Parting::Twin => {
                Self::Ended(why)
            }
            _ => Self::Refused { why, detail },
        }
    }

    /// Has one side a session with another service that says it is the same node?
    pub(super) fn is_occupied(&self) -> bool {
        matches!(self, Self::Ended(why) | Self::Refused { why, .. } if *why == Parting::Occupied)
    }

    /// Will it be the same at the next attempt, most likely?
    pub(super) fn is_lasting(&self) -> bool {
        match self {
            Self::Version(_) | Self::Malformed(_) => true,
            Self::Ended(why) => matches!(why, Parting::Superseded | Parting::Twin),
            Self::Refused { why, .. } => {
                matches!(why, Parting::Superseded | Parting::Malformed | Parting::Crowded)
            }
            Self::Broken(_) => false,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended(why) => why.fmt(f),
            Self::Broken(how) => write!(f, "the connection broke: {how}"),
            Self::Malformed(what) => write!(f, "{}: {what}", Parting::Malformed),
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

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Leaving => "it left",
            Self::Duplicate => "there is another connection with this node",
            Self::Replaced => "another connection took its place",
            Self::Superseded => "another service of the same node started later",
            Self::Oneself => "it is this node itself",
            Self::Twin => "another service has the identity of this node",
            Self::Late => "it did not introduce itself in time",
            Self::Crowded => "there are connections enough",
            Self::Backlog => "more waits to be sent to it than may wait",
            Self::Malformed => "it does not follow the protocol of nodes",
            Self::Silent => "it was not heard for too long",
            Self::Occupied => {
                "another service of the same identity has a session, which is not over"
            }
        })
    }
}
