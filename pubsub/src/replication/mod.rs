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
//! [`Sink`] only. The `Replicator` belongs to the service's thread. It composes `remote_nodes`,
//! `routing`, `worker_pool` and `received_topics`: each gets the others that it uses as arguments,
//! and returns what concerns the rest.

mod connection_messages;
mod control_messages;
mod inbound;
mod message_header;
mod outbound;
mod probe;
mod received_topics;
mod remote_nodes;
mod report_rows;
mod retry_schedule;
mod routing;
#[cfg(test)]
mod simulated_tests;
mod sink;
mod slab;
mod source;
#[cfg(test)]
mod tests;
mod traits;
mod transport;
mod worker;
mod worker_pool;
mod workers;

pub use connection_messages::{ConnectionMessage, DirectWriter, Provider, Side, TopicParameters};
#[cfg(test)]
pub(crate) use connection_messages::{MAX_LANES, MAX_REASON_LENGTH, fit_addresses};
pub use inbound::InboundCounters;
pub use message_header::{MAX_PAYLOAD_LENGTH, MAX_PREFIX_LENGTH, MessageHeader};
pub use outbound::DestinationCounters;
use threads::lock;
pub use worker::{
    Announcer, Command, Counters, TopicKey, TopicOptions, Worker, WorkerEvent, WorkerOptions,
};
pub use workers::Workers;

#[cfg(any(test, feature = "fuzzing"))]
pub use control_messages::reencode_control_message;
pub(crate) use retry_schedule::RetrySchedule;
pub(crate) use routing::reconcile::{is_owed, release_retained};
pub use traits::*;

pub use crate::pool::Metadata;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use ipc::{Caller, MappedWords, Participant, ParticipantTable};

use self::control_messages::ControlMessage;
use self::received_topics::ReceivedTopics;
use self::remote_nodes::RemoteNodes;
use self::routing::Routing;
use self::source::lost_publishers;
use self::source::publish_listener::PublishListener;
use self::worker_pool::{PoolEvent, WorkerPool};
use crate::error::{Error, Result};
pub use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::node_segment::{NodeSegment, PublishDoorbell};
use crate::peers::{PeerEvent, Peers};
use crate::pool::{GrowthRequest, Pool};
use crate::topic::Topic;
use crate::wake::WakeFd;

/// Interval of polling for changes that send no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
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
    pub(crate) node_segment: Arc<NodeSegment>,
    pub(crate) participants: Arc<ParticipantTable<MappedWords>>,
    /// Requests to grow pools; `bell` wakes the thread that grows them.
    pub(crate) growth: Sender<GrowthRequest>,
    pub(crate) bell: Arc<WakeFd>,
    pub(crate) waiting_arrivals: WaitingArrivals,
    pub(crate) arrival_repair_lock: ArrivalRepairLock,
}

impl ServiceContext {
    fn caller(&self) -> Caller<'_> {
        Caller { timeout: LOCK_TIMEOUT, ..Caller::new(self.me, &*self.participants) }
    }

    fn request_growth(&self, request: GrowthRequest) {
        // If the queue is full, a later call requests it again.
        let _ = self.growth.try_send(request);
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

/// A reading of both clocks, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClockReading {
    monotonic: u64,
    realtime: u64,
}

/// Result of one turn of a topic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Something moved: there may be more.
    has_moved: bool,
    /// A device copies; its end sends no notification.
    is_copying: bool,
    /// A retry is needed without a notification: the sink or the provider's queue is full.
    is_waiting: bool,
}

/// Why a turn of a topic failed.
#[derive(Debug)]
pub(crate) enum TurnFailure {
    /// The connection to a node: a new one may succeed.
    Connection(Error),
    /// The source, the sink, or a device.
    Topic(Error),
    /// The probe of the ring, with the cause.
    Probe(String),
}

impl From<Error> for TurnFailure {
    fn from(error: Error) -> Self {
        Self::Topic(error)
    }
}

