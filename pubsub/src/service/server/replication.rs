//! Replication to other nodes, if this service has network options.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use threads::{RetryBackoff, lock};

use super::Service;
use crate::error::{Error, ErrorKind};
use crate::network_options::NetworkOptions;
use crate::node_segment::MAX_NETWORK_BYTES;
use crate::pool::GrowthRequest;
use crate::replication::{
    self, ArrivalRepairLock, Replicator, RetrySchedule, ServiceContext, WaitingArrivals,
};
use crate::report::Row;
use crate::service::protocol;

/// Back-off of attempts to start: the last service may still use the address.
const START_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(100), Duration::from_secs(5));
/// Back-off of log messages with the same reason.
const LOG_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_secs(5), Duration::from_secs(60));
/// Back-off of attempts to release retained messages.
const RELEASE_RETRY: Duration = Duration::from_millis(100);
const MAX_GROWTH_REQUESTS: usize = 64;

pub(super) struct ReplicationSupervisor {
    replicator: Option<Replicator>,
    /// Held by all threads that act as a participant of this service.
    service_context: Weak<ServiceContext>,
    attempts: StartAttempts,
    /// The network options are those of an earlier service.
    is_inherited: bool,
    /// Retained messages were released, since replication cannot work.
    has_released: bool,
    /// Some of them could not be released yet.
    must_release_again: bool,
    arrival_repair_lock: ArrivalRepairLock,
    waiting_arrivals: WaitingArrivals,
    growth_sender: Sender<GrowthRequest>,
    growth_requests: Receiver<GrowthRequest>,
    /// The replicator has not received all topics yet; `changed_topics` are among the changes.
    needs_topics: bool,
    changed_topics: BTreeSet<u32>,
}

/// Failed attempts to start replication.
#[derive(Debug, Default)]
struct StartAttempts {
    /// Time of the first one.
    first: Option<Instant>,
    backoff: Option<RetrySchedule>,
    /// Retrying is useless: the options are invalid.
    are_permanent: bool,
    /// Reason of the last one.
    reason: Option<Error>,
    /// Until then only another reason is logged.
    log_backoff: Option<RetrySchedule>,
}

impl StartAttempts {
    /// Records a failure. True if it is to be logged: the first one, one with a new reason, and
    /// others at growing intervals.
    fn record_failure(&mut self, now: Instant, is_permanent: bool, reason: Error) -> bool {
        self.first.get_or_insert(now);
        self.backoff = Some(RetrySchedule::after(self.backoff, now, START_BACKOFF));
        let cause = |error: &Error| (error.kind(), error.operation());
        let is_new = self.reason.as_ref().map(cause) != Some(cause(&reason))
            || self.are_permanent != is_permanent;
        self.reason = Some(reason);
        self.are_permanent = is_permanent;
        let is_logged =
            is_new || self.log_backoff.is_none_or(|log_backoff| log_backoff.is_over(now));
        if is_logged {
            self.log_backoff =
                Some(RetrySchedule::after(self.log_backoff.filter(|_| !is_new), now, LOG_BACKOFF));
        }
        is_logged
    }

    /// The reason and its consequence, for a report.
    fn row(&self) -> Option<Row> {
        let reason = self.reason.as_ref()?;
        let backoff = if self.are_permanent { "" } else { "; retrying" };
        Some(Row::replication_error(reason.kind(), &format!("{reason}{backoff}")))
    }

    fn may_begin(&self, now: Instant) -> bool {
        !self.are_permanent && self.backoff.is_none_or(|backoff| backoff.is_over(now))
    }

    /// Returns true if retained messages are useless: replication cannot work, or has failed for as
    /// long as a lost node is awaited.
    fn have_expired(&self, now: Instant, network: Option<&NetworkOptions>) -> bool {
        let Some(network) = network else { return true };
        let tried = self.first.map(|first| now.saturating_duration_since(first));
        self.are_permanent || tried.is_some_and(|tried| tried >= network.lost_after)
    }
}

