//! Starting, draining and losing the workers; commands to them and events of them.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};

use super::{Replicator, key};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::NodeId;
use crate::peers::is_local_address;
use crate::replication::Command;
use crate::replication::control_messages::ControlMessage;
use crate::replication::retry_backoff::RetryBackoff;
use crate::replication::{Side, TopicKey, Worker, WorkerEvent, WorkerOptions, Workers};

/// Backoff between attempts to start workers.
const START_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// Events of one worker handled in one turn.
const EVENTS_PER_WORKER: usize = 1024;

/// How workers are started.
pub(super) type StartWorkers = fn(usize, &WorkerOptions, IpAddr) -> Result<Workers>;

/// Workers that are being started.
pub(super) struct WorkerStart {
    local: IpAddr,
    since: Instant,
    outcome: Receiver<Result<Workers>>,
    /// It exceeded its timeout: nothing waits for it any more.
    is_late: bool,
}

/// How long the end of a service waits for a provider that is being opened.
const START_JOIN_TIMEOUT: Duration = Duration::from_secs(5);

impl WorkerStart {
    /// Waits, lest the process ends while a provider is being opened. A provider that hangs is
    /// abandoned.
    pub(super) fn end(self) {
        drop(self.outcome.recv_timeout(START_JOIN_TIMEOUT));
    }
}

/// Whether workers at `local` can be reached by nodes that reach `wanted`.
fn is_reachable_from(local: IpAddr, wanted: IpAddr) -> bool {
    let is_remote = |address: IpAddr| !address.to_canonical().is_loopback();
    // From another address of this machine the system finds a route, but no other machine reaches
    // its loopback.
    local == wanted || is_remote(local) && is_local_address(local) || !is_remote(wanted)
}

impl Replicator {
    /// Starts the workers when another node connects, at an address that it reaches. Restarts them
    /// if one has ended, or if later nodes do not reach their address.
    pub(super) fn manage_workers(&mut self, now: Instant) {
        let local_address = || {
            let addresses = || self.nodes.values().map(|node| node.local_address);
            let far = addresses().find(|address| !address.to_canonical().is_loopback());
            far.or_else(|| addresses().next())
        };
        let local = self.options.source.or_else(local_address);
        if let Some(worker_start) = &mut self.worker_start {
            // Also when all nodes have disconnected meanwhile: the opened workers are used.
            let (at, outcome) = (worker_start.local, worker_start.outcome.try_recv());
            let outcome = match outcome {
                Err(TryRecvError::Empty)
                    if local.is_none_or(|local| is_reachable_from(at, local)) =>
                {
                    return self.check_start_timeout(now);
                }
                // Other nodes do not reach that address any more: the thread closes the workers
                // again.
                Err(TryRecvError::Empty) => None,
                Ok(outcome) => Some(outcome),
                Err(TryRecvError::Disconnected) => {
                    let detail = "the thread that opens a provider panicked";
                    Some(Err(Error::new("open a provider", ErrorKind::Failed, detail)))
                }
            };
            self.worker_start = None;
            if let Some(outcome) = outcome {
                return self.finish_start(now, at, outcome);
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
        if self.worker_backoff.is_some_and(|backoff| !backoff.is_over(now)) {
            return;
        }
        match self.begin_worker_start(now, local) {
            Ok(worker_start) => {
                self.worker_start = Some(worker_start);
                // Nothing can be retained for a node yet, so no node is promised anything.
                self.plan.set_can_send(false);
            }
            Err(error) => self.finish_start(now, local, Err(error)),
        }
    }

    /// A thread of its own opens the provider: if it hangs, only replication waits.
    fn begin_worker_start(&self, now: Instant, local: IpAddr) -> Result<WorkerStart> {
        let options = WorkerOptions {
            policy: self.options.policy()?,
            lanes: self.options.lanes,
            ..WorkerOptions::default()
        };
        let (count, start_workers) = (self.options.workers, self.start_workers);
        let (sender, outcome) = bounded(1);
        let bell = Arc::clone(&self.service_context.bell);
        std::thread::Builder::new()
            .name("fabricast-open".into())
            .spawn(move || {
                // If nothing waits any more, the workers are closed here.
                let _ = sender.send(start_workers(count, &options, local));
                bell.ring();
            })
            .map_err(|error| Error::of("open a provider", error))?;
        Ok(WorkerStart { local, since: now, outcome, is_late: false })
    }

    /// Other nodes do not wait for a provider that is slow to open.
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
            "opening a provider at {local} takes longer than {longest:?}; the setting \"provider\" \
             chooses another"
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

    /// When to check a provider that is being opened, unless it opens before.
    pub(super) fn start_deadline(&self) -> Option<Instant> {
        let worker_start = self.worker_start.as_ref().filter(|it| !it.is_late)?;
        Some(worker_start.since + self.start_timeout())
    }

    /// Sends the interests of this node to new nodes, unless its provider is about to be known. A
    /// node that knows that its messages cannot be sent here retains none.
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
                // The start is retried: one error line is enough.
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

    /// Drains the workers, which may take a while; other workers take over their topics.
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
            // The workers ended here.
            Err(error) => tracing::debug!(%error, "no thread to drain workers"),
        }
    }

