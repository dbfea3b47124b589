//! What two nodes tell each other before the first byte of a topic, as opaque letters.
//!
//! 1. the writer: [`Wish`](Terms::Wish): a topic that it has messages of for the reader
//! 2. the reader: [`Offer`](Terms::Offer): a ring, and from which position on it wants them
//! 3. the writer: [`Answer`](Terms::Answer)
//!
//! All letters of one connection bear its number, which the writer draws; what answers an earlier
//! one is of no interest any more. The writer says by how many lanes it could write, and a ring is
//! offered for as many as both have. That is version 2 of a letter; with one lane it is version 1,
//! which is all that older nodes read: so a wish for several is told them a second time, for one,
//! and who read the first takes no notice of that. A reader that cannot [refuses](Terms::Refused); one whose ring
//! broke, or who wants it otherwise, asks to begin [again](Terms::Again).

use fabric::ring::{RingAnswer, RingOffer};
use serde::{Deserialize, Serialize};

use super::header::{LONGEST, MOST_POSITIONS};
use crate::error::{Error, ErrorKind, Result};
use crate::settings::TopicSettings;

/// The longest letter, in bytes: three descriptors, two addresses and a little more.
pub const LONGEST_TERMS: usize = 16 << 10;
/// The longest address of a fabric.
const LONGEST_ADDRESS: usize = 1 << 10;
/// The longest reason.
const LONGEST_REASON: usize = 400;
/// The longest name of a provider.
pub(crate) const LONGEST_PROVIDER: usize = 100;
const VERSION: u8 = 1;
/// Of letters that say something of several lanes.
const WITH_LANES: u8 = 2;
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

/// Where an endpoint is, and what it speaks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// The provider, as text: the same on both sides, or they do not understand each other.
    pub provider: String,
    /// Its protocol's number.
    pub protocol: u32,
    /// The format of its addresses.
    pub format: u32,
    /// The endpoint's address.
    pub address: Vec<u8>,
}

impl Spot {
    /// Can the two reach each other?
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        (&self.provider, self.protocol, self.format)
            == (&other.provider, other.protocol, other.format)
    }
}

/// A letter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Terms {
    /// From the writer: it has messages for the reader.
    Wish {
        /// Names the connection.
        connection: u64,
        /// What the topic is like.
        facts: TopicFacts,
        /// Where the writer is.
        from: Spot,
        /// By how many lanes it could write; 0: by one.
        #[serde(skip)]
        lanes: u8,
    },
    /// From the reader: a ring for them.
    Offer {
        /// The connection that was wished for.
        connection: u64,
        /// The ring.
        ring: RingOffer,
        /// The first position that it does not have.
        position: u64,
        /// Where the reader is.
        from: Spot,
        /// Where its further lanes are, of those that the ring is for.
        #[serde(skip)]
        further: Vec<Vec<u8>>,
    },
    /// From the writer: it writes into that ring.
    Answer {
        /// The connection.
        connection: u64,
        /// What the ring wants to know of its writer.
        answer: RingAnswer,
    },
    /// From the reader: it cannot be.
    Refused {
        /// The connection that was wished for.
        connection: u64,
        /// Why not.
        reason: String,
    },
    /// From the reader: the ring is of no use any more.
    Again {
        /// The connection that was.
        connection: u64,
        /// Why.
        reason: String,
    },
}

/// As much of a text as a letter takes.
pub(super) fn short(reason: &str) -> String {
    let mut end = reason.len().min(LONGEST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].to_owned()
}

impl Terms {
    /// Who writes such a letter.
    #[must_use]
    pub fn side(&self) -> Side {
        match self {
            Self::Wish { .. } | Self::Answer { .. } => Side::Writer,
            Self::Offer { .. } | Self::Refused { .. } | Self::Again { .. } => Side::Reader,
        }
    }

