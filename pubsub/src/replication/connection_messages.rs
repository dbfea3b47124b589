//! Messages that two nodes exchange before the first byte of a topic, inside control messages.
//!
//! 1. the writer: [`ConnectRequest`](ConnectionMessage::ConnectRequest): it has messages
//! 2. the reader: [`Offer`](ConnectionMessage::Offer): a ring, and the first position that it lacks
//! 3. the writer: [`Answer`](ConnectionMessage::Answer)
//!
//! All messages of one connection bear its number, which the writer chooses; answers to an earlier
//! number are ignored. The writer says how many lanes it could write, and a ring is offered for as
//! many as both have. A reader that cannot connect [refuses](ConnectionMessage::Refused). A reader
//! whose ring broke, or that wants another ring, asks for a [restart](ConnectionMessage::Restart).
//!
//! The connect request has the addresses that the writer will write from. The reader inserts them
//! before it offers a ring, since some providers drop messages from an address that they do not
//! know. It also says whether the writer can write to a ring in device memory. Such a ring is
//! offered only if this works at the reader, too; the first one begins with a
//! [probe](super::probe).

use std::fmt;

use fabric::ring::{RingAnswer, RingOffer};
use serde::{Deserialize, Serialize};
use transfer::device_memory::MemoryEnd;

use crate::network_options::NetworkOptions;
use crate::replication::message_header::{MAX_PAYLOAD_LENGTH, POSITION_LIMIT};
use crate::settings::TopicSettings;

const MAX_ADDRESS_LENGTH: usize = 1 << 10;
/// Bytes of all addresses of a message together; this leaves space for as many descriptors.
const MAX_TOTAL_ADDRESS_LENGTH: usize = 8 << 10;
pub(crate) const MAX_REASON_LENGTH: usize = 400;
const MAX_PROVIDER_NAME_LENGTH: usize = 100;
pub(crate) const MAX_LANES: u8 = NetworkOptions::MAX_LANES as u8;

/// A side of a topic between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Has the messages.
    Writer,
    /// Wants the messages.
    Reader,
}

/// Parameters of a topic for replication, as its writer states them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicParameters {
    /// Number of the topic at the writer, for logs.
    pub number: u64,
    /// The length of its longest message, in bytes.
    pub largest: u64,
    /// Messages that may be queued.
    pub depth: u32,
}

/// The provider of a node. Two nodes exchange messages only with the same one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// The provider's name, or its fabric's name where providers of that fabric do not
    /// interoperate, as text.
    pub name: String,
    /// Number of the provider's protocol.
    pub protocol: u32,
    /// The format of its addresses.
    pub format: u32,
}

impl Provider {
    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        (self.name.len() > MAX_PROVIDER_NAME_LENGTH).then_some("provider name too long")
    }
}

/// What a writer says about its memory, if it can write to rings in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectWriter {
    memory: MemoryEnd,
    probes: bool,
}

impl DirectWriter {
    /// A writer of this memory; it insists on a probe if `probes`.
    pub(crate) fn new(memory: MemoryEnd, probes: bool) -> Self {
        Self { memory, probes }
    }

    pub(crate) fn memory(&self) -> MemoryEnd {
        self.memory
    }

    pub(crate) fn probes(&self) -> bool {
        self.probes
    }
}

/// Takes as many addresses of further lanes as a message has space for, beside `from`.
pub(crate) fn fit_addresses(from: &[u8], lane_addresses: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut left = MAX_TOTAL_ADDRESS_LENGTH.saturating_sub(from.len());
    let fits = |address: &Vec<u8>| {
        let less = left.checked_sub(address.len());
        less.map(|less| left = less).is_some()
    };
    lane_addresses.into_iter().take_while(fits).collect()
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {}, addresses {})", self.name, self.protocol, self.format)
    }
}

/// A message about one connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ConnectionMessage {
    /// From the writer: it has messages for the reader.
    ConnectRequest {
        connection: u64,
        parameters: TopicParameters,
        from: Vec<u8>,
        /// Addresses of further lanes that it could write from.
        lane_addresses: Vec<Vec<u8>>,
        /// None: the ring must lie in host memory.
        direct: Option<DirectWriter>,
    },
    /// From the reader: a ring for them.
    Offer {
        connection: u64,
        ring: RingOffer,
        /// The first position that it lacks.
        position: u64,
        from: Vec<u8>,
        /// Addresses of further lanes of the ring.
        lane_addresses: Vec<Vec<u8>>,
        is_probed: bool,
    },
    /// From the writer: it writes into the offered ring.
    Answer { connection: u64, answer: RingAnswer },
    /// From the reader: it cannot connect.
    Refused { connection: u64, reason: String },
    /// From the reader: the ring is not usable any more.
    Restart { connection: u64, reason: String },
    /// From the writer of a stalled ring: the number of chunks that should have arrived, and the
    /// position up to which the reader has acknowledged.
    StallCheck { connection: u64, chunks: u64, read: u64 },
}

impl ConnectionMessage {
    /// The side that sends such a message.
    pub fn side(&self) -> Side {
        match self {
            Self::ConnectRequest { .. } | Self::Answer { .. } | Self::StallCheck { .. } => {
                Side::Writer
            }
            Self::Offer { .. } | Self::Refused { .. } | Self::Restart { .. } => Side::Reader,
        }
    }

    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        let are_addresses = |from: &Vec<u8>, lane_addresses: &[Vec<u8>]| {
            let is_address = |it: &Vec<u8>| !it.is_empty() && it.len() <= MAX_ADDRESS_LENGTH;
            let all = || std::iter::once(from).chain(lane_addresses);
            all().all(is_address) && all().map(Vec::len).sum::<usize>() <= MAX_TOTAL_ADDRESS_LENGTH
        };
        match self {
            Self::ConnectRequest { parameters, from, lane_addresses, .. } => {
                if parameters.largest > MAX_PAYLOAD_LENGTH
                    || parameters.depth > TopicSettings::MAX_DEPTH
                {
                    return Some("topic parameters out of range");
                }
                if lane_addresses.len() >= usize::from(MAX_LANES) {
                    return Some("too many lanes");
                }
                (!are_addresses(from, lane_addresses)).then_some("addresses of an invalid length")
            }
            Self::Offer { ring, position, from, lane_addresses, .. } => {
                let lanes = lane_addresses.len() + 1;
                let fits = ring.lanes.len() == lanes && lanes <= usize::from(MAX_LANES);
                if *position >= POSITION_LIMIT || !fits || ring.geometry().is_err() {
                    return Some("ring geometry out of range");
                }
                (!are_addresses(from, lane_addresses)).then_some("addresses of an invalid length")
            }
            Self::Answer { .. } | Self::StallCheck { .. } => None,
            Self::Refused { reason, .. } | Self::Restart { reason, .. } => {
                (reason.len() > MAX_REASON_LENGTH).then_some("reason text too long")
            }
        }
    }
}
