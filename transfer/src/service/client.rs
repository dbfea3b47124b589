//! Asking a service.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{Channel, ChannelError, Credentials, Incarnation};

use super::protocol::{Reply, is_name, request};
use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::share::{Opened, Opener, check_fork};

const CONNECT: &str = "connect";
const ASK: &str = "ask for shared memory";
/// Rests between attempts to connect where nobody listens yet.
const RESTS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));
/// Rests while another thread's call is under way.
const TURNS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(5));

/// Asks a service. Threads may share one: their calls follow each other.
///
/// A connection that the service gave up, because it had others to serve or was started
/// anew, is made again by the next call.
#[derive(Debug)]
pub struct Client {
    channel: Mutex<Channel>,
    path: PathBuf,
    peer: String,
    trusted: Vec<u32>,
    opener: Arc<Opener>,
    born: Incarnation,
}

/// Ends a connection whose answer did not come in time: a late one would be taken for the answer to
/// the next request. What has come already stays readable, so it is taken out.
fn abandon(channel: &Channel) {
    channel.end();
    while channel.receive(Duration::ZERO).is_ok() {}
}

impl Client {
    /// Connects to the service at a path, and waits for it if it is not there yet.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if nobody listens there in time;
    /// [`Denied`](ErrorKind::Denied) if it is neither our own user's nor root's.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self> {
        Self::connect_trusting(path, &[], patience)
    }

    /// As [`connect`](Self::connect), where the service may also be one of these users',
    /// by number: what it sends is mapped, and read as data.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_trusting(path: &Path, users: &[u32], patience: Duration) -> Result<Self> {
        let end = ipc::deadline(patience);
        let peer = path.display().to_string();
        let trusted = [&[0, Credentials::of_this_process().user], users].concat();
        let mut rest = RESTS.0;
        let channel = loop {
            let error = match Channel::connect(path, left(end)) {
                Ok(channel) => break channel,
                Err(error) => error,
            };
            if !is_nobody_there(&error) {
                return Err(Error::of_channel_at(CONNECT, path, error));
            }
            if Instant::now() >= end {
                let error = Error::of_channel_at(CONNECT, path, error);
                return Err(error.and_kind(ErrorKind::DeadlineExceeded));
            }
            std::thread::sleep(rest.min(left(end)));
            rest = (2 * rest).min(RESTS.1);
        };
        check_owner(&channel, &trusted).map_err(|error| error.with(&peer))?;
        Ok(Self {
            channel: Mutex::new(channel),
            path: path.to_owned(),
            peer,
            trusted,
            opener: Opener::shared(),
            born: Incarnation::current(),
        })
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
    /// the service is gone, [`Forked`](ErrorKind::Forked) in a child of the process that
    /// connected.
    pub fn handle(&self, name: &str, patience: Duration) -> Result<Handle> {
        check_fork(self.born, ASK)?;
        if !is_name(name) {
            return Err(self.failed(ErrorKind::Malformed, "a name has 1 to 255 bytes"));
        }
        let end = ipc::deadline(patience);
        let mut channel = self.turn(end)?;
        let mut asked = self.ask(&channel, name, end);
        if asked.as_ref().is_err_and(|error| error.kind() == ErrorKind::Closed) {
            *channel = self.connect_again(end)?;
            asked = self.ask(&channel, name, end);
        }
        if asked.as_ref().is_err_and(|error| error.kind() == ErrorKind::DeadlineExceeded) {
            abandon(&channel);
        }
        asked
    }

    /// Asks for a handle and opens it, for the device that it lies on or for another one.
    ///
    /// # Errors
    /// As for [asking](Self::handle) and for [opening](Opener::open).
    pub fn open(&self, name: &str, device: Option<&Device>, patience: Duration) -> Result<Opened> {
        self.opener.open(&self.handle(name, patience)?, device).map_err(|e| e.with(&self.peer))
    }

    fn failed(&self, kind: ErrorKind, detail: impl Into<String>) -> Error {
        Error::new(ASK, kind, detail).with(&self.peer)
    }

    /// The connection, when no other call uses it.
    fn turn(&self, end: Instant) -> Result<MutexGuard<'_, Channel>> {
        let mut rest = TURNS.0;
        loop {
            match self.channel.try_lock() {
                Ok(channel) => return Ok(channel),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            if Instant::now() >= end {
                let detail = "another thread waits for its answer";
                return Err(self.failed(ErrorKind::DeadlineExceeded, detail));
            }
            std::thread::sleep(rest.min(left(end)));
            rest = (2 * rest).min(TURNS.1);
        }
    }

    /// After the service closed the connection. If nobody is there, it is gone.
    fn connect_again(&self, end: Instant) -> Result<Channel> {
        let connected = Channel::connect(&self.path, left(end)).map_err(|error| {
            let is_gone = is_nobody_there(&error);
            let error = Error::of_channel_at(ASK, &self.path, error);
            if is_gone { error.and_kind(ErrorKind::Closed) } else { error }
        });
        let channel = connected?;
        check_owner(&channel, &self.trusted).map_err(|error| error.with(&self.peer))?;
        Ok(channel)
    }

    fn ask(&self, channel: &Channel, name: &str, end: Instant) -> Result<Handle> {
        let of_channel = |error| Error::of_channel(ASK, error).with(&self.peer);
        // A service that turned us away has closed already; its answer says why, and comes
        // after the news that our request was not read.
        let sent = channel.send(&request(name), &[], left(end)).map_err(of_channel);
        let received = channel.receive(left(end)).or_else(|error| match error {
            ChannelError::Closed => channel.receive(Duration::ZERO),
            other => Err(other),
        });
        let message = received.map_err(|error| sent.err().unwrap_or_else(|| of_channel(error)))?;
        let reply = Reply::decode(ASK, &message.bytes).map_err(|error| error.with(&self.peer))?;
        let (kind, detail) = match reply {
            Reply::Handle(bytes) => {
                let handle = Handle::from_parts(&bytes, message.descriptors);
                return handle.map_err(|error| error.with(&self.peer));
            }
            Reply::Unknown => (ErrorKind::Unknown, format!("nothing is shared as \"{name}\"")),
            Reply::Denied => (ErrorKind::Denied, "the service does not serve this user".to_owned()),
            Reply::Malformed | Reply::Failed => {
                (ErrorKind::Failed, "the service cannot answer".to_owned())
            }
        };
        if matches!(reply, Reply::Denied | Reply::Malformed) {
            // The service closes it; the next call makes another.
            channel.end();
        }
        Err(self.failed(kind, detail))
    }
}

/// Does nobody listen at the path, as before a service starts and after it ended?
fn is_nobody_there(error: &ChannelError) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error, ChannelError::System { cause, .. }
        if [ConnectionRefused, NotFound].contains(&cause.kind()))
}

fn check_owner(channel: &Channel, trusted: &[u32]) -> Result<()> {
    let who = channel.credentials().map_err(|error| Error::of_channel(CONNECT, error))?;
    if trusted.contains(&who.user) {
        return Ok(());
    }
    let detail = format!("the service belongs to user {}", who.user);
    Err(Error::new(CONNECT, ErrorKind::Denied, detail))
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
