//! How far it is with each topic that may go to other nodes, and the next step to where the
//! [plan](crate::replication::plan) wants it to be.
//!
//! What is to be done is seen each time from what there is: what the plan says, what was done so
//! far, and what lies in shared memory, where an earlier service may have left it at any point.
//! A step that cannot be done now is seen to be missing the next time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ipc::{Caller, Participant};

use crate::error::Result;
use crate::peers::NodeId;
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

/// How long to wait until what failed is tried again.
const RETRY_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// A topic.
pub(in crate::replication) struct TopicReplication {
    pub(in crate::replication) facts: LocalTopic,
    /// The service does not have it any more.
    pub(in crate::replication) is_gone: bool,
    pub(in crate::replication) state: State,
    /// How far its destinations are.
    delivered: Arc<DeliveredPositions>,
    /// The last numbers of publishers that its destinations were told.
    pub(in crate::replication) reported: ReportedSequences,
    /// It failed, and is tried again then.
    pub(in crate::replication) backoff: Option<RetryBackoff>,
    /// What failed is not to be carried meanwhile: who publishes must not wait for it.
    pub(in crate::replication) is_given_up: bool,
    /// And its destinations still have to be given up.
    is_owed: bool,
    has_logged_failure: bool,
}

pub(in crate::replication) enum State {
    /// Nothing is kept for other nodes.
    None,
    /// Something may be kept for them, by an earlier service or by a source that has ended.
    Inherited,
    Replicating(Replicating),
    /// Its source may still be at work. Whoever subscribes in the role's name next must not lose
    /// that to the one before.
    Stopping(Stopping),
}

/// A topic whose messages a worker has.
pub(in crate::replication) struct Replicating {
    /// Nothing leaves before it is open.
    gate: Arc<AtomicBool>,
    /// As long as the source lives.
    source: Weak<AtomicBool>,
    /// The destinations that the worker knows, and whether it was told to connect to them.
    announced: BTreeMap<NodeId, bool>,
    /// What was published before anything was kept.
    start_sequences: StartSequences,
}

impl Replicating {
    /// A node vanished: it is to be connected to anew.
    pub(in crate::replication) fn node_lost(&mut self, node: NodeId) {
        self.announced.entry(node).and_modify(|is_connected| *is_connected = false);
    }
}

pub(in crate::replication) struct Stopping {
    source: Weak<AtomicBool>,
    /// The next source goes on where this one stops.
    resumes: bool,
}

