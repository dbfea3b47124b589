//! The state of each replicated topic, and the next step towards the [plan](super::plan).
//!
//! Each pass derives the next step from the plan, from what was done so far, and from shared
//! memory, where an earlier service may have stopped at any point. A step that fails now is found
//! missing by the next pass.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};
use threads::RetryBackoff;

use crate::error::Result;
use crate::ids::NodeId;
use crate::pool::Pool;
use crate::replication::remote_nodes::seen_nodes::SeenNodes;
use crate::replication::routing::Routing;
use crate::replication::routing::incompatible_topics::LocalUse;
use crate::replication::routing::plan::{DestinationState, RoutedTopic, RoutingPlan};
use crate::replication::source::reported_sequences::ReportedSequences;
use crate::replication::source::{DeliveredPositions, TopicSource, lost_publishers};
use crate::replication::{
    Command, LocalTopic, POLL_INTERVAL, RemoteNodes, RetrySchedule, ServiceContext, TopicOptions,
    TopicParameters, WorkerPool, key,
};
use crate::settings::{Reliability, SharedLocation};
use crate::topic::Topic;

/// Backoff of a topic whose replication failed.
const RETRY_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(100), Duration::from_secs(60));

pub(super) struct TopicReplication {
    local_topic: LocalTopic,
    /// The service does not have it any more.
    is_gone: bool,
    state: State,
    /// Positions that the destinations have acknowledged.
    delivered: Arc<DeliveredPositions>,
    reported: ReportedSequences,
    backoff: Option<RetrySchedule>,
    /// Not replicated until the backoff ends, so that publishers do not wait.
    is_given_up: bool,
    /// The topic's destinations still have to be given up.
    gives_up_destinations: bool,
    has_logged_failure: bool,
}

enum State {
    /// Nothing is retained for other nodes.
    Idle,
    /// Messages may be retained, by an earlier service or by an ended source.
    Inherited,
    Replicating(Replicating),
    /// The ended source may still be running. The next subscriber in the role's name must not start
    /// before it ends.
    Stopping {
        source: Weak<AtomicBool>,
        /// The next source continues where this one stops.
        resumes: bool,
    },
}

/// A topic whose messages a worker sends.
struct Replicating {
    /// No message is sent before it is open.
    gate: Arc<AtomicBool>,
    /// Alive as long as the source.
    source: Weak<AtomicBool>,
    /// The destinations that the worker knows, and whether it has to connect to them.
    announced: BTreeMap<NodeId, bool>,
}

impl Replicating {
    /// A node disconnected: it needs a new connection.
    fn node_lost(&mut self, node: NodeId) {
        self.announced.entry(node).and_modify(|is_connected| *is_connected = false);
    }

    /// Tells the worker which destinations are new, and which have ended. True if there may be
    /// messages for new ones.
    fn update_destinations(
        &mut self,
        topic: &Topic,
        wanted: &BTreeMap<NodeId, DestinationState>,
        worker_pool: &WorkerPool,
    ) -> bool {
        let key = key(topic.number());
        let is_reliable = topic.settings().reliability == Reliability::Reliable;
        // An idle destination costs nothing yet. Once any message is sent, all destinations have to
        // be known.
        let is_open = self.gate.load(Ordering::Acquire) || !is_reliable;
        let mut has_new = false;
        for (node, state) in wanted {
            let connects = state.is_sending();
            let is_new = match self.announced.get(node) {
                None => is_open || *state != DestinationState::Idle,
                Some(is_connected) => connects && !is_connected,
            };
            if is_new {
                worker_pool.send(topic.number(), Command::AddDestination(key, *node));
                has_new = true;
                self.announced.insert(*node, connects);
            } else if !connects {
                self.node_lost(*node);
            }
        }
        self.announced.retain(|node, _| {
            let is_wanted = wanted.contains_key(node);
            if !is_wanted {
                worker_pool.send(topic.number(), Command::RemoveDestination(key, *node));
            }
            is_wanted
        });
        // The worker knows all destinations of retained messages: it may begin.
        if !is_reliable || wanted.values().any(|state| state.is_sending()) {
            has_new |= !self.gate.swap(true, Ordering::AcqRel);
        }
        has_new
    }
}

