//! What two nodes tell each other before the first byte of a topic, in letters that others carry.
//!
//! 1. the writer: [`Wish`](Terms::Wish): a topic that it has messages of for the reader
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

use super::header::{LONGEST, MOST_POSITIONS};
use crate::settings::TopicSettings;

/// The longest address of a fabric.
const LONGEST_ADDRESS: usize = 1 << 10;
/// Bytes of all addresses of a letter together, which leaves room for as many descriptors.
const LONGEST_ADDRESSES: usize = 8 << 10;
/// The longest reason.
pub(crate) const LONGEST_REASON: usize = 400;
/// The longest name of a provider.
const LONGEST_PROVIDER: usize = 100;
/// Lanes that a ring has at most.
pub(crate) const MOST_LANES: u8 = 16;

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
pub struct TopicFacts {
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
    pub(crate) fn fault(&self) -> Option<&'static str> {
        (self.name.len() > LONGEST_PROVIDER).then_some("a name without end")
    }
}

/// Of further lanes' addresses as many as a letter has room for, beside this one.
pub(crate) fn addresses_that_fit(from: &[u8], further: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut left = LONGEST_ADDRESSES.saturating_sub(from.len());
    let fits = |address: &Vec<u8>| match left.checked_sub(address.len()) {
        Some(less) => {
            left = less;
            true
        }
        None => false,
    };
    further.into_iter().take_while(fits).collect()
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (protocol {}, addresses {})", self.name, self.protocol, self.format)
    }
}

/// A letter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Terms {
    /// From the writer: it has messages for the reader.
    Wish {
        connection: u64,
        facts: TopicFacts,
        from: Vec<u8>,
        /// Where its further lanes are, of those that it could write by.
        further: Vec<Vec<u8>>,
    },
    /// From the reader: a ring for them.
    Offer {
        connection: u64,
        ring: RingOffer,
        /// The first position that it does not have.
        position: u64,
        from: Vec<u8>,
        /// Where its further lanes are, of those that the ring is for.
        further: Vec<Vec<u8>>,
    },
    /// From the writer: it writes into that ring.
    Answer { connection: u64, answer: RingAnswer },
    /// From the reader: it cannot be.
    Refused { connection: u64, reason: String },
    /// From the reader: the ring is of no use any more.
    Again { connection: u64, reason: String },
    /// From the writer, where nothing moves: so many chunks should have come, and the reader is known to
    /// be done with the ring up to this position.
    Check { connection: u64, chunks: u64, read: u64 },
}

impl Terms {
    /// Who writes such a letter.
    pub fn side(&self) -> Side {
        match self {
            Self::Wish { .. } | Self::Answer { .. } | Self::Check { .. } => Side::Writer,
            Self::Offer { .. } | Self::Refused { .. } | Self::Again { .. } => Side::Reader,
        }
    }

    /// What it says that cannot be.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let are_addresses = |from: &Vec<u8>, further: &[Vec<u8>]| {
            let is_address = |it: &Vec<u8>| !it.is_empty() && it.len() <= LONGEST_ADDRESS;
            let all = || std::iter::once(from).chain(further);
            all().all(is_address) && all().map(Vec::len).sum::<usize>() <= LONGEST_ADDRESSES
        };
        match self {
            Self::Wish { facts, from, further, .. } => {
                if facts.largest > LONGEST || facts.depth > TopicSettings::MOST_DEPTH {
                    return Some("a topic that cannot be");
                }
                if further.len() >= usize::from(MOST_LANES) {
                    return Some("more lanes than there can be");
                }
                (!are_addresses(from, further)).then_some("addresses that cannot be")
            }
            Self::Offer { ring, position, from, further, .. } => {
                let lanes = further.len() + 1;
                let fits = ring.lanes.len() == lanes && lanes <= usize::from(MOST_LANES);
                if *position >= MOST_POSITIONS || !fits || ring.shape().is_err() {
                    return Some("a ring that cannot be");
                }
                (!are_addresses(from, further)).then_some("addresses that cannot be")
            }
            Self::Answer { .. } | Self::Check { .. } => None,
            Self::Refused { reason, .. } | Self::Again { reason, .. } => {
                (reason.len() > LONGEST_REASON).then_some("a reason without end")
            }
        }
    }
}
