//! Reaching the service of a node, and becoming it where there is none.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, Life, Message, Participant};

use super::link::of_channel;
use super::options::{NodeOptions, ServiceMode};
use crate::carrier::Rest;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::peers::NodeIdentity;
use crate::service::election::{Claim, Office, socket_in};
use crate::service::protocol::{self, Notice};
use crate::service::{Service, ServiceOptions, ServiceProcess};

/// How long to listen before it is looked whether anybody can answer at all.
const LISTENING: Duration = Duration::from_millis(100);
/// Between two looks for a service.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a vacant office is left to a process that is there to serve. The kernel takes the
/// claim from the dead, so this is for one that is stopped, or starved.
const DEFERENCE: Duration = Duration::from_secs(5);
/// How long one serves at least that began because who has the claim had its time.
const STAYING: Duration = Duration::from_secs(30);

/// How long one that cannot serve leaves the office to others.
const LEFT_TO_OTHERS: Duration = Duration::from_millis(100);
/// And how long it does not say that it is there to serve: at first, and when it failed often.
const SETBACK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The service that this process runs, if it does, and whether it is there for that.
#[derive(Debug, Default)]
pub(super) struct OwnService {
    service: Mutex<Option<Service>>,
    claim: Mutex<Option<Claim>>,
    /// Has it the claim? The service asks that itself.
    stands: Arc<AtomicBool>,
    /// When it could not serve, has let go of the claim, and for how long.
    setback: Mutex<Option<(Instant, Rest)>>,
}

impl OwnService {
    /// Serves the node, if nobody does. The office has been vacant since then: for a while it is
    /// left to another process that is there for it.
    fn offer(
        &self,
        operation: &'static str,
        options: &NodeOptions,
        vacant_since: Instant,
    ) -> Result<()> {
        let mut service = lock(&self.service);
        if service.as_ref().is_some_and(|service| !service.is_over()) {
            return Ok(());
        }
        // One that could not go on gives up the office first.
        self.buries(&mut service);
        let now = Instant::now();
        if lock(&self.setback).is_some_and(|(since, _)| now < since + LEFT_TO_OTHERS) {
            return Ok(());
        }
        let mut stays_until = None;
        if !self.claims(operation, options)?
            && Claim::holder(operation, &options.directory)?.is_some()
        {
            if now.saturating_duration_since(vacant_since) < deference(options) {
                return Ok(());
            }
            // Whoever has the claim does not serve, or not for long, and may say again at once
            // that it wants to.
            stays_until = Some(now + STAYING);
        }
        let started = Service::start(ServiceOptions {
            directory: options.directory.clone(),
            label: options.label.clone(),
            budgets: options.budgets,
            network: options.network.clone(),
            stands: Arc::clone(&self.stands),
            stays_until,
            identity: NodeIdentity::random()?,
        });
        *service = started.inspect_err(|error| self.suffers_setback(&error.to_string()))?;
        Ok(())
    }

    /// This process cannot serve now. If it has the claim all others leave the office to it, so it
    /// lets go of it, and takes it again later, the later the more often that happened.
    fn suffers_setback(&self, why: &str) {
        if self.stands.load(Ordering::Acquire) {
            let now = Instant::now();
            let mut setback = lock(&self.setback);
            let rest = Rest::after(setback.map(|(_, rest)| rest), now, SETBACK);
            *setback = Some((now, rest));
            drop(setback);
            self.renounce();
            let pause = rest.until() - now;
            tracing::warn!(
                why,
                ?pause,
                "this process cannot serve its node, and leaves it to others"
            );
        }
    }

    /// Says that this process is there to serve, if it is, and no other one says so. True if it
    /// has said it.
    pub(super) fn claims(&self, operation: &'static str, options: &NodeOptions) -> Result<bool> {
        let now = Instant::now();
        let is_set_back = || lock(&self.setback).is_some_and(|(_, rest)| !rest.is_over(now));
        if options.service != ServiceMode::Standing || is_set_back() {
            return Ok(false);
        }
        let mut claim = lock(&self.claim);
        if claim.is_none() {
            *claim = Claim::take(operation, &options.directory)?;
            self.stands.store(claim.is_some(), Ordering::Release);
        }
        Ok(claim.is_some())
    }

