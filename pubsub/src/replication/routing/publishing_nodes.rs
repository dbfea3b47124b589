//! Other nodes that publish to topics, as subscribers of this node are told: connected nodes, and lost
//! ones that are still waited for.
//!
//! A node counts until it reports that it does not publish any more. That report follows its last
//! message. A node that disconnects counts for the grace period, also across a takeover of this
//! node's service, which finds it in the topic. After its return it first counts until it has
//! reported its topics, and some of its processes may rejoin later than others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::plan::{INTERESTS_TIMEOUT, are_compatible};
use crate::ids::NodeId;
use crate::peers::Interest;
use crate::settings::SharedSettings;

#[derive(Debug)]
struct Publishing {
    /// None until the node reports them to this service.
    settings: Option<SharedSettings>,
    /// None while the node is connected and has reported that it publishes.
    wait: Option<Wait>,
}

/// How long a node that was lost still counts.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// When it was first lost: connections that come and go do not prolong this without end.
    since: Instant,
    until: Instant,
}

#[derive(Debug)]
pub(super) struct PublishingNodes {
    grace: Duration,
    topics: BTreeMap<String, BTreeMap<NodeId, Publishing>>,
    /// Topics to tell about.
    changed: BTreeSet<String>,
    /// No node expires before this time.
    next_end: Option<Instant>,
}

impl PublishingNodes {
    pub(super) fn new(grace: Duration) -> Self {
        Self { grace, topics: BTreeMap::new(), changed: BTreeSet::new(), next_end: None }
    }

    /// A connected node has this interest in a topic.
    pub(super) fn set_interest(&mut self, node: NodeId, interest: &Interest) {
        if !interest.publishes {
            return self.remove_interest(node, &interest.topic);
        }
        let publishing = Publishing { settings: Some(interest.settings), wait: None };
        self.topics.entry(interest.topic.clone()).or_default().insert(node, publishing);
        self.changed.insert(interest.topic.clone());
    }

    /// A connected node does not publish to a topic.
    pub(super) fn remove_interest(&mut self, node: NodeId, topic: &str) {
        let Some(nodes) = self.topics.get_mut(topic) else { return };
        // After a takeover there, its publisher may not have rejoined yet.
        if nodes.get(&node).is_none_or(|it| it.wait.is_some()) {
            return;
        }
        nodes.remove(&node);
        if nodes.is_empty() {
            self.topics.remove(topic);
        }
        self.changed.insert(topic.to_owned());
    }

    fn change(&mut self, node: NodeId, change: impl Fn(Option<Wait>) -> Option<Wait>) {
        for (topic, nodes) in &mut self.topics {
            if let Some(publishing) = nodes.get_mut(&node) {
                let wait = change(publishing.wait);
                if std::mem::replace(&mut publishing.wait, wait).is_none() != wait.is_none() {
                    self.changed.insert(topic.clone());
                }
                let until = wait.map(|wait| wait.until);
                self.next_end = self.next_end.into_iter().chain(until).min();
            }
        }
    }

    pub(super) fn node_vanished(&mut self, now: Instant, node: NodeId) {
        let until = now + self.grace;
        self.change(node, |wait| Some(wait.unwrap_or(Wait { since: now, until })));
    }

    pub(super) fn node_appeared(&mut self, now: Instant, node: NodeId) {
        let (end, longest) = (now + INTERESTS_TIMEOUT, self.grace + INTERESTS_TIMEOUT);
        self.change(node, |wait| {
            let Wait { since, until } = wait.unwrap_or(Wait { since: now, until: end });
            Some(Wait { since, until: until.max(end).min(since + longest) })
        });
    }

    /// A node that returned has sent its first interests.
    pub(super) fn first_interests_received(&mut self, now: Instant, node: NodeId) {
        let end = now + self.grace;
        self.change(node, |wait| wait.map(|wait| Wait { until: wait.until.min(end), ..wait }));
    }

    /// A topic that this service did not have: an earlier service recorded these nodes.
    pub(super) fn restore(&mut self, now: Instant, topic: &str, nodes: &[[u8; 16]]) {
        if !nodes.is_empty() {
            let (known, end) = (self.topics.entry(topic.to_owned()).or_default(), now + self.grace);
            for node in nodes {
                let wait = Some(Wait { since: now, until: end });
                let publishing = Publishing { settings: None, wait };
                known.entry(NodeId(*node)).or_insert(publishing);
            }
            self.next_end = Some(self.next_end.map_or(end, |before| before.min(end)));
        }
        self.changed.insert(topic.to_owned());
    }