    /// The bytes that travel.
    ///
    /// # Errors
    /// `TooLong` if they are more than [`LONGEST_TERMS`].
    pub fn encode(&self) -> Result<Vec<u8>> {
        let operation = "write terms";
        let written = match self {
            Self::Wish { lanes, .. } if *lanes > 1 => postcard::to_extend(self, vec![WITH_LANES])
                .and_then(|bytes| postcard::to_extend(lanes, bytes)),
            Self::Offer { further, .. } if !further.is_empty() => {
                postcard::to_extend(self, vec![WITH_LANES])
                    .and_then(|bytes| postcard::to_extend(further, bytes))
            }
            _ => postcard::to_extend(self, vec![VERSION]),
        };
        let bytes =
            written.map_err(|cause| Error::because(operation, ErrorKind::Malformed, cause))?;
        if bytes.len() > LONGEST_TERMS {
            let detail = format!("{} bytes, {LONGEST_TERMS} at most", bytes.len());
            return Err(Error::new(operation, ErrorKind::TooLong, detail));
        }
        Ok(bytes)
    }

    /// Reads a letter of another node. What is accepted has one encoding only.
    ///
    /// # Errors
    /// `VersionMismatch`; `Malformed`.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let operation = "read terms";
        let refuse = |detail: &str| Err(Error::new(operation, ErrorKind::Malformed, detail));
        let Some((version, body)) = bytes.split_first() else {
            return refuse("no bytes");
        };
        if !matches!(*version, VERSION | WITH_LANES) {
            let detail = format!("version {version}, up to {WITH_LANES} is spoken here");
            return Err(Error::new(operation, ErrorKind::VersionMismatch, detail));
        }
        if bytes.len() > LONGEST_TERMS {
            return refuse("more bytes than a letter has");
        }
        let malformed = |cause| Error::because(operation, ErrorKind::Malformed, cause);
        let (mut terms, mut rest) = postcard::take_from_bytes::<Self>(body).map_err(malformed)?;
        if *version == WITH_LANES {
            rest = match &mut terms {
                Self::Wish { lanes, .. } => {
                    let read = postcard::take_from_bytes(rest).map_err(malformed)?;
                    *lanes = read.0;
                    read.1
                }
                Self::Offer { further, .. } => {
                    let read = postcard::take_from_bytes(rest).map_err(malformed)?;
                    *further = read.0;
                    read.1
                }
                _ => return refuse("of a version that it does not have"),
            };
        }
        if !rest.is_empty() {
            return refuse("bytes behind the end");
        }
        if let Some(detail) = terms.fault() {
            return refuse(detail);
        }
        if terms.encode().ok().as_deref() != Some(bytes) {
            return refuse("written otherwise than it would be here");
        }
        Ok(terms)
    }

    /// What it says that cannot be.
    fn fault(&self) -> Option<&'static str> {
        let spot = |spot: &Spot| {
            let is_good = !spot.address.is_empty()
                && spot.address.len() <= LONGEST_ADDRESS
                && spot.provider.len() <= LONGEST_PROVIDER;
            (!is_good).then_some("an address that is none")
        };
        match self {
            Self::Wish { facts, from, lanes, .. } => {
                if facts.largest > LONGEST || facts.depth > TopicSettings::MOST_DEPTH {
                    return Some("a topic that cannot be");
                }
                if *lanes > MOST_LANES {
                    return Some("more lanes than there can be");
                }
                spot(from)
            }
            Self::Offer { ring, position, from, further, .. } => {
                let lanes = further.len() + 1;
                let fits = ring.lanes.len() == lanes && lanes <= usize::from(MOST_LANES);
                if *position >= MOST_POSITIONS || !fits || ring.shape().is_err() {
                    return Some("a ring that cannot be");
                }
                let is_good = |it: &Vec<u8>| !it.is_empty() && it.len() <= LONGEST_ADDRESS;
                if !further.iter().all(is_good) {
                    return Some("a lane at an address that is none");
                }
                spot(from)
            }
            Self::Answer { .. } => None,
            Self::Refused { reason, .. } | Self::Again { reason, .. } => {
                (reason.len() > LONGEST_REASON).then_some("a reason without end")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn wish() -> Terms {
        Terms::Wish {
            connection: 1 << 40,
            facts: TopicFacts { number: 3, largest: 1 << 20, depth: 16 },
            from: Spot { provider: "net".into(), protocol: 7, format: 2, address: vec![1; 16] },
            lanes: 0,
        }
    }

    fn by(count: u8) -> Terms {
        let Terms::Wish { connection, facts, from, .. } = wish() else { unreachable!() };
        Terms::Wish { connection, facts, from, lanes: count }
    }

    #[test]
    fn what_says_nothing_of_lanes_is_what_older_nodes_read() {
        let plain = wish().encode().unwrap();
        assert_eq!(plain[0], VERSION);
        // So is what says that there is one.
        assert_eq!(by(1).encode().unwrap(), plain);
        let several = by(4).encode().unwrap();
        assert_eq!((several[0], several.len()), (WITH_LANES, plain.len() + 1));
        assert_eq!(&several[1..plain.len()], &plain[1..]);
        assert_eq!(Terms::decode(&several).unwrap(), by(4));
    }

    #[test]
    fn lanes_that_cannot_be_are_refused() {
        let kind = |bytes: &[u8]| Terms::decode(bytes).unwrap_err().kind();
        let several = by(4).encode().unwrap();
        assert_eq!(kind(&by(MOST_LANES + 1).encode().unwrap()), ErrorKind::Malformed);
        assert_eq!(kind(&several[..several.len() - 1]), ErrorKind::Malformed);
        assert_eq!(kind(&[&several[..], &[1]].concat()), ErrorKind::Malformed);
        // One lane in the version of several, and a letter that has none.
        let mut one = several.clone();
        *one.last_mut().unwrap() = 1;
        assert_eq!(kind(&one), ErrorKind::Malformed);
        let mut again = Terms::Again { connection: 9, reason: String::new() }.encode().unwrap();
        again[0] = WITH_LANES;
        assert_eq!(kind(&again), ErrorKind::Malformed);
    }

    #[test]
    fn letters_are_read_as_written() {
        let again = Terms::Again { connection: 9, reason: short(&"ä".repeat(1000)) };
        let refused = Terms::Refused { connection: 9, reason: String::new() };
        for terms in [wish(), by(2), again, refused] {
            assert_eq!(Terms::decode(&terms.encode().unwrap()).unwrap(), terms);
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = wish().encode().unwrap();
        let kind = |bytes: &[u8]| Terms::decode(bytes).unwrap_err().kind();
        assert_eq!(kind(&[]), ErrorKind::Malformed);
        assert_eq!(kind(&[&[3], &good[1..]].concat()), ErrorKind::VersionMismatch);
        assert_eq!(kind(&[&good[..], &[0]].concat()), ErrorKind::Malformed);
        assert_eq!(kind(&good[..good.len() - 1]), ErrorKind::Malformed);
        let long = Terms::Again { connection: 1, reason: "x".repeat(LONGEST_REASON + 1) };
        assert_eq!(kind(&long.encode().unwrap()), ErrorKind::Malformed);
        let Terms::Wish { connection, facts, from, lanes } = wish() else { unreachable!() };
        let nowhere = Spot { address: Vec::new(), ..from.clone() };
        let nowhere = Terms::Wish { connection, facts, from: nowhere, lanes };
        assert_eq!(kind(&nowhere.encode().unwrap()), ErrorKind::Malformed);
        let deep = TopicFacts { depth: TopicSettings::MOST_DEPTH + 1, ..facts };
        let deep = Terms::Wish { connection, facts: deep, from, lanes };
        assert_eq!(kind(&deep.encode().unwrap()), ErrorKind::Malformed);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Terms::decode(&bytes);
            for version in [VERSION, WITH_LANES] {
                let mut versioned = vec![version];
                versioned.extend(&bytes);
                if let Ok(terms) = Terms::decode(&versioned) {
                    prop_assert_eq!(terms.encode().unwrap(), versioned);
                }
            }
        }
    }

    #[test]
    fn the_fuzzers_corpus_does_not_panic() {
        let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/bridge_terms");
        let mut seen = 0;
        for entry in std::fs::read_dir(corpus).expect("the corpus is part of the repository") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            let _ = Terms::decode(&bytes);
            let _ = super::super::MessageHeader::decode(&bytes);
            seen += 1;
        }
        assert!(seen > 0, "the corpus is empty");
    }
}
