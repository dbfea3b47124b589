//! Publishers that died, told to the nodes that subscribe to what they published.
//!
//! A node says it once, when it has cleaned up after them, to the destinations that are there; as
//! long as none of these is, it waits. What was told is noted in the topic, so the next service
//! goes on from there. It may say something twice, and who hears it looks whether it is known. A
//! letter that is lost with its connection is not written again.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::letters::{Kind, Note};
use super::receiving::Letter;
use crate::error::Result;
use crate::peers::NodeIdentity;
use crate::publisher::PublisherId;
use crate::topic::{Elsewhere, Topic};

/// As many as the topic of who hears of them is sure to remember.
const MOST: usize = 15;

/// What there is to tell of the publishers that were lost.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    /// Nothing, or not yet.
    Nothing,
    /// Nobody is there who would want to know.
    Nobody,
    /// Those from this number on, to these nodes.
    From(u64, Vec<NodeIdentity>),
}

/// Decides it: so many were lost, and so many told of; and which destinations there are, and whether
/// they are there.
fn due(
    (lost, told): (u64, u64),
    destinations: impl IntoIterator<Item = (NodeIdentity, bool)>,
) -> Due {
    if lost == told {
        return Due::Nothing;
    }
    let (mut has_any, mut there) = (false, Vec::new());
    for (node, is_there) in destinations {
        has_any = true;
        there.extend(is_there.then_some(node));
    }
    match (has_any, there.is_empty()) {
        (false, _) => Due::Nobody,
        (true, true) => Due::Nothing,
        // What was told is anybody's word.
        (true, false) => Due::From(if told < lost { told } else { lost }, there),
    }
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Obituary {
    publishers: Vec<u64>,
}

impl Obituary {
    /// Of more than are remembered the last are told of.
    fn of(publishers: &[u64]) -> Self {
        Self { publishers: publishers[publishers.len().saturating_sub(MOST)..].to_vec() }
    }
}

impl Note for Obituary {
    const KIND: Kind = Kind::Obituary;
    const READ: &'static str = "read which publishers died";

    fn check(&self) -> std::result::Result<(), &'static str> {
        let is_one = (1..=MOST).contains(&self.publishers.len());
        is_one.then_some(()).ok_or("of nobody, or of more than are told of")
    }
}

impl Carrier {
    /// Tells the nodes that were destinations up to now of the publishers that died here.
    pub(super) fn tell_of_the_dead(&self, topic: &Topic) {
        let lost = topic.publishers_lost();
        if lost == topic.losses_told() {
            return;
        }
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        // Those that an earlier service left may not be planned yet.
        let noted = topic.destinations().into_iter().map(NodeIdentity);
        let destinations: BTreeSet<_> = planned.chain(noted).collect();
        let destinations =
            destinations.into_iter().map(|node| (node, self.nodes.contains_key(&node)));
        match due((lost, topic.losses_told()), destinations) {
            Due::Nothing => {}
            Due::Nobody => topic.set_losses_told(lost),
            Due::From(first, nodes) => {
                let publishers: Vec<_> = (first.max(lost.saturating_sub(MOST as u64))..lost)
                    .filter_map(|number| topic.publisher_lost(number))
                    .collect();
                for node in nodes.into_iter().filter(|_| !publishers.is_empty()) {
                    let (topic, terms) =
                        (topic.name().to_owned(), Obituary::of(&publishers).encode());
                    self.write(node, &Letter { topic, terms });
                }
                topic.set_losses_told(lost);
            }
        }
    }

    /// Another node tells of publishers of a topic that died there.
    pub(super) fn hears_of_the_dead(&self, node: NodeIdentity, letter: &Letter) -> Result<()> {
        let Obituary { publishers } = Obituary::decode(&letter.terms)?;
        let Some(facts) = self.facts(&letter.topic).filter(|facts| facts.subscribes) else {
            return Ok(());
        };
        for publisher in publishers {
            let lost = Elsewhere { node: node.0, publisher };
            if facts.topic.is_lost_elsewhere(lost) {
                let (topic, publisher) = (facts.topic.name(), PublisherId(publisher));
                tracing::info!(topic, %node, %publisher, "a publisher at another node died");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::carrier::letters::tests::{is_read_as_written, is_read_or_refused, is_refused};

    const ONE: NodeIdentity = NodeIdentity([1; 16]);
    const OTHER: NodeIdentity = NodeIdentity([2; 16]);

    #[test]
    fn those_that_are_there_are_told_once() {
        assert_eq!(due((3, 3), [(ONE, true)]), Due::Nothing);
        assert_eq!(due((4, 2), [(ONE, true), (OTHER, false)]), Due::From(2, vec![ONE]));
        assert_eq!(due((4, 2), [(ONE, true), (OTHER, true)]), Due::From(2, vec![ONE, OTHER]));
        // It is waited for as long as it is a destination.
        assert_eq!(due((4, 2), [(ONE, false)]), Due::Nothing);
        assert_eq!(due((4, 2), []), Due::Nobody);
        // What stands there makes no sense: from here on it does.
        assert_eq!(due((4, 9), [(ONE, true)]), Due::From(4, vec![ONE]));
    }

    #[test]
    fn letters_are_read_as_written() {
        for publishers in [vec![256], (1..=MOST as u64).map(|number| number << 40).collect()] {
            is_read_as_written(&Obituary::of(&publishers));
        }
        let many: Vec<u64> = (0..40).collect();
        assert_eq!(Obituary::of(&many).publishers, many[40 - MOST..]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let of_many = Obituary { publishers: vec![1; MOST + 1] };
        for note in [of_many, Obituary::of(&[])] {
            is_refused::<Obituary>(&note.encode());
        }
        is_refused::<Obituary>(&[Kind::Obituary as u8, 1, 0x81, 0]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            is_read_or_refused::<Obituary>(&bytes);
        }
    }
}
