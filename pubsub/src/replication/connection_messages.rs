//! What two nodes tell each other before the first byte of a topic, in letters that others carry.
//!
//! 1. the writer: [`ConnectRequest`](Terms::Wish): a topic that it has messages of for the reader
//! 2. the reader: [`Offer`](Terms::Offer): a ring, and from which position on it wants them
//! 3. the writer: [`Answer`](Terms::Answer)
//!
//! All letters of one connection bear its number, which the writer draws; what answers an earlier
//! one is of no interest any more. The writer says by how many lanes it could write, and a ring is
//! offered for as many as both have. A reader that cannot [refuses](Terms::Refused); one whose ring
//! broke, or who wants it otherwise, asks to begin [again](Terms::Again).
//!
//! The wish has the addresses that will be written from: the reader inserts them before it offers a
//! ring, since some providers drop what comes from an address that they do not have.

use std::fmt;

use fabric::ring::{RingAnswer, RingOffer};
use serde::{Deserialize, Serialize};

use crate::replication::message_header::{MAX_PAYLOAD_LENGTH, POSITION_LIMIT};
use crate::settings::TopicSettings;

/// The longest address of a fabric.
const MAX_ADDRESS_LENGTH: usize = 1 << 10;
/// Bytes of all addresses of a letter together, which leaves room for as many descriptors.
const MAX_TOTAL_ADDRESS_LENGTH: usize = 8 << 10;
/// The longest reason.
pub(crate) const MAX_REASON_LENGTH: usize = 400;
/// The longest name of a provider.
const MAX_PROVIDER_NAME_LENGTH: usize = 100;
/// Lanes that a ring has at most.
pub(crate) const MAX_LANES: u8 = 16;

/// A side of a topic between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Who has the messages.
    Writer,
    /// Who wants them.
    Reader,
}

/// What a topic is like for the bridge: its writer's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopicParameters {
    /// Its number at the writer, for logs.
    pub number: u64,
    /// The length of its longest message, in bytes.
    pub largest: u64,
    /// Messages that may wait.
    pub depth: u32,
}

/// What carries messages at a node: the same at both, or they do not understand each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provider {
    /// The provider, or its fabric where that does not understand the provider's others, as text.
    pub name: String,
    /// Its protocol's number.
    pub protocol: u32,
    /// The format of its addresses.
    pub format: u32,
}

impl Provider {
    /// What it says that cannot be.
    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        (self.name.len() > MAX_PROVIDER_NAME_LENGTH).then_some("provider name too long")
    }
}

/// Of further lanes' addresses as many as a letter has room for, beside this one.
pub(crate) fn fit_addresses(from: &[u8], lane_addresses: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut left = MAX_TOTAL_ADDRESS_LENGTH.saturating_sub(from.len());
    let fits = |address: &Vec<u8>| match left.checked_sub(address.len()) {
        Some(less) => {
            left = less;
            true
        }
        None => false,
    };
    lane_addresses.into_iter().take_while(fits).collect()
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {}, addresses {})", self.name, self.protocol, self.format)
    }
}

/// A letter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ConnectionMessage {
    /// From the writer: it has messages for the reader.
    ConnectRequest {
        connection: u64,
        facts: TopicParameters,
        from: Vec<u8>,
        /// Where its further lanes are, of those that it could write by.
        lane_addresses: Vec<Vec<u8>>,
    },
    /// From the reader: a ring for them.
    Offer {
        connection: u64,
        ring: RingOffer,
        /// The first position that it does not have.
        position: u64,
        from: Vec<u8>,
        /// Where its further lanes are, of those that the ring is for.
        lane_addresses: Vec<Vec<u8>>,
    },
    /// From the writer: it writes into that ring.
    Answer { connection: u64, answer: RingAnswer },
    /// From the reader: it cannot be.
    Refused { connection: u64, reason: String },
    /// From the reader: the ring is of no use any more.
    Restart { connection: u64, reason: String },
    /// From the writer, where nothing moves: so many chunks should have come, and the reader is known to
    /// be done with the ring up to this position.
    StallCheck { connection: u64, chunks: u64, read: u64 },
}

impl ConnectionMessage {
    /// Who writes such a letter.
    pub fn side(&self) -> Side {
        match self {
            Self::ConnectRequest { .. } | Self::Answer { .. } | Self::StallCheck { .. } => {
                Side::Writer
            }
            Self::Offer { .. } | Self::Refused { .. } | Self::Restart { .. } => Side::Reader,
        }
    }

    /// What it says that cannot be.
    pub(crate) fn validation_error(&self) -> Option<&'static str> {
        let are_addresses = |from: &Vec<u8>, lane_addresses: &[Vec<u8>]| {
            let is_address = |it: &Vec<u8>| !it.is_empty() && it.len() <= MAX_ADDRESS_LENGTH;
            let all = || std::iter::once(from).chain(lane_addresses);
            all().all(is_address) && all().map(Vec::len).sum::<usize>() <= MAX_TOTAL_ADDRESS_LENGTH
        };
        match self {
            Self::ConnectRequest { facts, from, lane_addresses, .. } => {
                if facts.largest > MAX_PAYLOAD_LENGTH || facts.depth > TopicSettings::MAX_DEPTH {
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
