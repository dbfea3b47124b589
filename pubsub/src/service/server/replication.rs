//! What carries messages to other nodes, if this service was told of any.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::Service;
use crate::error::ErrorKind;
use crate::lock::lock;
use crate::network_options::NetworkOptions;
use crate::node_segment::MAX_NETWORK_BYTES;
use crate::pool::PoolId;
use crate::replication::{
    self, ArrivalRepairLock, LocalTopic, Replicator, RetryBackoff, ServiceContext, WaitingArrivals,
};
use crate::report::Row;
use crate::service::protocol;

/// Between two attempts to start: the last service may still have the address.
const START_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Between two times that it is told why they fail, as long as that stays the same.
const LOG_BACKOFF: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// Between two attempts to let go of what was kept for other nodes.
const RELEASE_RETRY: Duration = Duration::from_millis(100);
/// Requests for memory that may wait.
const MAX_GROWTH_REQUESTS: usize = 64;

pub(super) struct ReplicationSupervisor {
    pub(super) replicator: Option<Replicator>,
    /// Held by all that work in this service's name.
    pub(super) service_context: Weak<ServiceContext>,
    attempts: StartAttempts,
    /// How is another service's word.
    pub(super) is_inherited: bool,
    /// What is kept for other nodes was let go of, since nothing can be carried there.
    has_released: bool,
    /// Of some of it that was not possible yet.
    must_release_again: bool,
    arrival_repair_lock: ArrivalRepairLock,
    waiting_arrivals: WaitingArrivals,
    growth_sender: Sender<(PoolId, u64)>,
    growth_requests: Receiver<(PoolId, u64)>,
}

/// Attempts to start what carries messages, that have failed.
#[derive(Debug, Default)]
struct StartAttempts {
    /// The first of them.
    first: Option<Instant>,
    backoff: Option<RetryBackoff>,
    /// It would fail each time: the options are impossible.
    are_permanent: bool,
    /// Why the last one did.
    reason: Option<(ErrorKind, String)>,
    /// Until then it is told again only if there is another reason.
    log_backoff: Option<RetryBackoff>,
}

impl StartAttempts {
    /// One has failed. True if that is to be told: the first, one for another reason than the last
    /// one, and otherwise less and less often.
    fn record_failure(
        &mut self,
        now: Instant,
        is_permanent: bool,
        reason: (ErrorKind, String),
    ) -> bool {
        self.first.get_or_insert(now);
        self.backoff = Some(RetryBackoff::after(self.backoff, now, START_BACKOFF));
        let is_new = self.reason.as_ref() != Some(&reason) || self.are_permanent != is_permanent;
        self.reason = Some(reason);
        self.are_permanent = is_permanent;
        let is_logged =
            is_new || self.log_backoff.is_none_or(|log_backoff| log_backoff.is_over(now));
        if is_logged {
            self.log_backoff =
                Some(RetryBackoff::after(self.log_backoff.filter(|_| !is_new), now, LOG_BACKOFF));
        }
        is_logged
    }

    /// Why they fail, and what comes of it, for people.
    fn row(&self) -> Option<Row> {
        let (kind, reason) = self.reason.as_ref()?;
        let backoff = if self.are_permanent { "" } else { "; retrying" };
        Some(Row::replication_error(*kind, &format!("{reason}{backoff}")))
    }

    fn may_begin(&self, now: Instant) -> bool {
        !self.are_permanent && self.backoff.is_none_or(|backoff| backoff.is_over(now))
    }

    /// Is what is owed to other nodes kept for nothing? It is if nothing leads there, or has not
    /// for as long as a node that is gone is waited for.
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
        }
    }

    /// Held by who looks through what a dead service had begun to deliver.
    pub(super) fn arrival_repair_lock(&self) -> ArrivalRepairLock {
        ArrivalRepairLock::clone(&self.arrival_repair_lock)
    }

    /// Nothing will go to other nodes, so nothing is kept for them.
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

    /// Topics at which what arrives has begun to wait since this was asked last.
    pub(super) fn waiting_arrivals(&self) -> BTreeSet<u32> {
        std::mem::take(&mut *lock(&self.waiting_arrivals))
    }

    pub(super) fn rows(&mut self) -> Vec<Row> {
        match &mut self.replicator {
            Some(replication) => replication.rows(),
            None => self.attempts.row().into_iter().collect(),
        }
    }

    /// Does anything work in this service's name, and be it a worker that was given up?
    pub(super) fn has_workers(&self) -> bool {
        self.service_context.strong_count() > 0
    }
}

