//! The client side of sharing by name.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{Channel, ChannelError, Credentials, ForkGeneration};
use threads::{RetryBackoff, lock};

use super::protocol::{Reply, Request, is_name};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::handle::{Handle, HandleMetadata};
use crate::remaining;
use crate::share::{OpenedBuffer, Opener, check_fork};

const CONNECT: &str = "connect to share service";
const REQUEST: &str = "request shared memory";
/// Connections that are kept for further calls.
const MAX_IDLE: usize = 4;
/// Above this number of names, those whose memory is not used any more are forgotten.
const FORGET_ABOVE: usize = 64;
/// Pauses between attempts to connect while no service listens.
const RETRY_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(10), Duration::from_millis(200));

/// Between two questions whether a wait goes on.
const SLICE: Duration = Duration::from_millis(50);

/// How long a call waits for a service: until a deadline, and as long as its caller wants. A call that
/// its caller ended fails as at the deadline.
#[derive(Clone, Copy)]
pub(super) struct Wait<'a> {
    end: Instant,
    goes_on: &'a dyn Fn() -> bool,
}

impl<'a> Wait<'a> {
    pub(super) fn new(timeout: Duration, goes_on: &'a dyn Fn() -> bool) -> Self {
        Self { end: ipc::deadline(timeout), goes_on }
    }

    fn in_slices<T>(
        self,
        step: impl Fn(Duration) -> std::result::Result<T, ChannelError>,
    ) -> std::result::Result<T, ChannelError> {
        loop {
            let left = remaining(self.end);
            match step(left.min(SLICE)) {
                Err(ChannelError::DeadlineExceeded { .. }) if left > SLICE && (self.goes_on)() => {}
                outcome => return outcome,
            }
        }
    }
}

/// Opens shared memory of a service. Threads may share a client: concurrent calls have a connection
/// each.
///
/// If the service closed a connection, because it was busy or restarted, the same call connects
/// again as long as it has time.
#[derive(Debug)]
pub struct ShareClient {
    /// Connections that no call uses now. After a timeout a connection is not used again: a late
    /// reply would be taken for the answer to the next request.
    idle: Mutex<Vec<Arc<Connection>>>,
    /// Memory that this process has opened, by its names.
    opened: Mutex<HashMap<String, KnownMemory>>,
    path: PathBuf,
    trusted: Vec<u32>,
    fork_generation: ForkGeneration,
}

/// Memory that was opened by its name, and may still be used.
#[derive(Debug)]
struct KnownMemory {
    metadata: HandleMetadata,
    held: Weak<HeldByService>,
}

/// A connection, which exists as long as memory that was opened by it.
#[derive(Debug)]
struct Connection {
    fork_generation: ForkGeneration,
    channel: Channel,
    /// The number of the next memory that is opened.
    next: AtomicU64,
    /// Memory that is not used any more, of which the service does not know yet, and whether it was
    /// used.
    released: Mutex<Vec<(u64, bool)>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A child that was forked in between may have the socket, too.
        if self.fork_generation.is_current() {
            self.channel.end();
        }
    }
}

/// How long a release waits for the service. What it does not take is sent with the next message.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(100);

impl Connection {
    /// Sends what is not used any more, as far as the service takes it.
    fn send_released(&self) {
        let mut released = lock(&self.released);
        while let Some((number, is_used)) = released.last() {
            let request = Request::Release(*number, *is_used).encode();
            match self.channel.send(&request, &[], RELEASE_TIMEOUT) {
                // It is sent with the next request.
                Err(ChannelError::DeadlineExceeded { .. }) => return,
                _ => released.pop(),
            };
        }
    }
}

/// Memory that the service holds for this process.
#[derive(Debug)]
struct HeldByService {
    connection: Arc<Connection>,
    number: u64,
    /// Has it been mapped, or passed on?
    is_used: AtomicBool,
}

impl Drop for HeldByService {
    fn drop(&mut self) {
        // A forked child has no connection, and its parent still uses the memory.
        if self.connection.fork_generation.is_current() {
            let is_used = self.is_used.load(Ordering::Relaxed);
            lock(&self.connection.released).push((self.number, is_used));
            self.connection.send_released();
        }
    }
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

