//! Publishers that died, told to the nodes that subscribe to what they published.
//!
//! A node says it once, when it has cleaned up after them, to the destinations that are there; as
//! long as none of these is, it waits. What was told is noted in the topic, so the next service
//! goes on from there. It may say something twice, and who hears it looks whether it is known. A
//! letter that is lost with its connection is not written again.

use std::collections::BTreeSet;

use crate::peers::NodeId;
use crate::pool::Direction;
use crate::publisher::PublisherId;
use crate::replication::Replicator;
use crate::replication::control_messages::ControlMessage;
use crate::topic::{LostPublisher, Topic};

/// As many as the topic of who hears of them is sure to remember.
pub(in crate::replication) const MAX_PUBLISHERS: usize = 15;

/// From which number on there is something to tell of the publishers that were lost, and whom: perhaps
/// nobody. None: nothing, or not yet. Decided from how many were lost, and how many told of; and which
/// destinations there are, and whether they are there.
fn due(
    (lost, told): (u64, u64),
    destinations: impl IntoIterator<Item = (NodeId, bool)>,
) -> Option<(u64, Vec<NodeId>)> {
    let (mut has_any, mut there) = (false, Vec::new());
    for (node, is_there) in destinations {
        has_any = true;
        there.extend(is_there.then_some(node));
    }
    let is_due = lost != told && (!has_any || !there.is_empty());
    // What was told is anybody's word.
    is_due.then(|| (told.min(lost), there))
}

impl Replicator {
    /// Tells the nodes that were destinations up to now of the publishers that died here.
    pub(in crate::replication) fn send_lost_publishers(&self, topic: &Topic) {
        let lost = topic.publishers_lost(Direction::Local);
        if lost == topic.losses_sent() {
            return;
        }
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        // Those that an earlier service left may not be planned yet.
        let recorded = topic.destinations().into_iter().map(NodeId);
        let destinations: BTreeSet<_> = planned.chain(recorded).collect();
        let destinations =
            destinations.into_iter().map(|node| (node, self.nodes.contains_key(&node)));
        let Some((first, nodes)) = due((lost, topic.losses_sent()), destinations) else { return };
        // Of more than are remembered the last are told of.
        let publishers: Vec<_> = (first.max(lost.saturating_sub(MAX_PUBLISHERS as u64))..lost)
            .filter_map(|number| topic.publisher_lost(Direction::Local, number))
            .map(|dead| dead.publisher)
            .collect();
        if !publishers.is_empty() {
            let letter =
                ControlMessage::PublisherLost { topic: topic.name().to_owned(), publishers };
            nodes.into_iter().for_each(|node| self.write(node, &letter));
        }
        topic.set_losses_sent(lost);
    }

    /// Another node tells of publishers of a topic that died there.
    pub(in crate::replication) fn handle_lost_publishers(
        &self,
        node: NodeId,
        topic: &str,
        publishers: Vec<u64>,
    ) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        for publisher in publishers {
            let lost = LostPublisher { node: node.0, publisher };
            if facts.topic.record_loss(Direction::Inbound, lost) {
                facts.topic.local().ring_messages();
                let (topic, publisher) = (facts.topic.name(), PublisherId(publisher));
                tracing::info!(topic, %node, %publisher, "a publisher at another node died");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId([1; 16]);
    const OTHER: NodeId = NodeId([2; 16]);

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
