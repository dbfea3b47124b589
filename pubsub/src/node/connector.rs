//! Connects to the service of a node, and starts it if there is none.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Message, PidFd};
use threads::{RetryBackoff, lock};

use super::Welcome;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::node_options::{NodeOptions, ServiceMode};
use crate::replication::RetrySchedule;
use crate::service::election::{LeaderLock, PriorityLock, socket_path};
use crate::service::protocol::{self, Notice};
use crate::service::{ServiceProcess, ServiceThread, describe_process};

/// Wait for an answer before the leader is checked.
const ANSWER_POLL: Duration = Duration::from_millis(100);
/// Between two attempts to connect or join.
pub(super) const PAUSE: Duration = Duration::from_millis(5);

/// How long a free leader lock is left to the holder of the priority lock. The kernel frees the
/// priority lock of a dead process, so this bounds a stopped or starved one.
const PRIORITY_GRACE: Duration = Duration::from_secs(5);
/// Minimum term of a service that started after the holder of the priority lock missed its grace.
const MIN_TERM: Duration = Duration::from_secs(30);

/// How long a process that cannot serve leaves the leader lock to others.
const CANDIDACY_PAUSE: Duration = Duration::from_millis(100);
/// How long it then gives up its priority lock: at first, and after repeated failures.
const CANDIDACY_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_secs(1), Duration::from_secs(60));

/// The service of this process, if it runs one, and its priority.
#[derive(Debug, Default)]
pub(super) struct LocalService {
    service: Mutex<Option<ServiceThread>>,
    priority_lock: Mutex<Option<PriorityLock>>,
    /// True while it holds the priority lock; read by the service.
    has_priority: Arc<AtomicBool>,
    /// When it failed to serve and released the priority lock, and for how long.
    backoff: Mutex<Option<(Instant, RetrySchedule)>>,
}

impl LocalService {
    /// Starts the service if there is none. For a grace since `leaderless_since`, a process with
    /// priority goes first.
    fn try_serve(
        &self,
        operation: &'static str,
        options: &NodeOptions,
        leaderless_since: Instant,
    ) -> Result<()> {
        let mut service = lock(&self.service);
        if service.as_ref().is_some_and(|service| !service.is_over()) {
            return Ok(());
        }
        // A failed service releases the leader lock first.
        self.drop_ended(&mut service);
        let now = Instant::now();
        if lock(&self.backoff).is_some_and(|(since, _)| now < since + CANDIDACY_PAUSE) {
            return Ok(());
        }
        let mut min_term_until = None;
        if !self.acquire_priority(operation, options)?
            && PriorityLock::holder(operation, &options.directory)?.is_some()
        {
            if now.saturating_duration_since(leaderless_since) < priority_grace(options) {
                return Ok(());
            }
            // The process with priority does not serve, or not for long, and may claim priority
            // again at once.
            min_term_until = Some(now + MIN_TERM);
        }
        let has_priority = Arc::clone(&self.has_priority);
        let started = ServiceThread::start(options.clone(), has_priority, min_term_until);
        *service = started.inspect_err(|error| self.back_off(&error.to_string()))?;
        Ok(())
    }

    /// This process cannot serve now. While it has priority all others leave the leader lock to it,
    /// so it releases the priority lock. It takes it again after a back-off that grows with
    /// repeated failures.
    fn back_off(&self, reason: &str) {
        if self.has_priority.load(Ordering::Acquire) {
            let now = Instant::now();
            let mut backoff = lock(&self.backoff);
            let rest = RetrySchedule::after(backoff.map(|(_, rest)| rest), now, CANDIDACY_BACKOFF);
            *backoff = Some((now, rest));
            drop(backoff);
            self.release_priority();
            let pause = rest.until() - now;
            tracing::warn!(reason, ?pause, "this process cannot serve its node; other members may");
        }
    }

    /// Takes the priority lock, if this process runs a dedicated service and no other process holds
    /// it. True if this process holds it.
    pub(super) fn acquire_priority(
        &self,
        operation: &'static str,
        options: &NodeOptions,
    ) -> Result<bool> {
        let now = Instant::now();
        let is_backing_off = || lock(&self.backoff).is_some_and(|(_, rest)| !rest.is_over(now));
        if options.service != ServiceMode::Dedicated || is_backing_off() {
            return Ok(false);
        }
        let mut priority_lock = lock(&self.priority_lock);
        if priority_lock.is_none() {
            *priority_lock = PriorityLock::take(operation, &options.directory)?;
            self.has_priority.store(priority_lock.is_some(), Ordering::Release);
        }
        Ok(priority_lock.is_some())
    }