impl TopicReplication {
    /// The local use of the topic, unless it was removed.
    pub(super) fn local(&self) -> Option<LocalUse<'_>> {
        (!self.is_gone).then(|| LocalUse::of(&self.local_topic))
    }

    pub(super) fn local_topic(&self) -> &LocalTopic {
        &self.local_topic
    }

    pub(super) fn is_subscribed(&self) -> bool {
        !self.is_gone && self.local_topic.subscribes
    }

    /// The service does not have the topic any more. True if it had it until now.
    pub(super) fn remove(&mut self) -> bool {
        !std::mem::replace(&mut self.is_gone, true)
    }

    /// Takes the topic's current state in the service. True if it changed.
    pub(super) fn set_local(&mut self, local_topic: LocalTopic) -> bool {
        let is_changed = self.is_gone || !self.local_topic.is_same_as(&local_topic);
        if is_changed {
            (self.local_topic, self.is_gone) = (local_topic, false);
        }
        is_changed
    }

    pub(super) fn node_lost(&mut self, node: NodeId) {
        self.reported.forget(node);
        if let State::Replicating(replication) = &mut self.state {
            replication.node_lost(node);
        }
    }

    /// A topic that an earlier service may have replicated.
    pub(super) fn new(local_topic: LocalTopic) -> Self {
        Self {
            local_topic,
            is_gone: false,
            state: State::Inherited,
            delivered: Arc::default(),
            reported: ReportedSequences::default(),
            backoff: None,
            is_given_up: false,
            gives_up_destinations: false,
            has_logged_failure: false,
        }
    }

    fn should_plan(&self, now: Instant) -> bool {
        let backs_off = self.backoff.is_some_and(|backoff| !backoff.is_over(now));
        let is_given_up = self.is_given_up && (backs_off || self.gives_up_destinations);
        !self.is_gone && !is_given_up
    }

    pub(super) fn is_replicated(&self) -> bool {
        matches!(self.state, State::Replicating(_))
    }

    /// Returns true if destinations still have messages to acknowledge.
    pub(super) fn has_backlog(&self) -> bool {
        !matches!(self.state, State::Idle) && has_backlog(&self.local_topic.topic)
    }

    /// Returns true if messages are retained for other nodes, or its source is still ending.
    pub(super) fn holds(&self) -> bool {
        match &self.state {
            State::Idle => false,
            State::Inherited => is_owed(&self.local_topic.topic),
            State::Replicating(_) => has_backlog(&self.local_topic.topic),
            State::Stopping { .. } => true,
        }
    }

    /// A source that was running ends; another one `resumes` there if its worker ended. True if
    /// there was one.
    pub(super) fn stop_source(&mut self, resumes: bool) -> bool {
        let State::Replicating(Replicating { source, .. }) = &self.state else { return false };
        self.state = State::Stopping { source: Weak::clone(source), resumes };
        true
    }

    /// The worker failed on this topic, and has ended it.
    pub(super) fn source_failed(&mut self, now: Instant) {
        if self.stop_source(false) {
            (self.is_given_up, self.gives_up_destinations) = (true, true);
            self.back_off(now);
        }
    }

    /// Sends changed last sequences to the destinations; all of them to new destinations.
    pub(super) fn send_last_sequences(
        &mut self,
        changes: Vec<(u64, u64)>,
        plan: &RoutingPlan,
        remote_nodes: &RemoteNodes,
    ) {
        self.reported.send(&self.local_topic.topic, changes, plan, remote_nodes);
    }

    fn back_off(&mut self, now: Instant) {
        self.backoff = Some(RetrySchedule::after(self.backoff, now, RETRY_BACKOFF));
    }

    /// Records its destinations for the next service, before anything is retained for them.
    fn record_destinations(&mut self, wanted: &BTreeMap<NodeId, DestinationState>) {
        let topic = &self.local_topic.topic;
        let recorded: Vec<_> = topic.destinations().into_iter().map(NodeId).collect();
        let mut new = wanted.keys().filter(|node| !recorded.contains(node));
        let is_recorded = new.all(|node| topic.add_destination(&node.0));
        if !is_recorded && !std::mem::replace(&mut self.has_logged_failure, true) {
            tracing::warn!(
                topic = topic.name(),
                "more nodes subscribe to a topic than can be recorded: some may miss messages if \
                 this service ends"
            );
        }
    }

    /// Removes former destinations: nodes that do not want the topic any more, and given up nodes,
    /// which miss the rest.
    fn drop_destinations(
        &mut self,
        plan: &RoutingPlan,
        (service_context, seen_nodes): (&ServiceContext, &mut SeenNodes),
        wanted: &BTreeMap<NodeId, DestinationState>,
    ) -> Result<()> {
        self.drop_destinations_after_halt(service_context, seen_nodes)?;
        let topic = &self.local_topic.topic;
        topic.finish_giving_up();
        let recorded = topic.destinations().into_iter().map(NodeId);
        let others: Vec<_> = recorded.filter(|node| !wanted.contains_key(node)).collect();
        let (done, given_up): (Vec<_>, Vec<_>) = others
            .into_iter()
            .partition(|node| plan.has_unsubscribed(topic.name(), topic.settings(), *node));
        for node in done {
            topic.remove_destination(&node.0);
            self.delivered.forget(&node.0);
        }
        if !given_up.is_empty() && wanted.is_empty() {
            // Messages published from now on are for no other node.
            topic.halt(&service_context.caller(), service_context.role)?;
        }
        for node in given_up {
            give_up(topic, service_context.role, (node, seen_nodes), self.delivered.to(&node.0));
            self.delivered.forget(&node.0);
        }
        self.gives_up_destinations = false;
        Ok(())
    }

    /// An earlier service died between halting and releasing the retained messages: nothing can
    /// continue from there. Its remaining destinations are given up, and miss the retained
    /// messages, even if connected again. This happens before any destination is recorded, and
    /// releases the messages: so none is counted twice, or as missed by a later destination.
    fn drop_destinations_after_halt(
        &mut self,
        service_context: &ServiceContext,
        seen_nodes: &mut SeenNodes,
    ) -> Result<()> {
        let (topic, role) = (&self.local_topic.topic, service_context.role);
        let is_halted = matches!(self.state, State::Inherited)
            && topic.local().subscriptions_of(role).next().is_some()
            && !topic.local().subscription_ids().any(|id| id.participant() == Some(role));
        if is_halted {
            topic.finish_giving_up();
            for node in topic.destinations() {
                give_up(topic, role, (NodeId(node), &mut *seen_nodes), 0);
            }
            stop_retaining(topic, &self.local_topic.local, &service_context.caller(), role)?;
        }
        Ok(())
    }

    /// When the topic needs a pass at the latest, without any event.
    fn deadline(&self, now: Instant, interval: Duration) -> Option<Instant> {
        let backoff = self.backoff.filter(|it| !it.is_over(now)).map(|it| it.until());
        match &self.state {
            State::Stopping { .. } => Some(now + interval),
            State::Idle | State::Inherited => backoff,
            // Retained messages of a topic without publishers.
            State::Replicating(_) if !self.local_topic.publishes && self.has_backlog() => {
                Some(now + interval)
            }
            State::Replicating(_) => None,
        }
    }
}

