//! Replication: messages of topics are sent to other nodes and received from them, on rings.
//!
//! In the order of the data:
//!
//! - `routing` decides which topics are sent to which nodes; services exchange `control_messages`
//!   about it (`peers` delivers them);
//! - `source` gives the messages of a topic, `sink` publishes the messages of another node;
//! - `outbound` writes a topic's messages, in order, once to each node; `inbound` copies the
//!   messages of one node into the memory that the sink allocates. Both are plain state machines,
//!   tested in pairs in simulated time;
//! - `transport` is a port with its queue and registered memory; a `worker` is a thread that owns a
//!   transport and all topics on it.
//!
//! `outbound`, `inbound`, `transport` and `worker` know a topic by the traits [`Source`] and
//! [`Sink`] only. The `Replicator` joins all of them; it belongs to the service's thread.

mod connection_messages;
mod control_messages;
mod inbound;
mod message_header;
mod outbound;
mod provider_check;
mod report;
mod retry_backoff;
mod routing;
#[cfg(test)]
mod simulated_tests;
mod sink;
mod source;
#[cfg(test)]
mod tests;
mod traits;
mod transport;
mod worker;
mod workers;

pub use connection_messages::{ConnectionMessage, Provider, Side, TopicParameters};
#[cfg(test)]
pub(crate) use connection_messages::{MAX_LANES, MAX_REASON_LENGTH, fit_addresses};
pub use inbound::InboundCounters;
pub use message_header::{
    HEADER_LENGTH, MAX_PAYLOAD_LENGTH, MAX_PREFIX_LENGTH, MessageHeader, POSITION_LIMIT,
    RingMessageKind, TRAILER_LENGTH,
};
pub use outbound::DestinationCounters;
pub use worker::{
    Announcer, Command, Counters, TopicKey, TopicOptions, Worker, WorkerEvent, WorkerOptions,
    Workers,
};

#[cfg(any(test, feature = "fuzzing"))]
pub use control_messages::reencode_control_message;
pub(crate) use retry_backoff::RetryBackoff;
pub(crate) use routing::reconcile::{is_owed, release_retained};
pub use traits::*;

pub use crate::pool::Metadata;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use ipc::{Caller, MappedWords, Participant, ParticipantTable};

use crate::error::Result;
pub use crate::ids::NodeId;
use crate::lock::lock;
use crate::log_limit::LogLimit;
use crate::network_options::NetworkOptions;
use crate::node_segment::PublishDoorbell;
use crate::peers::{Interest, InterestChange, PeerEvent, Peers, SessionId};
use crate::pool::{Pool, PoolId};
use crate::replication::report::PolledCounters;
use crate::replication::routing::incompatible_topics::IncompatibleTopics;
use crate::replication::routing::reconcile::{State, TopicReplication};
use crate::replication::routing::seen_nodes::SeenNodes;
use crate::replication::routing::work_queue::ReconcileQueue;
use crate::replication::routing::{RoutingPlan, of_topic};
use crate::replication::sink::received_topics::{DrainingSink, ReceivedTopic};
use crate::replication::source::publish_listener::PublishListener;
use crate::replication::source::start_sequences::StartSequences;
use crate::replication::workers::{StartWorkers, WorkerStart};
use crate::topic::Topic;
use crate::wake::WakeFd;

/// Interval of polling for changes that send no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Events of other nodes handled in one turn.
const EVENTS_PER_TURN: usize = 64;
/// Timeout for a lock that a living process holds. The service's thread has other work, so the
/// operation is retried later.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);

/// Held while the arrivals of a dead writer are repaired: one repair at a time.
pub(crate) type ArrivalRepairLock = Arc<Mutex<()>>;

/// Topics whose messages from other nodes wait for capacity.
pub(crate) type WaitingArrivals = Arc<Mutex<BTreeSet<u32>>>;

/// What service, replication and peers of one node share.
#[derive(Debug)]
pub(crate) struct ServiceContext {
    pub(crate) me: Participant,
    pub(crate) role: Participant,
    pub(crate) roster: Arc<ParticipantTable<MappedWords>>,
    /// Requests to grow pools; `bell` wakes the thread that grows them.
    pub(crate) growth: Sender<(PoolId, u64)>,
    pub(crate) bell: Arc<WakeFd>,
    pub(crate) waiting_arrivals: WaitingArrivals,
    pub(crate) arrival_repair_lock: ArrivalRepairLock,
}

