//! Data about other nodes that outlasts their sessions: their labels, and which nodes were given
//! up.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::NodeId;
use crate::log_limit::LogLimit;
use crate::peers::ServiceInstance;
use crate::report::Row;

/// Limit of known nodes, unless more are connected.
const MAX_NODES: usize = 1024;
/// Limit of reported nodes that missed messages of a topic.
const MAX_NODES_OF_TOPIC: usize = 64;

#[derive(Debug)]
struct SeenNode {
    label: String,
    /// The last instance of its service.
    instance: Option<ServiceInstance>,
    /// Limits log lines, since a node may connect and disconnect repeatedly.
    log: LogLimit,
}

/// Nodes seen by this service; data of an earlier service is lost with it.
#[derive(Debug, Default)]
pub(crate) struct SeenNodes {
    nodes: BTreeMap<NodeId, SeenNode>,
    /// Messages missed by each given up node, by topic.
    given_up: BTreeMap<u32, BTreeMap<NodeId, u64>>,
}

impl SeenNodes {
    fn node(&mut self, node: NodeId, is_connected: impl Fn(&NodeId) -> bool) -> &mut SeenNode {
        if self.nodes.len() >= MAX_NODES && !self.nodes.contains_key(&node) {
            self.nodes.retain(|node, _| is_connected(node));
        }
        self.nodes.entry(node).or_insert_with(|| SeenNode {
            label: String::new(),
            instance: None,
            log: LogLimit::short(),
        })
    }

    /// A node connects. True if its service instance is the previous one: only the session was
    /// lost.
    pub(crate) fn connects(
        &mut self,
        node: NodeId,
        label: String,
        instance: ServiceInstance,
        is_connected: impl Fn(&NodeId) -> bool,
    ) -> bool {
        let seen = self.node(node, is_connected);
        seen.label = label;
        seen.instance.replace(instance) == Some(instance)
    }

    /// Returns true if one more log line about a connected or disconnected node is allowed.
    pub(crate) fn may_log(
        &mut self,
        node: NodeId,
        now: Duration,
        is_connected: impl Fn(&NodeId) -> bool,
    ) -> bool {
        self.node(node, is_connected).log.allows(now)
    }

    /// The last known label of a node; empty if unknown.
    pub(crate) fn label(&self, node: NodeId) -> &str {
        self.nodes.get(&node).map_or("", |seen| &seen.label)
    }

    /// A node was given up, and missed messages of a topic.
    pub(crate) fn record_given_up(&mut self, topic: u32, node: NodeId, messages: u64) {
        let nodes = self.given_up.entry(topic).or_default();
        if nodes.len() < MAX_NODES_OF_TOPIC || nodes.contains_key(&node) {
            *nodes.entry(node).or_default() += messages;
        }
    }

    /// Forgets a removed topic with its missed messages.
    pub(crate) fn forget_topic(&mut self, topic: u32) {
        self.given_up.remove(&topic);
    }

    /// A row for each node that missed messages of these topics.
    pub(crate) fn rows<'a>(
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
    fn given_up_node_is_reported_until_the_topic_is_removed() {
        let node = |number: u8| NodeId([number; 16]);
        let mut seen_nodes = SeenNodes::default();
        seen_nodes.connects(node(1), "one".to_owned(), ServiceInstance::new(0), |_| true);
        for number in [1, 2, 1] {
            seen_nodes.record_given_up(7, node(number), 5);
        }
        let reported = |seen_nodes: &SeenNodes| {
            let rows = seen_nodes.rows([(7, "numbers"), (8, "images")].into_iter());
            let rows = rows.map(|row| match row {
                Row::GivenUp { topic, label, messages, .. } => {
                    assert_eq!(topic, "numbers");
                    (label, messages)
                }
                other => panic!("{other:?}"),
            });
            rows.collect::<Vec<_>>()
        };
        let expected = [("one".to_owned(), 10), (String::new(), 5)];
        assert_eq!(reported(&seen_nodes), expected);
        seen_nodes.forget_topic(7);
        assert_eq!(reported(&seen_nodes), []);
    }

    #[test]
    fn returned_service_instance_is_distinguished_from_the_next() {
        let (node, mut seen_nodes) = (NodeId([1; 16]), SeenNodes::default());
        let mut returns = |run| seen_nodes.connects(node, String::new(), run, |_| true);
        let [first, second] = [0, 1].map(ServiceInstance::new);
        assert!(first != second && !returns(first));
        assert!(returns(first) && !returns(second) && returns(second));
    }

    #[test]
    fn data_of_disconnected_nodes_is_bounded() {
        let mut seen_nodes = SeenNodes::default();
        for number in 0..2 * MAX_NODES {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            let first = NodeId([0; 16]);
            let (node, instance) = (NodeId(bytes), ServiceInstance::new(0));
            seen_nodes.connects(node, number.to_string(), instance, |node| *node == first);
            seen_nodes.record_given_up(7, node, 1);
            assert!(seen_nodes.nodes.len() <= MAX_NODES && seen_nodes.label(first) == "0");
        }
        assert_eq!(seen_nodes.given_up[&7].len(), MAX_NODES_OF_TOPIC);
    }
}