    /// Like [`connect`](Self::connect), but also trusts services of these user ids: memory that
    /// they send is mapped and read.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_trusting(path: &Path, users: &[u32], timeout: Duration) -> Result<Self> {
        let wait = Wait::new(timeout, &|| true);
        let end = wait.end;
        let client = Self::new(path, users);
        let mut backoff = RETRY_BACKOFF;
        let connection = loop {
            match client.connect_once(CONNECT, wait) {
                Err(error) if error.kind() == ErrorKind::Closed && Instant::now() < end => {}
                Err(error) if error.kind() == ErrorKind::Closed => {
                    return Err(error.with_kind(ErrorKind::DeadlineExceeded));
                }
                reached => break reached?,
            }
            std::thread::sleep(backoff.next_pause().min(remaining(end)));
        };
        lock(&client.idle).push(connection);
        Ok(client)
    }

    /// A client that connects when it is used.
    pub(super) fn new(path: &Path, users: &[u32]) -> Self {
        Self {
            idle: Mutex::default(),
            opened: Mutex::default(),
            path: path.to_owned(),
            trusted: [&[0, Credentials::of_this_process().user], users].concat(),
            fork_generation: ForkGeneration::current(),
        }
    }

    /// Requests a handle, to be passed on or opened later. The service does not hold the memory
    /// for it, as it does for [opened](Self::open) memory.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown), [`Denied`](ErrorKind::Denied),
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed) if the
    /// service ended or closed each connection until the timeout, [`Forked`](ErrorKind::Forked) in
    /// a child of the process that connected.
    pub fn handle(&self, name: &str, timeout: Duration) -> Result<Handle> {
        let wait = Wait::new(timeout, &|| true);
        self.with_connection(name, wait, |connection| {
            let mut pieces = self.request_handle(connection, name, wait)?;
            let count = pieces.metadata.pieces();
            let descriptors = (0..count).map(|_| pieces.next()).collect::<Result<_>>()?;
            pieces.held.is_used.store(true, Ordering::Relaxed);
            Ok(Handle { metadata: pieces.metadata, descriptors })
        })
    }

    /// Maps memory, for its own device or for another one too. The service holds it until the
    /// returned buffer and its clones are gone.
    ///
    /// # Errors
    /// As for [`handle`](Self::handle) and [`Opener::open`].
    pub fn open(
        &self,
        name: &str,
        device: Option<&Device>,
        timeout: Duration,
    ) -> Result<OpenedBuffer> {
        let wait = Wait::new(timeout, &|| true);
        self.open_while(name, device, wait)
    }

    /// Like [`open`](Self::open), with a wait that its caller may end.
    pub(super) fn open_while(
        &self,
        name: &str,
        device: Option<&Device>,
        wait: Wait<'_>,
    ) -> Result<OpenedBuffer> {
        self.with_connection(name, wait, |connection| {
            let mut pieces = self.request_handle(connection, name, wait)?;
            let metadata = pieces.metadata.clone();
            let opener = Opener::shared();
            let opened = opener.open_pieces(&metadata, device, &mut || pieces.next());
            let opened = opened.map_err(|error| self.with_path(error))?;
            if metadata.is_of_pool {
                opener.keep(&opened);
            }
            let held = Arc::new(pieces.held);
            held.is_used.store(true, Ordering::Relaxed);
            if !pieces.is_for_one {
                self.remember(name, metadata, &held);
            }
            Ok(opened.held(held))
        })
    }

    fn remember(&self, name: &str, metadata: HandleMetadata, held: &Arc<HeldByService>) {
        let mut opened = lock(&self.opened);
        if opened.len() >= FORGET_ABOVE {
            opened.retain(|_, known| known.held.strong_count() > 0);
        }
        let known = KnownMemory { metadata, held: Arc::downgrade(held) };
        opened.insert(name.to_owned(), known);
    }

    /// Is memory in use that was opened with this client?
    pub(super) fn is_in_use(&self) -> bool {
        lock(&self.opened).values().any(|known| known.held.strong_count() > 0)
    }

    /// Memory that this process has opened by this name and still uses; None otherwise, or if it is
    /// not mapped for this device. It never waits, and needs neither the service nor its process. Only
    /// for names that never stand for other memory.
    pub(super) fn opened(&self, name: &str, device: Option<&Device>) -> Option<OpenedBuffer> {
        check_fork(self.fork_generation, REQUEST).ok()?;
        let (metadata, held) = {
            let opened = lock(&self.opened);
            let known = opened.get(name)?;
            (known.metadata.clone(), known.held.upgrade()?)
        };
        let no_piece = &mut || Err(self.failed(ErrorKind::Unknown, "it is not mapped"));
        let opened = Opener::shared().open_pieces(&metadata, device, no_piece).ok()?;
        Some(opened.held(held))
    }

    /// Makes a call with a connection that is not used by another one.
    fn with_connection<T>(
        &self,
        name: &str,
        wait: Wait<'_>,
        call: impl Fn(&Arc<Connection>) -> Result<T>,
    ) -> Result<T> {
        check_fork(self.fork_generation, REQUEST)?;
        if !is_name(name) {
            return Err(self.failed(ErrorKind::Malformed, "a name has 1 to 255 bytes"));
        }
        let is_closed = |outcome: &Result<T>| {
            outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Closed)
        };
        let attempt = |connection: Arc<Connection>| {
            let outcome = call(&connection);
            // After other errors a reply may still arrive, or the service has closed it.
            let is_answered = outcome.as_ref().map_or_else(is_of_complete_reply, |_| true);
            if is_answered && lock(&self.idle).len() < MAX_IDLE {
                lock(&self.idle).push(connection);
            }
            outcome
        };
        let idle = lock(&self.idle).pop();
        if let Some(connection) = idle {
            let outcome = attempt(connection);
            if !is_closed(&outcome) {
                return outcome;
            }
        }
        // The service limits connections per user, and more threads may request at once.
        let mut backoff = RETRY_BACKOFF;
        loop {
            let outcome = attempt(self.connect_once(REQUEST, wait)?);
            let pause = backoff.next_pause();
            if !is_closed(&outcome) || remaining(wait.end) <= pause || !(wait.goes_on)() {
                return outcome;
            }
            std::thread::sleep(pause);
        }
    }

    fn with_path(&self, error: Error) -> Error {
        error.at(&self.path)
    }

    fn failed(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        self.with_path(Error::new(REQUEST, kind, detail))
    }

    /// A new connection. [`Closed`](ErrorKind::Closed) if no service listens, as before a service
    /// starts and after it ended.
    fn connect_once(&self, operation: &'static str, wait: Wait<'_>) -> Result<Arc<Connection>> {
        use std::io::ErrorKind::{ConnectionRefused, NotFound, PermissionDenied};
        let channel = wait.in_slices(|slice| Channel::connect(&self.path, slice));
        let channel = channel.map_err(|error| {
            let kind = match &error {
                ChannelError::System { cause, .. } => match cause.kind() {
                    // No process listens there.
                    ConnectionRefused | NotFound => Some(ErrorKind::Closed),
                    // The directory of another user.
                    PermissionDenied => Some(ErrorKind::Denied),
                    _ => None,
                },
                _ => None,
            };
            let error = Error::of_channel_at(operation, &self.path, error);
            match kind {
                Some(ErrorKind::Denied) => {
                    let detail = "this user may not connect. Its owner shares it with this user, in a \
                                  directory that this user can enter";
                    self.with_path(Error::new(operation, ErrorKind::Denied, detail))
                }
                Some(kind) => error.with_kind(kind),
                None => error,
            }
        })?;
        let peer = channel.credentials().during(CONNECT).map_err(|error| self.with_path(error))?;
        if self.trusted.contains(&peer.user) {
            let (next, released) = (AtomicU64::new(0), Mutex::default());
            let fork_generation = self.fork_generation;
            return Ok(Arc::new(Connection { fork_generation, channel, next, released }));
        }
        let detail =
            format!("user {} shares it: name this user as its owner to open it", peer.user);
        Err(self.with_path(Error::new(CONNECT, ErrorKind::Denied, detail)))
    }

    /// Requests a handle, whose memory the service holds from now on.
    fn request_handle<'a>(
        &'a self,
        connection: &Arc<Connection>,
        name: &str,
        wait: Wait<'a>,
    ) -> Result<HandlePieces<'a>> {
        let number = connection.next.fetch_add(1, Ordering::Relaxed);
        // Also released if the reply is late.
        let held = HeldByService {
            connection: Arc::clone(connection),
            number,
            is_used: AtomicBool::new(false),
        };
        let request = Request::Open(name.to_owned(), number);
        let (reply, descriptors) = self.exchange(connection, &request, wait)?;
        let (kind, detail) = match reply {
            Reply::Handle { bytes, is_for_one } => {
                let metadata =
                    HandleMetadata::decode(&bytes).map_err(|error| self.with_path(error))?;
                return Ok(HandlePieces {
                    client: self,
                    metadata,
                    is_for_one,
                    held,
                    received: descriptors.into(),
                    taken: 0,
                    wait,
                });
            }
            Reply::Unknown => (ErrorKind::Unknown, format!("no memory is shared as \"{name}\"")),
            Reply::Denied => (
                ErrorKind::Denied,
                "its owner does not admit this user: share it with this user, too".to_owned(),
            ),
            Reply::Failed(cause) => (ErrorKind::Failed, cause),
            Reply::Malformed | Reply::Pieces => {
                (ErrorKind::Malformed, "the service does not know the request".to_owned())
            }
        };
        Err(self.failed(kind, detail))
    }

    fn exchange(
        &self,
        connection: &Connection,
        request: &Request,
        wait: Wait<'_>,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        connection.send_released();
        let channel = &connection.channel;
        let of_channel = |error| self.with_path(Error::caused_by(REQUEST, error));
        // A service that refused this client has closed already. Its reply has the cause, and
        // arrives after the error of the send.
        let sent = wait.in_slices(|slice| channel.send(&request.encode(), &[], slice));
        let sent = sent.map_err(of_channel);
        let received =
            wait.in_slices(|slice| channel.receive(slice)).or_else(|error| match error {
                ChannelError::Closed => channel.receive(Duration::ZERO),
                other => Err(other),
            });
        let message = received.map_err(|error| sent.err().unwrap_or_else(|| of_channel(error)))?;
        let reply =
            Reply::decode(REQUEST, &message.bytes).map_err(|error| self.with_path(error))?;
        Ok((reply, message.descriptors))
    }
}