impl ReplicationSupervisor {
    pub(super) fn new() -> Self {
        let (growth_sender, growth_requests) = bounded(MAX_GROWTH_REQUESTS);
        Self {
            replicator: None,
            service_context: Weak::new(),
            attempts: StartAttempts::default(),
            is_inherited: false,
            has_released: false,
            must_release_again: false,
            arrival_repair_lock: ArrivalRepairLock::default(),
            waiting_arrivals: WaitingArrivals::default(),
            growth_sender,
            growth_requests,
            needs_topics: false,
            changed_topics: BTreeSet::new(),
        }
    }

    pub(super) fn replicator(&self) -> Option<&Replicator> {
        self.replicator.as_ref()
    }

    /// Ends replication, which uses participants of the service. True if a thread still acts as one
    /// of them, even an abandoned worker.
    pub(super) fn end(&mut self) -> bool {
        self.replicator = None;
        self.service_context.strong_count() > 0
    }

    /// Topics were created: the replicator has to know them before its next turn.
    pub(super) fn mark_changed(&mut self, has_new: bool) {
        self.needs_topics |= has_new;
    }

    pub(super) fn backlog_blocks_publishers(&mut self, number: u32) {
        if let Some(replicator) = &mut self.replicator {
            replicator.backlog_blocks_publishers(number);
        }
    }

    /// Locked during the repair of unfinished deliveries of a dead service.
    pub(super) fn arrival_repair_lock(&self) -> &ArrivalRepairLock {
        &self.arrival_repair_lock
    }

    /// No messages will be sent to other nodes, so none are retained for them.
    fn is_over(&self, network: Option<&NetworkOptions>) -> bool {
        self.replicator.is_none() && self.attempts.have_expired(Instant::now(), network)
    }

    pub(super) fn max_poll_timeout(&self) -> Option<Duration> {
        let now = Instant::now();
        if let Some(replication) = &self.replicator {
            return replication.max_poll_timeout(now);
        }
        let backoff = self.attempts.backoff.filter(|_| !self.attempts.are_permanent);
        let next = backoff.map(|backoff| backoff.until().saturating_duration_since(now));
        next.into_iter().chain(self.must_release_again.then_some(RELEASE_RETRY)).min()
    }

    /// Topics with inbound messages that have begun to wait since the last call.
    pub(super) fn waiting_arrivals(&self) -> BTreeSet<u32> {
        std::mem::take(&mut *lock(&self.waiting_arrivals))
    }

    pub(super) fn rows(&mut self) -> Vec<Row> {
        match &mut self.replicator {
            Some(replication) => replication.rows(),
            None => self.attempts.row().into_iter().collect(),
        }
    }
}

#[cfg(test)]
impl ReplicationSupervisor {
    pub(super) fn set_context(&mut self, service_context: &Arc<ServiceContext>) {
        self.service_context = Arc::downgrade(service_context);
    }
}

impl Service {
    pub(super) fn run_replication(&mut self) {
        self.start_replication();
        while let Ok(request) = self.replication.growth_requests.try_recv() {
            let Some(served_node) = &self.served_node else { continue };
            self.broker.grow_as_requested(&served_node.caller(), request);
        }
        let replication = &mut self.replication;
        if let Some(replicator) = &mut replication.replicator {
            replicator.topics_changed(&std::mem::take(&mut replication.changed_topics));
            if std::mem::take(&mut replication.needs_topics) {
                replicator.set_topics(self.broker.registry().local_topics());
            }
            replicator.turn();
        } else if self.replication.is_over(self.options.network.as_ref()) {
            self.release_all();
        }
        for number in self.broker.registry().unused().collect::<Vec<_>>() {
            self.remove_unused(number);
        }
    }

    /// Replication cannot work: releases messages that an earlier service retained, or publishers
    /// would wait for ever.
    fn release_all(&mut self) {
        let replication = &mut self.replication;
        let again = std::mem::take(&mut replication.must_release_again);
        let is_first = !std::mem::replace(&mut replication.has_released, true);
        if std::mem::take(&mut replication.needs_topics) || again || is_first {
            for number in self.broker.registry().topic_numbers() {
                self.release_retained(number);
            }
        }
    }

