//! Reaching the service of a node, and becoming it where there is none.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Message, Participant, PidFd};

use super::link::channel_error;
use super::options::{NodeOptions, ServiceMode};
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::peers::NodeId;
use crate::replication::RetryBackoff;
use crate::service::election::{LeaderLock, PriorityLock, socket_path};
use crate::service::protocol::{self, Notice};
use crate::service::{ServiceOptions, ServiceProcess, ServiceThread};

/// How long to listen before it is looked whether anybody can answer at all.
const ANSWER_POLL: Duration = Duration::from_millis(100);
/// Between two looks for a service.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a vacant office is left to a process that is there to serve. The kernel takes the
/// claim from the dead, so this is for one that is stopped, or starved.
const PRIORITY_GRACE: Duration = Duration::from_secs(5);
/// How long one serves at least that began because who has the claim had its time.
const MIN_TERM: Duration = Duration::from_secs(30);

/// How long one that cannot serve leaves the office to others.
const CANDIDACY_PAUSE: Duration = Duration::from_millis(100);
/// And how long it does not say that it is there to serve: at first, and when it failed often.
const CANDIDACY_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The service that this process runs, if it does, and whether it is there for that.
#[derive(Debug, Default)]
pub(super) struct LocalService {
    service: Mutex<Option<ServiceThread>>,
    priority_lock: Mutex<Option<PriorityLock>>,
    /// Has it the claim? The service asks that itself.
    has_priority: Arc<AtomicBool>,
    /// When it could not serve, has let go of the claim, and for how long.
    backoff: Mutex<Option<(Instant, RetryBackoff)>>,
}

impl LocalService {
    /// Serves the node, if nobody does. The office has been vacant since then: for a while it is
    /// left to another process that is there for it.
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
        // One that could not go on gives up the office first.
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
            // Whoever has the claim does not serve, or not for long, and may say again at once
            // that it wants to.
            min_term_until = Some(now + MIN_TERM);
        }
        let started = ServiceThread::start(ServiceOptions {
            directory: options.directory.clone(),
            label: options.label.clone(),
            budgets: options.budgets,
            network: options.network.clone(),
            has_priority: Arc::clone(&self.has_priority),
            min_term_until,
            identity: NodeId::random()?,
        });
        *service = started.inspect_err(|error| self.back_off(&error.to_string()))?;
        Ok(())
    }

    /// This process cannot serve now. If it has the claim all others leave the office to it, so it
    /// lets go of it, and takes it again later, the later the more often that happened.
    fn back_off(&self, reason: &str) {
        if self.has_priority.load(Ordering::Acquire) {
            let now = Instant::now();
            let mut backoff = lock(&self.backoff);
            let rest = RetryBackoff::after(backoff.map(|(_, rest)| rest), now, CANDIDACY_BACKOFF);
            *backoff = Some((now, rest));
            drop(backoff);
            self.release_priority();
            let pause = rest.until() - now;
            tracing::warn!(reason, ?pause, "this process cannot serve its node; other members may");
        }
    }

    /// Says that this process is there to serve, if it is, and no other one says so. True if it
    /// has said it.
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

    /// It is not there to serve any more.
    pub(super) fn release_priority(&self) {
        let mut priority_lock = lock(&self.priority_lock);
        self.has_priority.store(false, Ordering::Release);
        drop(priority_lock.take());
    }

    /// Does it run? If it has ended by itself, this is when that is noticed.
    pub(super) fn is_running(&self) -> bool {
        let mut service = lock(&self.service);
        let is_over = service.as_ref().is_none_or(ServiceThread::is_over);
        if is_over {
            self.drop_ended(&mut service);
        }
        !is_over
    }

    /// Lets go of a service that has ended.
    fn drop_ended(&self, service: &mut Option<ServiceThread>) {
        if service.take().is_some_and(ServiceThread::has_failed) {
            self.back_off("its service failed");
        }
    }

    /// Ends it, if there is one.
    pub(super) fn end(&self) {
        // First: nobody leaves a vacant office to this process any more.
        self.release_priority();
        let service = lock(&self.service).take();
        drop(service);
    }
}

/// How long a process with these options leaves a vacant office to another one: it has still to be
/// let in then, within its patience.
fn priority_grace(options: &NodeOptions) -> Duration {
    PRIORITY_GRACE.min(options.service_timeout / 2)
}

/// A process that has a lock, in words.
pub(super) fn describe_process(process: u32) -> String {
    match process {
        0 => "a process in another PID namespace".to_owned(),
        number => format!("process {number}"),
    }
}

/// The file of the socket by which a process came in: a service that has ended may have left
/// its socket with a forked child, where nobody ever answers.
type SocketId = Option<(u64, u64)>;