/// Does this error mean that the connection has no request in flight, and is open?
fn is_of_complete_reply(error: &Error) -> bool {
    use ErrorKind::{Closed, DeadlineExceeded, Denied, Malformed, VersionMismatch};
    ![Closed, DeadlineExceeded, Denied, Malformed, VersionMismatch].contains(&error.kind())
}

/// The descriptors of a handle. Those that did not come with it are requested as they are needed.
struct HandlePieces<'a> {
    client: &'a ShareClient,
    metadata: HandleMetadata,
    is_for_one: bool,
    held: HeldByService,
    received: VecDeque<OwnedFd>,
    taken: usize,
    wait: Wait<'a>,
}

impl HandlePieces<'_> {
    fn next(&mut self) -> Result<OwnedFd> {
        if self.received.is_empty() && self.taken < self.metadata.pieces() {
            let request = Request::Pieces(self.held.number, self.taken as u32);
            let (reply, descriptors) =
                self.client.exchange(&self.held.connection, &request, self.wait)?;
            match reply {
                Reply::Pieces => self.received.extend(descriptors),
                Reply::Failed(cause) => return Err(self.client.failed(ErrorKind::Failed, cause)),
                _ => {}
            }
        }
        self.taken += 1;
        let missing =
            || self.client.failed(ErrorKind::Malformed, "the service sends too few descriptors");
        self.received.pop_front().ok_or_else(missing)
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
