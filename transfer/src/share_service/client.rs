//! Asking a service.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{Channel, ChannelError, Credentials, ForkGeneration};

use super::protocol::{Reply, is_name, request};
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::lock;
use crate::share::{OpenedBuffer, Opener, check_fork};

const CONNECT: &str = "connect";
const REQUEST: &str = "request shared memory";
/// Rests between attempts to connect where nobody listens yet.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Asks a service. Threads may share one: those that ask at the same time have a connection each.
///
/// A connection that the service gave up, because it had others to serve or was started
/// anew, is made again, by the same call if it has time left.
#[derive(Debug)]
pub struct ShareClient {
    /// A connection that no call uses now. One whose answer did not come in time is not kept: a late
    /// one would be taken for the answer to the next request.
    idle: Mutex<Option<Channel>>,
    path: PathBuf,
    trusted: Vec<u32>,
    opener: Arc<Opener>,
    fork_generation: ForkGeneration,
}

impl ShareClient {
    /// Connects to the service at a path, and waits for it if it is not there yet.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if nobody listens there in time;
    /// [`Denied`](ErrorKind::Denied) if it is neither our own user's nor root's.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        Self::connect_trusting(path, &[], timeout)
    }

    /// As [`connect`](Self::connect), where the service may also be one of these users',
    /// by number: what it sends is mapped, and read as data.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_trusting(path: &Path, users: &[u32], timeout: Duration) -> Result<Self> {
        let end = ipc::deadline(timeout);
        let client = Self {
            idle: Mutex::default(),
            path: path.to_owned(),
            trusted: [&[0, Credentials::of_this_process().user], users].concat(),
            opener: Opener::shared(),
            fork_generation: ForkGeneration::current(),
        };
        let mut rest = RETRY_PAUSES.0;
        let channel = loop {
            match client.connect_once(CONNECT, end) {
                Err(error) if error.kind() == ErrorKind::Closed && Instant::now() < end => {}
                Err(error) if error.kind() == ErrorKind::Closed => {
                    return Err(error.with_kind(ErrorKind::DeadlineExceeded));
                }
                reached => break reached?,
            }
            std::thread::sleep(rest.min(remaining(end)));
            rest = (2 * rest).min(RETRY_PAUSES.1);
        };
        *lock(&client.idle) = Some(channel);
        Ok(client)
    }

    /// Opens with this from now on, and not with [that of the process](Opener::shared).
    #[must_use]
    pub fn with_opener(self, opener: Arc<Opener>) -> Self {
        Self { opener, ..self }
    }

    /// Asks for a handle.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown), [`Denied`](ErrorKind::Denied),
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed) if
    /// the service is gone, or gives up each connection until the time is over,
    /// [`Forked`](ErrorKind::Forked) in a child of the process that connected.
    pub fn handle(&self, name: &str, timeout: Duration) -> Result<Handle> {
        check_fork(self.fork_generation, REQUEST)?;
        if !is_name(name) {
            return Err(self.failed(ErrorKind::Malformed, "a name has 1 to 255 bytes"));
        }
        let end = ipc::deadline(timeout);
        let is_closed = |outcome: &Result<Handle>| {
            outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Closed)
        };
        let idle = lock(&self.idle).take();
        if let Some(channel) = idle {
            let outcome = self.request_handle(channel, name, end);
            if !is_closed(&outcome) {
                return outcome;
            }
        }
        // A user has only so many places there, and more threads than that may ask.
        let mut rest = RETRY_PAUSES.0;
        loop {
            let outcome = self.request_handle(self.connect_once(REQUEST, end)?, name, end);
            if !is_closed(&outcome) || remaining(end) <= rest {
                return outcome;
            }
            std::thread::sleep(rest);
            rest = (2 * rest).min(RETRY_PAUSES.1);
        }
    }

    /// Asks for a handle and opens it, for the device that it lies on or for another one.
    ///
    /// # Errors
    /// As for [asking](Self::handle) and for [opening](Opener::open).
    pub fn open(
        &self,
        name: &str,
        device: Option<&Device>,
        timeout: Duration,
    ) -> Result<OpenedBuffer> {
        self.opener.open(&self.handle(name, timeout)?, device).map_err(|e| self.with_path(e))
    }

    fn with_path(&self, error: Error) -> Error {
        error.with(self.path.display())
    }

    fn failed(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        self.with_path(Error::new(REQUEST, kind, detail))
    }

    /// A new connection. [`Closed`](ErrorKind::Closed) if nobody listens there, as before a service
    /// starts and after it ended.
    fn connect_once(&self, operation: &'static str, end: Instant) -> Result<Channel> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let channel = Channel::connect(&self.path, remaining(end)).map_err(|error| {
            let has_no_listener = matches!(&error, ChannelError::System { cause, .. }
                if [ConnectionRefused, NotFound].contains(&cause.kind()));
            let error = Error::of_channel_at(operation, &self.path, error);
            if has_no_listener { error.with_kind(ErrorKind::Closed) } else { error }
        })?;
        let who = channel.credentials();
        let who = who.map_err(|error| self.with_path(Error::of_channel(CONNECT, error)))?;
        if self.trusted.contains(&who.user) {
            return Ok(channel);
        }
        let detail = format!("the service belongs to user {}", who.user);
        Err(self.with_path(Error::new(CONNECT, ErrorKind::Denied, detail)))
    }

    fn request_handle(&self, channel: Channel, name: &str, end: Instant) -> Result<Handle> {
        let of_channel = |error| self.with_path(Error::of_channel(REQUEST, error));
        // A service that turned us away has closed already; its answer says why, and comes
        // after the news that our request was not read.
        let sent = channel.send(&request(name), &[], remaining(end)).map_err(of_channel);
        let received = channel.receive(remaining(end)).or_else(|error| match error {
            ChannelError::Closed => channel.receive(Duration::ZERO),
            other => Err(other),
        });
        let message = received.map_err(|error| sent.err().unwrap_or_else(|| of_channel(error)))?;
        let reply =
            Reply::decode(REQUEST, &message.bytes).map_err(|error| self.with_path(error))?;
        // The service closes it behind the others.
        if matches!(reply, Reply::Handle(_) | Reply::Unknown | Reply::Failed) {
            *lock(&self.idle) = Some(channel);
        }
        let (kind, detail) = match reply {
            Reply::Handle(bytes) => {
                let handle = Handle::from_parts(&bytes, message.descriptors);
                return handle.map_err(|error| self.with_path(error));
            }
            Reply::Unknown => (ErrorKind::Unknown, format!("nothing is shared as \"{name}\"")),
            Reply::Denied => (ErrorKind::Denied, "the service does not serve this user".to_owned()),
            Reply::Malformed | Reply::Failed => {
                (ErrorKind::Failed, "the service cannot answer".to_owned())
            }
        };
        Err(self.failed(kind, detail))
    }
}

fn remaining(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