impl ServiceContext {
    fn caller(&self) -> Caller<'_> {
        Caller { timeout: LOCK_TIMEOUT, ..Caller::new(self.me, &*self.roster) }
    }

    fn request_growth(&self, pool: PoolId, bytes: u64) {
        // If the queue is full, a later call requests it again.
        let _ = self.growth.try_send((pool, bytes));
        self.bell.ring();
    }

    /// Messages of another node wait for capacity: the service has to find what blocks them.
    fn note_waiting_arrivals(&self, number: u32) {
        lock(&self.waiting_arrivals).insert(number);
        self.bell.ring();
    }
}

/// A topic of this node, as the service sees it.
#[derive(Debug, Clone)]
pub(crate) struct LocalTopic {
    pub(crate) topic: Arc<Topic>,
    pub(crate) local: Arc<Pool>,
    pub(crate) inbound: Arc<Pool>,
    pub(crate) publishes: bool,
    pub(crate) subscribes: bool,
}

impl LocalTopic {
    fn is_same_as(&self, others: &Self) -> bool {
        let activity = |topic: &Self| (topic.publishes, topic.subscribes);
        Arc::ptr_eq(&self.topic, &others.topic) && activity(self) == activity(others)
    }
}

/// Another node with a session.
struct ConnectedNode {
    session: SessionId,
    /// The address of this node that the other node reaches.
    local_address: IpAddr,
    /// Its provider; None until its provider message arrives.
    provider: Option<Provider>,
    /// How often its provider changed.
    changes: u32,
}

pub(crate) struct Replicator {
    options: NetworkOptions,
    service_context: Arc<ServiceContext>,
    peers: Peers,
    plan: RoutingPlan,
    reconcile_queue: ReconcileQueue,
    /// How often a topic was reconciled.
    #[cfg(test)]
    reconciliations: u64,
    incompatible_topics: IncompatibleTopics,
    /// The provider of this node, or the last one.
    provider: Option<Provider>,
    publish_listener: PublishListener,
    nodes: BTreeMap<NodeId, ConnectedNode>,
    seen_nodes: SeenNodes,
    /// None until another node connects, and while starting workers fails.
    workers: Option<Workers>,
    /// The address of the workers.
    local: Option<IpAddr>,
    worker_backoff: Option<RetryBackoff>,
    /// Workers that are being started.
    worker_start: Option<WorkerStart>,
    start_workers: StartWorkers,
    /// Nodes that have not received the interests of this node yet.
    unannounced_nodes: Vec<(NodeId, SessionId)>,
    /// Why the last start of workers failed.
    start_error: Option<String>,
    /// Threads that end workers.
    draining_workers: Vec<JoinHandle<()>>,
    /// Last counters of each worker.
    worker_counters: Vec<PolledCounters>,
    names: BTreeMap<String, u32>,
    replicated_topics: BTreeMap<u32, TopicReplication>,
    received: BTreeMap<(u32, NodeId), ReceivedTopic>,
    /// Start sequences announced for topics that are about to be received.
    announced_starts: BTreeMap<(u32, NodeId), StartSequences>,
    /// Sinks that are being drained.
    draining_sinks: Vec<DrainingSink>,
    /// Work remains that no notification announces: retry soon.
    has_more_work: bool,
    began: Instant,
    /// Limits log lines that other nodes can cause.
    log: LogLimit,
}

fn key(number: u32) -> TopicKey {
    TopicKey(u64::from(number))
}

impl Replicator {
    /// Makes this node visible to other nodes; the first [`set_topics`](Self::set_topics) sends its
    /// interests. A caller that retries logs the [insecurity
    /// warning](NetworkOptions::say_if_insecure) itself, once.
    pub(crate) fn start(
        options: &NetworkOptions,
        identity: NodeId,
        label: &str,
        service_context: Arc<ServiceContext>,
        bell: Arc<PublishDoorbell>,
    ) -> Result<Self> {
        let peers = Peers::start(options, identity, label)?;
        Ok(Self {
            plan: RoutingPlan::new(options.lost_after),
            reconcile_queue: ReconcileQueue::new(Instant::now()),
            #[cfg(test)]
            reconciliations: 0,
            incompatible_topics: IncompatibleTopics::default(),
            provider: None,
            publish_listener: PublishListener::start(bell, Arc::clone(&service_context.bell))?,
            options: options.clone(),
            service_context,
            peers,
            nodes: BTreeMap::new(),
            seen_nodes: SeenNodes::default(),
            workers: None,
            local: None,
            worker_backoff: None,
            worker_start: None,
            start_workers: Workers::start,
            unannounced_nodes: Vec::new(),
            start_error: None,
            draining_workers: Vec::new(),
            worker_counters: Vec::new(),
            names: BTreeMap::new(),
            replicated_topics: BTreeMap::new(),
            received: BTreeMap::new(),
            announced_starts: BTreeMap::new(),
            draining_sinks: Vec::new(),
            has_more_work: false,
            began: Instant::now(),
            log: LogLimit::new(),
        })
    }

