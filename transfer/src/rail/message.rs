//! Messages between agents over a fabric.
//!
//! A [`Frame`] has the session's random id, chosen by the initiator, its own number, the
//! acknowledged number of the peer, and a [`Message`]. Numbered messages are [retransmitted until
//! they are acknowledged](super::reliable_window). Unnumbered ones start or end a session, or are
//! useless later. The *initiator* puts and gets; the *target* has the regions. A connection is all
//! that one agent does at another, by one or more rails: each rail has its own session, and a new
//! one after a loss.

use control::codec;
use serde::{Deserialize, Serialize};

use super::Chunk;
use crate::device_memory::MemoryEnd;
use crate::error::Result;
use crate::notice::{MAX_NOTICE_LENGTH, Notice};
use crate::refusal::Refusal;
use crate::wire::{self, MAX_ADDRESS_LENGTH, MAX_LABEL_LENGTH};

const OPERATION: &str = "read message";
const VERSION: u8 = 4;
/// A notice of the maximum length, and its frame.
pub(crate) const MAX_MESSAGE_LENGTH: usize = MAX_NOTICE_LENGTH + 256;
const MAX_MEMORY_KEY_LENGTH: usize = 3072;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    // From the initiator.
    Hello {
        /// The identity of the target agent.
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
    RequestStaging {
        request: u64,
    },
    Notice(Notice),
    /// Copy from the slot to the region.
    RequestDrain(Chunk),
    /// Copy from the region to the slot.
    RequestFill(Chunk),
    Released {
        region: u64,
    },
    /// Poll without sleep for a while.
    KeepPolling,
    /// Access an opened region directly, with device memory at one end or both.
    RequestDirect {
        request: u64,
        region: u64,
        ticket: u64,
        /// The memory of this side.
        from: MemoryEnd,
        /// Does this side need a probe?
        probes: bool,
    },
    /// The writes of this step have completed.
    ProbeWritten {
        probe: u64,
        step: u32,
    },
    /// Write the bytes of this step, to be read.
    RequestProbeFill {
        probe: u64,
        step: u32,
    },
    /// All steps are right; answer the request.
    ProbePassed {
        probe: u64,
    },
    /// The initiator has ended it.
    ProbeAbandoned {
        probe: u64,
    },
    // From both sides.
    Ping,
    /// Also acknowledges messages.
    Pong,
    Bye,
    // From the target.
    Welcome {
        /// Number of notices.
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
        /// Zero: the session itself is refused.
        request: u64,
        refusal: Refusal,
    },
    Done {
        /// Number of the chunk.
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
    /// The region may be accessed directly.
    Direct {
        request: u64,
        /// The key of device memory; empty for host memory.
        memory: Vec<u8>,
    },
    /// A probe is to be made first, in this memory.
    ProbeReady {
        request: u64,
        /// Random: its number, and the seed of its bytes.
        probe: u64,
        memory: Vec<u8>,
    },
    /// What the target found after the notice of a step.
    ProbeChecked {
        probe: u64,
        step: u32,
        failure: Option<Refusal>,
    },
    /// The bytes of this step are there.
    ProbeFilled {
        probe: u64,
        step: u32,
    },
}

/// A message with its header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frame {
    pub(super) session: u64,
    /// Zero for unnumbered messages.
    pub(super) number: u64,
    /// All messages of the peer up to this number were received.
    pub(super) acknowledged: u64,
    pub(super) message: Message,
}

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
            | Self::RequestStaging { .. }
            | Self::Notice(_)
            | Self::RequestDrain(_)
            | Self::RequestFill(_)
            | Self::Released { .. }
            | Self::RequestDirect { .. }
            | Self::ProbeWritten { .. }
            | Self::RequestProbeFill { .. }
            | Self::ProbePassed { .. }
            | Self::ProbeAbandoned { .. }
            | Self::KeepPolling => ReceiverRole::Target,
            Self::Ping | Self::Pong | Self::Bye => ReceiverRole::Either,
            _ => ReceiverRole::Initiator,
        }
    }

    /// Is it retransmitted until it is acknowledged?
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

    /// Decodes and validates the result of [`encode`](Self::encode).
    pub(super) fn decode(bytes: &[u8]) -> Result<Frame> {
        let frame: Frame = wire::decode(OPERATION, VERSION, bytes)?;
        let fits = match &frame.message {
            Self::Hello { label, address, .. } => {
                label.len() <= MAX_LABEL_LENGTH && address.len() <= MAX_ADDRESS_LENGTH
            }
            Self::Staging { memory, .. }
            | Self::Direct { memory, .. }
            | Self::ProbeReady { memory, .. } => memory.len() <= MAX_MEMORY_KEY_LENGTH,
            Self::Refused { refusal, .. }
            | Self::Done { refusal: Some(refusal), .. }
            | Self::ProbeChecked { failure: Some(refusal), .. } => refusal.is_short(),
            _ => true,
        };
        if !fits {
            return Err(wire::malformed(OPERATION, "a field is too long"));
        }
        if frame.message.is_numbered() != (frame.number != 0) {
            return Err(wire::malformed(OPERATION, "sequence number missing or unexpected"));
        }
        Ok(frame)
    }
}

#[cfg(test)]
mod tests;
