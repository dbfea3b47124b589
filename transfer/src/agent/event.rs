//! What an agent reports about its peers.

use crate::notice::Notice;

/// How a peer departed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Departure {
    /// The program of the peer closed or dropped its agent.
    Closed,
    /// The process of the peer ended without that, or the connection to it was lost.
    Dead,
}

/// An event that peers caused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// An initiator connected, by one or more rails.
    Joined {
        /// Identity of the initiator.
        from: [u8; 16],
        /// Label of the initiator.
        label: String,
    },
    /// A notice arrived. The data of its transfer has arrived before.
    Notice {
        /// Identity of its sender.
        from: [u8; 16],
        /// Contents of the notice.
        notice: Notice,
    },
    /// An initiator disconnected or died, or the connection to it was lost. All its notices were
    /// reported before.
    Left {
        /// Identity of the initiator.
        from: [u8; 16],
        /// Label of the initiator.
        label: String,
        /// The initiator's process ended, or no rail received anything from it within the timeout.
        is_dead: bool,
    },
    /// A fabric between this agent and a peer was lost. The other rails continue, and this one is
    /// retried. If it was the last one of an initiator, [`Left`](Self::Left) is reported too.
    RailLost {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the [fabric](super::AgentOptions::fabric) of this agent, from 0.
        rail: usize,
        /// The cause.
        reason: String,
    },
    /// A lost rail carries bytes again. Not reported for an initiator that has [left](Self::Left):
    /// it is reported as [joined](Self::Joined) when it reconnects.
    RailRestored {
        /// Identity of the peer.
        with: [u8; 16],
        /// Label of the peer.
        label: String,
        /// Index of the fabric of this agent.
        rail: usize,
    },
}
