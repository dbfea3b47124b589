//! The client side of sharing by name.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{Channel, ChannelError, Credentials, ForkGeneration};

use super::protocol::{Reply, is_name, request};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::share::{OpenedBuffer, Opener, check_fork};
use crate::{lock, remaining};

const CONNECT: &str = "connect to share service";
const REQUEST: &str = "request shared memory";
/// Shortest and longest pause between attempts to connect while no service listens.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Requests handles from a service. Threads may share a client: concurrent calls have a connection
/// each.
///
/// If the service closed a connection, because it was busy or restarted, the same call connects
/// again as long as it has time.
#[derive(Debug)]
pub struct ShareClient {
    /// A connection that no call uses now. After a timeout the connection is dropped: a late reply
    /// would be taken for the answer to the next request.
    idle: Mutex<Option<Channel>>,
    path: PathBuf,
    trusted: Vec<u32>,
    opener: Arc<Opener>,
    fork_generation: ForkGeneration,
}

impl ShareClient {
    /// Connects to the service at a path, and waits until it listens.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if no service listens there in time;
    /// [`Denied`](ErrorKind::Denied) if it belongs neither to this user nor to root.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self> {
        Self::connect_trusting(path, &[], timeout)
    }

    /// As [`connect`](Self::connect), but also trusts services of these user ids: memory that they
    /// send is mapped and read.
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
        let mut pause = RETRY_PAUSES.0;
        let channel = loop {
            match client.connect_once(CONNECT, end) {
                Err(error) if error.kind() == ErrorKind::Closed && Instant::now() < end => {}
                Err(error) if error.kind() == ErrorKind::Closed => {
                    return Err(error.with_kind(ErrorKind::DeadlineExceeded));
                }
                reached => break reached?,
            }
            std::thread::sleep(pause.min(remaining(end)));
            pause = (2 * pause).min(RETRY_PAUSES.1);
        };
        *lock(&client.idle) = Some(channel);
        Ok(client)
    }

    /// Uses this opener instead of [that of the process](Opener::shared).
    #[must_use]
    pub fn with_opener(self, opener: Arc<Opener>) -> Self {
        Self { opener, ..self }
    }

    /// Requests a handle.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown), [`Denied`](ErrorKind::Denied),
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed) if the
    /// service ended or closed each connection until the timeout, [`Forked`](ErrorKind::Forked) in
    /// a child of the process that connected.
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
        // The service limits connections per user, and more threads may request at once.
        let mut pause = RETRY_PAUSES.0;
        loop {
            let outcome = self.request_handle(self.connect_once(REQUEST, end)?, name, end);
            if !is_closed(&outcome) || remaining(end) <= pause {
                return outcome;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(RETRY_PAUSES.1);
        }
    }

    /// Requests a handle and opens it, for its own device or for another one.
    ///
    /// # Errors
    /// As for [`handle`](Self::handle) and [`Opener::open`].
    pub fn open(
        &self,
        name: &str,
        device: Option<&Device>,
        timeout: Duration,
    ) -> Result<OpenedBuffer> {
        self.opener.open(&self.handle(name, timeout)?, device).map_err(|e| self.with_path(e))
    }

    fn with_path(&self, error: Error) -> Error {
        error.at(&self.path)
    }

    fn failed(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        self.with_path(Error::new(REQUEST, kind, detail))
    }

    /// A new connection. [`Closed`](ErrorKind::Closed) if no service listens, as before a service
    /// starts and after it ended.
    fn connect_once(&self, operation: &'static str, end: Instant) -> Result<Channel> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let channel = Channel::connect(&self.path, remaining(end)).map_err(|error| {
            let has_no_listener = matches!(&error, ChannelError::System { cause, .. }
                if [ConnectionRefused, NotFound].contains(&cause.kind()));
            let error = Error::of_channel_at(operation, &self.path, error);
            if has_no_listener { error.with_kind(ErrorKind::Closed) } else { error }
        })?;
        let peer = channel.credentials().during(CONNECT).map_err(|error| self.with_path(error))?;
        if self.trusted.contains(&peer.user) {
            return Ok(channel);
        }
        let detail = format!("the service belongs to user {}", peer.user);
        Err(self.with_path(Error::new(CONNECT, ErrorKind::Denied, detail)))
    }

    fn request_handle(&self, channel: Channel, name: &str, end: Instant) -> Result<Handle> {
        let of_channel = |error| self.with_path(Error::caused_by(REQUEST, error));
        // A service that refused this client has closed already. Its reply has the cause, and
        // arrives after the error of the send.
        let sent = channel.send(&request(name), &[], remaining(end)).map_err(of_channel);
        let received = channel.receive(remaining(end)).or_else(|error| match error {
            ChannelError::Closed => channel.receive(Duration::ZERO),
            other => Err(other),
        });
        let message = received.map_err(|error| sent.err().unwrap_or_else(|| of_channel(error)))?;
        let reply =
            Reply::decode(REQUEST, &message.bytes).map_err(|error| self.with_path(error))?;
        // The service closes the connection after any other reply.
        if matches!(reply, Reply::Handle(_) | Reply::Unknown | Reply::Failed) {
            *lock(&self.idle) = Some(channel);
        }
        let (kind, detail) = match reply {
            Reply::Handle(bytes) => {
                let handle = Handle::from_parts(&bytes, message.descriptors);
                return handle.map_err(|error| self.with_path(error));
            }
            Reply::Unknown => (ErrorKind::Unknown, format!("no memory is shared as \"{name}\"")),
            Reply::Denied => (ErrorKind::Denied, "the service does not admit this user".to_owned()),
            Reply::Malformed | Reply::Failed => {
                (ErrorKind::Failed, "the service cannot export the memory".to_owned())
            }
        };
        Err(self.failed(kind, detail))
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