fn socket_id(directory: &Path) -> SocketId {
    let found = std::fs::symlink_metadata(socket_path(directory)).ok()?;
    Some((found.dev(), found.ino()))
}

/// Who comes in: by which options, with the service that its process may run, and how long it
/// waits.
pub(super) struct ServiceConnector<'a> {
    pub(super) operation: &'static str,
    pub(super) options: &'a NodeOptions,
    pub(super) own: &'a LocalService,
    pub(super) end: &'a dyn Fn() -> Instant,
    /// Does it serve, if nobody does and the options allow it?
    pub(super) serves: &'a dyn Fn() -> bool,
    /// Since when nobody has been seen to have the office.
    pub(super) leaderless_since: Cell<Option<Instant>>,
}

impl ServiceConnector<'_> {
    fn is_late(&self) -> bool {
        Instant::now() >= (self.end)()
    }

    /// Looks whether anybody has the office, and since when nobody has. One who has it may be stopped,
    /// or about to end, or wait for others, and not answer: then it is not vacant.
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
                format!("{process} serves the node, but does not answer: {}", process.state())
            }
            (None, Some(process)) => {
                let process = describe_process(process);
                format!(
                    "no process holds the leader lock: {process} has priority, but does not serve"
                )
            }
            (None, None) => "no process serves the node, or its service keeps exiting".to_owned(),
        };
        let error = Error::new(self.operation, ErrorKind::DeadlineExceeded, detail);
        error.on(self.options.directory.display())
    }

    /// Connects to the service of the node, as soon as there is one.
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

    /// Comes to the service of the node, says who this is, and hears whether it is let in. A
    /// service that ends meanwhile, or has ended long ago, is left for the next one.
    pub(super) fn handshake(
        &self,
        greet: impl Fn(&Channel) -> Result<()>,
    ) -> Result<(Channel, HandshakeResult)> {
        loop {
            let (channel, by) = self.reach()?;
            let answered = match greet(&channel) {
                // Why it closed the connection comes behind the news that it did.
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
                Err(error) => return Err(error.on(self.options.directory.display())),
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// None if it is to be tried again.
    fn read_answer(&self, channel: &Channel, by: SocketId) -> Result<Option<HandshakeResult>> {
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
                // Why comes behind the news that it closed the connection, if it says so.
                Err(ChannelError::Closed) => channel
                    .receive(Duration::ZERO)
                    .map_err(|error| channel_error(operation, error))?,
                Err(error) => return Err(channel_error(operation, error)),
            };
            match protocol::decode(operation, &bytes)? {
                Notice::Pidfds { participants } => {
                    pidfds.extend(protocol::pidfds(&participants, descriptors)?);
                }
                Notice::Welcome { participant, .. } => {
                    let [node_segment, service] =
                        <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| {
                            let detail =
                                "a welcome without node segment, or without pidfd of the service";
                            Error::new(operation, ErrorKind::Malformed, detail)
                        })?;
                    let service = PidFd::from_fd(service)
                        .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
                    let welcome = Welcome { participant, node_segment, service, pidfds };
                    return Ok(Some(HandshakeResult::Welcome(welcome)));
                }
                Notice::Rejected { reason } => {
                    return Ok(Some(HandshakeResult::Refused(reason.into_error(operation))));
                }
                other => {
                    let detail = format!("unexpected first message {other:?}");
                    return Err(Error::new(operation, ErrorKind::Malformed, detail));
                }
            }
        }
    }
}

/// What the first answers say.
pub(super) struct Welcome {
    pub(super) participant: u32,
    pub(super) node_segment: OwnedFd,
    /// Whose end is the service's, whatever children keep open.
    pub(super) service: PidFd,
    pub(super) pidfds: Vec<(Participant, PidFd)>,
}

/// What becomes of one that comes.
pub(super) enum HandshakeResult {
    Welcome(Welcome),
    Refused(Error),
}

/// Connects, if anybody listens.
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
                .on(directory.display()))
        }
        // Its backlog is full: it is busy, or about to end.
        Err(ChannelError::DeadlineExceeded { .. } | ChannelError::Closed) => Ok(None),
        Err(error) => {
            let kind = match &error {
                ChannelError::InvalidPath(_) => ErrorKind::InvalidArgument,
                ChannelError::System { cause, .. } if cause.kind() == Io::PermissionDenied => {
                    ErrorKind::Denied
                }
                _ => ErrorKind::Failed,
            };
            Err(Error::because(operation, kind, error).on(path.display()))
        }
    }
}

#[cfg(test)]
#[path = "connector_tests.rs"]
mod tests;