    pub(super) fn release_priority(&self) {
        let mut priority_lock = lock(&self.priority_lock);
        self.has_priority.store(false, Ordering::Release);
        drop(priority_lock.take());
    }

    /// Also detects a service that has ended by itself.
    pub(super) fn is_running(&self) -> bool {
        let mut service = lock(&self.service);
        let is_over = service.as_ref().is_none_or(ServiceThread::is_over);
        if is_over {
            self.drop_ended(&mut service);
        }
        !is_over
    }

    fn drop_ended(&self, service: &mut Option<ServiceThread>) {
        if service.take().is_some_and(ServiceThread::has_failed) {
            self.back_off("its service failed");
        }
    }

    pub(super) fn end(&self) {
        // First: no other process leaves a free leader lock to this one any more.
        self.release_priority();
        drop(lock(&self.service).take());
    }
}

/// How long a process with these options leaves a free leader lock to another one: it still has to
/// join within its timeout afterwards.
fn priority_grace(options: &NodeOptions) -> Duration {
    PRIORITY_GRACE.min(options.service_timeout / 2)
}

/// Identity of the socket file that was connected to: a forked child may keep the socket of an
/// ended service, where no process answers.
type SocketId = Option<(u64, u64)>;

fn socket_id(directory: &Path) -> SocketId {
    let found = std::fs::symlink_metadata(socket_path(directory)).ok()?;
    Some((found.dev(), found.ino()))
}

/// A connection attempt: its options, the service that its process may run, and its deadline.
pub(super) struct ServiceConnector<'a> {
    operation: &'static str,
    options: &'a NodeOptions,
    own: &'a LocalService,
    end: &'a dyn Fn() -> Instant,
    /// Starts a service if there is none and the options allow it.
    serves: &'a dyn Fn() -> bool,
    leaderless_since: Cell<Option<Instant>>,
}

impl<'a> ServiceConnector<'a> {
    pub(super) fn new(
        operation: &'static str,
        options: &'a NodeOptions,
        own: &'a LocalService,
        end: &'a dyn Fn() -> Instant,
        serves: &'a dyn Fn() -> bool,
    ) -> Self {
        Self { operation, options, own, end, serves, leaderless_since: Cell::new(None) }
    }

    fn is_late(&self) -> bool {
        Instant::now() >= (self.end)()
    }

    /// Since when the leader lock has been free; None while it is held. Its holder may be stopped,
    /// about to end, or waiting, and then does not answer.
    fn check_leader(&self) -> Result<Option<Instant>> {
        let is_leaderless = LeaderLock::holder(self.operation, &self.options.directory)?.is_none();
        let since = || self.leaderless_since.get().unwrap_or_else(Instant::now);
        self.leaderless_since.set(is_leaderless.then(since));
        Ok(self.leaderless_since.get())
    }

    fn try_serve(&self) -> Result<()> {
        if let Some(since) = self.check_leader()?
            && self.options.service != ServiceMode::External
            && (self.serves)()
        {
            self.own.try_serve(self.operation, self.options, since)?;
        }
        Ok(())
    }

    fn timeout_error(&self) -> Error {
        let directory = &self.options.directory;
        let priority_lock = || PriorityLock::holder(self.operation, directory).ok().flatten();
        let priority_lock = self.leaderless_since.get().and_then(|_| priority_lock());
        let leader = ServiceProcess::of(directory).ok().flatten();
        let detail = match (leader, priority_lock) {
            (Some(process), _) => {
                format!("{process} serves the node, and does not answer: {}", process.state())
            }
            (None, Some(process)) => format!(
                "no process holds the leader lock: {} has priority, but does not serve",
                describe_process(process)
            ),
            (None, None) => "no process serves the node, or its service keeps exiting".to_owned(),
        };
        let error = Error::new(self.operation, ErrorKind::DeadlineExceeded, detail);
        error.at(self.options.directory.display())
    }

