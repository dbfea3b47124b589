//! From where on the messages of a topic are for another node, told to that one before the first goes
//! there.
//!
//! Where messages are dropped the first that comes is not the first that was to come, and there is
//! none before it by which those could be seen that are [missing](super::gaps). So a node that begins
//! to keep such messages for another one tells it what was published before: what comes next is
//! for that one, and so is all of publishers that are made later.

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::receiving::Letter;
use crate::error::{Error, ErrorKind, Result};
use crate::peers::NodeIdentity;
use crate::topic::{Published, Topic};

/// How such a letter begins: as no [terms](crate::bridge::Terms) of a topic do. Nodes that do not
/// know of it take no notice, but for a line in their log.
const VERSION: u8 = 131;
/// As many as can publish in a topic of a node.
const MOST: usize = 256;
/// The number of a publisher's first message.
const FIRST: u64 = 1;

/// What had been published of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Beginning {
    /// The topic's number at its node.
    pub(super) topic: u64,
    /// The position of the next message.
    pub(super) position: u64,
    /// How many publishers it had had.
    serial: u64,
    /// Those that it had, each with the number of its last message.
    publishers: Vec<(u64, u64)>,
}

impl Beginning {
    /// From now on.
    pub(super) fn of(topic: &Topic) -> Self {
        let Published { position, serial, publishers } = topic.published();
        Self { topic: u64::from(topic.number()), position, serial, publishers }
    }

    /// The first message of a publisher that counts, if that is known.
    pub(super) fn first_of(&self, publisher: u64) -> Option<u64> {
        let known = self.publishers.iter().find(|(id, _)| *id == publisher);
        match known {
            Some((_, last)) => Some(last.saturating_add(1)),
            // It came later.
            None => (Published::serial_of(publisher) > self.serial).then_some(FIRST),
        }
    }

    /// The bytes that travel.
    pub(super) fn encode(&self) -> Vec<u8> {
        // Writing to memory does not fail.
        postcard::to_extend(self, vec![VERSION]).unwrap_or_default()
    }

    /// Reads a letter of another node. What is accepted has one encoding only.
    fn decode(bytes: &[u8]) -> Result<Self> {
        let operation = "read what was published before";
        let refuse = |detail: &str| Error::new(operation, ErrorKind::Malformed, detail);
        let body = bytes.strip_prefix(&[VERSION]).ok_or_else(|| refuse("another letter"))?;
        let (read, rest) = postcard::take_from_bytes::<Self>(body)
            .map_err(|cause| Error::because(operation, ErrorKind::Malformed, cause))?;
        if read.publishers.len() > MOST {
            return Err(refuse("of more publishers than there can be"));
        }
        if !rest.is_empty() || read.encode() != bytes {
            return Err(refuse("written otherwise than it would be here"));
        }
        Ok(read)
    }
}

/// Is it such a letter?
pub(super) fn is_one(bytes: &[u8]) -> bool {
    bytes.first() == Some(&VERSION)
}

impl Carrier {
    /// Tells a node what is not for it.
    pub(super) fn tell_beginning(&self, node: NodeIdentity, topic: &Topic, begins: &Beginning) {
        let (topic, terms) = (topic.name().to_owned(), begins.encode());
        self.write(node, &Letter { topic, terms });
    }

    /// Another node tells what is not for this one.
    pub(super) fn hears_of_a_beginning(
        &mut self,
        node: NodeIdentity,
        letter: &Letter,
    ) -> Result<()> {
        let begins = Beginning::decode(&letter.terms)?;
        let Some(facts) = self.facts(&letter.topic).filter(|facts| facts.subscribes) else {
            return Ok(());
        };
        let number = facts.topic.number();
        // Who receives it knows better what came last.
        if !self.is_receiving(number, node, begins.topic) {
            self.beginnings.insert((number, node), begins);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Beginning {
        pub(in crate::carrier) fn at(
            position: u64,
            serial: u64,
            publishers: Vec<(u64, u64)>,
        ) -> Self {
            Self { topic: 3, position, serial, publishers }
        }
    }

    fn beginning(publishers: Vec<(u64, u64)>) -> Beginning {
        Beginning::at(70, 4, publishers)
    }

    #[test]
    fn what_comes_next_counts_and_all_of_those_that_come_later() {
        let begins = beginning(vec![(2 << 8, 9), (4 << 8 | 1, 0)]);
        let first = |serial: u64, line: u64| begins.first_of(serial << 8 | line);
        assert_eq!((first(2, 0), first(4, 1)), (Some(10), Some(1)));
        // One that had left, and one that came later, in its line.
        assert_eq!((first(3, 2), first(5, 2)), (None, Some(1)));
    }

    #[test]
    fn letters_are_read_as_written() {
        for publishers in [vec![], vec![(256, u64::MAX)], vec![(1, 1); MOST]] {
            let begins = beginning(publishers);
            let bytes = begins.encode();
            assert!(is_one(&bytes) && crate::bridge::Terms::decode(&bytes).is_err());
            assert!(!super::super::obituaries::is_one(&bytes));
            assert_eq!(Beginning::decode(&bytes).unwrap(), begins);
        }
        let good = beginning(vec![(1, 1)]).encode();
        for bytes in [
            &[][..],
            &[VERSION],
            &good[..good.len() - 1],
            &[&good[..], &[0]].concat(),
            &beginning(vec![(1, 1); MOST + 1]).encode(),
            &[VERSION, 0x83, 0, 70, 4, 0],
        ] {
            assert_eq!(Beginning::decode(bytes).unwrap_err().kind(), ErrorKind::Malformed);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let versioned = [&[VERSION][..], &bytes].concat();
            if let Ok(begins) = Beginning::decode(&versioned) {
                prop_assert_eq!(begins.encode(), versioned);
            }
        }
    }
}