    /// Whether one more log line that another node causes is allowed.
    fn may_log(&mut self, now: Instant) -> bool {
        self.log.allows(now.saturating_duration_since(self.began))
    }

    /// Whether one more log line about a connected or disconnected node is allowed.
    fn may_log_node(&mut self, now: Instant, node: NodeId) -> bool {
        let since = now.saturating_duration_since(self.began);
        let is_connected = |node: &NodeId| self.nodes.contains_key(node);
        self.seen_nodes.may_log(node, since, is_connected) && self.log.allows(since)
    }

    /// The options of the node's next service: the port and name that other nodes know.
    pub(crate) fn successor_options(&self, label: &str) -> NetworkOptions {
        NetworkOptions {
            listen: self.peers.listens().or(self.options.listen),
            name: self.options.name(label).to_owned(),
            ..self.options.clone()
        }
    }

    /// Descriptors that become readable when there is work.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let workers = self.workers.iter().flat_map(Workers::all);
        std::iter::once(self.peers.descriptor()).chain(workers.map(Worker::wake_descriptor))
    }

    /// How long the next turn may be delayed.
    pub(crate) fn max_poll_timeout(&self, now: Instant) -> Option<Duration> {
        let polls = self.has_more_work || !self.draining_sinks.is_empty();
        let workers =
            self.worker_backoff.filter(|backoff| self.workers.is_none() && !backoff.is_over(now));
        let deadlines = self.reconcile_queue.deadline(now, POLL_INTERVAL).into_iter();
        let deadline = deadlines
            .chain(workers.map(|backoff| backoff.until()))
            .chain(polls.then_some(now + POLL_INTERVAL))
            .chain(self.start_deadline())
            .min();
        deadline.map(|when| when.saturating_duration_since(now))
    }

    /// Publishers or subscribers of these topics have changed, perhaps only briefly.
    pub(crate) fn topics_changed(&mut self, topics: &BTreeSet<u32>) {
        self.reconcile_queue.enqueue_all(topics.iter().copied());
    }

    /// Sets the current topics of this node.
    pub(crate) fn set_topics(&mut self, topics: BTreeMap<String, LocalTopic>) {
        self.names = topics.iter().map(|(name, it)| (name.clone(), it.topic.number())).collect();
        let interests = topics.iter().map(|(name, local)| Interest {
            topic: name.clone(),
            publishes: local.publishes,
            subscribes: local.subscribes,
            settings: *local.topic.settings(),
        });
        let interests: Vec<_> = interests.filter(|it| it.publishes || it.subscribes).collect();
        let present: BTreeSet<_> = topics.values().map(|local| local.topic.number()).collect();
        for (number, replicated) in &mut self.replicated_topics {
            if !present.contains(number) && !std::mem::replace(&mut replicated.is_gone, true) {
                self.incompatible_topics.local_topic_changed(replicated.local_topic.topic.name());
                self.reconcile_queue.enqueue(*number);
            }
        }
        for local in topics.into_values() {
            let number = local.topic.number();
            let is_as_before = |replicated: &TopicReplication| {
                !replicated.is_gone && replicated.local_topic.is_same_as(&local)
            };
            if self.replicated_topics.get(&number).is_some_and(is_as_before) {
                continue;
            }
            self.incompatible_topics.local_topic_changed(local.topic.name());
            match self.replicated_topics.get_mut(&number) {
                Some(replicated) => (replicated.local_topic, replicated.is_gone) = (local, false),
                None => drop(self.replicated_topics.insert(number, TopicReplication::new(local))),
            }
            self.reconcile_queue.enqueue(number);
        }
        self.stop_receiving_unwanted();
        tracing::trace!(?interests, "interests sent to other nodes");
        if let Err(error) = self.peers.set_interests(interests) {
            tracing::warn!(%error, "cannot send interests to other nodes");
        }
        self.check_compatibility();
        self.update(Instant::now());
    }

    /// Whether messages of the topic are or will be retained for other nodes.
    pub(crate) fn holds(&self, number: u32) -> bool {
        self.replicated_topics.get(&number).is_some_and(TopicReplication::holds)
    }

    /// Whether a subscriber of this node blocks messages of other nodes.
    pub(crate) fn has_waiters(&self, number: u32) -> bool {
        let Some(replicated) = self.replicated_topics.get(&number) else { return false };
        let holds = replicated.local_topic.topic.refusal_window();
        let mut of_topic = self.received.range(of_topic(number));
        of_topic.any(|(_, received)| received.room_wait.is_waiting(holds))
    }

    /// Handles all pending events.
    pub(crate) fn turn(&mut self) {
        let now = Instant::now();
        self.has_more_work = false;
        for _ in 0..EVENTS_PER_TURN {
            // Remaining events keep the descriptor readable.
            let Some(event) = self.peers.next_event() else { break };
            self.handle_peer_event(now, event);
        }
        self.check_compatibility();
        self.handle_worker_events(now);
        self.manage_workers(now);
        self.reap_sinks();
        self.send_idle_publishers();
        self.update(now);
    }

    fn is_session(&self, node: NodeId, session: SessionId) -> bool {
        self.nodes.get(&node).is_some_and(|remote| remote.session == session)
    }

    fn handle_peer_event(&mut self, now: Instant, event: PeerEvent) {
        tracing::trace!(?event, "from another node");
        match event {
            PeerEvent::Connected { node, session, instance, label, local_address } => {
                if self.may_log_node(now, node) {
                    tracing::info!(%node, label, "node connected");
                }
                let remote = ConnectedNode {
                    session,
                    local_address: local_address.ip(),
                    provider: None,
                    changes: 0,
                };
                self.nodes.insert(node, remote);
                let is_connected = |node: &NodeId| self.nodes.contains_key(node);
                self.seen_nodes.set_label(node, label, is_connected);
                if self.seen_nodes.returns(node, instance, is_connected) {
                    self.renew_connections(node);
                }
                self.plan.node_appeared(now, node);
                self.enqueue_all();
                self.incompatible_topics.forget(node);
                self.send_provider(node);
                self.unannounced_nodes.push((node, session));
                // Starting workers announces to all nodes if the provider changed.
                self.manage_workers(now);
                self.announce_unless_starting();
            }
            PeerEvent::Interests { node, session, changes } if self.is_session(node, session) => {
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
            PeerEvent::ControlMessage { node, session, bytes }
                if self.is_session(node, session) =>
            {
                self.handle_control_message(node, &bytes);
            }
            PeerEvent::Disconnected { node, session, reason } if self.is_session(node, session) => {
                if self.may_log_node(now, node) {
                    let label = self.seen_nodes.label(node);
                    tracing::info!(%node, label, %reason, "node disconnected");
                }
                self.nodes.remove(&node);
                self.unannounced_nodes.retain(|(other, _)| *other != node);
                self.plan.node_vanished(now, node);
                self.reconcile_queue.enqueue_all(self.plan.topics_of(node));
                self.incompatible_topics.forget(node);
                for replicated in self.replicated_topics.values_mut() {
                    replicated.reported.forget(node);
                    if let State::Replicating(replication) = &mut replicated.state {
                        replication.node_lost(node);
                    }
                }
                self.lose_node(node);
                self.announced_starts.retain(|(_, from), _| *from != node);
                let of_node = self.received.keys().filter(|(_, from)| *from == node);
                for (number, node) in of_node.copied().collect::<Vec<_>>() {
                    self.stop_receiving(number, node);
                }
            }
            // Events of an earlier session.
            PeerEvent::Interests { .. }
            | PeerEvent::ControlMessage { .. }
            | PeerEvent::Disconnected { .. } => {}
        }
    }

    fn local_topic(&self, name: &str) -> Option<&LocalTopic> {
        self.replicated_topics.get(self.names.get(name)?).map(|replicated| &replicated.local_topic)
    }

    /// Checks compatibility after topics here or interests of other nodes may have changed.
    fn check_compatibility(&mut self) {
        let Self { replicated_topics, names, incompatible_topics, seen_nodes, .. } = self;
        incompatible_topics.check(
            |name| replicated_topics.get(names.get(name)?)?.local(),
            |node| seen_nodes.label(node),
        );
    }

    /// Enqueues all topics after a change that concerns all of them.
    fn enqueue_all(&mut self) {
        self.reconcile_queue.enqueue_all(self.replicated_topics.keys().copied());
    }

    /// Reconciles all topics that are due.
    fn update(&mut self, now: Instant) {
        for number in self.reconcile_queue.take(now, &self.replicated_topics) {
            self.reconcile(now, number);
        }
    }
}

impl Drop for Replicator {
    fn drop(&mut self) {
        // Workers end first: their sources and sinks use participants of this
        // service.
        self.workers = None;
        if let Some(worker_start) = self.worker_start.take() {
            worker_start.end();
        }
        for draining_worker in self.draining_workers.drain(..) {
            if draining_worker.join().is_err() {
                tracing::error!("a thread that ended workers panicked");
            }
        }
    }
}