    /// True if no messages of a topic are retained any more.
    fn release_retained(&mut self, number: u32) -> bool {
        let (Some(served_node), Some((topic, [local, _]))) =
            (&self.served_node, self.broker.registry().topic_and_pools(number))
        else {
            return true;
        };
        let Some(role) = served_node.participants.admit_role(0) else { return true };
        match replication::release_retained(topic, local, &served_node.caller(), role) {
            Ok(false) => true,
            Ok(true) => {
                tracing::warn!(
                    topic = topic.name(),
                    "this service does not replicate: messages retained for other nodes are dropped"
                );
                true
            }
            Err(error) => {
                tracing::debug!(%error, "cannot release messages retained for other nodes yet");
                self.replication.must_release_again = true;
                false
            }
        }
    }

    /// Without network options of its own, the service uses those of the last service.
    pub(super) fn load_network_options(&mut self) {
        let served_node = self.served_node.as_ref().filter(|_| self.options.network.is_none());
        let Some(stored) = served_node.and_then(|it| it.node_segment.network()) else { return };
        match protocol::decode::<NetworkOptions>("read network options of last service", &stored) {
            Ok(network) => {
                let listen = network.listen.map(tracing::field::display);
                let peers = network.peers.join(", ");
                tracing::info!(listen, peers, "network options of the last service are used");
                (self.options.network, self.replication.is_inherited) = (Some(network), true);
            }
            Err(error) => tracing::error!(%error, "replication ended"),
        }
    }

    /// Stores the network options for the next service of this node.
    fn store_network_options(&self, network: &NetworkOptions) {
        let Some(served_node) = &self.served_node else { return };
        let bytes = protocol::encode(network);
        if served_node.node_segment.network().as_ref() == Some(&bytes)
            || served_node.node_segment.store_network(&bytes)
        {
            return;
        }
        tracing::warn!(
            bytes = bytes.len(),
            most = MAX_NETWORK_BYTES,
            "network options are too long to be stored: a service that takes over without \
             options will not replicate"
        );
    }

    pub(super) fn start_replication(&mut self) {
        let (Some(network), Some(served_node)) = (&self.options.network, &self.served_node) else {
            return;
        };
        let replication = &mut self.replication;
        if replication.replicator.is_some() || !replication.attempts.may_begin(Instant::now()) {
            return;
        }
        let Some(role) = served_node.participants.admit_role(0) else { return };
        let service_context = Arc::new(ServiceContext {
            me: served_node.me,
            role,
            node_segment: Arc::clone(&served_node.node_segment),
            participants: Arc::clone(&served_node.participants),
            growth: replication.growth_sender.clone(),
            bell: Arc::clone(&self.bell),
            waiting_arrivals: WaitingArrivals::clone(&replication.waiting_arrivals),
            arrival_repair_lock: ArrivalRepairLock::clone(&replication.arrival_repair_lock),
        });
        replication.service_context = Arc::downgrade(&service_context);
        let bell = Arc::clone(served_node.node_segment.publish_doorbell());
        let (identity, label) = (served_node.node_segment.identity(), &self.options.label);
        let is_first = replication.attempts.first.is_none();
        if is_first {
            network.warn_if_insecure();
        }
        match Replicator::start(network, identity, label, service_context, bell) {
            Ok(replicator) => {
                let (listens, successor_options) =
                    (replicator.listens(), replicator.successor_options(label));
                let also = if is_first || listens.is_none() { "" } else { "; the node listens" };
                tracing::info!(node = %identity, listens, "peer discovery started{also}");
                replication.replicator = Some(replicator);
                (replication.attempts, replication.has_released) =
                    (StartAttempts::default(), false);
                replication.needs_topics = true;
                self.store_network_options(&successor_options);
            }
            Err(error) => {
                // Stored options worked for another service, so a failure may be temporary.
                let is_permanent =
                    error.kind() == ErrorKind::InvalidArgument && !replication.is_inherited;
                let attempts = &mut replication.attempts;
                let is_logged =
                    attempts.record_failure(Instant::now(), is_permanent, error.clone());
                if is_logged {
                    let also = if is_permanent { "" } else { "; retrying" };
                    tracing::error!(%error, "replication cannot start{also}");
                }
                if is_first && !is_permanent && !replication.is_inherited {
                    self.store_network_options(&network.clone());
                }
            }
        }
    }

