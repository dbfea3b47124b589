//! The topics of this node, and which of them go to other nodes: the [`plan`] decides, and
//! [`reconcile`] follows it.

pub(in crate::replication) mod incompatible_topics;
pub(in crate::replication) mod plan;
pub(in crate::replication) mod provider_mismatch;
pub(in crate::replication) mod reconcile;
pub(in crate::replication) mod work_queue;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::incompatible_topics::IncompatibleTopics;
use self::plan::RoutingPlan;
use self::reconcile::TopicReplication;
use self::work_queue::ReconcileQueue;
use crate::error::Error;
use crate::peers::{Interest, InterestChange, NodeId};
use crate::replication::remote_nodes::RemoteNodes;
use crate::replication::remote_nodes::seen_nodes::SeenNodes;
use crate::replication::source::publish_listener::PublishListener;
use crate::replication::workers::WorkerPool;
use crate::replication::{Command, LocalTopic, POLL_INTERVAL, ServiceContext, Side, key};
use crate::report::Row;
use crate::settings::SharedSettings;

pub(in crate::replication) struct Routing {
    service_context: Arc<ServiceContext>,
    plan: RoutingPlan,
    reconcile_queue: ReconcileQueue,
    /// The numbers of the topics of this node.
    names: BTreeMap<String, u32>,
    /// These topics, and removed ones whose replication has not ended.
    replicated_topics: BTreeMap<u32, TopicReplication>,
    incompatible_topics: IncompatibleTopics,
    publish_listener: PublishListener,
    /// How often a topic was reconciled.
    #[cfg(test)]
    reconciliations: u64,
}