impl TopicReplication {
    /// What the topic is like here, as long as it is.
    pub(in crate::replication) fn local(&self) -> Option<LocalUse<'_>> {
        let LocalTopic { topic, publishes, subscribes, .. } = &self.facts;
        let (settings, publishes, subscribes) = (topic.settings(), *publishes, *subscribes);
        (!self.is_gone).then_some(LocalUse { settings, publishes, subscribes })
    }

    /// A topic that may have been carried by an earlier service.
    pub(in crate::replication) fn new(facts: LocalTopic) -> Self {
        Self {
            facts,
            is_gone: false,
            state: State::Inherited,
            delivered: Arc::default(),
            reported: ReportedSequences::default(),
            backoff: None,
            is_given_up: false,
            is_owed: false,
            has_logged_failure: false,
        }
    }

    pub(in crate::replication) fn should_plan(&self, now: Instant) -> bool {
        let rests = self.backoff.is_some_and(|backoff| !backoff.is_over(now));
        let is_given_up = self.is_given_up && (rests || self.is_owed);
        !self.is_gone && !is_given_up
    }

    pub(in crate::replication) fn is_replicated(&self) -> bool {
        matches!(self.state, State::Replicating(_))
    }

    /// Has somebody something to take of it yet?
    pub(in crate::replication) fn has_backlog(&self) -> bool {
        !matches!(self.state, State::None) && has_backlog(&self.facts.topic)
    }

    /// Is something of it owed to other nodes, or still being ended?
    pub(in crate::replication) fn holds(&self) -> bool {
        match &self.state {
            State::None => false,
            State::Inherited => is_owed(&self.facts.topic),
            State::Replicating(_) => has_backlog(&self.facts.topic),
            State::Stopping(_) => true,
        }
    }

    /// Its source has ended, or ends, together with its worker: another one is to go on with it.
    pub(in crate::replication) fn worker_stopped(&mut self) {
        match &mut self.state {
            State::Replicating(Replicating { source, .. }) => {
                let source = Weak::clone(source);
                self.state = State::Stopping(Stopping { source, resumes: true });
            }
            State::Stopping(_) | State::None | State::Inherited => {}
        }
    }

    /// The worker could not go on with it, and has ended it.
    pub(in crate::replication) fn fails(&mut self, now: Instant) {
        if let State::Replicating(Replicating { source, .. }) = &self.state {
            let source = Weak::clone(source);
            self.state = State::Stopping(Stopping { source, resumes: false });
            (self.is_given_up, self.is_owed) = (true, true);
            self.rests(now);
        }
    }

    fn rests(&mut self, now: Instant) {
        self.backoff = Some(RetryBackoff::after(self.backoff, now, RETRY_BACKOFF));
    }

    /// Notes its destinations for the next service, before anything is kept for them.
    fn record_destinations(&mut self, wanted: &BTreeMap<NodeId, DestinationState>) {
        let topic = &self.facts.topic;
        let recorded: Vec<_> = topic.destinations().into_iter().map(NodeId).collect();
        let mut new = wanted.keys().filter(|node| !recorded.contains(node));
        let is_noted = new.all(|node| topic.add_destination(&node.0));
        if !is_noted && !std::mem::replace(&mut self.has_logged_failure, true) {
            tracing::warn!(
                topic = topic.name(),
                "more nodes want a topic than can be noted: some may miss messages if this \
                 service ends"
            );
        }
    }

    /// Forgets who is no destination any more: who does not want the topic, and who is given up and
    /// misses what it did not get.
    fn drop_destinations(
        &mut self,
        plan: &RoutingPlan,
        (service_context, seen_nodes): (&ServiceContext, &mut SeenNodes),
        wanted: &BTreeMap<NodeId, DestinationState>,
    ) -> Result<()> {
        self.drop_destinations_after_halt(service_context, seen_nodes)?;
        let topic = &self.facts.topic;
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
            // What is published from now on is for nobody elsewhere.
            topic.halt(&service_context.caller(), service_context.role)?;
        }
        for node in given_up {
            give_up(topic, service_context.role, (node, seen_nodes), self.delivered.to(&node.0));
            self.delivered.forget(&node.0);
        }
        self.is_owed = false;
        Ok(())
    }

    /// A service died between halting and letting go of what was kept: nothing can go on from there.
    /// Whom it had still to give up misses what was kept, also one that is there again. That is before
    /// any other one is noted, and what is kept is let go of with it: so nothing is counted twice, and
    /// nothing as missed by one that came later.
    fn drop_destinations_after_halt(
        &mut self,
        service_context: &ServiceContext,
        seen_nodes: &mut SeenNodes,
    ) -> Result<()> {
        let (topic, role) = (&self.facts.topic, service_context.role);
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
            stop_retaining(topic, &self.facts.local, &service_context.caller(), role)?;
        }
        Ok(())
    }

    /// When there is something to do at the latest, of which nobody tells.
    pub(in crate::replication) fn deadline(&self, now: Instant, look: Duration) -> Option<Instant> {
        let backoff =
            self.backoff.filter(|backoff| !backoff.is_over(now)).map(|backoff| backoff.until());
        match &self.state {
            State::Stopping(_) => Some(now + look),
            State::None | State::Inherited => backoff,
            // What nobody publishes to any more, and is still owed.
            State::Replicating(_) if !self.facts.publishes && self.has_backlog() => {
                Some(now + look)
            }
            State::Replicating(_) => None,
        }
    }
}

/// A node is no destination of a topic any more, and has it only up to a position. Counts what it
/// misses, and says so.
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
            "a node was given up: it misses messages of a topic, which nobody keeps for it any more"
        );
        seen_nodes.record_given_up(number, node, messages);
    }
}

/// The seats of those that carry it.
fn subscription_ids(topic: &Topic) -> impl Iterator<Item = ipc::SubscriptionId> {
    topic
        .local()
        .subscription_ids()
        .filter(|subscription_id| subscription_id.who().is_some_and(Participant::is_role))
}

pub(in crate::replication) fn has_backlog(topic: &Topic) -> bool {
    !is_delivered(topic, topic.local().position())
}