/// A node ends as a destination of a topic and has acknowledged it only up to a position. Counts
/// and logs the messages that it misses.
fn give_up(
    topic: &Topic,
    role: Participant,
    (node, seen_nodes): (NodeId, &mut SeenNodes),
    from: u64,
) {
    let messages = topic.give_up(&node.0, role, from);
    let (number, topic, label) = (topic.number(), topic.name(), seen_nodes.label(node));
    if messages == 0 {
        tracing::debug!(topic, %node, "destination removed; it missed nothing");
    } else {
        tracing::warn!(
            topic, %node, label, messages,
            "destination given up: retained messages dropped"
        );
        seen_nodes.record_given_up(number, node, messages);
    }
}

pub(crate) fn has_backlog(topic: &Topic) -> bool {
    !topic.is_replicated_until(topic.local().position())
}

/// Returns true if messages are retained for other nodes, even while no worker replicates them.
pub(crate) fn is_owed(topic: &Topic) -> bool {
    !topic.destinations().is_empty() && has_backlog(topic)
}

/// Releases all messages retained for other nodes, by a service that cannot replicate the topic. No
/// worker may be replicating it. May be repeated after an interruption or a failure.
pub(crate) fn release_retained(
    topic: &Topic,
    local: &Pool,
    caller: &Caller<'_>,
    role: Participant,
) -> Result<bool> {
    // No other node is received either.
    topic.set_publishing_nodes(&[]);
    topic.finish_giving_up();
    let destinations = topic.destinations();
    if !destinations.is_empty() {
        topic.halt(caller, role)?;
        // No node was connected, so none has a label.
        let mut seen_nodes = SeenNodes::default();
        let nodes = destinations.iter().copied().map(NodeId);
        nodes.for_each(|node| give_up(topic, role, (node, &mut seen_nodes), 0));
    }
    Ok(stop_retaining(topic, local, caller, role)? || !destinations.is_empty())
}

