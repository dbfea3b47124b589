//! What is known of other nodes beyond the time for which they are there: what they call themselves,
//! and which of them were given up.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::log_limit::LogLimit;
use crate::peers::{NodeIdentity, Run};
use crate::report::Row;

/// Names that are kept of nodes that are not there, at most.
const MOST_NAMES: usize = 1024;
/// Nodes that are told of that missed messages of a topic.
const MOST_OF_TOPIC: usize = 64;

/// As this service saw it: what an earlier one knew is gone with it.
#[derive(Debug, Default)]
pub(super) struct Known {
    labels: BTreeMap<NodeIdentity, String>,
    /// The last start of their services.
    runs: BTreeMap<NodeIdentity, Run>,
    /// What may be logged of each, which may come and go without end.
    logs: BTreeMap<NodeIdentity, LogLimit>,
    /// By topic: what a node missed, each time that it was given up.
    given_up: BTreeMap<u32, BTreeMap<NodeIdentity, u64>>,
}

impl Known {
    /// A node is there, and calls itself so.
    pub(super) fn is_called(
        &mut self,
        node: NodeIdentity,
        label: String,
        is_there: impl Fn(&NodeIdentity) -> bool,
    ) {
        if self.labels.len() >= MOST_NAMES {
            self.labels.retain(|node, _| is_there(node));
        }
        self.labels.insert(node, label);
    }

    /// A node is there. True if it is the service that was there before: the connection with it was
    /// lost, and it was not.
    pub(super) fn returns(
        &mut self,
        node: NodeIdentity,
        run: Run,
        is_there: impl Fn(&NodeIdentity) -> bool,
    ) -> bool {
        if self.runs.len() >= MOST_NAMES {
            self.runs.retain(|node, _| is_there(node));
        }
        self.runs.insert(node, run) == Some(run)
    }

    /// May one more line be logged of a node that comes or goes?
    pub(super) fn may_log(
        &mut self,
        node: NodeIdentity,
        now: Duration,
        is_there: impl Fn(&NodeIdentity) -> bool,
    ) -> bool {
        if self.logs.len() >= MOST_NAMES {
            self.logs.retain(|node, _| is_there(node));
        }
        self.logs.entry(node).or_insert_with(LogLimit::short).allows(now)
    }

    /// What a node calls itself, or did when it was there last; empty if that is not known.
    pub(super) fn label(&self, node: NodeIdentity) -> &str {
        self.labels.get(&node).map_or("", String::as_str)
    }

    /// A node was given up, and missed messages of a topic.
    pub(super) fn gives_up(&mut self, topic: u32, node: NodeIdentity, messages: u64) {
        let nodes = self.given_up.entry(topic).or_default();
        if nodes.len() < MOST_OF_TOPIC || nodes.contains_key(&node) {
            *nodes.entry(node).or_default() += messages;
        }
    }

    /// The topic is gone, and with it what anybody missed.
    pub(super) fn forget_topic(&mut self, topic: u32) {
        self.given_up.remove(&topic);
    }

    /// A row for each node that missed messages of these topics.
    pub(super) fn rows<'a>(
        &self,
        topics: impl Iterator<Item = (u32, &'a str)>,
    ) -> impl Iterator<Item = Row> {
        topics.flat_map(move |(number, topic)| {
            let nodes = self.given_up.get(&number).into_iter().flatten();
            nodes.map(move |(node, messages)| Row::GivenUp {
                topic: topic.to_owned(),
                node: node.to_string(),
                label: self.label(*node).to_owned(),
                messages: *messages,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_given_up_is_named_as_long_as_there_is_the_topic() {
        let node = |number: u8| NodeIdentity([number; 16]);
        let mut known = Known::default();
        known.is_called(node(1), "one".to_owned(), |_| true);
        for number in [1, 2, 1] {
            known.gives_up(7, node(number), 5);
        }
        let told = |known: &Known| {
            let rows = known.rows([(7, "numbers"), (8, "letters")].into_iter());
            let told = rows.map(|row| match row {
                Row::GivenUp { topic, label, messages, .. } => {
                    assert_eq!(topic, "numbers");
                    (label, messages)
                }
                other => panic!("{other:?}"),
            });
            told.collect::<Vec<_>>()
        };
        let expected = [("one".to_owned(), 10), (String::new(), 5)];
        assert_eq!(told(&known), expected);
        known.forget_topic(7);
        assert_eq!(told(&known), []);
    }

    #[test]
    fn a_service_that_was_lost_and_is_back_is_told_from_the_next_one() {
        let (node, mut known) = (NodeIdentity([1; 16]), Known::default());
        let mut returns = |run| known.returns(node, run, |_| true);
        let [first, second] = [0, 1].map(Run::new);
        assert!(first != second && !returns(first));
        assert!(returns(first) && !returns(second) && returns(second));
    }

    #[test]
    fn what_is_kept_of_those_that_are_gone_has_an_end() {
        let mut known = Known::default();
        for number in 0..2 * MOST_NAMES {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            let first = NodeIdentity([0; 16]);
            known.is_called(NodeIdentity(bytes), number.to_string(), |node| *node == first);
            known.gives_up(7, NodeIdentity(bytes), 1);
            known.returns(NodeIdentity(bytes), Run::new(0), |node| *node == first);
            assert!(known.labels.len() <= MOST_NAMES && known.label(first) == "0");
            assert!(known.runs.len() <= MOST_NAMES);
        }
        assert_eq!(known.given_up[&7].len(), MOST_OF_TOPIC);
    }
}
