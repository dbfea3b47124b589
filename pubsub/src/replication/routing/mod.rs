//! The topics of this node, and which of them go to other nodes: the [`plan`] decides, and
//! [`reconcile`] follows it.

pub(crate) mod incompatible_topics;
pub(crate) mod plan;
mod publishing_nodes;
pub(crate) mod reconcile;
pub(crate) mod work_queue;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::incompatible_topics::IncompatibleTopics;
use self::plan::RoutingPlan;
use self::publishing_nodes::PublishingNodes;
use self::reconcile::TopicReplication;
use self::work_queue::ReconcileQueue;
use crate::ids::NodeId;
use crate::node_segment::NodeSegment;
use crate::peers::{Interest, InterestChange};
use crate::replication::remote_nodes::seen_nodes::SeenNodes;
use crate::replication::source::last_sequences::LastSequences;
use crate::replication::source::lost_publishers;
use crate::replication::source::start_sequences::StartSequences;
use crate::replication::{
    Command, ControlMessage, LocalTopic, POLL_INTERVAL, Provider, PublishListener, RemoteNodes,
    ServiceContext, Side, WorkerEvent, WorkerPool, key, number,
};
use crate::report::Row;
use crate::settings::SharedSettings;
use crate::topic::{PublishingNode, Topic};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProviderMismatch {
    local: String,
    remote: String,
}

impl ProviderMismatch {
    /// None as long as messages may be exchanged, as far as is known.
    fn of(ours: Option<&Provider>, theirs: Option<&Provider>) -> Option<Self> {
        let (ours, theirs) = (ours?, theirs?);
        (ours != theirs).then(|| Self { local: ours.to_string(), remote: theirs.to_string() })
    }

    /// Why nothing can be exchanged with a node, for any topic.
    pub(super) fn with(remote_nodes: &RemoteNodes, node: NodeId) -> Option<Self> {
        Self::of(remote_nodes.provider(), remote_nodes.remote_provider(node))
    }
}

impl fmt::Display for ProviderMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, remote } = self;
        write!(f, "no messages can be exchanged: its provider is {remote}, ")?;
        write!(f, "the provider of this node is {local}; choose one for both")
    }
}

/// The last sequences of publishers of this name whose topic was removed.
pub(super) fn ended_publishers(node_segment: &NodeSegment, name: &str) -> Vec<ControlMessage> {
    let last = LastSequences::of(&node_segment.ended_publishers(name)).collect::<Vec<_>>();
    let message = |last| ControlMessage::LastSequences { topic: name.to_owned(), last };
    last.into_iter().map(message).collect()
}

pub(crate) struct Routing {
    service_context: Arc<ServiceContext>,
    /// How long a disconnected node is waited for.
    lost_after: Duration,
    plan: RoutingPlan,
    reconcile_queue: ReconcileQueue,
    /// The numbers of the topics of this node.
    names: BTreeMap<String, u32>,
    /// These topics, and removed ones whose replication has not ended.
    replicated_topics: BTreeMap<u32, TopicReplication>,
    incompatible_topics: IncompatibleTopics,
    publishing_nodes: PublishingNodes,
    /// Topics without publishers whose messages other nodes do not have yet: they hear of the end
    /// afterwards.
    undelivered: BTreeSet<u32>,
    /// Topics that this node has told others it publishes to.
    told_published: BTreeSet<u32>,
    publish_listener: PublishListener,
    /// How often a topic was reconciled.
    #[cfg(test)]
    reconciliations: u64,
}

impl Routing {
    pub(super) fn new(
        service_context: Arc<ServiceContext>,
        lost_after: Duration,
        publish_listener: PublishListener,
    ) -> Self {
        Self {
            service_context,
            lost_after,
            plan: RoutingPlan::new(lost_after),
            reconcile_queue: ReconcileQueue::new(Instant::now()),
            names: BTreeMap::new(),
            replicated_topics: BTreeMap::new(),
            incompatible_topics: IncompatibleTopics::default(),
            publishing_nodes: PublishingNodes::new(lost_after),
            undelivered: BTreeSet::new(),
            told_published: BTreeSet::new(),
            publish_listener,
            #[cfg(test)]
            reconciliations: 0,
        }
    }

    /// A topic of this node, even if it was removed and its replication has not ended.
    pub(super) fn local_topic(&self, number: u32) -> Option<&LocalTopic> {
        self.replicated_topics.get(&number).map(TopicReplication::local_topic)
    }

