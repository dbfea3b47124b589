//! What publishers of a topic have published, told to the nodes that subscribe to it.
//!
//! Readers see by the numbers of messages which of them are missing. No message comes behind the last
//! one by which that could be seen. So once a publisher has published nothing for a second, and what it
//! published was delivered or given up, its node tells the number of its last message, and tells it
//! again to a node that comes back.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::letters::Letter;
use super::lines::{Line, is_delivered};
use crate::peers::NodeIdentity;
use crate::topic::{MOST_PUBLISHERS, PublishedElsewhere, Topic};

/// As many as can publish in a topic of a node.
pub(super) const MOST: usize = MOST_PUBLISHERS;

/// Publishers, each with the number of its last message.
type Numbers = Vec<(u64, u64)>;

/// The number of each publisher's last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastPublished {
    /// The topic's number at its node.
    pub(super) topic: u64,
    pub(super) publishers: Numbers,
}

/// How far a topic was at some time.
#[derive(Debug, PartialEq, Eq)]
struct Snapshot {
    publishers: Numbers,
    /// All that was published by these lies before this position, or was dropped.
    position: u64,
    drops: u64,
}

impl Snapshot {
    fn of(topic: &Topic) -> Self {
        let mut publishers = topic.last_of_all();
        publishers.retain(|(_, last)| *last > 0);
        Self { publishers, position: topic.here().position(), drops: topic.drops() }
    }
}

/// Looks once a second for publishers of a topic that have become quiet.
#[derive(Debug, Default)]
pub(super) struct QuietPublishers {
    before: Option<Snapshot>,
    /// Nothing has happened since all were found to be quiet.
    are_all_quiet: bool,
    found: BTreeSet<(u64, u64)>,
}

impl QuietPublishers {
    /// Those that have become quiet since the last time, if all that they published has been delivered or
    /// given up.
    pub(super) fn look(&mut self, topic: &Topic) -> Numbers {
        let now = (topic.here().position(), topic.drops());
        let is_as_before = |before: &Snapshot| (before.position, before.drops) == now;
        if self.are_all_quiet && self.before.as_ref().is_some_and(is_as_before) {
            return Numbers::new();
        }
        if self.before.as_ref().is_some_and(|before| !is_delivered(topic, before.position)) {
            return Numbers::new();
        }
        let now = Snapshot::of(topic);
        self.are_all_quiet = self.before.as_ref() == Some(&now);
        let quiet = self.before.iter().flat_map(|before| &before.publishers).copied();
        let quiet: Numbers = quiet.filter(|it| now.publishers.contains(it)).collect();
        let news = quiet.iter().filter(|it| !self.found.contains(it)).copied().collect();
        self.found = quiet.into_iter().collect();
        self.before = Some(now);
        news
    }
}

/// The last numbers that the nodes which subscribe to a topic were told.
#[derive(Debug, Default)]
pub(super) struct Announced {
    /// By their lines in the publishers' table.
    publishers: BTreeMap<u64, (u64, u64)>,
    nodes: BTreeSet<NodeIdentity>,
}

impl Announced {
    pub(super) fn forget(&mut self, node: NodeIdentity) {
        self.nodes.remove(&node);
    }

    /// What these nodes are to be told when this is news: who was told before the news, the others all.
    fn tell(
        &mut self,
        news: Numbers,
        nodes: impl Iterator<Item = NodeIdentity>,
    ) -> Vec<(NodeIdentity, Numbers)> {
        self.publishers.extend(news.iter().map(|it| (it.0 % MOST_PUBLISHERS as u64, *it)));
        let all: Numbers = self.publishers.values().copied().collect();
        let mut what = |node| if self.nodes.insert(node) { all.clone() } else { news.clone() };
        let told = nodes.map(|node| (node, what(node)));
        told.filter(|(_, numbers)| !numbers.is_empty()).collect()
    }
}

impl Carrier {
    /// Tells the nodes that are destinations of a topic of publishers that have become quiet; those that
    /// were not told of any, of all that have.
    pub(super) fn tell_published(&self, line: &mut Line, news: Numbers) {
        let topic = &line.facts.topic;
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        let there = planned.filter(|node| self.nodes.contains_key(node));
        for (node, publishers) in line.announced.tell(news, there) {
            let last = LastPublished { topic: u64::from(topic.number()), publishers };
            self.write(node, &Letter::Published { topic: topic.name().to_owned(), last });
        }
    }

    pub(super) fn tell_of_quiet_publishers(&mut self) {
        for (number, news) in self.ear.take_quiet() {
            let Some(mut line) = self.lines.remove(&number) else { continue };
            self.tell_published(&mut line, news);
            self.lines.insert(number, line);
        }
    }

    /// Another node tells what was published there.
    pub(super) fn hears_what_was_published(
        &self,
        node: NodeIdentity,
        topic: &str,
        last: LastPublished,
    ) {
        let Some(facts) = self.facts(topic).filter(|facts| facts.subscribes) else { return };
        let topic = &facts.topic;
        let receiving = self.receiving_of(topic.number(), node, last.topic);
        let at = topic.arrivals().position();
        let mut is_news = false;
        for (publisher, last) in last.publishers {
            let (first, since) =
                receiving.map_or((0, 0), |receiving| receiving.start().first_of(publisher));
            let told = PublishedElsewhere { node: node.0, publisher, last, first, since, at };
            is_news |= topic.note_published_elsewhere(&told);
        }
        if is_news {
            topic.here().ring_messages();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl LastPublished {
        pub(in crate::carrier) fn at(publishers: Vec<(u64, u64)>) -> Self {
            Self { topic: 3, publishers }
        }
    }

    #[test]
    fn nodes_are_told_the_news_and_those_that_come_all() {
        let [one, other] = [1, 2].map(|byte| NodeIdentity([byte; 16]));
        let (first, second) = ((1 << 8 | 3, 7), (2 << 8 | 4, 9));
        let mut told = Announced::default();
        let mut tell = |news: &[(u64, u64)], nodes: &[NodeIdentity]| {
            told.tell(news.to_vec(), nodes.iter().copied())
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