/// Was all before a position delivered to other nodes, or given up?
pub(in crate::replication) fn is_delivered(topic: &Topic, position: u64) -> bool {
    subscription_ids(topic)
        .all(|subscription_id| topic.local().oldest_unreleased(subscription_id) >= position)
}

/// Are messages of a topic kept for other nodes? Also if nobody carries it at the moment.
pub(crate) fn is_owed(topic: &Topic) -> bool {
    !topic.destinations().is_empty() && has_backlog(topic)
}

/// Lets go of all that is kept of a topic for other nodes, by a service that cannot carry it there.
/// Nobody else is carrying it. May be done again, if it was cut short or has failed.
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
        // Nobody was met who could be called anything.
        let mut seen_nodes = SeenNodes::default();
        let nodes = destinations.iter().copied().map(NodeId);
        nodes.for_each(|node| give_up(topic, role, (node, &mut seen_nodes), 0));
    }
    Ok(stop_retaining(topic, local, caller, role)? || !destinations.is_empty())
}

/// Lets go of what is kept of a topic for nodes that were given up, or are done with it.
fn stop_retaining(
    topic: &Topic,
    local: &Pool,
    caller: &Caller<'_>,
    role: Participant,
) -> Result<bool> {
    let is_kept = topic.local().subscriptions_of(role).next().is_some();
    if !is_kept && !topic.is_replicated() {
        return Ok(false);
    }
    topic.set_replicated(false);
    topic.stop_replication(caller, role, local)?;
    Ok(true)
}

impl Replicator {
    /// Looks at a topic, and brings it to where the plan wants it to be.
    pub(in crate::replication) fn reconcile(&mut self, now: Instant, number: u32) {
        let Some(mut replicated) = self.replicated_topics.remove(&number) else {
            return self.reconcile_queue.forget(number);
        };
        #[cfg(test)]
        {
            self.looks += 1;
        }
        self.send_lost_publishers(&replicated.facts.topic);
        if replicated.should_plan(now) {
            let facts = &replicated.facts;
            let local = RoutedTopic {
                number,
                settings: *facts.topic.settings(),
                has_messages: facts.publishes || replicated.has_backlog(),
                recorded: facts.topic.destinations().into_iter().map(NodeId).collect(),
            };
            self.plan.update(now, facts.topic.name(), &local);
        } else {
            self.plan.forget(number);
        }
        let wanted: BTreeMap<_, _> = self.plan.destinations(number).collect();
        if let Err(error) = replicated.drop_destinations(
            &self.plan,
            (&self.service_context, &mut self.seen_nodes),
            &wanted,
        ) {
            // It stays one: nothing that it is owed may be let go of before it is counted.
            tracing::debug!(%error, "cannot give up a node yet");
            self.reconcile_queue.schedule(number, Some(now + POLL_INTERVAL));
            self.replicated_topics.insert(number, replicated);
            return;
        }
        replicated.record_destinations(&wanted);
        while self.reconcile_step(now, number, &mut replicated, &wanted) {}
        self.send_last_sequences(&mut replicated, Vec::new());
        if replicated.is_gone && matches!(replicated.state, State::None) {
            self.seen_nodes.forget_topic(number);
            return self.reconcile_queue.forget(number);
        }
        let deadline = replicated.deadline(now, POLL_INTERVAL);
        self.reconcile_queue
            .schedule(number, deadline.into_iter().chain(self.plan.deadline(now, number)).min());
        self.replicated_topics.insert(number, replicated);
    }

    /// The next step of a topic. True if it was done, so that there may be one more.
    fn reconcile_step(
        &mut self,
        now: Instant,
        number: u32,
        replicated: &mut TopicReplication,
        wanted: &BTreeMap<NodeId, DestinationState>,
    ) -> bool {
        match &mut replicated.state {
            State::None if wanted.is_empty() => false,
            State::Inherited if wanted.is_empty() => self.finish_stopping(replicated),
            State::None | State::Inherited => self.start_replicating(now, number, replicated),
            State::Replicating(carried) if wanted.is_empty() => {
                let source = Weak::clone(&carried.source);
                replicated.state = State::Stopping(Stopping { source, resumes: false });
                replicated.facts.topic.set_replicated(false);
                self.publish_listener.stop_listening(number);
                self.tell(number, |worker| worker.tell(Command::StopOutbound(key(number))));
                true
            }
            State::Replicating(carried) => {
                let is_kept =
                    replicated.facts.topic.settings().reliability == Reliability::Reliable;
                let topic = &replicated.facts.topic;
                self.update_destinations(topic, carried, wanted, is_kept);
                false
            }
            State::Stopping(ending) => {
                ending.resumes &= !wanted.is_empty();
                if ending.source.strong_count() > 0 {
                    return false;
                }
                if ending.resumes {
                    replicated.state = State::Inherited;
                    return true;
                }
                self.finish_stopping(replicated)
            }
        }
    }

