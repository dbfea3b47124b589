//! The workers that move messages: where they are, what they are told, and what they say.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};

use super::{Replicator, key};
use crate::error::{Error, ErrorKind, Result};
use crate::peers::{NodeId, is_local_address};
use crate::replication::Command;
use crate::replication::control_messages::ControlMessage;
use crate::replication::retry_backoff::RetryBackoff;
use crate::replication::{Side, TopicKey, Worker, WorkerEvent, WorkerOptions, Workers};

/// How long to wait until it is tried again to start them.
const START_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// Reports of one worker that are heard before others have their turn.
const EVENTS_PER_WORKER: usize = 1024;

/// How workers are started.
pub(super) type StartWorkers = fn(usize, &WorkerOptions, IpAddr) -> Result<Workers>;

/// Workers that are being started.
pub(super) struct WorkerStart {
    local: IpAddr,
    since: Instant,
    outcome: Receiver<Result<Workers>>,
    /// It takes so long that nothing waits for it any more.
    is_late: bool,
}

/// How long the end of a service waits for a provider that is being opened.
const START_JOIN_TIMEOUT: Duration = Duration::from_secs(5);

impl WorkerStart {
    /// Waits for it, lest the process ends while a provider is in the middle of it. One that hangs is
    /// left behind.
    pub(super) fn end(self) {
        drop(self.outcome.recv_timeout(START_JOIN_TIMEOUT));
    }
}

/// Can workers at this address be reached from others that are reached from that one?
fn is_reachable_from(local: IpAddr, wanted: IpAddr) -> bool {
    let is_far = |address: IpAddr| !address.to_canonical().is_loopback();
    // From another address of this machine the system finds its way; but nobody else reaches its
    // loopback.
    local == wanted || is_far(local) && is_local_address(local) || !is_far(wanted)
}

