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

use crate::agent::{LONGEST_LABEL, Notice, Refusal};
use crate::error::Result;
use crate::wire;

const OPERATION: &str = "read a message";
const VERSION: u8 = 2;
/// As long as a message can be.
pub(crate) const LONGEST: usize = 4096;
pub(crate) const LONGEST_ADDRESS: usize = 512;
const LONGEST_MEMORY: usize = 3072;

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
        visit: u64,
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
    Deliver(Chunk),
    /// To copy from the region to the slot.
    Fetch(Chunk),
    Released {
        region: u64,
    },
    /// To stay awake for a while.
    Rouse,
    // From both.
    Ping,
    /// Also to tell what was heard.
    Pong,
    Bye,
    // From the host.
    Welcome {
        /// Notices.
        may_send: u64,
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
    Heard {
        notices: u64,
        may_send: u64,
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
    pub(super) heard: u64,
    pub(super) message: Message,
}

/// Whom a message is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    Host,
    Guest,
    Either,
}

impl Message {
    pub(super) fn is_for(&self) -> For {
        match self {
            Self::Hello { .. }
            | Self::Open { .. }
            | Self::Stage { .. }
            | Self::Notice(_)
            | Self::Deliver(_)
            | Self::Fetch(_)
            | Self::Released { .. }
            | Self::Rouse => For::Host,
            Self::Ping | Self::Pong | Self::Bye => For::Either,
            Self::Welcome { .. }
            | Self::Opened { .. }
            | Self::Staging { .. }
            | Self::Refused { .. }
            | Self::Done { .. }
            | Self::Heard { .. }
            | Self::Withdrawn { .. } => For::Guest,
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
                | Self::Rouse
        )
    }

    pub(super) fn encode(&self, session: u64, number: u64, heard: u64) -> Vec<u8> {
        codec::encode(VERSION, &(session, number, heard, self))
    }

    /// Reads what [`encode`](Self::encode) wrote, believing nothing.
    pub(super) fn decode(bytes: &[u8]) -> Result<Frame> {
        let frame: Frame = wire::decode(OPERATION, VERSION, bytes)?;
        let fits = match &frame.message {
            Self::Hello { label, address, .. } => {
                label.len() <= LONGEST_LABEL && address.len() <= LONGEST_ADDRESS
            }
            Self::Staging { memory, .. } => memory.len() <= LONGEST_MEMORY,
            Self::Refused { refusal, .. } | Self::Done { refusal: Some(refusal), .. } => {
                refusal.is_short()
            }
            _ => true,
        };
        if !fits {
            return Err(wire::malformed(OPERATION, "a part of it is too long"));
        }
        if frame.message.is_numbered() != (frame.number != 0) {
            let detail = "a number where there is none, or none where there is one";
            return Err(wire::malformed(OPERATION, detail));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests;
