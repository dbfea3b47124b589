//! The worker threads: their start, their end and their counters, commands to them and events of
//! them.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError, bounded};
use threads::RetryBackoff;
use transfer::path::DeviceFabric;

use super::{RetrySchedule, key};
use crate::error::{Error, ErrorKind, Result};
use crate::network_options::NetworkOptions;
use crate::peers::is_local_address;
use crate::replication::{
    Command, Counters, Provider, Worker, WorkerEvent, WorkerOptions, Workers,
};
use crate::wake::WakeFd;

const START_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(100), Duration::from_secs(60));
const EVENTS_PER_WORKER: usize = 1024;
/// Timeout for the counters of all workers together. A worker that exceeds it is not waited for
/// again before it has answered.
const COUNTERS_TIMEOUT: Duration = Duration::from_millis(100);
/// How long the end of a service waits for a provider that is being opened.
const START_JOIN_TIMEOUT: Duration = Duration::from_secs(5);

type StartWorkers = fn(usize, &WorkerOptions, IpAddr) -> Result<Workers>;

struct WorkerStart {
    local: IpAddr,
    since: Instant,
    /// Other nodes do not wait for a provider that is slower to open.
    timeout: Duration,
    outcome: Receiver<Result<Workers>>,
    /// The start exceeded its timeout: nothing waits for it any more.
    is_late: bool,
}

#[derive(Debug, Default)]
struct PolledCounters {
    pending: Option<Receiver<Counters>>,
    last: Counters,
}

impl PolledCounters {
    /// Receives a pending answer until `end`.
    fn take_answer(&mut self, end: Instant) {
        let Some(pending) = &self.pending else { return };
        match pending.recv_deadline(end) {
            Ok(counters) => (self.last, self.pending) = (counters, None),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.pending = None,
        }
    }

    /// Requests counters, unless a request is pending. True if it sent a request.
    fn request(&mut self, worker: &Worker) -> bool {
        self.take_answer(Instant::now());
        let is_new = self.pending.is_none();
        if is_new {
            self.pending = worker.request_counters().ok();
        }
        is_new
    }
}

/// A change of the pool that concerns other parts of replication.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PoolEvent {
    /// The workers end, and with them all that they send and receive.
    Drained,
    /// A start began: nothing can be retained for a node yet, so no node is promised anything.
    StartBegun,
    /// A start ended, or takes long.
    StartSettled,
}

pub(super) struct WorkerPool {
    /// None until another node connects, and while starting workers fails.
    workers: Option<Workers>,
    /// The address of the workers.
    local: Option<IpAddr>,
    backoff: Option<RetrySchedule>,
    start: Option<WorkerStart>,
    start_workers: StartWorkers,
    start_error: Option<String>,
    /// Kind and operation of that error.
    logged_error: Option<(ErrorKind, &'static str)>,
    /// Threads that end workers.
    draining: Vec<JoinHandle<()>>,
    counters: Vec<PolledCounters>,
    /// Wakes the service's thread when a start ended.
    bell: Arc<WakeFd>,
}

/// Returns true if workers at `local` can be reached by nodes that reach `wanted`.
fn is_reachable_from(local: IpAddr, wanted: IpAddr) -> bool {
    let is_remote = |address: IpAddr| !address.to_canonical().is_loopback();
    // From another address of this machine the system finds a route, but no other machine reaches
    // its loopback.
    local == wanted || is_remote(local) && is_local_address(local) || !is_remote(wanted)
}

impl WorkerPool {
    pub(super) fn new(bell: Arc<WakeFd>) -> Self {
        Self {
            workers: None,
            local: None,
            backoff: None,
            start: None,
            start_workers: Workers::start,
            start_error: None,
            logged_error: None,
            draining: Vec::new(),
            counters: Vec::new(),
            bell,
        }
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().flat_map(Workers::all)
    }

    pub(super) fn is_running(&self) -> bool {
        self.workers.is_some()
    }

    pub(super) fn provider(&self) -> Option<&Provider> {
        self.all().next().map(Worker::provider)
    }

    /// Returns true if the provider is about to be known.
    pub(super) fn is_starting(&self) -> bool {
        self.start.as_ref().is_some_and(|start| !start.is_late)
    }