impl Replicator {
    /// Starts the workers when there is another node, at an address from which it is reached, and
    /// anew if one has ended, or if they are where later nodes do not reach them.
    pub(super) fn manage_workers(&mut self, now: Instant) {
        let local_address = || {
            let addresses = || self.nodes.values().map(|node| node.local_address);
            let far = addresses().find(|address| !address.to_canonical().is_loopback());
            far.or_else(|| addresses().next())
        };
        let local = self.options.source.or_else(local_address);
        if let Some(worker_start) = &mut self.worker_start {
            // Also when all nodes have left meanwhile: what was opened is taken.
            let (place, outcome) = (worker_start.local, worker_start.outcome.try_recv());
            let outcome = match outcome {
                Err(TryRecvError::Empty)
                    if local.is_none_or(|local| is_reachable_from(place, local)) =>
                {
                    return self.check_start_timeout(now);
                }
                // At an address that others do not reach any more: its thread closes it again.
                Err(TryRecvError::Empty) => None,
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Disconnected) => {
                    let detail = "the thread that opens a provider panicked";
                    Some(Err(Error::new("open a provider", ErrorKind::Failed, detail)))
                }
            };
            self.worker_start = None;
            if let Some(outcome) = outcome {
                return self.finish_start(now, place, outcome);
            }
        }
        let Some(local) = local else { return };
        if self.workers.is_some() {
            if self.local.is_some_and(|now| is_reachable_from(now, local)) {
                return;
            }
            tracing::info!(%local, "the address of this node changed; restarting workers");
            self.drain_workers();
        }
        if self.worker_backoff.is_some_and(|rest| !rest.is_over(now)) {
            return;
        }
        match self.begin_worker_start(now, local) {
            Ok(worker_start) => {
                self.worker_start = Some(worker_start);
                // No node is promised anything that cannot be kept for it yet.
                self.plan.set_can_send(false);
            }
            Err(error) => self.finish_start(now, local, Err(error)),
        }
    }

    /// A provider is opened by a thread of its own: one that hangs holds up nothing but the messages
    /// that go between nodes.
    fn begin_worker_start(&self, now: Instant, local: IpAddr) -> Result<WorkerStart> {
        let options = WorkerOptions {
            policy: self.options.policy()?,
            lanes: self.options.lanes,
            ..WorkerOptions::default()
        };
        let (count, start_workers) = (self.options.workers, self.start_workers);
        let (told, outcome) = bounded(1);
        let bell = Arc::clone(&self.service_context.bell);
        std::thread::Builder::new()
            .name("fabricast-open".into())
            .spawn(move || {
                // If nothing waits for it any more, it is closed again here.
                let _ = told.send(start_workers(count, &options, local));
                bell.ring();
            })
            .map_err(|error| Error::of("open a provider", error))?;
        Ok(WorkerStart { local, since: now, outcome, is_late: false })
    }

    /// Other nodes do not wait for a provider that takes long.
    fn check_start_timeout(&mut self, now: Instant) {
        let longest = self.start_timeout();
        let Some(worker_start) = self.worker_start.as_mut().filter(|it| !it.is_late) else {
            return;
        };
        if now < worker_start.since + longest {
            return;
        }
        worker_start.is_late = true;
        let local = worker_start.local;
        let why = format!(
            "opening a provider at {local} takes longer than {longest:?}; the setting \"provider\" chooses another"
        );
        tracing::error!(why, "replication waits for a provider to open");
        self.start_error = Some(why);
        self.plan.set_can_send(false);
        self.announce_to_all();
        self.enqueue_all();
    }

    fn start_timeout(&self) -> Duration {
        self.options.lost_after / 2
    }

    /// When it is to be looked again at a provider that is being opened, if nothing tells before.
    pub(super) fn start_deadline(&self) -> Option<Instant> {
        let worker_start = self.worker_start.as_ref().filter(|it| !it.is_late)?;
        Some(worker_start.since + self.start_timeout())
    }

    /// Those that have come are told what there is here, unless it is about to be known by what
    /// messages go: who knows that nothing can go here does not keep anything for this node.
    pub(super) fn announce_unless_starting(&mut self) {
        if self.worker_start.as_ref().is_none_or(|it| it.is_late) {
            self.announce_to_all();
        }
    }

    fn announce_to_all(&mut self) {
        for (node, session) in std::mem::take(&mut self.unannounced_nodes) {
            if let Err(error) = self.peers.announce_interests(node, session) {
                tracing::warn!(%error, %node, "cannot send interests to a node");
            }
        }
    }

    fn finish_start(&mut self, now: Instant, local: IpAddr, outcome: Result<Workers>) {
        match outcome {
            Ok(workers) => {
                if let Some(first) = workers.all().next() {
                    let provider = &first.provider().name;
                    tracing::info!(%local, provider, "replication started");
                    self.set_local_provider(first.provider());
                }
                (self.workers, self.local) = (Some(workers), Some(local));
                self.start_error = None;
            }
            Err(error) => {
                // It is tried again and again: said once is enough.
                let why = error.to_string();
                match self.start_error.as_ref() == Some(&why) {
                    true => tracing::debug!(why, %local, "still cannot start replication"),
                    false => tracing::error!(why, %local, "cannot start replication"),
                }
                self.start_error = Some(why);
                self.worker_backoff =
                    Some(RetryBackoff::after(self.worker_backoff, now, START_BACKOFF));
            }
        }
        self.plan.set_can_send(self.workers.is_some());
        self.announce_to_all();
        self.enqueue_all();
    }

    /// Lets go of the workers, which may take a while; others go on with all that they did.
    fn drain_workers(&mut self) {
        let Some(workers) = self.workers.take() else { return };
        for (number, replicated) in &mut self.replicated_topics {
            self.publish_listener.stop_listening(*number);
            replicated.worker_stopped();
        }
        self.enqueue_all();
        self.stop_receiving_all();
        self.worker_counters.clear();
        let draining_worker =
            std::thread::Builder::new().name("fabricast-drain".into()).spawn(move || drop(workers));
        self.draining_workers.retain(|draining_worker| !draining_worker.is_finished());
        match draining_worker {
            Ok(draining_worker) => self.draining_workers.push(draining_worker),
            // They ended here, then.
            Err(error) => tracing::debug!(%error, "no thread to drain workers"),
        }
    }

    /// Tells the worker of a topic something. If it has ended others take its place, and are told all
    /// anew.
    pub(super) fn tell(&self, number: u32, what: impl FnOnce(&Worker) -> Result<()>) {
        let Some(workers) = &self.workers else { return };
        if let Err(error) = what(workers.of(key(number))) {
            tracing::debug!(%error, "a worker did not take a command");
        }
    }

    /// Tells all workers of a node that is gone, before it is connected to anew.
    pub(super) fn lose_node(&self, node: NodeId) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::NodeLost(node));
        }
    }

    /// The connection with a node was lost, and is back. What the workers' connections with it have on
    /// their way the system sends again when it likes, which is the later the longer the link was
    /// down: other ones begin at once.
    pub(super) fn renew_connections(&self, node: NodeId) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::NodeReturned(node));
        }
    }

    pub(super) fn handle_worker_events(&mut self, now: Instant) {
        let (mut reports, mut has_ended) = (Vec::new(), false);
        for worker in self.workers.iter().flat_map(Workers::all) {
            for count in 0..=EVENTS_PER_WORKER {
                match worker.try_report() {
                    Ok(Some(report)) => reports.push(report),
                    Ok(None) => break,
                    Err(_) => {
                        has_ended = true;
                        break;
                    }
                }
                self.has_more_work |= count == EVENTS_PER_WORKER;
            }
        }
        for report in reports {
            self.handle_worker_event(now, report);
        }
        if has_ended {
            tracing::error!("a replication worker ended; starting another one");
            self.worker_backoff =
                Some(RetryBackoff::after(self.worker_backoff, now, START_BACKOFF));
            self.drain_workers();
            self.plan.set_can_send(false);
            self.enqueue_all();
        }
    }

    fn handle_worker_event(&mut self, now: Instant, report: WorkerEvent) {
        let number = |key: TopicKey| key.0 as u32;
        match report {
            WorkerEvent::ControlMessage { key, node, terms } => {
                let Some(replicated) = self.replicated_topics.get(&number(key)) else { return };
                let topic = replicated.facts.topic.name().to_owned();
                self.write(node, &ControlMessage::ConnectionMessage { topic, terms });
            }
            WorkerEvent::Connected { key, node, side } => {
                tracing::debug!(?key, %node, ?side, "a topic is connected");
                if let Some(replicated) = self.replicated_topics.get(&number(key)) {
                    self.incompatible_topics
                        .clear_failure(replicated.facts.topic.name(), (node, side));
                }
            }
            WorkerEvent::Disconnected { key, node, side, reason } => {
                tracing::debug!(?key, %node, ?side, %reason, "a topic's connection broke");
                if side == Side::Writer {
                    self.plan.connection_broke(now, number(key), node);
                    self.reconcile_queue.enqueue(number(key));
                }
            }
            WorkerEvent::Lagging { key, node } => {
                self.drop_lagging_destination(now, number(key), node)
            }
            WorkerEvent::Failed { key, node: Some(node), side, error } => {
                let (number, node) = (number(key), node);
                let label = self.seen_nodes.label(node);
                tracing::error!(%error, ?key, %node, label, ?side, "a topic cannot be replicated between two nodes");
                // Of one that is gone nothing is noted that only its coming back would end.
                let is_there = self.nodes.contains_key(&node);
                if let Some(replicated) = self.replicated_topics.get(&number).filter(|_| is_there) {
                    let topic = replicated.facts.topic.name();
                    self.incompatible_topics.fails(topic, (node, side), &error.to_string());
                }
                match side {
                    Side::Reader => self.stop_receiving(number, node),
                    Side::Writer => {
                        if is_there {
                            self.plan.mark_unsendable(number, node);
                        }
                        self.reconcile_queue.enqueue(number);
                    }
                }
            }
            WorkerEvent::Failed { key, node: None, error, .. } => {
                tracing::error!(%error, ?key, "a topic is not replicated for now");
                // Whoever publishes must not wait for what nobody takes.
                if let Some(replicated) = self.replicated_topics.get_mut(&number(key)) {
                    self.publish_listener.stop_listening(number(key));
                    replicated.fails(now);
                    self.reconcile_queue.enqueue(number(key));
                }
            }
        }
    }

    /// Sends a letter to a node, if it is there.
    pub(super) fn write(&self, node: NodeId, letter: &ControlMessage) {
        let Some(there) = self.nodes.get(&node) else { return };
        if let Err(error) = self.peers.tell(node, there.session, letter.encode()) {
            tracing::debug!(%error, %node, "a control message was not sent");
        }
    }

    /// How long a destination may take nothing while others wait because of that: longer than it
    /// takes to find out that its node is gone, or to remove there who is in the way.
    pub(crate) fn stall_timeout(&self, number: u32) -> Duration {
        let replicated = self.replicated_topics.get(&number);
        let release =
            replicated.map(|replicated| replicated.facts.topic.settings().release_deadline());
        2 * (self.options.lost_after + release.unwrap_or_default())
    }

    /// What other nodes are owed of a topic is in the way, and has been for as long as that may be.
    pub(crate) fn backlog_blocks_publishers(&mut self, number: u32) {
        let Some(replicated) = self.replicated_topics.get(&number) else { return };
        if replicated.is_replicated() {
            // It knows who takes nothing.
            self.tell(number, |worker| worker.tell(Command::ReportLagging(key(number))));
            return;
        }
        let nodes: Vec<_> = self.plan.destinations(number).map(|(node, _)| node).collect();
        for node in nodes {
            self.drop_lagging_destination(Instant::now(), number, node);
        }
    }

    fn drop_lagging_destination(&mut self, now: Instant, number: u32, node: NodeId) {
        let stall_timeout = self.stall_timeout(number);
        if self.plan.suspend_if_stalled(now, (number, node), stall_timeout) {
            self.reconcile_queue.enqueue(number);
            let topic =
                self.replicated_topics.get(&number).map(|replicated| replicated.facts.topic.name());
            tracing::warn!(
                topic, %node, label = self.seen_nodes.label(node), ?stall_timeout,
                "a node blocked publishers for too long: it will miss messages"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_at_the_loopback_is_reached_from_there_only() {
        let [loopback, near, far] =
            ["127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1"].map(|it| it.parse::<IpAddr>().unwrap());
        assert!(
            is_reachable_from(loopback, loopback)
                && is_reachable_from(loopback, near)
                && is_reachable_from(far, loopback)
        );
        assert!(!is_reachable_from(loopback, far) && !is_reachable_from(near, far));
        // Where this machine cannot be reached, whatever it was.
        assert!(!is_reachable_from("192.0.2.1".parse().unwrap(), far));
    }
}