    /// Runs a command on a topic's worker. If the worker has ended, its successor gets all commands
    /// again.
    pub(super) fn with_worker(&self, number: u32, command: impl FnOnce(&Worker) -> Result<()>) {
        let Some(workers) = &self.workers else { return };
        if let Err(error) = command(workers.of(key(number))) {
            tracing::debug!(%error, "a worker did not take a command");
        }
    }

    /// Reports a disconnected node to all workers, before it connects again.
    pub(super) fn lose_node(&self, node: NodeId) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::NodeLost(node));
        }
    }

    /// A lost session is back. The system retransmits data in flight on the workers' connections
    /// only after a delay that grows with the outage: new connections start at once.
    pub(super) fn renew_connections(&self, node: NodeId) {
        for worker in self.workers.iter().flat_map(Workers::all) {
            let _ = worker.tell(Command::NodeReturned(node));
        }
    }

    pub(super) fn handle_worker_events(&mut self, now: Instant) {
        let (mut events, mut has_ended) = (Vec::new(), false);
        for worker in self.workers.iter().flat_map(Workers::all) {
            for count in 0..=EVENTS_PER_WORKER {
                match worker.try_report() {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => break,
                    Err(_) => {
                        has_ended = true;
                        break;
                    }
                }
                self.has_more_work |= count == EVENTS_PER_WORKER;
            }
        }
        for event in events {
            self.handle_worker_event(now, event);
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

    fn handle_worker_event(&mut self, now: Instant, event: WorkerEvent) {
        let number = |key: TopicKey| key.0 as u32;
        match event {
            WorkerEvent::ControlMessage { key, node, terms: message } => {
                let Some(replicated) = self.replicated_topics.get(&number(key)) else { return };
                let topic = replicated.local_topic.topic.name().to_owned();
                self.send_control_message(
                    node,
                    &ControlMessage::ConnectionMessage { topic, message },
                );
            }
            WorkerEvent::Connected { key, node, side } => {
                tracing::debug!(?key, %node, ?side, "connection of a topic established");
                if let Some(replicated) = self.replicated_topics.get(&number(key)) {
                    self.incompatible_topics
                        .clear_failure(replicated.local_topic.topic.name(), (node, side));
                }
            }
            WorkerEvent::Disconnected { key, node, side, reason } => {
                tracing::debug!(?key, %node, ?side, %reason, "connection of a topic lost");
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
                tracing::error!(
                    %error,
                    ?key,
                    %node,
                    label,
                    ?side,
                    "replication of a topic with a node failed"
                );
                // A failure of a disconnected node is not recorded: only its return would clear it.
                let is_connected = self.nodes.contains_key(&node);
                if let Some(replicated) =
                    self.replicated_topics.get(&number).filter(|_| is_connected)
                {
                    let topic = replicated.local_topic.topic.name();
                    self.incompatible_topics.record_failure(
                        topic,
                        (node, side),
                        &error.to_string(),
                    );
                }
                match side {
                    Side::Reader => self.stop_receiving(number, node),
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
                if let Some(replicated) = self.replicated_topics.get_mut(&number(key)) {
                    self.publish_listener.stop_listening(number(key));
                    replicated.source_failed(now);
                    self.reconcile_queue.enqueue(number(key));
                }
            }
        }
    }

    /// Sends a control message to a node, if it is connected.
    pub(super) fn send_control_message(&self, node: NodeId, message: &ControlMessage) {
        let Some(remote) = self.nodes.get(&node) else { return };
        if let Err(error) = self.peers.send(node, remote.session, message.encode()) {
            tracing::debug!(%error, %node, "a control message was not sent");
        }
    }

    /// How long a destination may take nothing while publishers wait for it. This exceeds the time
    /// to detect its disconnection, and to evict a stalled subscriber there.
    pub(crate) fn stall_timeout(&self, number: u32) -> Duration {
        let replicated = self.replicated_topics.get(&number);
        let release =
            replicated.map(|replicated| replicated.local_topic.topic.settings().release_deadline());
        2 * (self.options.lost_after + release.unwrap_or_default())
    }

    /// Retained messages of a topic have blocked publishers for as long as is allowed.
    pub(crate) fn backlog_blocks_publishers(&mut self, number: u32) {
        let Some(replicated) = self.replicated_topics.get(&number) else { return };
        if replicated.is_replicated() {
            // The worker knows which destinations lag.
            self.with_worker(number, |worker| worker.tell(Command::ReportLagging(key(number))));
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
            let topic = self
                .replicated_topics
                .get(&number)
                .map(|replicated| replicated.local_topic.topic.name());
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
    fn loopback_address_is_reached_from_the_same_machine_only() {
        let [loopback, mapped, remote] =
            ["127.0.0.1", "::ffff:127.0.0.1", "10.0.0.1"].map(|it| it.parse::<IpAddr>().unwrap());
        assert!(
            is_reachable_from(loopback, loopback)
                && is_reachable_from(loopback, mapped)
                && is_reachable_from(remote, loopback)
        );
        assert!(!is_reachable_from(loopback, remote) && !is_reachable_from(mapped, remote));
        // An address that is not of this machine any more.
        assert!(!is_reachable_from("192.0.2.1".parse().unwrap(), remote));
    }
}
