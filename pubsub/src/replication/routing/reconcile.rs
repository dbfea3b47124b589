//! The state of each replicated topic, and the next step towards the [plan](RoutingPlan).
//!
//! Each pass derives the next step from the plan, from what was done so far, and from shared
//! memory, where an earlier service may have stopped at any point. A step that fails now is found
//! missing by the next pass.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use crate::error::Result;
use crate::ids::NodeId;
use crate::pool::Pool;
use crate::replication::Command;
use crate::replication::retry_backoff::RetryBackoff;
use crate::replication::routing::incompatible_topics::LocalUse;
use crate::replication::routing::seen_nodes::SeenNodes;
use crate::replication::routing::{DestinationState, RoutedTopic, RoutingPlan};
use crate::replication::source::last_sequences::ReportedSequences;
use crate::replication::source::start_sequences::StartSequences;
use crate::replication::source::{DeliveredPositions, TopicSource};
use crate::replication::{LocalTopic, POLL_INTERVAL, Replicator, ServiceContext, key};
use crate::replication::{TopicOptions, TopicParameters};
use crate::settings::Reliability;
use crate::topic::Topic;

/// Backoff of a topic whose replication failed.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// Replication of one local topic.
pub(in crate::replication) struct TopicReplication {
    pub(in crate::replication) local_topic: LocalTopic,
    /// The service does not have it any more.
    pub(in crate::replication) is_gone: bool,
    pub(in crate::replication) state: State,
    /// Positions that the destinations have acknowledged.
    delivered: Arc<DeliveredPositions>,
    /// Last sequences reported to the destinations.
    pub(in crate::replication) reported: ReportedSequences,
    /// Backoff after a failure.
    pub(in crate::replication) backoff: Option<RetryBackoff>,
    /// Not replicated until the backoff ends, so that publishers do not wait.
    pub(in crate::replication) is_given_up: bool,
    /// Its destinations still have to be given up.
    gives_up_destinations: bool,
    has_logged_failure: bool,
}

pub(in crate::replication) enum State {
    /// Nothing is retained for other nodes.
    Idle,
    /// Messages may be retained, by an earlier service or by an ended source.
    Inherited,
    Replicating(Replicating),
    /// Its source may still be running. The next subscriber in the role's name must not start
    /// before it ends.
    Stopping(Stopping),
}

/// A topic whose messages a worker sends.
pub(in crate::replication) struct Replicating {
    /// No message is sent before it is open.
    gate: Arc<AtomicBool>,
    /// Alive as long as the source.
    source: Weak<AtomicBool>,
    /// The destinations that the worker knows, and whether it has to connect to them.
    announced: BTreeMap<NodeId, bool>,
    /// Sequences published before anything was retained.
    start_sequences: StartSequences,
}

impl Replicating {
    /// A node disconnected: it needs a new connection.
    pub(in crate::replication) fn node_lost(&mut self, node: NodeId) {
        self.announced.entry(node).and_modify(|is_connected| *is_connected = false);
    }
}

pub(in crate::replication) struct Stopping {
    source: Weak<AtomicBool>,
    /// The next source continues where this one stops.
    resumes: bool,
}