    /// Nothing of a topic is to be kept, and nobody is at it.
    fn finish_stopping(&mut self, replicated: &mut TopicReplication) -> bool {
        let topic = &replicated.facts.topic;
        let service_context = &self.service_context;
        match stop_retaining(
            topic,
            &replicated.facts.local,
            &service_context.caller(),
            service_context.role,
        ) {
            Ok(_) => {
                replicated.state = State::None;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "cannot stop replicating a topic yet; retrying");
                self.reconcile_queue.enqueue(topic.number());
                false
            }
        }
    }

    /// Keeps a topic's messages for other nodes from now on.
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
        let (topic, gate) = (&replicated.facts.topic, Arc::new(AtomicBool::new(false)));
        let settings = topic.settings();
        let is_kept = settings.reliability == Reliability::Reliable;
        // Before anything is kept: what is published meanwhile is missing there.
        let start_sequences = StartSequences::of(topic);
        // Held by the source alone: when it is gone the source is.
        let (source, made) = {
            let alive = Arc::new(AtomicBool::new(true));
            let source = Arc::downgrade(&alive);
            let facts = (topic, &replicated.facts.local);
            let service_context = &self.service_context;
            (source, TopicSource::new(service_context, facts, &replicated.delivered, &gate, alive))
        };
        let options = TopicOptions {
            facts: TopicParameters {
                number: u64::from(number),
                largest: settings.largest,
                depth: settings.depth,
            },
            max_retained: (!is_kept).then_some(settings.depth as usize),
        };
        workers.place(key(number), settings.largest);
        let sent = made.and_then(|source| {
            workers.of(key(number)).send_topic(key(number), options, Box::new(source))
        });
        match sent {
            Ok(announcer) => {
                tracing::debug!(topic = topic.name(), "carried");
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
                // It may have begun: that is gone on with, or let go of.
                replicated.state = State::Inherited;
                replicated.rests(now);
                false
            }
        }
    }

    fn update_destinations(
        &mut self,
        topic: &Topic,
        carried: &mut Replicating,
        wanted: &BTreeMap<NodeId, DestinationState>,
        is_kept: bool,
    ) {
        let number = topic.number();
        // From where on it is for those that are added now.
        let mut start_sequences =
            carried.announced.is_empty().then(|| carried.start_sequences.clone());
        // Who is there and idle costs nothing yet. But as soon as something leaves, it has to go to
        // all.
        let is_open = carried.gate.load(Ordering::Acquire) || !is_kept;
        let mut has_new = false;
        for (node, destination_state) in wanted {
            let connects = destination_state.is_sending();
            let is_to_be_told = match carried.announced.get(node) {
                None => is_open || *destination_state != DestinationState::Idle,
                Some(is_connected) => connects && !is_connected,
            };
            if is_to_be_told {
                if !carried.announced.contains_key(node) {
                    let start_sequences =
                        start_sequences.get_or_insert_with(|| StartSequences::of(topic));
                    self.send_start_sequences(*node, topic, start_sequences);
                }
                let add = |worker: &crate::replication::Worker| {
                    worker.tell(Command::AddDestination(key(number), *node))
                };
                self.tell(number, add);
                has_new = true;
                carried.announced.insert(*node, connects);
            } else if !connects {
                carried.node_lost(*node);
            }
        }
        let others: Vec<_> =
            carried.announced.keys().filter(|node| !wanted.contains_key(node)).copied().collect();
        for node in others {
            self.tell(number, |worker| worker.tell(Command::RemoveDestination(key(number), node)));
            carried.announced.remove(&node);
        }
        // Those that are owed something are all known to the worker: it may begin.
        if !is_kept || wanted.values().any(|destination_state| destination_state.is_sending()) {
            has_new |= !carried.gate.swap(true, Ordering::AcqRel);
        }
        if has_new {
            self.publish_listener.announce_again(number);
        }
    }
}
