//! Lost publishers, reported to the nodes that subscribe to their topics.
//!
//! A node reports them once, after cleanup, to its connected destinations; while none is connected,
//! it waits. The topic records what was reported, so the next service continues from there. A
//! report may be repeated: the receiver ignores what it knows. A message lost with its connection
//! is not sent again.

use std::collections::BTreeSet;

use crate::ids::{NodeId, PublisherId};
use crate::pool::Direction;
use crate::replication::control_messages::MAX_LOST_PUBLISHERS;
use crate::replication::routing::plan::RoutingPlan;
use crate::replication::{ControlMessage, RemoteNodes};
use crate::topic::{LostPublisher, Topic};

/// The first lost publisher to report, and the nodes to report it to, perhaps none. Returns None if
/// there is nothing to report, or not yet. `lost` and `sent` are counts; each destination comes
/// with whether it is connected.
fn due(
    lost: u64,
    sent: u64,
    destinations: impl IntoIterator<Item = (NodeId, bool)>,
) -> Option<(u64, Vec<NodeId>)> {
    let (mut has_any, mut connected) = (false, Vec::new());
    for (node, is_connected) in destinations {
        has_any = true;
        connected.extend(is_connected.then_some(node));
    }
    let is_due = lost != sent && (!has_any || !connected.is_empty());
    // The count lies in shared memory: any process may have changed it.
    is_due.then(|| (sent.min(lost), connected))
}

/// Reports the publishers of a topic that died here to its destinations.
pub(crate) fn report(topic: &Topic, plan: &RoutingPlan, remote_nodes: &RemoteNodes) {
    let lost = topic.publishers_lost(Direction::Local);
    if lost == topic.losses_sent() {
        return;
    }
    let planned = plan.destinations(topic.number()).map(|(node, _)| node);
    // Destinations that an earlier service left may not be planned yet.
    let recorded = topic.destinations().into_iter().map(NodeId);
    let destinations: BTreeSet<_> = planned.chain(recorded).collect();
    let destinations = destinations.into_iter().map(|node| (node, remote_nodes.is_connected(node)));
    let Some((first, nodes)) = due(lost, topic.losses_sent(), destinations) else { return };
    // Of more than are remembered, report the last.
    let publishers: Vec<_> = (first.max(lost.saturating_sub(MAX_LOST_PUBLISHERS as u64))..lost)
        .filter_map(|number| topic.publisher_lost(Direction::Local, number))
        .map(|dead| dead.publisher)
        .collect();
    if !publishers.is_empty() {
        let message = ControlMessage::PublisherLost { topic: topic.name().to_owned(), publishers };
        nodes.into_iter().for_each(|node| remote_nodes.send(node, &message));
    }
    topic.set_losses_sent(lost);
}

/// Records lost publishers that another node reports.
pub(crate) fn record(topic: &Topic, node: NodeId, publishers: Vec<u64>) {
    for publisher in publishers {
        let lost = LostPublisher { node: node.0, publisher };
        if topic.record_loss(Direction::Inbound, lost) {
            topic.local().messages().ring();
            let (topic, publisher) = (topic.name(), PublisherId(publisher));
            tracing::info!(topic, %node, %publisher, "a publisher at another node died");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId([1; 16]);
    const OTHER: NodeId = NodeId([2; 16]);

    #[test]
    fn connected_nodes_get_the_report_once() {
        assert_eq!(due(3, 3, [(ONE, true)]), None);
        assert_eq!(due(4, 2, [(ONE, true), (OTHER, false)]), Some((2, vec![ONE])));
        assert_eq!(due(4, 2, [(ONE, true), (OTHER, true)]), Some((2, vec![ONE, OTHER])));
        // A destination is waited for as long as it is one.
        assert_eq!(due(4, 2, [(ONE, false)]), None);
        assert_eq!(due(4, 2, []), Some((2, Vec::new())));
        // An impossible count is corrected.
        assert_eq!(due(4, 9, [(ONE, true)]), Some((4, vec![ONE])));
    }
}
