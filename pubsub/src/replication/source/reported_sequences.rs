//! Sends the last sequences of publishers to subscribing nodes.

use std::collections::{BTreeMap, BTreeSet};

use super::last_sequences::{LastSequences, PublisherSequences};
use crate::ids::NodeId;
use crate::replication::routing::plan::RoutingPlan;
use crate::replication::{ControlMessage, RemoteNodes};
use crate::topic::{PUBLISHER_SLOTS, Topic};

#[derive(Debug, Default)]
pub(crate) struct ReportedSequences {
    /// By index in the table of publishers.
    publishers: BTreeMap<u64, (u64, u64)>,
    nodes: BTreeSet<NodeId>,
}

impl ReportedSequences {
    pub(crate) fn forget(&mut self, node: NodeId) {
        self.nodes.remove(&node);
    }

    /// What to send to these nodes: the changes to nodes that have the earlier sequences, all to
    /// the others.
    fn updates(
        &mut self,
        changes: PublisherSequences,
        nodes: impl Iterator<Item = NodeId>,
    ) -> Vec<(NodeId, PublisherSequences)> {
        self.publishers.extend(changes.iter().map(|it| (it.0 % PUBLISHER_SLOTS as u64, *it)));
        let all: PublisherSequences = self.publishers.values().copied().collect();
        let mut new_to = |node| if self.nodes.insert(node) { all.clone() } else { changes.clone() };
        let updates = nodes.map(|node| (node, new_to(node)));
        updates.filter(|(_, numbers)| !numbers.is_empty()).collect()
    }

    /// Sends changed last sequences to the destinations of a topic; all of them to destinations
    /// that have none yet.
    pub(crate) fn send(
        &mut self,
        topic: &Topic,
        changes: PublisherSequences,
        plan: &RoutingPlan,
        remote_nodes: &RemoteNodes,
    ) {
        let planned = plan.destinations(topic.number()).map(|(node, _)| node);
        let connected = planned.filter(|node| remote_nodes.is_connected(*node));
        for (node, publishers) in self.updates(changes, connected) {
            for last in LastSequences::of(&publishers) {
                let topic = topic.name().to_owned();
                remote_nodes.send(node, &ControlMessage::LastSequences { topic, last });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_nodes_get_changes_and_new_nodes_get_all() {
        let [one, other] = [1, 2].map(|byte| NodeId([byte; 16]));
        let (first, second) = ((1 << 8 | 3, 7), (2 << 8 | 4, 9));
        let mut reported = ReportedSequences::default();
        let mut updates = |changes: &[(u64, u64)], nodes: &[NodeId]| {
            reported.updates(changes.to_vec(), nodes.iter().copied())
        };
        assert_eq!(updates(&[], &[]), []);
        assert_eq!(updates(&[first], &[one]), [(one, vec![first])]);
        assert_eq!(updates(&[], &[one, other]), [(other, vec![first])]);
        let both = [(one, vec![second]), (other, vec![second])];
        assert_eq!(updates(&[second], &[one, other]), both);
        assert_eq!(updates(&[], &[one, other]), []);
        // Another publisher takes the index of the first.
        let third = (5 << 8 | 3, 1);
        assert_eq!(updates(&[third], &[one]), [(one, vec![third])]);
        reported.forget(other);
        assert_eq!(reported.updates(vec![], [other].into_iter()), [(other, vec![third, second])]);
    }
}