    /// Publishers or subscribers of a topic joined or left.
    pub(super) fn topic_changed(&mut self, number: u32) {
        if self.broker.registry_mut().update_activity(number) {
            self.replication.changed_topics.insert(number);
        }
        self.monitor_topic(number);
        self.replication.needs_topics = true;
    }

    /// After changes of the users of these topics.
    pub(super) fn review_topics(&mut self, topics: Vec<u32>) {
        for number in topics {
            self.topic_changed(number);
            self.remove_unused(number);
        }
    }

    /// Removes a topic without users, unless messages of it are retained for other nodes.
    pub(super) fn remove_unused(&mut self, number: u32) {
        let registry = self.broker.registry();
        let found = registry.topic_and_pools(number).filter(|_| registry.is_unused(number));
        let Some(topic) = found.map(|(topic, _)| Arc::clone(topic)) else { return };
        let is_held = if self.replication.is_over(self.options.network.as_ref()) {
            !self.release_retained(number)
        } else {
            // For instance by the last service, while replication has not started.
            self.replication.replicator.as_ref().is_some_and(|it| it.holds(number))
                || replication::is_owed(&topic)
        };
        if !is_held && self.broker.registry_mut().remove_unused(number) {
            // Other nodes that could not be reached are told later.
            if let (Some(_), Some(served_node)) = (&self.options.network, &self.served_node) {
                let publishers = topic.ended_publishers();
                served_node.node_segment.record_ended_publishers(topic.name(), &publishers);
            }
            log_change!(self, topic = topic.name(), "a topic was removed");
            self.eviction_monitor.forget(number);
            self.replication.changed_topics.remove(&number);
            self.replication.needs_topics = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn because(operation: &'static str) -> Error {
        Error::new(operation, ErrorKind::CannotListen, "")
    }

    #[test]
    fn failure_is_logged_at_once_if_new_and_else_with_growing_pauses() {
        let (now, mut attempts) = (Instant::now(), StartAttempts::default());
        let mut logged = Vec::new();
        for seconds in 0..300 {
            let reason = if seconds < 200 { "no such address" } else { "taken" };
            if attempts.record_failure(now + Duration::from_secs(seconds), false, because(reason)) {
                logged.push(seconds);
            }
        }
        assert_eq!(logged, [0, 5, 15, 35, 75, 135, 195, 200, 205, 215, 235, 275]);
    }

    #[test]
    fn retained_messages_expire_after_lost_after() {
        let network = NetworkOptions::default();
        let (now, mut attempts) = (Instant::now(), StartAttempts::default());
        assert!(attempts.have_expired(now, None));
        assert!(!attempts.have_expired(now, Some(&network)) && attempts.may_begin(now));
        attempts.record_failure(now, false, because("taken"));
        assert!(!attempts.may_begin(now) && attempts.may_begin(now + START_BACKOFF.first()));
        assert!(!attempts.have_expired(now + network.lost_after / 2, Some(&network)));
        attempts.record_failure(now + network.lost_after / 2, false, because("taken"));
        let late = now + network.lost_after;
        assert!(attempts.have_expired(late, Some(&network)));
        // A later attempt may still succeed.
        assert!(attempts.may_begin(late));
        attempts.record_failure(now, true, because("impossible"));
        assert!(
            attempts.have_expired(now, Some(&network))
                && !attempts.may_begin(late + 100 * RELEASE_RETRY)
        );
    }
}
