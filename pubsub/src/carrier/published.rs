//! What publishers of a topic have published, told to the nodes that subscribe to it.
//!
//! Readers see by the numbers of messages which of them are missing. No message comes behind the last
//! one by which that could be seen. So once nothing of a topic was published for a second, and all of it was
//! delivered or given up, its node tells the number of each publisher's last message. It tells it
//! again to a node that comes back.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Carrier;
use super::letters::Letter;
use super::lines::{Line, has_backlog};
use crate::peers::NodeIdentity;
use crate::topic::{PublishedElsewhere, Topic};

/// As many as can publish in a topic of a node.
pub(super) const MOST: usize = crate::topic::MOST_PUBLISHERS;

/// The number of each publisher's last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LastPublished {
    /// The topic's number at its node.
    pub(super) topic: u64,
    pub(super) publishers: Vec<(u64, u64)>,
}

impl LastPublished {
    /// None while a publisher is at a message, or another node is owed one.
    fn of(topic: &Topic) -> Option<Self> {
        // First: what is published afterwards may be owed.
        let mut publishers = topic.settled()?;
        publishers.retain(|(_, last)| *last > 0);
        let number = u64::from(topic.number());
        (!has_backlog(topic)).then_some(Self { topic: number, publishers })
    }
}

/// Which nodes were told, and of what.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The position of the next message, and how many were dropped here.
    when: (u64, u64),
    nodes: BTreeSet<NodeIdentity>,
}

/// By how much it can be seen that something was published or dropped.
pub(super) fn progress(topic: &Topic) -> (u64, u64) {
    (topic.here().position(), topic.drops())
}

impl Told {
    pub(super) fn forget(&mut self, node: NodeIdentity) {
        self.nodes.remove(&node);
    }

    /// Those of these nodes that have still to be told.
    fn untold(
        &mut self,
        when: (u64, u64),
        nodes: impl Iterator<Item = NodeIdentity>,
    ) -> Vec<NodeIdentity> {
        if self.when != when {
            (self.when, self.nodes) = (when, BTreeSet::new());
        }
        nodes.filter(|node| !self.nodes.contains(node)).collect()
    }
}

impl Carrier {
    /// Tells the nodes that are destinations of a topic what was published. False if that is not possible
    /// yet.
    pub(super) fn tell_published(&self, line: &mut Line) -> bool {
        let topic = &line.facts.topic;
        let planned = self.plan.destinations(topic.number()).map(|(node, _)| node);
        let there = planned.filter(|node| self.nodes.contains_key(node));
        let untold = line.told.untold(progress(topic), there);
        if untold.is_empty() {
            return true;
        }
        let Some(last) = LastPublished::of(topic) else { return false };
        if !last.publishers.is_empty() {
            let letter = Letter::Published { topic: topic.name().to_owned(), last };
            untold.iter().for_each(|node| self.write(*node, &letter));
        }
        line.told.nodes.extend(untold);
        true
    }

    /// Tells it of topics of which nothing was published for a while.
    pub(super) fn tell_of_quiet_topics(&mut self) {
        for number in self.ear.take_quiet() {
            let Some(mut line) = self.lines.remove(&number) else { continue };
            if line.is_carried() && !self.tell_published(&mut line) {
                self.ear.tell_again(number);
            }
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
                receiving.map_or((0, 0), |receiving| receiving.first_of(publisher));
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
    fn each_node_is_told_once_of_the_same() {
        let [one, other] = [1, 2].map(|byte| NodeIdentity([byte; 16]));
        let mut told = Told::default();
        assert_eq!(told.untold((4, 0), [one].into_iter()), [one]);
        told.nodes.insert(one);
        assert_eq!(told.untold((4, 0), [one, other].into_iter()), [other]);
        told.nodes.insert(other);
        assert!(told.untold((4, 0), [one, other].into_iter()).is_empty());
        // It came back; something was dropped.
        told.forget(one);
        assert_eq!(told.untold((4, 0), [one, other].into_iter()), [one]);
        assert_eq!(told.untold((4, 1), [one, other].into_iter()), [one, other]);
    }
}
