//! Letters between the services of two nodes.

use control::codec;
use serde::{Deserialize, Serialize};

use super::beginnings::{self, Beginning};
use super::obituaries;
use super::published::{self, LastPublished};
use crate::bridge::{Provider, Terms};
use crate::error::{Error, ErrorKind, Result};

/// The longest letter, in bytes: as many lanes as there can be, each with its descriptors, and
/// their addresses.
const LONGEST: usize = 16 << 10;
/// How each letter begins.
const TAG: u8 = 1;

/// A letter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Letter {
    /// What carries messages at the node that writes. It is the first letter, and is told again when it
    /// is another one.
    Provider(Provider),
    /// What the bridges have to tell each other about a topic.
    Terms { topic: String, terms: Terms },
    /// What had been published of a topic before anything was kept for who reads this.
    Beginning { topic: String, begins: Beginning },
    /// Publishers of a topic that died.
    Obituary { topic: String, publishers: Vec<u64> },
    /// What was published of a topic, when nothing of it was on its way any more.
    Published { topic: String, last: LastPublished },
}

impl Letter {
    /// The bytes that travel.
    pub(super) fn encode(&self) -> Vec<u8> {
        codec::encode(TAG, self)
    }

    /// Reads a letter of another node. What is accepted has one encoding only.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let operation = "read a letter of another node";
        let refuse = |detail| Error::new(operation, ErrorKind::Malformed, detail);
        if bytes.len() > LONGEST {
            return Err(refuse("more bytes than a letter has"));
        }
        let letter: Self = codec::decode(TAG, bytes)
            .map_err(|cause| Error::because(operation, ErrorKind::Malformed, cause))?;
        letter.fault().map_or(Ok(letter), |detail| Err(refuse(detail)))
    }

    /// What it says that cannot be.
    fn fault(&self) -> Option<&'static str> {
        match self {
            Self::Provider(provider) => provider.fault(),
            Self::Terms { terms, .. } => terms.fault(),
            Self::Beginning { begins, .. } => (begins.publishers.len() > beginnings::MOST)
                .then_some("of more publishers than there can be"),
            Self::Obituary { publishers, .. } => (!(1..=obituaries::MOST)
                .contains(&publishers.len()))
            .then_some("of nobody, or of more than are told of"),
            Self::Published { last, .. } => (!(1..=published::MOST)
                .contains(&last.publishers.len()))
            .then_some("of no publisher, or of more than there can be"),
        }
    }
}

/// Reads a letter, and writes it again: for fuzzing.
///
/// # Errors
/// What is wrong with it.
#[cfg(any(test, feature = "fuzzing"))]
pub fn read_letter(bytes: &[u8]) -> Result<Vec<u8>> {
    Letter::decode(bytes).map(|letter| letter.encode())
}

#[cfg(test)]
mod tests {
    use fabric::RemoteRegion;
    use fabric::ring::{LaneOffer, Layout, Notify, RingAnswer, RingOffer};
    use proptest::prelude::*;

    use super::*;
    use crate::bridge::{
        LONGEST as LONGEST_PAYLOAD, LONGEST_REASON, MOST_LANES, TopicFacts, addresses_that_fit,
    };
    use crate::peers::VERSION;
    use crate::settings::TopicSettings;
    use crate::text::shortened;

    const FACTS: TopicFacts = TopicFacts { number: 3, largest: 1 << 20, depth: 16 };
    const TOPIC: &str = "numbers";

    fn provider(name: &str) -> Letter {
        Letter::Provider(Provider { name: name.to_owned(), protocol: 1 << 31, format: 2 })
    }

    fn terms(terms: Terms) -> Letter {
        Letter::Terms { topic: TOPIC.to_owned(), terms }
    }

    fn wish(facts: TopicFacts, address: usize, lanes: u8) -> Letter {
        let further = vec![vec![1; address]; usize::from(lanes - 1)];
        terms(Terms::Wish { connection: 1 << 40, facts, from: vec![1; address], further })
    }

    fn again(reason: String) -> Letter {
        terms(Terms::Again { connection: 9, reason })
    }

    /// A descriptor of 64 bytes in host memory.
    const REGION: [u8; 54] = *b"FcMR\x01\x006\x00\x0b\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00@\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x08\x00\x8a\xc1\x92\x98\x08\xfd\x99\x0dw\xec\x07h";

    fn region() -> RemoteRegion {
        RemoteRegion::decode(&REGION).unwrap()
    }

    fn offer() -> Letter {
        let lane = LaneOffer { ring: region(), headers: None, credit_memory: region() };
        let ring = RingOffer {
            ring: 0,
            epoch: 1,
            capacity: 1 << 16,
            notify: Notify::Immediate,
            tagged: false,
            layout: Layout::Together,
            most_chunks: 1 << 14,
            whole: 0,
            lanes: vec![lane],
        };
        let (from, further) = (vec![1; 16], Vec::new());
        terms(Terms::Offer { connection: 7, ring, position: 3, from, further })
    }

    /// As long as an offer can be: of all lanes, with headers that lie apart.
    fn long_offer() -> Letter {
        let Letter::Terms { terms: Terms::Offer { mut ring, .. }, .. } = offer() else {
            panic!("it is an offer");
        };
        ring.lanes =
            vec![
                LaneOffer { ring: region(), headers: Some(region()), credit_memory: region() };
                usize::from(MOST_LANES)
            ];
        let (from, further) = (vec![1; 512], vec![vec![1; 512]; usize::from(MOST_LANES) - 1]);
        terms(Terms::Offer { connection: 7, ring, position: 3, from, further })
    }