/// Positions of a ring, in its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingProgress {
    /// End of the written bytes.
    tail: u64,
    /// Up to here the provider has completed the writes.
    left: u64,
    /// Up to here the reader has acknowledged.
    read: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct OutboundOptions {
    /// Bytes of a staged piece.
    piece: u64,
    /// Slots that the topic may use.
    slots: usize,
    /// Messages retained for lagging destinations; None: all.
    max_retained: Option<usize>,
    /// Timeout of a device's copy and of a provider's completion, in nanoseconds.
    timeout: u64,
}

pub(crate) struct Replicator {
    // Workers end first: their sources and sinks use participants of this service.
    worker_pool: WorkerPool,
    options: NetworkOptions,
    remote_nodes: RemoteNodes,
    routing: Routing,
    received_topics: ReceivedTopics,
    /// Work remains that no notification announces: retry soon.
    has_more_work: bool,
}

fn key(number: u32) -> TopicKey {
    TopicKey(u64::from(number))
}

fn number(key: TopicKey) -> u32 {
    key.0 as u32
}

impl Replicator {
    /// Makes this node visible to other nodes; the first [`set_topics`](Self::set_topics) sends its
    /// interests. A caller that retries logs the [insecurity
    /// warning](NetworkOptions::warn_if_insecure) itself, once.
    pub(crate) fn start(
        options: &NetworkOptions,
        identity: NodeId,
        label: &str,
        service_context: Arc<ServiceContext>,
        bell: Arc<PublishDoorbell>,
    ) -> Result<Self> {
        let remote_nodes = RemoteNodes::new(Peers::start(options, identity, label)?);
        let publish_listener = PublishListener::start(bell, Arc::clone(&service_context.bell))?;
        Ok(Self {
            worker_pool: WorkerPool::new(Arc::clone(&service_context.bell)),
            options: options.clone(),
            remote_nodes,
            routing: Routing::new(
                Arc::clone(&service_context),
                options.lost_after,
                publish_listener,
            ),
            received_topics: ReceivedTopics::new(service_context),
            has_more_work: false,
        })
    }

    /// The options of the node's next service: the port and name that other nodes know.
    pub(crate) fn successor_options(&self, label: &str) -> NetworkOptions {
        NetworkOptions {
            listen: self.remote_nodes.peers().listens().or(self.options.listen),
            name: self.options.name(label).to_owned(),
            ..self.options.clone()
        }
    }