impl TopicReplication {
    /// The local use of the topic, unless it was removed.
    pub(in crate::replication) fn local(&self) -> Option<LocalUse<'_>> {
        let LocalTopic { topic, publishes, subscribes, .. } = &self.local_topic;
        let (settings, publishes, subscribes) = (topic.settings(), *publishes, *subscribes);
        (!self.is_gone).then_some(LocalUse { settings, publishes, subscribes })
    }

    /// A topic that an earlier service may have replicated.
    pub(in crate::replication) fn new(local_topic: LocalTopic) -> Self {
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

    pub(in crate::replication) fn should_plan(&self, now: Instant) -> bool {
        let backs_off = self.backoff.is_some_and(|backoff| !backoff.is_over(now));
        let is_given_up = self.is_given_up && (backs_off || self.gives_up_destinations);
        !self.is_gone && !is_given_up
    }

    pub(in crate::replication) fn is_replicated(&self) -> bool {
        matches!(self.state, State::Replicating(_))
    }

    /// Whether destinations still have messages to acknowledge.
    pub(in crate::replication) fn has_backlog(&self) -> bool {
        !matches!(self.state, State::Idle) && has_backlog(&self.local_topic.topic)
    }

    /// Whether messages are retained for other nodes, or its source is still ending.
    pub(in crate::replication) fn holds(&self) -> bool {
        match &self.state {
            State::Idle => false,
            State::Inherited => is_owed(&self.local_topic.topic),
            State::Replicating(_) => has_backlog(&self.local_topic.topic),
            State::Stopping(_) => true,
        }
    }

    /// Its worker ends, and its source with it: another worker continues.
    pub(in crate::replication) fn worker_stopped(&mut self) {
        match &mut self.state {
            State::Replicating(Replicating { source, .. }) => {
                let source = Weak::clone(source);
                self.state = State::Stopping(Stopping { source, resumes: true });
            }
            State::Stopping(_) | State::Idle | State::Inherited => {}
        }
    }

    /// The worker failed on this topic, and has ended it.
    pub(in crate::replication) fn source_failed(&mut self, now: Instant) {
        if let State::Replicating(Replicating { source, .. }) = &self.state {
            let source = Weak::clone(source);
            self.state = State::Stopping(Stopping { source, resumes: false });
            (self.is_given_up, self.gives_up_destinations) = (true, true);
            self.back_off(now);
        }
    }

    fn back_off(&mut self, now: Instant) {
        self.backoff = Some(RetryBackoff::after(self.backoff, now, RETRY_BACKOFF));
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
            && !topic
                .local()
                .subscription_ids()
                .any(|subscription_id| subscription_id.who() == Some(role));
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
    pub(in crate::replication) fn deadline(
        &self,
        now: Instant,
        interval: Duration,
    ) -> Option<Instant> {
        let backoff =
            self.backoff.filter(|backoff| !backoff.is_over(now)).map(|backoff| backoff.until());
        match &self.state {
            State::Stopping(_) => Some(now + interval),
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

/// The subscriptions of services that replicate it.
fn subscription_ids(topic: &Topic) -> impl Iterator<Item = ipc::SubscriptionId> {
    topic
        .local()
        .subscription_ids()
        .filter(|subscription_id| subscription_id.who().is_some_and(Participant::is_role))
}

pub(in crate::replication) fn has_backlog(topic: &Topic) -> bool {
    !is_delivered(topic, topic.local().position())
}

/// Whether all messages before a position were delivered to other nodes, or given up.
pub(in crate::replication) fn is_delivered(topic: &Topic, position: u64) -> bool {
    subscription_ids(topic)
        .all(|subscription_id| topic.local().oldest_unreleased(subscription_id) >= position)
}

/// Whether messages are retained for other nodes, even while no worker replicates them.
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

impl Replicator {
    /// Reconciles a topic with the plan.
    pub(in crate::replication) fn reconcile(&mut self, now: Instant, number: u32) {
        let Some(mut replicated) = self.replicated_topics.remove(&number) else {
            return self.reconcile_queue.forget(number);
        };
        #[cfg(test)]
        {
            self.reconciliations += 1;
        }
        self.send_lost_publishers(&replicated.local_topic.topic);
        if replicated.should_plan(now) {
            let local = &replicated.local_topic;
            let routed = RoutedTopic {
                number,
                settings: *local.topic.settings(),
                has_messages: local.publishes || replicated.has_backlog(),
                recorded: local.topic.destinations().into_iter().map(NodeId).collect(),
            };
            self.plan.update(now, local.topic.name(), &routed);
        } else {
            self.plan.forget(number);
        }
        let wanted: BTreeMap<_, _> = self.plan.destinations(number).collect();
        if let Err(error) = replicated.drop_destinations(
            &self.plan,
            (&self.service_context, &mut self.seen_nodes),
            &wanted,
        ) {
            // It stays a destination until its missed messages are counted.
            tracing::debug!(%error, "cannot give up a node yet");
            self.reconcile_queue.schedule(number, Some(now + POLL_INTERVAL));
            self.replicated_topics.insert(number, replicated);
            return;
        }
        replicated.record_destinations(&wanted);
        while self.reconcile_step(now, number, &mut replicated, &wanted) {}
        self.send_last_sequences(&mut replicated, Vec::new());
        if replicated.is_gone && matches!(replicated.state, State::Idle) {
            self.seen_nodes.forget_topic(number);
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
        number: u32,
        replicated: &mut TopicReplication,
        wanted: &BTreeMap<NodeId, DestinationState>,
    ) -> bool {
        match &mut replicated.state {
            State::Idle if wanted.is_empty() => false,
            State::Inherited if wanted.is_empty() => self.finish_stopping(replicated),
            State::Idle | State::Inherited => self.start_replicating(now, number, replicated),
            State::Replicating(replication) if wanted.is_empty() => {
                let source = Weak::clone(&replication.source);
                replicated.state = State::Stopping(Stopping { source, resumes: false });
                replicated.local_topic.topic.set_replicated(false);
                self.publish_listener.stop_listening(number);
                self.with_worker(number, |worker| worker.tell(Command::StopOutbound(key(number))));
                true
            }
            State::Replicating(replication) => {
                let is_reliable =
                    replicated.local_topic.topic.settings().reliability == Reliability::Reliable;
                let topic = &replicated.local_topic.topic;
                self.update_destinations(topic, replication, wanted, is_reliable);
                false
            }
            State::Stopping(stopping) => {
                stopping.resumes &= !wanted.is_empty();
                if stopping.source.strong_count() > 0 {
                    return false;
                }
                if stopping.resumes {
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
        number: u32,
        replicated: &mut TopicReplication,
    ) -> bool {
        let Some(workers) = &mut self.workers else { return false };
        if replicated.backoff.is_some_and(|backoff| !backoff.is_over(now)) {
            return false;
        }
        let (topic, gate) = (&replicated.local_topic.topic, Arc::new(AtomicBool::new(false)));
        let settings = topic.settings();
        let is_reliable = settings.reliability == Reliability::Reliable;
        // Read before anything is retained: messages published in between are missed.
        let start_sequences = StartSequences::of(topic);
        // The source holds the only strong reference.
        let (source, made) = {
            let alive = Arc::new(AtomicBool::new(true));
            let source = Arc::downgrade(&alive);
            let parts = (topic, &replicated.local_topic.local);
            let service_context = &self.service_context;
            (source, TopicSource::new(service_context, parts, &replicated.delivered, &gate, alive))
        };
        let options = TopicOptions {
            facts: TopicParameters {
                number: u64::from(number),
                largest: settings.largest,
                depth: settings.depth,
            },
            max_retained: (!is_reliable).then_some(settings.depth as usize),
        };
        workers.assign(key(number), settings.largest);
        let sent = made.and_then(|source| {
            workers.of(key(number)).send_topic(key(number), options, Box::new(source))
        });
        match sent {
            Ok(announcer) => {
                tracing::debug!(topic = topic.name(), "replication of a topic started");
                topic.set_replicated(true);
                self.publish_listener.listen(topic, announcer);
                let announced = BTreeMap::new();
                replicated.state =
                    State::Replicating(Replicating { gate, source, announced, start_sequences });
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

    fn update_destinations(
        &mut self,
        topic: &Topic,
        replication: &mut Replicating,
        wanted: &BTreeMap<NodeId, DestinationState>,
        is_reliable: bool,
    ) {
        let number = topic.number();
        // Start sequences of destinations added in this pass.
        let mut start_sequences =
            replication.announced.is_empty().then(|| replication.start_sequences.clone());
        // An idle destination costs nothing yet. Once any message is sent, all destinations have to
        // be known.
        let is_open = replication.gate.load(Ordering::Acquire) || !is_reliable;
        let mut has_new = false;
        for (node, destination_state) in wanted {
            let connects = destination_state.is_sending();
            let is_new = match replication.announced.get(node) {
                None => is_open || *destination_state != DestinationState::Idle,
                Some(is_connected) => connects && !is_connected,
            };
            if is_new {
                if !replication.announced.contains_key(node) {
                    let start_sequences =
                        start_sequences.get_or_insert_with(|| StartSequences::of(topic));
                    self.send_start_sequences(*node, topic, start_sequences);
                }
                let add = |worker: &crate::replication::Worker| {
                    worker.tell(Command::AddDestination(key(number), *node))
                };
                self.with_worker(number, add);
                has_new = true;
                replication.announced.insert(*node, connects);
            } else if !connects {
                replication.node_lost(*node);
            }
        }
        let others: Vec<_> = replication
            .announced
            .keys()
            .filter(|node| !wanted.contains_key(node))
            .copied()
            .collect();
        for node in others {
            self.with_worker(number, |worker| {
                worker.tell(Command::RemoveDestination(key(number), node))
            });
            replication.announced.remove(&node);
        }
        // The worker knows all destinations of retained messages: it may begin.
        if !is_reliable || wanted.values().any(|destination_state| destination_state.is_sending()) {
            has_new |= !replication.gate.swap(true, Ordering::AcqRel);
        }
        if has_new {
            self.publish_listener.announce_again(number);
        }
    }
}