    pub(super) fn topic_named(&self, name: &str) -> Option<&LocalTopic> {
        self.local_topic(*self.names.get(name)?)
    }

    pub(super) fn is_subscribed(&self, number: u32) -> bool {
        self.replicated_topics.get(&number).is_some_and(TopicReplication::is_subscribed)
    }

    /// Returns true if messages of the topic are or will be retained for other nodes.
    pub(super) fn holds(&self, number: u32) -> bool {
        self.replicated_topics.get(&number).is_some_and(TopicReplication::holds)
    }

    pub(super) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        let settings = self.incompatible_topics.remote_settings(topic);
        settings.map(SharedSettings::with_default_held)
    }

    /// Sets the current topics of this node.
    pub(super) fn set_topics(&mut self, now: Instant, topics: BTreeMap<String, LocalTopic>) {
        self.names = topics.iter().map(|(name, it)| (name.clone(), it.topic.number())).collect();
        let present: BTreeSet<_> = topics.values().map(|local| local.topic.number()).collect();
        for (number, replicated) in &mut self.replicated_topics {
            if !present.contains(number) && replicated.remove() {
                self.incompatible_topics.local_topic_changed(replicated.local_topic().topic.name());
                self.reconcile_queue.enqueue(*number);
            }
        }
        for local in topics.into_values() {
            let topic = Arc::clone(&local.topic);
            let is_changed = match self.replicated_topics.get_mut(&topic.number()) {
                Some(replicated) => replicated.set_local(local),
                None => {
                    let recorded: Vec<_> =
                        topic.publishing_nodes().iter().map(PublishingNode::node).collect();
                    self.publishing_nodes.restore(now, topic.name(), &recorded);
                    topic.count_publisher_change();
                    self.replicated_topics.insert(topic.number(), TopicReplication::new(local));
                    true
                }
            };
            if is_changed {
                self.incompatible_topics.local_topic_changed(topic.name());
                self.reconcile_queue.enqueue(topic.number());
            }
        }
    }

    /// The interests of this node in its topics. It publishes until other nodes have all messages:
    /// then their subscribers have pulled these when they find no publisher.
    pub(super) fn interests(&mut self) -> Vec<Interest> {
        self.undelivered.clear();
        let present = self.replicated_topics.iter().filter(|(_, it)| it.local().is_some());
        let interests = present.map(|(number, replicated)| {
            let LocalTopic { topic, publishes, subscribes, .. } = replicated.local_topic();
            let is_undelivered = !publishes && replicated.has_backlog();
            if is_undelivered {
                self.undelivered.insert(*number);
            }
            Interest {
                topic: topic.name().to_owned(),
                publishes: *publishes || is_undelivered,
                subscribes: *subscribes,
                settings: *topic.settings(),
                subscription: topic.subscription(),
            }
        });
        interests.filter(|it| it.publishes || it.subscribes).collect()
    }

    /// Tells the subscribing nodes of lost publishers, and how much was published, to topics to which
    /// these interests end the publishing, before they hear of the end: then their subscribers have
    /// counted everything.
    pub(super) fn tell_last_sequences(
        &mut self,
        interests: &[Interest],
        remote_nodes: &RemoteNodes,
    ) {
        let published = interests.iter().filter(|it| it.publishes);
        let published: BTreeSet<u32> =
            published.filter_map(|it| self.names.get(&it.topic).copied()).collect();
        for number in self.told_published.difference(&published) {
            let Some(replicated) = self.replicated_topics.get(number) else { continue };
            lost_publishers::report(&replicated.local_topic().topic, &self.plan, remote_nodes);
            // Messages in flight are not missed.
            if replicated.has_backlog() {
                continue;
            }
            let topic = &replicated.local_topic().topic;
            let mut last = topic.last_of_all();
            last.retain(|(_, last)| *last > 0);
            let messages: Vec<_> = LastSequences::of(&last)
                .map(|last| ControlMessage::LastSequences { topic: topic.name().to_owned(), last })
                .collect();
            for node in self.plan.subscribers_of(topic.name(), topic.settings()) {
                messages.iter().for_each(|message| remote_nodes.send(node, message));
            }
        }
        self.told_published = published;
    }

    /// Returns true if other nodes have got all messages of a topic since the last
    /// [`interests`](Self::interests), which are others now.
    pub(super) fn has_delivered(&self) -> bool {
        let has_backlog =
            |number| self.replicated_topics.get(number).is_some_and(TopicReplication::has_backlog);
        !self.undelivered.iter().all(has_backlog)
    }

    pub(super) fn set_can_send(&mut self, can_send: bool) {
        self.plan.set_can_send(can_send);
    }

    pub(super) fn node_appeared(&mut self, now: Instant, node: NodeId) {
        self.plan.node_appeared(now, node);
        self.publishing_nodes.node_appeared(now, node);
        self.incompatible_topics.forget(node);
        self.enqueue_all();
    }

    pub(super) fn node_vanished(&mut self, now: Instant, node: NodeId) {
        self.plan.node_vanished(now, node);
        self.publishing_nodes.node_vanished(now, node);
        self.incompatible_topics.forget(node);
        self.reconcile_queue.enqueue_all(self.plan.topics_of(node));
        self.replicated_topics.values_mut().for_each(|replicated| replicated.node_lost(node));
    }

    /// A node has other interests. New subscriptions are answered with what was published before,
    /// and with the end of publishers whose topics were removed.
    pub(super) fn interests_changed(
        &mut self,
        now: Instant,
        node: NodeId,
        changes: Vec<InterestChange>,
        remote_nodes: &RemoteNodes,
    ) {
        let (mut starts, mut ended) = (Vec::new(), Vec::new());
        // A refused topic may be accepted now.
        self.reconcile_queue.enqueue_all(self.plan.unsendable_to(node));
        for change in changes {
            let name = match &change {
                InterestChange::Set(it) => &it.topic,
                InterestChange::Removed(topic) => topic,
            };
            self.reconcile_queue.enqueue_all(self.names.get(name).copied());
            match change {
                InterestChange::Set(it) => {
                    if it.subscribes {
                        let node_segment = &self.service_context.node_segment;
                        let local = self.topic_named(&it.topic).map(|local| &*local.topic);
                        starts.push(StartSequences::answer(
                            node_segment,
                            local,
                            &it.topic,
                            it.subscription,
                        ));
                        ended.extend(ended_publishers(node_segment, &it.topic));
                    }
                    let settings = it.subscribes.then_some(it.settings);
                    self.plan.set_subscription(node, &it.topic, settings);
                    self.publishing_nodes.set_interest(node, &it);
                    self.incompatible_topics.set_interest(node, it);
                }
                InterestChange::Removed(topic) => {
                    self.plan.set_subscription(node, &topic, None);
                    self.publishing_nodes.remove_interest(node, &topic);
                    self.incompatible_topics.remove_interest(node, &topic);
                }
            }
        }
        if self.plan.interests_received(now, node) {
            self.publishing_nodes.first_interests_received(now, node);
            self.reconcile_queue.enqueue_all(self.plan.topics_of(node));
        }
        for starts in StartSequences::into_messages(starts) {
            remote_nodes.send(node, &ControlMessage::StartSequences(starts));
        }
        ended.iter().for_each(|message| remote_nodes.send(node, message));
    }

    /// Tells all nodes that subscribe to a removed topic how much was published there.
    fn tell_end_of(&self, topic: &Topic, remote_nodes: &RemoteNodes) {
        let messages = ended_publishers(&self.service_context.node_segment, topic.name());
        for node in self.plan.subscribers_of(topic.name(), topic.settings()) {
            messages.iter().for_each(|message| remote_nodes.send(node, message));
        }
    }

    /// The workers end, and all sources with them.
    pub(super) fn workers_stopped(&mut self) {
        for (number, replicated) in &mut self.replicated_topics {
            self.publish_listener.stop_listening(*number);
            replicated.stop_source(true);
        }
        self.enqueue_all();
    }

    /// Returns a topic that can no longer be received from a node.
    pub(super) fn handle_worker_event(
        &mut self,
        now: Instant,
        event: WorkerEvent,
        remote_nodes: &RemoteNodes,
    ) -> Option<(u32, NodeId)> {
        match event {
            WorkerEvent::ControlMessage { key, node, message } => {
                let topic = self.local_topic(number(key))?.topic.name().to_owned();
                remote_nodes.send(node, &ControlMessage::ConnectionMessage { topic, message });
            }
            WorkerEvent::Connected { key, node, side } => {
                tracing::debug!(?key, %node, ?side, "connection of a topic established");
                let topic = self.replicated_topics.get(&number(key))?.local_topic().topic.name();
                self.incompatible_topics.clear_failure(topic, (node, side));
            }
            WorkerEvent::Disconnected { key, node, side, reason } => {
                tracing::debug!(?key, %node, ?side, %reason, "connection of a topic lost");
                if side == Side::Writer {
                    self.plan.connection_broke(now, number(key), node);
                    self.reconcile_queue.enqueue(number(key));
                }
            }
            WorkerEvent::Lagging { key, node } => {
                self.drop_lagging(now, number(key), node, remote_nodes);
            }
            WorkerEvent::Failed { key, node: Some(node), side, error } => {
                let (number, label) = (number(key), remote_nodes.label(node));
                tracing::error!(
                    %error,
                    ?key,
                    %node,
                    label,
                    ?side,
                    "replication of a topic with a node failed"
                );
                // A failure of a disconnected node is not recorded: only its return would clear it.
                let is_connected = remote_nodes.is_connected(node);
                if is_connected && let Some(replicated) = self.replicated_topics.get(&number) {
                    let topic = replicated.local_topic().topic.name();
                    let why = error.to_string();
                    self.incompatible_topics.record_failure(topic, (node, side), &why);
                }
                match side {
                    Side::Reader => return Some((number, node)),
                    Side::Writer => {
                        if is_connected {
                            self.plan.mark_unsendable(number, node);
                        }
                        self.reconcile_queue.enqueue(number);
                    }
                }
            }
            WorkerEvent::Failed { key, node: None, error, .. } => {
                tracing::error!(%error, ?key, "replication of a topic failed; it is retried");
                // A publisher must not wait for messages that no worker takes.
                let replicated = self.replicated_topics.get_mut(&number(key))?;
                self.publish_listener.stop_listening(number(key));
                replicated.source_failed(now);
                self.reconcile_queue.enqueue(number(key));
            }
        }
        None
    }

    /// How long a destination may take nothing while publishers wait for it. This exceeds the time
    /// to detect its disconnection, and to evict a stalled subscriber there.
    pub(super) fn stall_timeout(&self, number: u32) -> Duration {
        let release = self.local_topic(number).map(|it| it.topic.settings().release_deadline());
        self.lost_after.saturating_add(release.unwrap_or_default()).saturating_mul(2)
    }

    /// Retained messages of a topic have blocked publishers for as long as is allowed.
    pub(super) fn backlog_blocks_publishers(
        &mut self,
        number: u32,
        remote_nodes: &RemoteNodes,
        worker_pool: &WorkerPool,
    ) {
        let Some(replicated) = self.replicated_topics.get(&number) else { return };
        if replicated.is_replicated() {
            // The worker knows which destinations lag.
            return worker_pool.send(number, Command::ReportLagging(key(number)));
        }
        let nodes: Vec<_> = self.plan.destinations(number).map(|(node, _)| node).collect();
        for node in nodes {
            self.drop_lagging(Instant::now(), number, node, remote_nodes);
        }
    }

    fn drop_lagging(
        &mut self,
        now: Instant,
        number: u32,
        node: NodeId,
        remote_nodes: &RemoteNodes,
    ) {
        let stall_timeout = self.stall_timeout(number);
        if self.plan.suspend_if_stalled(now, (number, node), stall_timeout) {
            self.reconcile_queue.enqueue(number);
            let topic = self.local_topic(number).map(|local| local.topic.name());
            tracing::warn!(
                topic, %node, label = remote_nodes.label(node), ?stall_timeout,
                "a node blocked publishers for too long: it will miss messages"
            );
        }
    }

    /// Checks compatibility after topics here or interests of other nodes may have changed.
    pub(super) fn check_compatibility(&mut self, remote_nodes: &RemoteNodes) {
        let Self { replicated_topics, names, incompatible_topics, .. } = self;
        incompatible_topics.check(
            |name| replicated_topics.get(names.get(name)?)?.local(),
            |node| remote_nodes.label(node),
        );
    }

    /// Enqueues topics after an event.
    pub(super) fn enqueue(&mut self, numbers: impl IntoIterator<Item = u32>) {
        self.reconcile_queue.enqueue_all(numbers);
    }

    /// Enqueues all topics after a change that concerns all of them.
    pub(super) fn enqueue_all(&mut self) {
        self.reconcile_queue.enqueue_all(self.replicated_topics.keys().copied());
    }

    /// Reconciles all topics that are due.
    pub(super) fn update(
        &mut self,
        now: Instant,
        remote_nodes: &mut RemoteNodes,
        worker_pool: &mut WorkerPool,
    ) {
        for number in self.reconcile_queue.take(now, &self.replicated_topics) {
            self.reconcile(now, number, remote_nodes, worker_pool);
        }
        self.tell_publishing_nodes(now, remote_nodes);
    }

    /// Tells subscribers of this node which other nodes publish.
    fn tell_publishing_nodes(&mut self, now: Instant, remote_nodes: &RemoteNodes) {
        for name in self.publishing_nodes.take_changed(now) {
            let Some(LocalTopic { topic, .. }) = self.topic_named(&name) else { continue };
            let nodes = self.publishing_nodes.of_topic(&name, topic.settings());
            let nodes: Vec<_> = nodes
                .map(|(node, is_connected)| {
                    PublishingNode::new(node.0, is_connected, remote_nodes.label(node))
                })
                .collect();
            topic.set_publishing_nodes(&nodes);
        }
    }

    /// When to [update](Self::update) at the latest, without any event.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let queued = self.reconcile_queue.deadline(now, POLL_INTERVAL);
        queued.into_iter().chain(self.publishing_nodes.deadline()).min()
    }

    /// Sends the last sequences of publishers that have become idle.
    pub(super) fn send_idle_publishers(&mut self, remote_nodes: &RemoteNodes) {
        for (number, changes) in self.publish_listener.take_idle() {
            if let Some(replicated) = self.replicated_topics.get_mut(&number) {
                replicated.send_last_sequences(changes, &self.plan, remote_nodes);
            }
        }
    }

    /// Adds rows for topics that are not exchanged, for given up nodes, and for topics of other
    /// nodes only.
    pub(super) fn add_rows(&self, rows: &mut Vec<Row>, seen_nodes: &SeenNodes) {
        let local = |name: &str| self.replicated_topics.get(self.names.get(name)?)?.local();
        rows.extend(self.incompatible_topics.rows(local));
        let topics = self.replicated_topics.iter();
        let topics = topics.map(|(number, it)| (*number, it.local_topic().topic.name()));
        rows.extend(seen_nodes.rows(topics));
        let is_local = |name: &str| self.names.contains_key(name);
        rows.extend(self.incompatible_topics.remote_only_topics(is_local));
    }

    /// The provider of this node, or of another one, changed.
    pub(crate) fn compare_providers(&mut self, node: NodeId, remote_nodes: &mut RemoteNodes) {
        let mismatch = ProviderMismatch::with(remote_nodes, node);
        if self.incompatible_topics.provider_mismatch(node) == mismatch.as_ref() {
            return;
        }
        let may_log = remote_nodes.may_log(Instant::now());
        match &mismatch {
            _ if !may_log => {}
            Some(ProviderMismatch { local, remote }) => {
                tracing::warn!(
                    %node,
                    label = remote_nodes.label(node),
                    local,
                    remote,
                    "provider mismatch: no messages are exchanged with this node. Start both with \
                     the same provider"
                );
            }
            None => tracing::info!(%node, "provider mismatch resolved"),
        }
        self.plan.set_incompatible(node, mismatch.is_some());
        self.incompatible_topics.set_provider_mismatch(node, mismatch);
        self.enqueue_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Routing {
        pub(crate) fn plan(&self) -> &RoutingPlan {
            &self.plan
        }

        pub(crate) fn reconciliations(&self) -> u64 {
            self.reconciliations
        }
    }

    fn provider(name: &str, protocol: u32) -> Provider {
        Provider { name: name.to_owned(), protocol, format: 2 }
    }

    #[test]
    fn mismatch_needs_two_known_and_different_providers() {
        let (ours, other) = (provider("tcp", 25), provider("net", 25));
        for same in [None, Some(&ours)] {
            assert_eq!(ProviderMismatch::of(Some(&ours), same), None);
            assert_eq!(ProviderMismatch::of(same, Some(&ours)), None);
        }
        assert_eq!(ProviderMismatch::of(None, Some(&other)), None, "the local provider is unknown");
        assert!(ProviderMismatch::of(Some(&provider("net", 26)), Some(&other)).is_some());
        let text = ProviderMismatch::of(Some(&ours), Some(&other)).unwrap().to_string();
        let words =
            "is net (protocol 25, addresses 2), the provider of this node is tcp (protocol 25, ";
        assert!(text.contains(words) && text.ends_with("choose one for both"), "{text}");
    }
}