/// Releases messages retained for nodes that were given up, or need no more.
fn stop_retaining(
    topic: &Topic,
    local: &Pool,
    caller: &Caller<'_>,
    role: Participant,
) -> Result<bool> {
    let is_retained = topic.local().subscriptions_of(role).next().is_some();
    if !is_retained && !topic.is_replicated() {
        return Ok(false);
    }
    topic.set_replicated(false);
    topic.stop_replication(caller, role, local)?;
    Ok(true)
}

impl Routing {
    pub(super) fn reconcile(
        &mut self,
        now: Instant,
        number: u32,
        remote_nodes: &mut RemoteNodes,
        worker_pool: &mut WorkerPool,
    ) {
        let Some(mut replicated) = self.replicated_topics.remove(&number) else {
            return self.reconcile_queue.forget(number);
        };
        #[cfg(test)]
        {
            self.reconciliations += 1;
        }
        let topic = Arc::clone(&replicated.local_topic.topic);
        lost_publishers::report(&topic, &self.plan, remote_nodes);
        if replicated.should_plan(now) {
            let has_messages = replicated.local_topic.publishes || replicated.has_backlog();
            self.plan.update(now, topic.name(), &RoutedTopic::of(&topic, has_messages));
        } else {
            self.plan.forget(number);
        }
        let wanted: BTreeMap<_, _> = self.plan.destinations(number).collect();
        if let Err(error) = replicated.drop_destinations(
            &self.plan,
            (&self.service_context, remote_nodes.seen_nodes()),
            &wanted,
        ) {
            // It stays a destination until its missed messages are counted.
            tracing::debug!(%error, "cannot give up a node yet");
            self.reconcile_queue.schedule(number, Some(now + POLL_INTERVAL));
            self.replicated_topics.insert(number, replicated);
            return;
        }
        replicated.record_destinations(&wanted);
        while self.reconcile_step(now, &mut replicated, &wanted, worker_pool) {}
        replicated.send_last_sequences(Vec::new(), &self.plan, remote_nodes);
        if replicated.is_gone && matches!(replicated.state, State::Idle) {
            remote_nodes.seen_nodes().forget_topic(number);
            self.tell_end_of(&topic, remote_nodes);
            return self.reconcile_queue.forget(number);
        }
        let deadline = replicated.deadline(now, POLL_INTERVAL);
        self.reconcile_queue
            .schedule(number, deadline.into_iter().chain(self.plan.deadline(now, number)).min());
        self.replicated_topics.insert(number, replicated);
    }