    /// Connects to the service of the node, once there is one.
    fn reach(&self) -> Result<(Channel, SocketId)> {
        let directory = &self.options.directory;
        loop {
            let before = socket_id(directory);
            if let Some(channel) = connect(self.operation, directory)? {
                self.check_leader()?;
                if before.is_some() && before == socket_id(directory) {
                    return Ok((channel, before));
                }
            } else {
                self.try_serve()?;
            }
            if self.is_late() {
                return Err(self.timeout_error());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Connects to the service, sends the first message, and waits for the answer: a welcome or a
    /// refusal. A service that ends in the meantime is left for the next one.
    pub(super) fn handshake(
        &self,
        greet: impl Fn(&Channel) -> Result<()>,
    ) -> Result<(Channel, Result<Welcome>)> {
        loop {
            let (channel, by) = self.reach()?;
            let answered = match greet(&channel) {
                // The reason of a rejection follows the closed connection.
                Err(closed) if closed.kind() == ErrorKind::Closed => {
                    self.read_answer(&channel, by).map_err(|_| closed)
                }
                greeted => greeted.and_then(|()| self.read_answer(&channel, by)),
            };
            match answered {
                Ok(Some(answered)) => {
                    self.leaderless_since.set(None);
                    return Ok((channel, answered));
                }
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Closed && !self.is_late() => {}
                Err(error) => return Err(error.at(self.options.directory.display())),
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// None: try again.
    fn read_answer(&self, channel: &Channel, by: SocketId) -> Result<Option<Result<Welcome>>> {
        let operation = self.operation;
        let mut pidfds = Vec::new();
        loop {
            let Message { bytes, descriptors } = match channel.receive(ANSWER_POLL) {
                Ok(message) => message,
                Err(ChannelError::DeadlineExceeded { .. }) => {
                    if self.is_late() {
                        return Err(self.timeout_error());
                    }
                    self.try_serve()?;
                    if by != socket_id(&self.options.directory) {
                        return Ok(None);
                    }
                    continue;
                }
                // The reason, if any, follows the closed connection.
                Err(ChannelError::Closed) => channel.receive(Duration::ZERO).during(operation)?,
                Err(error) => return Err(error.during(operation)),
            };
            match protocol::decode(operation, &bytes)? {
                Notice::Pidfds { participants } => {
                    pidfds.extend(protocol::pidfds(&participants, descriptors)?);
                }
                Notice::Welcome { participant, .. } => {
                    let Ok([node_segment, service]) = <[OwnedFd; 2]>::try_from(descriptors) else {
                        let detail =
                            "a welcome without node segment, or without pidfd of the service";
                        return Err(Error::new(operation, ErrorKind::Malformed, detail));
                    };
                    let service = PidFd::from_fd(service)
                        .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
                    let welcome = Welcome { participant, node_segment, service, pidfds };
                    return Ok(Some(Ok(welcome)));
                }
                Notice::Rejected { reason } => {
                    return Ok(Some(Err(reason.into_error(operation))));
                }
                other => {
                    let detail = format!("unexpected first message {other:?}");
                    return Err(Error::new(operation, ErrorKind::Malformed, detail));
                }
            }
        }
    }
}

/// Connects, if a process listens.
pub(super) fn connect(operation: &'static str, directory: &Path) -> Result<Option<Channel>> {
    use std::io::ErrorKind as Io;
    let path = socket_path(directory);
    match Channel::connect(&path, Duration::from_secs(1)) {
        Ok(channel) => Ok(Some(channel)),
        Err(ChannelError::System { ref cause, .. })
            if matches!(cause.kind(), Io::NotFound | Io::ConnectionRefused) =>
        {
            let Some(found) = ChannelListener::non_socket_kind(&path) else { return Ok(None) };
            let error = ChannelError::NotASocket { path, found };
            Err(Error::because(operation, ErrorKind::InvalidArgument, error)
                .at(directory.display()))
        }
        // Its backlog is full: the service is busy, or about to end.
        Err(ChannelError::DeadlineExceeded { .. } | ChannelError::Closed) => Ok(None),
        Err(error) => {
            let kind = match &error {
                ChannelError::InvalidPath(_) => ErrorKind::InvalidArgument,
                ChannelError::System { cause, .. } if cause.kind() == Io::PermissionDenied => {
                    ErrorKind::Denied
                }
                _ => ErrorKind::Failed,
            };
            Err(Error::because(operation, kind, error).at(path.display()))
        }
    }
}

#[cfg(test)]
#[path = "connector_tests.rs"]
mod tests;
