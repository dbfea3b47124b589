//! Publishers that died, told to the nodes that subscribe to what they published.
//!
//! A node says it once, when it has cleaned up after them, to the destinations that are there; as
//! long as none of these is, it waits. What was told is noted in the topic, so the next service
//! goes on from there. It may say something twice, and who hears it looks whether it is known. A
//! letter that is lost with its connection is not written again.

use std::collections::BTreeSet;

use super::Carrier;
use super::letters::Letter;
use crate::peers::NodeIdentity;
use crate::pool::Direction;
use crate::publisher::PublisherId;
use crate::topic::{LostPublisher, Topic};

/// As many as the topic of who hears of them is sure to remember.
pub(super) const MOST: usize = 15;

/// From which number on there is something to tell of the publishers that were lost, and whom: perhaps
/// nobody. None: nothing, or not yet. Decided from how many were lost, and how many told of; and which
/// destinations there are, and whether they are there.
fn due(
    (lost, told): (u64, u64),
    destinations: impl IntoIterator<Item = (NodeIdentity, bool)>,
) -> Option<(u64, Vec<NodeIdentity>)> {
    let (mut has_any, mut there) = (false, Vec::new());
    for (node, is_there) in destinations {
        has_any = true;
        there.extend(is_there.then_some(node));
    }
    let is_due = lost != told && (!has_any || !there.is_empty());
    // What was told is anybody's word.
    is_due.then(|| (told.min(lost), there))
}

impl Carrier {
    /// Tells the nodes that were destinations up to now of the publishers that died here.
    pub(super) fn tell_of_the_dead(&self, topic: &Topic) {
        let lost = topic.publishers_lost(Direction::Here);
        if lost == topic.losses_told() {
            return;
        }
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        // Those that an earlier service left may not be planned yet.
        let noted = topic.destinations().into_iter().map(NodeIdentity);
        let destinations: BTreeSet<_> = planned.chain(noted).collect();
        let destinations =
            destinations.into_iter().map(|node| (node, self.nodes.contains_key(&node)));
        let Some((first, nodes)) = due((lost, topic.losses_told()), destinations) else { return };
        // Of more than are remembered the last are told of.
        let publishers: Vec<_> = (first.max(lost.saturating_sub(MOST as u64))..lost)
            .filter_map(|number| topic.publisher_lost(Direction::Here, number))
            .map(|dead| dead.publisher)
            .collect();
        if !publishers.is_empty() {
            let letter = Letter::Obituary { topic: topic.name().to_owned(), publishers };
            nodes.into_iter().for_each(|node| self.write(node, &letter));
        }
        topic.set_losses_told(lost);
    }

    /// Another node tells of publishers of a topic that died there.
    pub(super) fn hears_of_the_dead(&self, node: NodeIdentity, topic: &str, publishers: Vec<u64>) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        for publisher in publishers {
            let lost = LostPublisher { node: node.0, publisher };
            if facts.topic.is_lost(Direction::Arrivals, lost) {
                facts.topic.here().ring_messages();
                let (topic, publisher) = (facts.topic.name(), PublisherId(publisher));
                tracing::info!(topic, %node, %publisher, "a publisher at another node died");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeIdentity = NodeIdentity([1; 16]);
    const OTHER: NodeIdentity = NodeIdentity([2; 16]);

    #[test]
    fn those_that_are_there_are_told_once() {
        assert_eq!(due((3, 3), [(ONE, true)]), None);
        assert_eq!(due((4, 2), [(ONE, true), (OTHER, false)]), Some((2, vec![ONE])));
        assert_eq!(due((4, 2), [(ONE, true), (OTHER, true)]), Some((2, vec![ONE, OTHER])));
        // It is waited for as long as it is a destination.
        assert_eq!(due((4, 2), [(ONE, false)]), None);
        assert_eq!(due((4, 2), []), Some((2, Vec::new())));
        // What stands there makes no sense: from here on it does.
        assert_eq!(due((4, 9), [(ONE, true)]), Some((4, vec![ONE])));
    }
}