    /// Runs the next step of a topic. True if it did, so that another may follow.
    fn reconcile_step(
        &mut self,
        now: Instant,
        replicated: &mut TopicReplication,
        wanted: &BTreeMap<NodeId, DestinationState>,
        worker_pool: &mut WorkerPool,
    ) -> bool {
        let topic = &replicated.local_topic.topic;
        match &mut replicated.state {
            State::Idle if wanted.is_empty() => false,
            State::Inherited if wanted.is_empty() => self.finish_stopping(replicated),
            State::Idle | State::Inherited => self.start_replicating(now, replicated, worker_pool),
            State::Replicating(_) if wanted.is_empty() => {
                topic.set_replicated(false);
                self.publish_listener.stop_listening(topic.number());
                worker_pool.send(topic.number(), Command::StopOutbound(key(topic.number())));
                replicated.stop_source(false)
            }
            State::Replicating(replication) => {
                if replication.update_destinations(topic, wanted, worker_pool) {
                    self.publish_listener.announce_again(topic.number());
                }
                false
            }
            State::Stopping { source, resumes } => {
                *resumes &= !wanted.is_empty();
                if source.strong_count() > 0 {
                    return false;
                }
                if *resumes {
                    replicated.state = State::Inherited;
                    return true;
                }
                self.finish_stopping(replicated)
            }
        }
    }

    /// Nothing of the topic is to be retained, and its source has ended.
    fn finish_stopping(&mut self, replicated: &mut TopicReplication) -> bool {
        let topic = &replicated.local_topic.topic;
        let service_context = &self.service_context;
        match stop_retaining(
            topic,
            &replicated.local_topic.local,
            &service_context.caller(),
            service_context.role,
        ) {
            Ok(_) => {
                replicated.state = State::Idle;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "cannot stop replicating a topic yet; retrying");
                self.reconcile_queue.enqueue(topic.number());
                false
            }
        }
    }

    /// Retains a topic's messages for other nodes from now on.
    fn start_replicating(
        &mut self,
        now: Instant,
        replicated: &mut TopicReplication,
        worker_pool: &mut WorkerPool,
    ) -> bool {
        if replicated.backoff.is_some_and(|backoff| !backoff.is_over(now)) {
            return false;
        }
        let number = replicated.local_topic.topic.number();
        let largest = replicated.local_topic.topic.settings().largest;
        let Some(worker) = worker_pool.assign(number, largest) else { return false };
        let (topic, gate) = (&replicated.local_topic.topic, Arc::new(AtomicBool::new(false)));
        let settings = topic.settings();
        let is_reliable = settings.reliability == Reliability::Reliable;
        // The source holds the only strong reference.
        let alive = Arc::new(AtomicBool::new(true));
        let source = Arc::downgrade(&alive);
        let context = &self.service_context;
        let parts = (topic, &replicated.local_topic.local);
        let made = TopicSource::new(context, parts, &replicated.delivered, &gate, alive);
        let options = TopicOptions {
            parameters: TopicParameters {
                number: u64::from(number),
                largest: settings.largest,
                depth: settings.depth,
            },
            device: match settings.place {
                SharedLocation::Host => None,
                SharedLocation::Device(_) => replicated.local_topic.local.device().cloned(),
            },
            max_retained: (!is_reliable).then_some(settings.depth as usize),
        };
        let sent =
            made.and_then(|source| worker.send_topic(key(number), options, Box::new(source)));
        match sent {
            Ok(announcer) => {
                tracing::debug!(topic = topic.name(), "replication of a topic started");
                topic.set_replicated(true);
                self.publish_listener.listen(topic, announcer);
                let announced = BTreeMap::new();
                replicated.state = State::Replicating(Replicating { gate, source, announced });
                (replicated.is_given_up, replicated.has_logged_failure) = (false, false);
                true
            }
            Err(error) => {
                if !std::mem::replace(&mut replicated.has_logged_failure, true) {
                    let topic = topic.name();
                    tracing::error!(%error, topic, "cannot replicate a topic to other nodes");
                }
                // The source may exist: the next pass continues or releases it.
                replicated.state = State::Inherited;
                replicated.back_off(now);
                false
            }
        }
    }
}