    /// It is not there to serve any more.
    pub(super) fn renounce(&self) {
        let mut claim = lock(&self.claim);
        self.stands.store(false, Ordering::Release);
        drop(claim.take());
    }

    /// Does it run? If it has ended by itself, this is when that is noticed.
    pub(super) fn is_running(&self) -> bool {
        let mut service = lock(&self.service);
        let is_over = service.as_ref().is_none_or(Service::is_over);
        if is_over {
            self.buries(&mut service);
        }
        !is_over
    }

    /// Lets go of a service that has ended.
    fn buries(&self, service: &mut Option<Service>) {
        if service.take().is_some_and(Service::has_failed) {
            self.suffers_setback("its service could not go on");
        }
    }

    /// Ends it, if there is one.
    pub(super) fn end(&self) {
        // First: nobody leaves a vacant office to this process any more.
        self.renounce();
        let service = lock(&self.service).take();
        drop(service);
    }
}

/// How long a process with these options leaves a vacant office to another one: it has still to be
/// let in then, within its patience.
fn deference(options: &NodeOptions) -> Duration {
    DEFERENCE.min(options.patience / 2)
}

/// A process that has a lock, in words.
pub(super) fn in_words(process: u32) -> String {
    match process {
        0 => "a process that cannot be seen from here".to_owned(),
        number => format!("process {number}"),
    }
}

/// The file of the socket by which a process came in: a service that has ended may have left
/// its socket with a forked child, where nobody ever answers.
type Door = Option<(u64, u64)>;

fn door(directory: &Path) -> Door {
    let found = std::fs::symlink_metadata(socket_in(directory)).ok()?;
    Some((found.dev(), found.ino()))
}

/// Who comes in: by which options, with the service that its process may run, and how long it
/// waits.
pub(super) struct Coming<'a> {
    pub(super) operation: &'static str,
    pub(super) options: &'a NodeOptions,
    pub(super) own: &'a OwnService,
    pub(super) end: &'a dyn Fn() -> Instant,
    /// Does it serve, if nobody does and the options allow it?
    pub(super) serves: &'a dyn Fn() -> bool,
    /// Since when nobody has been seen to have the office.
    pub(super) vacant_since: Cell<Option<Instant>>,
}