impl Routing {
    pub(super) fn new(
        service_context: Arc<ServiceContext>,
        grace: Duration,
        publish_listener: PublishListener,
    ) -> Self {
        Self {
            service_context,
            plan: RoutingPlan::new(grace),
            reconcile_queue: ReconcileQueue::new(Instant::now()),
            names: BTreeMap::new(),
            replicated_topics: BTreeMap::new(),
            incompatible_topics: IncompatibleTopics::default(),
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

    /// Whether messages of the topic are or will be retained for other nodes.
    pub(super) fn holds(&self, number: u32) -> bool {
        self.replicated_topics.get(&number).is_some_and(TopicReplication::holds)
    }

    /// The settings of a topic at the connected nodes.
    pub(super) fn remote_settings(&self, topic: &str) -> Option<SharedSettings> {
        self.incompatible_topics.remote_settings(topic)
    }

    /// Sets the current topics of this node. Returns its interests in them.
    pub(super) fn set_topics(&mut self, topics: BTreeMap<String, LocalTopic>) -> Vec<Interest> {
        self.names = topics.iter().map(|(name, it)| (name.clone(), it.topic.number())).collect();
        let interests = topics.iter().map(|(name, local)| Interest {
            topic: name.clone(),
            publishes: local.publishes,
            subscribes: local.subscribes,
            settings: *local.topic.settings(),
        });
        let interests = interests.filter(|it| it.publishes || it.subscribes).collect();
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
                    self.replicated_topics.insert(topic.number(), TopicReplication::new(local));
                    true
                }
            };
            if is_changed {
                self.incompatible_topics.local_topic_changed(topic.name());
                self.reconcile_queue.enqueue(topic.number());
            }
        }
        interests
    }

    /// Whether anything can be sent.
    pub(super) fn set_can_send(&mut self, can_send: bool) {
        self.plan.set_can_send(can_send);
    }

    pub(super) fn node_appeared(&mut self, now: Instant, node: NodeId) {
        self.plan.node_appeared(now, node);
        self.incompatible_topics.forget(node);
        self.enqueue_all();
    }

    pub(super) fn node_vanished(&mut self, now: Instant, node: NodeId) {
        self.plan.node_vanished(now, node);
        self.incompatible_topics.forget(node);
        self.reconcile_queue.enqueue_all(self.plan.topics_of(node));
        self.replicated_topics.values_mut().for_each(|replicated| replicated.node_lost(node));
    }

    /// The interests of a node changed.
    pub(super) fn interests_changed(
        &mut self,
        now: Instant,
        node: NodeId,
        changes: Vec<InterestChange>,
    ) {
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
                    let settings = it.subscribes.then_some(it.settings);
                    self.plan.set_subscription(node, &it.topic, settings);
                    self.incompatible_topics.set_interest(node, it);
                }
                InterestChange::Removed(topic) => {
                    self.plan.set_subscription(node, &topic, None);
                    self.incompatible_topics.remove_interest(node, &topic);
                }
            }
        }
        if self.plan.interests_received(now, node) {
            self.reconcile_queue.enqueue_all(self.plan.topics_of(node));
        }
    }

    /// The workers end, and all sources with them.
    pub(super) fn workers_stopped(&mut self) {
        for (number, replicated) in &mut self.replicated_topics {
            self.publish_listener.stop_listening(*number);
            replicated.worker_stopped();
        }
        self.enqueue_all();
    }

    /// Messages of a topic flow to a node, or from it.
    pub(super) fn connected(&mut self, number: u32, (node, side): (NodeId, Side)) {
        if let Some(replicated) = self.replicated_topics.get(&number) {
            let topic = replicated.local_topic().topic.name();
            self.incompatible_topics.clear_failure(topic, (node, side));
        }
    }

    /// The connection to a destination broke, though its node is connected.
    pub(super) fn connection_broke(&mut self, now: Instant, number: u32, node: NodeId) {
        self.plan.connection_broke(now, number, node);
        self.reconcile_queue.enqueue(number);
    }

    /// A topic cannot be sent to a node, or received from it. A failure of a disconnected node is
    /// not recorded: only its return would clear it.
    pub(super) fn failed(
        &mut self,
        number: u32,
        (node, side): (NodeId, Side),
        error: &Error,
        is_connected: bool,
    ) {
        if is_connected && let Some(replicated) = self.replicated_topics.get(&number) {
            let topic = replicated.local_topic().topic.name();
            self.incompatible_topics.record_failure(topic, (node, side), &error.to_string());
        }
        if side == Side::Writer {
            if is_connected {
                self.plan.mark_unsendable(number, node);
            }
            self.reconcile_queue.enqueue(number);
        }
    }

    /// The worker failed on a topic, and has ended its source.
    pub(super) fn source_failed(&mut self, now: Instant, number: u32) {
        // A publisher must not wait for messages that no worker takes.
        if let Some(replicated) = self.replicated_topics.get_mut(&number) {
            self.publish_listener.stop_listening(number);
            replicated.source_failed(now);
            self.reconcile_queue.enqueue(number);
        }
    }

    /// Retained messages of a topic have blocked publishers for as long as is allowed.
    pub(super) fn backlog_blocks_publishers(
        &mut self,
        number: u32,
        stall_timeout: Duration,
        remote_nodes: &RemoteNodes,
        worker_pool: &WorkerPool,
    ) {
        let Some(replicated) = self.replicated_topics.get(&number) else { return };
        if replicated.is_replicated() {
            // The worker knows which destinations lag.
            return worker_pool.tell(number, Command::ReportLagging(key(number)));
        }
        let nodes: Vec<_> = self.plan.destinations(number).map(|(node, _)| node).collect();
        for node in nodes {
            self.drop_lagging(Instant::now(), (number, node), stall_timeout, remote_nodes);
        }
    }

    /// A destination makes no progress, and publishers wait for it: it is dropped after a while.
    pub(super) fn drop_lagging(
        &mut self,
        now: Instant,
        (number, node): (u32, NodeId),
        stall_timeout: Duration,
        remote_nodes: &RemoteNodes,
    ) {
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
    }

    /// When to [update](Self::update) at the latest, without any event.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        self.reconcile_queue.deadline(now, POLL_INTERVAL)
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
}

#[cfg(test)]
impl Routing {
    pub(super) fn plan(&self) -> &RoutingPlan {
        &self.plan
    }

    pub(super) fn reconciliations(&self) -> u64 {
        self.reconciliations
    }
}