    /// Why no workers run.
    pub(super) fn start_error(&self) -> Option<&str> {
        self.start_error.as_deref().filter(|_| self.workers.is_none())
    }

    /// Starts the workers when another node connects, at an address that it reaches. Restarts them
    /// if one has ended, or if later nodes do not reach their address. Call it again after
    /// [`Drained`](PoolEvent::Drained).
    pub(super) fn manage(
        &mut self,
        now: Instant,
        options: &NetworkOptions,
        local: Option<IpAddr>,
    ) -> Option<PoolEvent> {
        if let Some(start) = &mut self.start {
            // Also when all nodes have disconnected meanwhile: the opened workers are used.
            let (at, outcome) = (start.local, start.outcome.try_recv());
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
                    Some(Err(Error::new("open provider", ErrorKind::Failed, detail)))
                }
            };
            self.start = None;
            if let Some(outcome) = outcome {
                return Some(self.finish_start(now, at, outcome));
            }
        }
        let local = local?;
        if self.workers.is_some() {
            if self.local.is_some_and(|now| is_reachable_from(now, local)) {
                return None;
            }
            tracing::info!(%local, "the address of this node changed; restarting workers");
            self.drain();
            return Some(PoolEvent::Drained);
        }
        if self.backoff.is_some_and(|backoff| !backoff.is_over(now)) {
            return None;
        }
        match self.begin_start(now, options, local) {
            Ok(start) => {
                self.start = Some(start);
                Some(PoolEvent::StartBegun)
            }
            Err(error) => Some(self.finish_start(now, local, Err(error))),
        }
    }

    /// A thread of its own opens the provider: if it hangs, only replication waits.
    fn begin_start(
        &self,
        now: Instant,
        options: &NetworkOptions,
        local: IpAddr,
    ) -> Result<WorkerStart> {
        let worker_options = WorkerOptions {
            policy: options.policy()?,
            lanes: options.lanes,
            device_fabric: DeviceFabric::from_environment()
                .map_err(|error| Error::of("open provider", error))?,
            ..WorkerOptions::default()
        };
        let (count, start_workers) = (options.workers, self.start_workers);
        let (sender, outcome) = bounded(1);
        let bell = Arc::clone(&self.bell);
        threads::spawn("fabricast-open", move || {
            // If nothing waits any more, the workers are closed here.
            let _ = sender.send(start_workers(count, &worker_options, local));
            bell.ring();
        })
        .map_err(|error| Error::of("open provider", error))?;
        let timeout = options.lost_after / 2;
        Ok(WorkerStart { local, since: now, timeout, outcome, is_late: false })
    }

    fn check_start_timeout(&mut self, now: Instant) -> Option<PoolEvent> {
        let start = self.start.as_mut().filter(|it| !it.is_late && now >= it.since + it.timeout)?;
        start.is_late = true;
        let WorkerStart { local, timeout, .. } = start;
        let why = format!(
            "opening a provider at {local} takes longer than {timeout:?}; the setting \"provider\" \
             chooses another"
        );
        tracing::error!(why, "replication waits for a provider to open");
        (self.start_error, self.logged_error) = (Some(why), None);
        Some(PoolEvent::StartSettled)
    }

    fn finish_start(&mut self, now: Instant, local: IpAddr, outcome: Result<Workers>) -> PoolEvent {
        match outcome {
            Ok(workers) => {
                (self.workers, self.local) = (Some(workers), Some(local));
                (self.start_error, self.logged_error) = (None, None);
                if let Some(provider) = self.provider().map(|provider| &provider.name) {
                    tracing::info!(%local, provider, "replication started");
                }
            }
            Err(error) => {
                // The start is retried: one error line is enough.
                let (why, logged) = (error.to_string(), Some((error.kind(), error.operation())));
                match std::mem::replace(&mut self.logged_error, logged) == logged {
                    true => tracing::debug!(why, %local, "still cannot start replication"),
                    false => tracing::error!(why, %local, "cannot start replication"),
                }
                self.start_error = Some(why);
                self.back_off(now);
            }
        }
        PoolEvent::StartSettled
    }

    fn back_off(&mut self, now: Instant) {
        self.backoff = Some(RetrySchedule::after(self.backoff, now, START_BACKOFF));
    }

    /// When to call [`manage`](Self::manage) at the latest, without any event.
    pub(super) fn deadline(&self, now: Instant) -> Option<Instant> {
        let backoff = self.backoff.filter(|it| self.workers.is_none() && !it.is_over(now));
        let start = self.start.as_ref().filter(|start| !start.is_late);
        let late = start.map(|start| start.since + start.timeout);
        backoff.map(|backoff| backoff.until()).into_iter().chain(late).min()
    }

    /// Drains the workers, which may take a while; other workers take over their topics.
    fn drain(&mut self) {
        let Some(workers) = self.workers.take() else { return };
        self.counters.clear();
        let draining = threads::spawn("fabricast-drain", move || drop(workers));
        self.draining.retain(|draining| !draining.is_finished());
        match draining {
            Ok(draining) => self.draining.push(draining),
            // The workers ended here.
            Err(error) => tracing::debug!(%error, "no thread to drain workers"),
        }
    }

    /// Sends a command to a topic's worker. If the worker has ended, its successor gets all
    /// commands again.
    pub(super) fn send(&self, number: u32, command: Command) {
        let Some(workers) = &self.workers else { return };
        if let Err(error) = workers.of(key(number)).send(command) {
            tracing::debug!(%error, "a worker did not take a command");
        }
    }

    pub(super) fn send_to_all(&self, command: impl Fn() -> Command) {
        for worker in self.all() {
            let _ = worker.send(command());
        }
    }

    pub(super) fn assign(&mut self, number: u32, largest: u64) -> Option<&Worker> {
        let workers = self.workers.as_mut()?;
        workers.assign(key(number), largest);
        Some(workers.of(key(number)))
    }

    /// Takes events of the workers. Also returns whether there may be more, and whether a worker
    /// has ended.
    pub(super) fn take_events(&self) -> (Vec<WorkerEvent>, bool, bool) {
        let (mut events, mut has_more, mut has_ended) = (Vec::new(), false, false);
        for worker in self.all() {
            for count in 0..=EVENTS_PER_WORKER {
                match worker.try_event() {
                    Ok(Some(event)) => events.push(event),
                    Ok(None) => break,
                    Err(_) => {
                        has_ended = true;
                        break;
                    }
                }
                has_more |= count == EVENTS_PER_WORKER;
            }
        }
        (events, has_more, has_ended)
    }

    /// A worker has ended: the others end, too, and all are started again.
    pub(super) fn replace_ended(&mut self, now: Instant) {
        tracing::error!("a replication worker ended; starting another one");
        self.back_off(now);
        self.drain();
    }

    /// The counters of each worker, with its provider; the last ones if it does not answer in time.
    pub(super) fn counters(&mut self) -> impl Iterator<Item = (&Provider, &Counters)> {
        let workers: Vec<_> = self.workers.iter().flat_map(Workers::all).collect();
        self.counters.resize_with(workers.len(), PolledCounters::default);
        let end = Instant::now() + COUNTERS_TIMEOUT;
        let counters = self.counters.iter_mut().zip(&workers);
        let asked: Vec<_> = counters.map(|(count, worker)| count.request(worker)).collect();
        for (count, _) in self.counters.iter_mut().zip(asked).filter(|(_, is_new)| *is_new) {
            count.take_answer(end);
        }
        let providers = workers.into_iter().map(Worker::provider);
        providers.zip(self.counters.iter().map(|polled| &polled.last))
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.workers = None;
        if let Some(start) = self.start.take() {
            // Otherwise the process might end while a provider is being opened. A provider that
            // hangs is abandoned.
            drop(start.outcome.recv_timeout(START_JOIN_TIMEOUT));
        }
        for draining in self.draining.drain(..) {
            if draining.join().is_err() {
                tracing::error!("a thread that ended workers panicked");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl WorkerPool {
        pub(crate) fn start_with(&mut self, start_workers: StartWorkers) {
            self.start_workers = start_workers;
        }

        pub(crate) fn is_opening(&self) -> bool {
            self.start.is_some()
        }
    }

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
