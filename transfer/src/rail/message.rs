//! What agents say to each other by a fabric.
//!
//! A [`Frame`] has the number of its session, which the guest made at random, its own number, up to
//! which number the other side was heard, and a [`Message`]. Those that have a number are
//! [said until they are heard](super::hearing); those whose number is zero begin or end a session, or
//! are worth nothing later. A *guest* came to put and get; its *host* has the regions. A visit is all
//! that one agent does at another, by however many rails: each has a session of its own, and a rail
//! that comes back has another one.

use control::codec;
use serde::{Deserialize, Serialize};

use crate::agent::{MAX_LABEL_LENGTH, Notice, Refusal};
use crate::error::Result;
use crate::wire;

const OPERATION: &str = "read a message";
const VERSION: u8 = 2;
/// As long as a message can be.
pub(crate) const MAX_MESSAGE_LENGTH: usize = 4096;
pub(crate) const MAX_ADDRESS_LENGTH: usize = 512;
const MAX_MEMORY_KEY_LENGTH: usize = 3072;

/// A part of a transfer that the host has to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Chunk {
    /// The guest's; the answer has it.
    pub(super) number: u64,
    pub(super) region: u64,
    pub(super) ticket: u64,
    /// Of the staging memory that the host gave.
    pub(super) slot: u32,
    /// In the region.
    pub(super) offset: u64,
    pub(super) length: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    // From the guest.
    Hello {
        /// The agent that is looked for.
        to: [u8; 16],
        from: [u8; 16],
        connection_id: u64,
        label: String,
        address: Vec<u8>,
    },
    Open {
        request: u64,
        region: u64,
        ticket: u64,
    },
    Stage {
        request: u64,
    },
    Notice(Notice),
    /// To copy from the slot to the region.
    RequestDrain(Chunk),
    /// To copy from the region to the slot.
    FillSlot(Chunk),
    Released {
        region: u64,
    },
    /// To stay awake for a while.
    KeepPolling,
    // From both.
    Ping,
    /// Also to tell what was heard.
    Pong,
    Bye,
    // From the host.
    Welcome {
        /// Notices.
        credit_limit: u64,
    },
    Opened {
        request: u64,
    },
    Staging {
        request: u64,
        slots: u32,
        slot_length: u64,
        memory: Vec<u8>,
    },
    Refused {
        /// Zero: the guest itself is refused.
        request: u64,
        refusal: Refusal,
    },
    Done {
        /// The chunk's.
        number: u64,
        refusal: Option<Refusal>,
    },
    NoticeCredit {
        notices: u64,
        credit_limit: u64,
    },
    Withdrawn {
        region: u64,
    },
}

/// A message, as it travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frame {
    pub(super) session: u64,
    /// Zero if it need not be heard.
    pub(super) number: u64,
    /// Up to which number the other side was heard.
    pub(super) acknowledged: u64,
    pub(super) message: Message,
}

/// Whom a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReceiverRole {
    Target,
    Initiator,
    Either,
}

impl Message {
    pub(super) fn receiver_role(&self) -> ReceiverRole {
        match self {
            Self::Hello { .. }
            | Self::Open { .. }
            | Self::Stage { .. }
            | Self::Notice(_)
            | Self::RequestDrain(_)
            | Self::FillSlot(_)
            | Self::Released { .. }
            | Self::KeepPolling => ReceiverRole::Target,
            Self::Ping | Self::Pong | Self::Bye => ReceiverRole::Either,
            Self::Welcome { .. }
            | Self::Opened { .. }
            | Self::Staging { .. }
            | Self::Refused { .. }
            | Self::Done { .. }
            | Self::NoticeCredit { .. }
            | Self::Withdrawn { .. } => ReceiverRole::Initiator,
        }
    }

    /// Is it said until it is heard?
    pub(super) fn is_numbered(&self) -> bool {
        !matches!(
            self,
            Self::Hello { .. }
                | Self::Welcome { .. }
                | Self::Refused { request: 0, .. }
                | Self::Ping
                | Self::Pong
                | Self::Bye
                | Self::KeepPolling
        )
    }

    pub(super) fn encode(&self, session: u64, number: u64, acknowledged: u64) -> Vec<u8> {
        codec::encode(VERSION, &(session, number, acknowledged, self))
    }

    /// Reads what [`encode`](Self::encode) wrote, believing nothing.
    pub(super) fn decode(bytes: &[u8]) -> Result<Frame> {
        let frame: Frame = wire::decode(OPERATION, VERSION, bytes)?;
        let fits = match &frame.message {
            Self::Hello { label, address, .. } => {
                label.len() <= MAX_LABEL_LENGTH && address.len() <= MAX_ADDRESS_LENGTH
            }
            Self::Staging { memory, .. } => memory.len() <= MAX_MEMORY_KEY_LENGTH,
            Self::Refused { refusal, .. } | Self::Done { refusal: Some(refusal), .. } => {
                refusal.is_short()
            }
            _ => true,
        };
        if !fits {
            return Err(wire::malformed(OPERATION, "a field is too long"));
        }
        if frame.message.is_numbered() != (frame.number != 0) {
            let detail = "sequence number missing or unexpected";
            return Err(wire::malformed(OPERATION, detail));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests;
