//! From where on the messages of a topic are for another node, told to that one before the first goes
//! there.
//!
//! The first message of a publisher that comes need not be the first that was to come, and there is
//! none before it by which those could be seen that are missing. So a node that begins
//! to keep messages for another one tells it what was published before: what comes next is
//! for that one, and so is all of publishers that are made later.

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::letters::Letter;
use crate::peers::NodeIdentity;
use crate::topic::{Published, Topic};

/// As many as can publish in a topic of a node.
pub(super) const MOST: usize = 256;
/// The number of a publisher's first message.
const FIRST: u64 = 1;

/// What had been published of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Beginning {
    /// The topic's number at its node.
    pub(super) topic: u64,
    /// How many publishers it had had.
    serial: u64,
    /// Those that it had, each with the number of its last message.
    pub(super) publishers: Vec<(u64, u64)>,
}

impl Beginning {
    /// From now on.
    pub(super) fn of(topic: &Topic) -> Self {
        let Published { serial, publishers } = topic.published();
        Self { topic: u64::from(topic.number()), serial, publishers }
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
}

/// From where on the messages of a node's topic are for this node.
#[derive(Debug, Clone, Default)]
pub(super) struct Start {
    /// If the node told it.
    begins: Option<Beginning>,
    /// The position of the next arrival when they began to be received.
    since: u64,
}

impl Start {
    pub(super) fn new(begins: Option<Beginning>, since: u64) -> Self {
        Self { begins, since }
    }

    /// The number of a publisher's first message for this node, 0 if it is not known. It holds for
    /// subscribers that subscribed at or before the position of the arrivals that comes second.
    pub(super) fn first_of(&self, publisher: u64) -> (u64, u64) {
        let first = self.begins.as_ref().and_then(|begins| begins.first_of(publisher));
        (first.unwrap_or(0), self.since)
    }
}

impl Carrier {
    /// Tells a node what is not for it.
    pub(super) fn tell_beginning(&self, node: NodeIdentity, topic: &Topic, begins: &Beginning) {
        let (topic, begins) = (topic.name().to_owned(), begins.clone());
        self.write(node, &Letter::Beginning { topic, begins });
    }

    /// Another node tells what is not for this one.
    pub(super) fn hears_of_a_beginning(
        &mut self,
        node: NodeIdentity,
        topic: &str,
        begins: Beginning,
    ) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        let number = facts.topic.number();
        // Who receives it knows better what came last.
        if !self.is_receiving(number, node, begins.topic) {
            self.beginnings.insert((number, node), begins);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Beginning {
        pub(in crate::carrier) fn at(serial: u64, publishers: Vec<(u64, u64)>) -> Self {
            Self { topic: 3, serial, publishers }
        }
    }

    fn beginning(publishers: Vec<(u64, u64)>) -> Beginning {
        Beginning::at(4, publishers)
    }

    #[test]
    fn what_comes_next_counts_and_all_of_those_that_come_later() {
        let begins = beginning(vec![(2 << 8, 9), (4 << 8 | 1, 0)]);
        let first = |serial: u64, line: u64| begins.first_of(serial << 8 | line);
        assert_eq!((first(2, 0), first(4, 1)), (Some(10), Some(1)));
        // One that had left, and one that came later, in its line.
        assert_eq!((first(3, 2), first(5, 2)), (None, Some(1)));
    }
}