impl Coming<'_> {
    fn is_late(&self) -> bool {
        Instant::now() >= (self.end)()
    }

    /// Looks whether anybody has the office, and since when nobody has. One who has it may be stopped,
    /// or about to end, or wait for others, and not answer: then it is not vacant.
    fn look(&self) -> Result<Option<Instant>> {
        let is_vacant = Office::holder(self.operation, &self.options.directory)?.is_none();
        let since = || self.vacant_since.get().unwrap_or_else(Instant::now);
        self.vacant_since.set(is_vacant.then(since));
        Ok(self.vacant_since.get())
    }

    fn offer(&self) -> Result<()> {
        if let Some(since) = self.look()?
            && self.options.service != ServiceMode::Outside
            && (self.serves)()
        {
            self.own.offer(self.operation, self.options, since)?;
        }
        Ok(())
    }

    fn too_late(&self) -> Error {
        let directory = &self.options.directory;
        let claim = || Claim::holder(self.operation, directory).ok().flatten();
        let claim = self.vacant_since.get().and_then(|_| claim());
        let office = ServiceProcess::of(directory).ok().flatten();
        let detail = match (office, claim) {
            (Some(process), _) => {
                format!("{process} serves the node, and does not answer: {}", process.state())
            }
            (None, Some(process)) => {
                let process = in_words(process);
                format!("nobody has the office: {process} is there to serve, and does not")
            }
            (None, None) => "no service was started there, or it does not stay".to_owned(),
        };
        let error = Error::new(self.operation, ErrorKind::DeadlineExceeded, detail);
        error.on(self.options.directory.display())
    }

    /// Connects to the service of the node, as soon as there is one.
    fn reach(&self) -> Result<(Channel, Door)> {
        let directory = &self.options.directory;
        loop {
            let before = door(directory);
            if let Some(channel) = connect(self.operation, directory)? {
                self.look()?;
                if before.is_some() && before == door(directory) {
                    return Ok((channel, before));
                }
            } else {
                self.offer()?;
            }
            if self.is_late() {
                return Err(self.too_late());
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Comes to the service of the node, says who this is, and hears whether it is let in. A
    /// service that ends meanwhile, or has ended long ago, is left for the next one.
    pub(super) fn come_in(
        &self,
        greet: impl Fn(&Channel) -> Result<()>,
    ) -> Result<(Channel, Answered)> {
        loop {
            let (channel, by) = self.reach()?;
            let answered = match greet(&channel) {
                // Why it closed the connection comes behind the news that it did.
                Err(closed) if closed.kind() == ErrorKind::Closed => {
                    self.hear(&channel, by).map_err(|_| closed)
                }
                greeted => greeted.and_then(|()| self.hear(&channel, by)),
            };
            match answered {
                Ok(Some(answered)) => {
                    self.vacant_since.set(None);
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
    fn hear(&self, channel: &Channel, by: Door) -> Result<Option<Answered>> {
        let operation = self.operation;
        let mut lives = Vec::new();
        loop {
            let Message { bytes, descriptors } = match channel.receive(LISTENING) {
                Ok(message) => message,
                Err(ChannelError::DeadlineExceeded { .. }) => {
                    if self.is_late() {
                        return Err(self.too_late());
                    }
                    self.offer()?;
                    if by != door(&self.options.directory) {
                        return Ok(None);
                    }
                    continue;
                }
                // Why comes behind the news that it closed the connection, if it says so.
                Err(ChannelError::Closed) => {
                    channel.receive(Duration::ZERO).map_err(|error| of_channel(operation, error))?
                }
                Err(error) => return Err(of_channel(operation, error)),
            };
            match protocol::decode(operation, &bytes)? {
                Notice::Lives { participants } => {
                    lives.extend(protocol::lives(&participants, descriptors)?);
                }
                Notice::Welcome { participant, .. } => {
                    let [hall, service] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| {
                        let detail = "a welcome without a hall, or without the service's life";
                        Error::new(operation, ErrorKind::Malformed, detail)
                    })?;
                    let service = Life::from_fd(service)
                        .map_err(|error| Error::because(operation, ErrorKind::Malformed, error))?;
                    let welcome = Welcome { participant, hall, service, lives };
                    return Ok(Some(Answered::Welcome(welcome)));
                }
                Notice::SeenOff { why } => {
                    return Ok(Some(Answered::Refused(why.into_error(operation))));
                }
                other => {
                    let detail = format!("it begins with {other:?}");
                    return Err(Error::new(operation, ErrorKind::Malformed, detail));
                }
            }
        }
    }
}

/// What the first answers say.
pub(super) struct Welcome {
    pub(super) participant: u32,
    pub(super) hall: OwnedFd,
    /// Whose end is the service's, whatever children keep open.
    pub(super) service: Life,
    pub(super) lives: Vec<(Participant, Life)>,
}

/// What becomes of one that comes.
pub(super) enum Answered {
    Welcome(Welcome),
    Refused(Error),
}

/// Connects, if anybody listens.
pub(super) fn connect(operation: &'static str, directory: &Path) -> Result<Option<Channel>> {
    use std::io::ErrorKind as Io;
    let path = socket_in(directory);
    match Channel::connect(&path, Duration::from_secs(1)) {
        Ok(channel) => Ok(Some(channel)),
        Err(ChannelError::System { ref cause, .. })
            if matches!(cause.kind(), Io::NotFound | Io::ConnectionRefused) =>
        {
            let Some(found) = ChannelListener::other_than_socket(&path) else { return Ok(None) };
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
#[path = "line_tests.rs"]
mod tests;
