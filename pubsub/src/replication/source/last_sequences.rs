//! What publishers of a topic have published, told to the nodes that subscribe to it.
//!
//! Readers see by the numbers of messages which of them are missing. No message comes behind the last
//! one by which that could be seen. So once a publisher has published nothing for a second, and what it
//! published was delivered or given up, its node tells the number of its last message, and tells it
//! again to a node that comes back.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::peers::NodeId;
use crate::replication::Replicator;
use crate::replication::control_messages::ControlMessage;
use crate::replication::routing::reconcile::{TopicReplication, is_delivered};
use crate::topic::{PUBLISHER_SLOTS, RemoteHeartbeat, Topic};

/// As many as can publish in a topic of a node.
pub(in crate::replication) const MAX_PUBLISHERS: usize = PUBLISHER_SLOTS;

/// Publishers, each with the number of its last message.
type PublisherSequences = Vec<(u64, u64)>;

/// The number of each publisher's last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::replication) struct LastSequences {
    /// The topic's number at its node.
    pub(in crate::replication) topic: u64,
    pub(in crate::replication) publishers: PublisherSequences,
}

/// How far a topic was at some time.
#[derive(Debug, PartialEq, Eq)]
struct Snapshot {
    publishers: PublisherSequences,
    /// All that was published by these lies before this position, or was dropped.
    position: u64,
    drops: u64,
}

impl Snapshot {
    fn of(topic: &Topic) -> Self {
        let mut publishers = topic.last_of_all();
        publishers.retain(|(_, last)| *last > 0);
        Self { publishers, position: topic.local().position(), drops: topic.drops() }
    }
}

/// Looks once a second for publishers of a topic that have become quiet.
#[derive(Debug, Default)]
pub(in crate::replication) struct IdlePublishers {
    before: Option<Snapshot>,
    /// Nothing has happened since all were found to be quiet.
    are_all_idle: bool,
    reported_before: BTreeSet<(u64, u64)>,
}

impl IdlePublishers {
    /// Those that have become quiet since the last time, if all that they published has been delivered or
    /// given up.
    pub(in crate::replication) fn look(&mut self, topic: &Topic) -> PublisherSequences {
        let now = (topic.local().position(), topic.drops());
        let is_as_before = |before: &Snapshot| (before.position, before.drops) == now;
        if self.are_all_idle && self.before.as_ref().is_some_and(is_as_before) {
            return PublisherSequences::new();
        }
        if self.before.as_ref().is_some_and(|before| !is_delivered(topic, before.position)) {
            return PublisherSequences::new();
        }
        let now = Snapshot::of(topic);
        self.are_all_idle = self.before.as_ref() == Some(&now);
        let idle = self.before.iter().flat_map(|before| &before.publishers).copied();
        let idle: PublisherSequences = idle.filter(|it| now.publishers.contains(it)).collect();
        let changes =
            idle.iter().filter(|it| !self.reported_before.contains(it)).copied().collect();
        self.reported_before = idle.into_iter().collect();
        self.before = Some(now);
        changes
    }
}

/// The last numbers that the nodes which subscribe to a topic were told.
#[derive(Debug, Default)]
pub(in crate::replication) struct ReportedSequences {
    /// By their lines in the publishers' table.
    publishers: BTreeMap<u64, (u64, u64)>,
    nodes: BTreeSet<NodeId>,
}

impl ReportedSequences {
    pub(in crate::replication) fn forget(&mut self, node: NodeId) {
        self.nodes.remove(&node);
    }

    /// What these nodes are to be told when this is news: who was told before the news, the others all.
    fn tell(
        &mut self,
        changes: PublisherSequences,
        nodes: impl Iterator<Item = NodeId>,
    ) -> Vec<(NodeId, PublisherSequences)> {
        self.publishers.extend(changes.iter().map(|it| (it.0 % PUBLISHER_SLOTS as u64, *it)));
        let all: PublisherSequences = self.publishers.values().copied().collect();
        let mut what = |node| if self.nodes.insert(node) { all.clone() } else { changes.clone() };
        let told = nodes.map(|node| (node, what(node)));
        told.filter(|(_, numbers)| !numbers.is_empty()).collect()
    }
}

impl Replicator {
    /// Tells the nodes that are destinations of a topic of publishers that have become quiet; those that
    /// were not told of any, of all that have.
    pub(in crate::replication) fn send_last_sequences(
        &self,
        replicated: &mut TopicReplication,
        changes: PublisherSequences,
    ) {
        let topic = &replicated.facts.topic;
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        let there = planned.filter(|node| self.nodes.contains_key(node));
        for (node, publishers) in replicated.reported.tell(changes, there) {
            let last = LastSequences { topic: u64::from(topic.number()), publishers };
            self.write(
                node,
                &ControlMessage::LastSequences { topic: topic.name().to_owned(), last },
            );
        }
    }

    pub(in crate::replication) fn send_idle_publishers(&mut self) {
        for (number, changes) in self.publish_listener.take_idle() {
            let Some(mut replicated) = self.replicated_topics.remove(&number) else { continue };
            self.send_last_sequences(&mut replicated, changes);
            self.replicated_topics.insert(number, replicated);
        }
    }

    /// Another node tells what was published there.
    pub(in crate::replication) fn handle_last_sequences(
        &self,
        node: NodeId,
        topic: &str,
        last: LastSequences,
    ) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        let topic = &facts.topic;
        let received = self.receiving_of(topic.number(), node, last.topic);
        let at = topic.inbound().position();
        let mut is_news = false;
        for (publisher, last) in last.publishers {
            let (first, since) =
                received.map_or((0, 0), |received| received.start().first_of(publisher));
            let told = RemoteHeartbeat { node: node.0, publisher, last, first, since, at };
            is_news |= topic.record_remote_heartbeat(&told);
        }
        if is_news {
            topic.local().ring_messages();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl LastSequences {
        pub(in crate::replication) fn at(publishers: Vec<(u64, u64)>) -> Self {
            Self { topic: 3, publishers }
        }
    }

    #[test]
    fn nodes_are_told_the_news_and_those_that_come_all() {
        let [one, other] = [1, 2].map(|byte| NodeId([byte; 16]));
        let (first, second) = ((1 << 8 | 3, 7), (2 << 8 | 4, 9));
        let mut told = ReportedSequences::default();
        let mut tell = |changes: &[(u64, u64)], nodes: &[NodeId]| {
            told.tell(changes.to_vec(), nodes.iter().copied())
        };
        assert_eq!(tell(&[], &[]), []);
        assert_eq!(tell(&[first], &[one]), [(one, vec![first])]);
        assert_eq!(tell(&[], &[one, other]), [(other, vec![first])]);
        let both = [(one, vec![second]), (other, vec![second])];
        assert_eq!(tell(&[second], &[one, other]), both);
        assert_eq!(tell(&[], &[one, other]), []);
        // Another one has the line of the first.
        let third = (5 << 8 | 3, 1);
        assert_eq!(tell(&[third], &[one]), [(one, vec![third])]);
        told.forget(other);
        assert_eq!(told.tell(vec![], [other].into_iter()), [(other, vec![third, second])]);
    }
}