impl Service {
    /// Sees to what goes to other nodes and comes from them.
    pub(super) fn run_replication(&mut self) {
        self.start_replication();
        while let Ok((pool, bytes)) = self.replication.growth_requests.try_recv() {
            self.grow(pool, bytes);
        }
        if self.replication.replicator.is_some() {
            let topics = std::mem::take(&mut self.replicator_needs_topics).then(|| self.facts());
            let changed_topics = std::mem::take(&mut self.changed_topics);
            let Some(replication) = &mut self.replication.replicator else { return };
            replication.topics_changed(&changed_topics);
            if let Some(topics) = topics {
                replication.set_topics(topics);
            }
            replication.turn();
        } else if self.replication.is_over(self.options.network.as_ref()) {
            self.release_all();
        }
        for number in self.registry.unused().collect::<Vec<_>>() {
            self.remove_unused(number);
        }
    }

    /// Nothing can be carried to other nodes: what an earlier service kept for them is let go of, or
    /// those that publish would wait for ever.
    fn release_all(&mut self) {
        let replication = &mut self.replication;
        let again = std::mem::take(&mut replication.must_release_again);
        let is_first = !std::mem::replace(&mut replication.has_released, true);
        if std::mem::take(&mut self.replicator_needs_topics) || again || is_first {
            for number in self.registry.topics.keys().copied().collect::<Vec<_>>() {
                self.release_retained(number);
            }
        }
    }