    /// Forgets nodes that are waited for no longer.
    fn expire(&mut self, now: Instant) {
        if self.next_end.is_none_or(|end| now < end) {
            return;
        }
        let Self { topics, changed, .. } = self;
        topics.retain(|topic, nodes| {
            let before = nodes.len();
            nodes.retain(|_, publishing| publishing.wait.is_none_or(|wait| now < wait.until));
            if nodes.len() != before {
                changed.insert(topic.clone());
            }
            !nodes.is_empty()
        });
        let nodes = topics.values().flat_map(BTreeMap::values);
        self.next_end = nodes.filter_map(|publishing| publishing.wait).map(|wait| wait.until).min();
    }

    /// When to take the changes at the latest, without any event.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.next_end
    }

    /// The topics whose publishing nodes have changed since the last call.
    pub(super) fn take_changed(&mut self, now: Instant) -> BTreeSet<String> {
        self.expire(now);
        std::mem::take(&mut self.changed)
    }

    /// The nodes that publish to a topic with these settings, and whether they are connected.
    pub(super) fn of_topic(
        &self,
        topic: &str,
        ours: &SharedSettings,
    ) -> impl Iterator<Item = (NodeId, bool)> {
        let is_received = |publishing: &Publishing| {
            publishing.settings.as_ref().is_none_or(|theirs| are_compatible(ours, theirs))
        };
        let nodes = self.topics.get(topic).into_iter().flatten();
        let nodes = nodes.filter(move |(_, publishing)| is_received(publishing));
        nodes.map(|(node, publishing)| (*node, publishing.wait.is_none()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId([1; 16]);
    const GRACE: Duration = Duration::from_secs(5);

    fn interest(publishes: bool, depth: u32) -> Interest {
        Interest {
            topic: "numbers".to_owned(),
            publishes,
            subscribes: true,
            settings: SharedSettings::of_depth(depth),
            subscription: 0,
        }
    }

    fn nodes(publishing_nodes: &mut PublishingNodes, now: Instant) -> Vec<(NodeId, bool)> {
        publishing_nodes.take_changed(now);
        publishing_nodes.of_topic("numbers", &SharedSettings::of_depth(8)).collect()
    }

    #[test]
    fn node_publishes_until_it_reports_the_end() {
        let (now, mut all) = (Instant::now(), PublishingNodes::new(GRACE));
        all.node_appeared(now, NODE);
        all.set_interest(NODE, &interest(true, 8));
        assert_eq!(all.take_changed(now).into_iter().collect::<Vec<_>>(), ["numbers"]);
        assert_eq!((nodes(&mut all, now), all.deadline()), (vec![(NODE, true)], None));
        all.set_interest(NODE, &interest(false, 8));
        assert_eq!(all.take_changed(now).len(), 1);
        assert_eq!(nodes(&mut all, now), []);
        // Messages of other settings are not exchanged.
        all.set_interest(NODE, &interest(true, 9));
        assert_eq!(nodes(&mut all, now), []);
        all.remove_interest(NODE, "numbers");
        assert!(all.topics.is_empty());
    }

    #[test]
    fn lost_node_counts_for_the_grace_period() {
        let (now, mut all) = (Instant::now(), PublishingNodes::new(GRACE));
        all.set_interest(NODE, &interest(true, 8));
        all.node_vanished(now, NODE);
        assert_eq!(nodes(&mut all, now), [(NODE, false)]);
        assert_eq!(all.deadline(), Some(now + GRACE));
        assert_eq!(nodes(&mut all, now + GRACE), []);
        assert_eq!(all.deadline(), None);
    }

    #[test]
    fn returned_node_counts_until_it_has_reported_its_topics() {
        let (now, mut all) = (Instant::now(), PublishingNodes::new(GRACE));
        all.set_interest(NODE, &interest(true, 8));
        all.node_vanished(now, NODE);
        all.node_appeared(now, NODE);
        assert_eq!(nodes(&mut all, now + 2 * GRACE), [(NODE, false)]);
        let later = now + 3 * GRACE;
        // Its publisher may rejoin later.
        all.set_interest(NODE, &interest(false, 8));
        all.first_interests_received(later, NODE);
        assert_eq!(nodes(&mut all, later), [(NODE, false)]);
        all.set_interest(NODE, &interest(true, 8));
        assert_eq!(nodes(&mut all, later + GRACE), [(NODE, true)]);
        all.node_vanished(later, NODE);
        all.node_appeared(later, NODE);
        all.first_interests_received(later, NODE);
        assert_eq!(nodes(&mut all, later + GRACE), []);
    }

    #[test]
    fn recorded_node_counts_after_a_takeover() {
        let (now, mut all) = (Instant::now(), PublishingNodes::new(GRACE));
        all.restore(now, "numbers", &[NODE.0]);
        assert_eq!(nodes(&mut all, now), [(NODE, false)]);
        all.set_interest(NODE, &interest(true, 8));
        all.restore(now, "numbers", &[NODE.0]);
        assert_eq!(nodes(&mut all, now + GRACE), [(NODE, true)]);
        all.restore(now, "images", &[]);
        assert_eq!(all.take_changed(now).len(), 1, "a new topic learns who publishes");
    }
}