    fn answer() -> Letter {
        let answer = RingAnswer {
            name: 0,
            epoch: 1,
            most_chunks: 64,
            tagged: false,
            credit_memory: region(),
        };
        terms(Terms::Answer { connection: 7, answer })
    }

    fn beginning(publishers: usize) -> Letter {
        let begins = Beginning::at(4, vec![(256, u64::MAX); publishers]);
        Letter::Beginning { topic: TOPIC.to_owned(), begins }
    }

    fn obituary(publishers: usize) -> Letter {
        Letter::Obituary { topic: TOPIC.to_owned(), publishers: vec![1 << 40; publishers] }
    }

    fn last_published(publishers: usize) -> Letter {
        let last = LastPublished::at(vec![(256, u64::MAX); publishers]);
        Letter::Published { topic: TOPIC.to_owned(), last }
    }

    fn good() -> Vec<Letter> {
        vec![
            provider("tcp;ofi_rxm"),
            wish(FACTS, 16, 1),
            wish(FACTS, 1024, 1),
            wish(FACTS, 512, MOST_LANES),
            again(shortened(&"ä".repeat(1000), LONGEST_REASON).to_owned()),
            terms(Terms::Refused { connection: 9, reason: String::new() }),
            beginning(0),
            beginning(beginnings::MOST),
            obituary(1),
            obituary(obituaries::MOST),
            last_published(1),
            last_published(published::MOST),
            offer(),
            answer(),
            long_offer(),
        ]
    }

    #[track_caller]
    fn is_refused(bytes: &[u8]) {
        assert_eq!(Letter::decode(bytes).unwrap_err().kind(), ErrorKind::Malformed, "{bytes:?}");
    }

    #[test]
    fn letters_are_read_as_written_and_as_nothing_else() {
        for letter in good() {
            let bytes = letter.encode();
            assert_eq!(Letter::decode(&bytes).unwrap(), letter);
            let longer = [&bytes[..], &[0]].concat();
            let other = [&[TAG + 1], &bytes[1..]].concat();
            let less = &bytes[..bytes.len() - 1];
            for bytes in [&[][..], &bytes[..1], &bytes[1..], less, &longer, &other] {
                is_refused(bytes);
            }
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let deep = TopicFacts { depth: TopicSettings::MOST_DEPTH + 1, ..FACTS };
        let long = TopicFacts { largest: LONGEST_PAYLOAD + 1, ..FACTS };
        for letter in [
            provider(&"x".repeat(101)),
            again("x".repeat(401)),
            wish(FACTS, 0, 1),
            wish(FACTS, 1025, 1),
            wish(deep, 16, 1),
            wish(long, 16, 1),
            wish(FACTS, 16, MOST_LANES + 1),
            wish(FACTS, 513, MOST_LANES),
            beginning(beginnings::MOST + 1),
            obituary(0),
            obituary(obituaries::MOST + 1),
            last_published(0),
            last_published(published::MOST + 1),
            Letter::Terms {
                topic: "x".repeat(LONGEST),
                terms: Terms::Refused { connection: 9, reason: String::new() },
            },
        ] {
            is_refused(&letter.encode());
        }
    }

    #[test]
    fn lanes_are_cut_to_what_a_letter_has_room_for() {
        let lanes = usize::from(MOST_LANES) - 1;
        let fit = |address: usize| {
            let further = vec![vec![1; address]; lanes];
            addresses_that_fit(&vec![1; address], further).len()
        };
        assert_eq!([16, 512, 513, 1024].map(fit), [lanes, lanes, lanes - 1, 7]);
    }

    /// FNV-1a.
    fn digest(bytes: &[u8]) -> u64 {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
    }

    /// If this fails the layout of a letter is another one: then nodes of the version before do not
    /// understand it, and `VERSION` has to be another one, too.
    #[test]
    fn letters_of_a_version_have_one_layout() {
        let bytes: Vec<u8> = good().iter().flat_map(Letter::encode).collect();
        assert_eq!((VERSION, digest(&bytes)), (4, 0x6837_3fab_aeb8_cafe));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(
            kind in 0..6_u8,
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let letter = [&[TAG, kind], &bytes[..]].concat();
            for bytes in [bytes, letter] {
                if let Ok(again) = read_letter(&bytes) {
                    prop_assert_eq!(again, bytes);
                }
            }
        }
    }

    const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/bridge_terms");

    #[test]
    fn the_fuzzers_corpus_does_not_panic() {
        let (mut seen, mut read) = (0, 0);
        for entry in std::fs::read_dir(CORPUS).expect("the corpus is part of the repository") {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            read += usize::from(read_letter(&bytes).is_ok());
            let _ = crate::bridge::MessageHeader::decode(&bytes);
            seen += 1;
        }
        assert!(seen > read && read >= good().len(), "{read} of {seen} are letters");
    }

    /// Letters of all kinds, for the fuzzer to begin with: to be run when they are written otherwise.
    #[test]
    #[ignore = "it writes files"]
    fn the_corpus_is_written_anew() {
        for (number, letter) in good().into_iter().enumerate() {
            std::fs::write(format!("{CORPUS}/letter-{number}"), letter.encode()).unwrap();
        }
    }
}