    /// True if nothing of a topic is kept for other nodes any more.
    fn release_retained(&mut self, number: u32) -> bool {
        let (Some(served_node), Some((topic, [local, _]))) =
            (&self.served_node, self.registry.topic_and_pools(number))
        else {
            return true;
        };
        let Some(role) = served_node.roster.admit_role(0) else { return true };
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

    /// Who is told nothing about other nodes goes on with what the last service was told.
    pub(super) fn inherit_network(&mut self) {
        let Some(served_node) =
            self.served_node.as_ref().filter(|_| self.options.network.is_none())
        else {
            return;
        };
        let Some(kept) = served_node.node_segment.network() else { return };
        match protocol::decode::<NetworkOptions>(
            "read the network options of the last service",
            &kept,
        ) {
            Ok(network) => {
                let listen = network.listen.map(tracing::field::display);
                let peers = network.peers.join(", ");
                tracing::info!(listen, peers, "network options of the last service are used");
                (self.options.network, self.replication.is_inherited) = (Some(network), true);
            }
            Err(error) => {
                tracing::error!(%error, "replication ended");
            }
        }
    }

    /// The next service of this node is to be connected like this.
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
            "a service without network options that takes over will not reach other nodes: \
             these options are too long to be kept"
        );
    }

    /// Lets other nodes see this one, if it is told how.
    pub(super) fn start_replication(&mut self) {
        let (Some(network), Some(served_node)) = (&self.options.network, &self.served_node) else {
            return;
        };
        let replication = &mut self.replication;
        if replication.replicator.is_some() || !replication.attempts.may_begin(Instant::now()) {
            return;
        }
        let Some(role) = served_node.roster.admit_role(0) else { return };
        let service_context = Arc::new(ServiceContext {
            me: served_node.me,
            role,
            roster: Arc::clone(&served_node.roster),
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
            network.say_if_insecure();
        }
        match Replicator::start(network, identity, label, service_context, bell) {
            Ok(replicator) => {
                let (listens, successor_options) =
                    (replicator.listens(), replicator.successor_options(label));
                match (is_first, &listens) {
                    (false, Some(listens)) => tracing::info!(
                        node = %identity,
                        listens,
                        "peer discovery started; the node listens"
                    ),
                    _ => tracing::info!(node = %identity, listens, "peer discovery started"),
                }
                replication.replicator = Some(replicator);
                (replication.attempts, replication.has_released) =
                    (StartAttempts::default(), false);
                self.replicator_needs_topics = true;
                self.store_network_options(&successor_options);
            }
            Err(error) => {
                // What another service could do comes right again.
                let is_permanent =
                    error.kind() == ErrorKind::InvalidArgument && !replication.is_inherited;
                let attempts = &mut replication.attempts;
                let reason = (error.kind(), error.to_string());
                let is_logged = attempts.record_failure(Instant::now(), is_permanent, reason);
                if is_logged && is_permanent {
                    tracing::error!(%error, "replication cannot start");
                } else if is_logged {
                    tracing::error!(
                        %error,
                        "replication cannot start; retrying"
                    );
                }
                if is_first && !is_permanent && !replication.is_inherited {
                    self.store_network_options(&network.clone());
                }
            }
        }
    }

    fn facts(&self) -> BTreeMap<String, LocalTopic> {
        let topics = self.registry.topics.iter().filter_map(|(number, kept)| {
            let (topic, [local, inbound]) = self.registry.topic_and_pools(*number)?;
            let facts = LocalTopic {
                topic: Arc::clone(topic),
                local: Arc::clone(local),
                inbound: Arc::clone(inbound),
                publishes: kept.publishes,
                subscribes: kept.subscribes,
            };
            Some((topic.name().to_owned(), facts))
        });
        topics.collect()
    }

    /// Lets a topic go that nobody uses, unless other nodes are still owed messages of it.
    pub(super) fn remove_unused(&mut self, number: u32) {
        let is_unused = self.registry.is_unused(number);
        let kept = self.registry.topics.get(&number).filter(|_| is_unused);
        let Some(topic) = kept.map(|kept| Arc::clone(&kept.topic)) else { return };
        let is_held = if self.replication.is_over(self.options.network.as_ref()) {
            !self.release_retained(number)
        } else {
            // By the last service, say, though nobody carries it yet.
            self.replication.replicator.as_ref().is_some_and(|it| it.holds(number))
                || replication::is_owed(&topic)
        };
        if !is_held && self.registry.remove_unused(number) {
            log_change!(self, topic = topic.name(), "a topic was removed");
            self.eviction_monitor.forget(number);
            self.changed_topics.remove(&number);
            self.replicator_needs_topics = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn because(reason: &str) -> (ErrorKind, String) {
        (ErrorKind::CannotListen, reason.to_owned())
    }

    #[test]
    fn why_it_fails_is_told_at_once_if_it_is_news_and_else_less_and_less_often() {
        let (now, mut attempts) = (Instant::now(), StartAttempts::default());
        let mut told = Vec::new();
        for seconds in 0..300 {
            let reason = if seconds < 200 { "no such address" } else { "taken" };
            if attempts.record_failure(now + Duration::from_secs(seconds), false, because(reason)) {
                told.push(seconds);
            }
        }
        assert_eq!(told, [0, 5, 15, 35, 75, 135, 195, 200, 205, 215, 235, 275]);
    }

    #[test]
    fn what_is_owed_is_kept_as_long_as_there_is_hope() {
        let network = NetworkOptions::default();
        let (now, mut attempts) = (Instant::now(), StartAttempts::default());
        assert!(attempts.have_expired(now, None));
        assert!(!attempts.have_expired(now, Some(&network)) && attempts.may_begin(now));
        attempts.record_failure(now, false, because("taken"));
        assert!(!attempts.may_begin(now) && attempts.may_begin(now + START_BACKOFF.0));
        assert!(!attempts.have_expired(now + network.lost_after / 2, Some(&network)));
        attempts.record_failure(now + network.lost_after / 2, false, because("taken"));
        let late = now + network.lost_after;
        assert!(attempts.have_expired(late, Some(&network)));
        // It may come right yet.
        assert!(attempts.may_begin(late));
        attempts.record_failure(now, true, because("impossible"));
        assert!(
            attempts.have_expired(now, Some(&network))
                && !attempts.may_begin(late + 100 * RELEASE_RETRY)
        );
    }
}