    /// Descriptors that become readable when there is work.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let workers = self.worker_pool.all().map(Worker::wake_descriptor);
        std::iter::once(self.remote_nodes.peers().descriptor()).chain(workers)
    }

    /// How long the next turn may be delayed.
    pub(crate) fn max_poll_timeout(&self, now: Instant) -> Option<Duration> {
        let polls = self.has_more_work || self.received_topics.is_draining();
        let deadlines = [
            self.routing.deadline(now),
            self.worker_pool.deadline(now),
            polls.then_some(now + POLL_INTERVAL),
        ];
        let deadline = deadlines.into_iter().flatten().min();
        deadline.map(|when| when.saturating_duration_since(now))
    }

    /// Publishers or subscribers of these topics have changed, perhaps only briefly.
    pub(crate) fn topics_changed(&mut self, topics: &BTreeSet<u32>) {
        self.routing.enqueue(topics.iter().copied());
    }

    pub(crate) fn set_topics(&mut self, topics: BTreeMap<String, LocalTopic>) {
        // First: the next subscription is another one.
        topics.values().filter(|it| !it.subscribes).for_each(|it| it.topic.end_accounts());
        self.routing.set_topics(Instant::now(), topics);
        let is_wanted = |number| self.routing.is_subscribed(number);
        self.received_topics.stop_unwanted(is_wanted, &self.remote_nodes, &self.worker_pool);
        self.send_interests();
        self.routing.check_compatibility(&self.remote_nodes);
        self.routing.update(Instant::now(), &mut self.remote_nodes, &mut self.worker_pool);
    }

    fn send_interests(&mut self) {
        let interests = self.routing.interests();
        self.routing.tell_last_sequences(&interests, &self.remote_nodes);
        tracing::trace!(?interests, "interests sent to other nodes");
        if let Err(error) = self.remote_nodes.peers().set_interests(interests) {
            tracing::warn!(%error, "cannot send interests to other nodes");
        }
    }

    /// Returns true if messages of the topic are or will be retained for other nodes.
    pub(crate) fn holds(&self, number: u32) -> bool {
        self.routing.holds(number)
    }

    /// Returns true if a subscriber of this node blocks messages of other nodes.
    pub(crate) fn has_waiters(&self, number: u32) -> bool {
        self.received_topics.has_waiters(number)
    }

    /// How long a destination may take nothing while publishers wait for it.
    pub(crate) fn stall_timeout(&self, number: u32) -> Duration {
        self.routing.stall_timeout(number)
    }

    /// Retained messages of a topic have blocked publishers for as long as is allowed.
    pub(crate) fn backlog_blocks_publishers(&mut self, number: u32) {
        self.routing.backlog_blocks_publishers(number, &self.remote_nodes, &self.worker_pool);
    }

    /// Handles all pending events.
    pub(crate) fn turn(&mut self) {
        let now = Instant::now();
        for _ in 0..EVENTS_PER_TURN {
            // Remaining events keep the descriptor readable.
            let Some(event) = self.remote_nodes.peers().next_event() else { break };
            self.handle_peer_event(now, event);
        }
        self.routing.check_compatibility(&self.remote_nodes);
        self.handle_worker_events(now);
        self.manage_workers(now);
        self.received_topics.reap_sinks();
        self.routing.send_idle_publishers(&self.remote_nodes);
        self.routing.update(now, &mut self.remote_nodes, &mut self.worker_pool);
        if self.routing.has_delivered() {
            self.send_interests();
        }
    }

    fn handle_peer_event(&mut self, now: Instant, event: PeerEvent) {
        tracing::trace!(?event, "from another node");
        let is_session = |node, session| self.remote_nodes.is_session(node, session);
        match event {
            PeerEvent::Connected { node, session, instance, label, local_address } => {
                let session = (node, session, instance);
                // A lost session is back. The system retransmits data in flight on the workers'
                // connections only after a delay that grows with the outage: new connections start
                // at once.
                if self.remote_nodes.connect(now, session, label, local_address.ip()) {
                    self.worker_pool.send_to_all(|| Command::NodeReturned(node));
                }
                self.routing.node_appeared(now, node);
                // Starting workers announces to all nodes if the provider changed.
                self.manage_workers(now);
                // A node that knows that its messages cannot be sent here retains none.
                if !self.worker_pool.is_starting() {
                    self.remote_nodes.announce_interests();
                }
            }
            PeerEvent::Interests { node, session, changes } if is_session(node, session) => {
                self.routing.interests_changed(now, node, changes, &self.remote_nodes);
            }
            PeerEvent::ControlMessage { node, session, bytes } if is_session(node, session) => {
                self.handle_control_message(now, node, &bytes);
            }
            PeerEvent::Disconnected { node, session, reason } if is_session(node, session) => {
                self.remote_nodes.disconnect(now, node, &reason);
                self.routing.node_vanished(now, node);
                // Before it connects again.
                self.worker_pool.send_to_all(|| Command::NodeLost(node));
                self.received_topics.node_lost(node, &self.worker_pool);
            }
            // Events of an earlier session.
            PeerEvent::Interests { .. }
            | PeerEvent::ControlMessage { .. }
            | PeerEvent::Disconnected { .. } => {}
        }
    }

    fn handle_control_message(&mut self, now: Instant, node: NodeId, bytes: &[u8]) {
        let subscribed = |topic: &str| {
            let local = self.routing.topic_named(topic).filter(|local| local.subscribes);
            local.map(|local| &*local.topic)
        };
        match ControlMessage::decode(bytes) {
            Ok(ControlMessage::Provider(theirs)) => {
                if self.remote_nodes.set_remote_provider(node, theirs) {
                    self.routing.compare_providers(node, &mut self.remote_nodes);
                }
            }
            Ok(ControlMessage::ConnectionMessage { topic, message }) => {
                self.received_topics.handle_connection_message(
                    node,
                    (&topic, self.routing.topic_named(&topic)),
                    message,
                    &self.remote_nodes,
                    &mut self.worker_pool,
                );
            }
            Ok(ControlMessage::StartSequences(all)) => {
                for one in &all {
                    if let Some(topic) = subscribed(one.topic()) {
                        one.begin(node, topic);
                    }
                }
            }
            Ok(ControlMessage::LastSequences { topic, last }) => {
                if let Some(topic) = subscribed(&topic) {
                    last.record(node, topic);
                }
            }
            Ok(ControlMessage::PublisherLost { topic, publishers }) => {
                if let Some(topic) = subscribed(&topic) {
                    lost_publishers::record(topic, node, publishers);
                }
            }
            Err(error) if self.remote_nodes.may_log(now) => {
                tracing::warn!(%error, %node, "decoding a control message failed");
            }
            Err(_) => {}
        }
    }

    /// Starts, restarts or ends workers, as the connected nodes need them.
    fn manage_workers(&mut self, now: Instant) {
        let local = self.options.source.or_else(|| self.remote_nodes.local_address());
        let mut event = self.worker_pool.manage(now, &self.options, local);
        if event == Some(PoolEvent::Drained) {
            self.workers_stopped();
            event = self.worker_pool.manage(now, &self.options, local);
        }
        if event.is_some() {
            self.routing.set_can_send(self.worker_pool.is_running());
        }
        if event == Some(PoolEvent::StartSettled) {
            if let Some(provider) = self.worker_pool.provider() {
                for node in self.remote_nodes.set_provider(provider) {
                    self.routing.compare_providers(node, &mut self.remote_nodes);
                }
            }
            self.remote_nodes.announce_interests();
            self.routing.enqueue_all();
        }
    }

    fn workers_stopped(&mut self) {
        self.routing.workers_stopped();
        self.received_topics.workers_stopped(&self.remote_nodes);
    }

    fn handle_worker_events(&mut self, now: Instant) {
        let (events, has_more, has_ended) = self.worker_pool.take_events();
        self.has_more_work = has_more;
        for event in events {
            let ended = self.routing.handle_worker_event(now, event, &self.remote_nodes);
            if let Some((number, node)) = ended {
                self.received_topics.end_sink(number, node, false, &self.worker_pool);
            }
        }
        if has_ended {
            self.worker_pool.replace_ended(now);
            self.workers_stopped();
            self.routing.set_can_send(false);
        }
    }
}

impl NetworkOptions {
    /// Refuses a [provider](Self::provider) that is not available or lacks a required capability,
    /// and a machine without a suitable one. The [source](Self::source) address is checked, if set;
    /// otherwise any address suffices. The actual address is known only once another node connects,
    /// so replication may still fail: then the service logs and
    /// [reports](crate::Row::ReplicationError) the cause. A service with such options serves its
    /// node all the same, and retries.
    ///
    /// # Errors
    /// Of the kind [`NoProvider`](crate::ErrorKind::NoProvider), with the reason.
    ///
    /// ```
    /// use pubsub::{ErrorKind, NetworkOptions};
    /// let provider = Some("carrier-pigeon".into());
    /// let network = NetworkOptions { provider, ..NetworkOptions::default() };
    /// let error = network.check_provider().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::NoProvider);
    /// assert!(error.detail().contains("carrier-pigeon"));
    /// ```
    pub fn check_provider(&self) -> Result<()> {
        worker::choose_provider(&self.policy()?, self.source).map(drop)
    }
}
