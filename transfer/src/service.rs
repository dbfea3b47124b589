//! Where other processes ask for shared memory by name: a socket with a path.
//!
//! Whoever connects is asked for nothing but what the kernel says of it, and served in a
//! thread of its own, with deadlines, so that one who sends garbage or nothing at all
//! holds up nobody else.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpu::Device;
use ipc::{Channel, ChannelError, ChannelListener, Credentials};

use crate::error::{Error, ErrorKind, Result};
use crate::handle::Handle;
use crate::share::{Opened, Opener, Shared};

/// The longest name, in bytes.
pub const LONGEST_NAME: usize = 255;
/// Connections that are served at the same time; more are turned away.
const MOST_CLIENTS: usize = 64;
/// A connection on which nothing was asked for so long is closed.
const IDLE: Duration = Duration::from_secs(10);
/// How long one that is turned away has to hear why.
const PARTING: Duration = Duration::from_secs(1);
/// How often the thread that accepts looks whether it is over.
const LOOK: Duration = Duration::from_millis(100);

const REQUEST: &[u8; 4] = b"FcRQ";
const ANSWER: &[u8; 4] = b"FcAN";
const VERSION: u16 = 1;

/// What an answer begins with, after its name and version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Here = 0,
    Unknown = 1,
    Denied = 2,
    Malformed = 3,
    Full = 4,
    Failed = 5,
}

fn answer(verdict: Verdict, rest: &[u8]) -> Vec<u8> {
    [&ANSWER[..], &VERSION.to_le_bytes(), &[verdict as u8], rest].concat()
}

/// Who may ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Users, by number.
    pub users: Vec<u32>,
    /// Groups, by number.
    pub groups: Vec<u32>,
}

impl Admission {
    /// The user that this process runs as, and nobody else.
    #[must_use]
    pub fn own_user() -> Self {
        Self { users: vec![Credentials::of_this_process().user], groups: Vec::new() }
    }

    fn admits(&self, who: &Credentials) -> bool {
        self.users.contains(&who.user) || self.groups.contains(&who.group)
    }
}

/// What a service has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Handles given out.
    pub handles: usize,
    /// Requests for names that are not shared.
    pub unknown: usize,
    /// Connections turned away for who they were.
    pub denied: usize,
    /// Requests that were none.
    pub malformed: usize,
}

#[derive(Default)]
struct Counts {
    handles: AtomicUsize,
    unknown: AtomicUsize,
    denied: AtomicUsize,
    malformed: AtomicUsize,
}

struct State {
    shared: Mutex<HashMap<String, Arc<Shared>>>,
    admission: Admission,
    is_over: AtomicBool,
    clients: AtomicUsize,
    counts: Counts,
}

impl State {
    fn shared(&self) -> MutexGuard<'_, HashMap<String, Arc<Shared>>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives handles of shared memory to those that ask for them by name, until dropped.
///
/// ```
/// # use std::time::Duration;
/// # use gpu::Device;
/// # use transfer::{Admission, Client, Shared, ShareService, Tensor};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// # let path = directory.join("share");
/// # let device = Device::open("stand-in:0".parse()?)?;
/// # let memory = device.allocate_shared(4096, &[])?;
/// let service = ShareService::start(&path, Admission::own_user())?;
/// service.offer("weights", Shared::new(&memory, &Tensor::bytes(4096))?);
/// // In another process, container or not:
/// let client = Client::connect(&path, Duration::from_secs(1))?;
/// let opened = client.open("weights", None, Duration::from_secs(1))?;
/// assert_eq!(opened.memory.length(), memory.length());
/// # drop(service);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ShareService {
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

impl fmt::Debug for ShareService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShareService({:?})", self.served())
    }
}

impl ShareService {
    /// Listens at a path, in a thread of its own.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if somebody listens there already, or the path is no
    /// good.
    pub fn start(path: &Path, admission: Admission) -> Result<Self> {
        let operation = "listen";
        let of_channel = |error| Error::of_channel(operation, error).with(path.display());
        let listener = ChannelListener::bind(path).map_err(of_channel)?;
        let state = Arc::new(State {
            shared: Mutex::default(),
            admission,
            is_over: AtomicBool::new(false),
            clients: AtomicUsize::new(0),
            counts: Counts::default(),
        });
        let theirs = Arc::clone(&state);
        let accepting = std::thread::Builder::new()
            .name("fabricast-share".to_owned())
            .spawn(move || accept(&listener, &theirs))
            .map_err(|error| Error::new(operation, ErrorKind::Failed, error.to_string()))?;
        Ok(Self { state, accepting: Some(accepting) })
    }

    /// Gives this to those that ask for the name, from now on. Gives what they got before.
    pub fn offer(&self, name: &str, shared: Shared) -> Option<Arc<Shared>> {
        self.state.shared().insert(name.to_owned(), Arc::new(shared))
    }

    /// Gives nobody the name any more. Those that have it keep it.
    pub fn withdraw(&self, name: &str) -> Option<Arc<Shared>> {
        self.state.shared().remove(name)
    }

    /// What was done so far.
    #[must_use]
    pub fn served(&self) -> Served {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let counts = &self.state.counts;
        Served {
            handles: count(&counts.handles),
            unknown: count(&counts.unknown),
            denied: count(&counts.denied),
            malformed: count(&counts.malformed),
        }
    }
}

impl Drop for ShareService {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

fn accept(listener: &ChannelListener, state: &Arc<State>) {
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    while !state.is_over.load(Ordering::Relaxed) {
        clients.retain(|client| !client.is_finished());
        let channel = match listener.accept(LOOK) {
            Ok(channel) => channel,
            Err(ChannelError::DeadlineExceeded { .. }) => continue,
            Err(_) => {
                // Out of descriptors, say: others may let go of some.
                std::thread::sleep(LOOK);
                continue;
            }
        };
        if state.clients.load(Ordering::Relaxed) >= MOST_CLIENTS {
            let _ = channel.send(&answer(Verdict::Full, &[]), &[], Duration::ZERO);
            continue;
        }
        state.clients.fetch_add(1, Ordering::Relaxed);
        let theirs = Arc::clone(state);
        let spawned = std::thread::Builder::new().name("fabricast-share-client".to_owned()).spawn(
            move || {
                serve(&channel, &theirs);
                theirs.clients.fetch_sub(1, Ordering::Relaxed);
            },
        );
        match spawned {
            Ok(client) => clients.push(client),
            // No thread to be had: the connection is closed by now, and may be tried again.
            Err(_) => drop(state.clients.fetch_sub(1, Ordering::Relaxed)),
        }
    }
    clients.into_iter().for_each(|client| drop(client.join()));
}

/// Answers one connection until it is closed, idle, or up to no good.
fn serve(channel: &Channel, state: &State) {
    let admitted = channel.credentials().is_ok_and(|who| state.admission.admits(&who));
    if !admitted {
        state.counts.denied.fetch_add(1, Ordering::Relaxed);
        let _ = channel.send(&answer(Verdict::Denied, &[]), &[], LOOK);
        // Closed with a request unread, its sender would hear of that before the answer.
        let end = Instant::now() + PARTING;
        while Instant::now() < end && !state.is_over.load(Ordering::Relaxed) {
            if let Err(ChannelError::Closed) = channel.receive(LOOK) {
                return;
            }
        }
        return;
    }
    let mut idle_since = Instant::now();
    while !state.is_over.load(Ordering::Relaxed) && idle_since.elapsed() < IDLE {
        let message = match channel.receive(LOOK) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => continue,
            // More than a request can be: thrown away, and told so.
            Err(ChannelError::TooLong { .. }) => ipc::Message::default(),
            Err(_) => return,
        };
        idle_since = Instant::now();
        let Some(name) = name_in(&message.bytes) else {
            state.counts.malformed.fetch_add(1, Ordering::Relaxed);
            let _ = channel.send(&answer(Verdict::Malformed, &[]), &[], LOOK);
            return;
        };
        let shared = state.shared().get(name).cloned();
        let sent = match shared.map(|shared| shared.handle()) {
            Some(Ok(handle)) => {
                state.counts.handles.fetch_add(1, Ordering::Relaxed);
                let descriptors: Vec<_> =
                    handle.descriptors.iter().map(std::os::fd::AsFd::as_fd).collect();
                let bytes = answer(Verdict::Here, &handle.facts.encode());
                channel.send(&bytes, &descriptors, IDLE)
            }
            Some(Err(_)) => channel.send(&answer(Verdict::Failed, &[]), &[], IDLE),
            None => {
                state.counts.unknown.fetch_add(1, Ordering::Relaxed);
                channel.send(&answer(Verdict::Unknown, &[]), &[], IDLE)
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

/// The name that a request asks for.
fn name_in(bytes: &[u8]) -> Option<&str> {
    let rest = bytes.strip_prefix(REQUEST)?;
    let (version, name) = rest.split_first_chunk()?;
    let is_good =
        u16::from_le_bytes(*version) == VERSION && (1..=LONGEST_NAME).contains(&name.len());
    std::str::from_utf8(name).ok().filter(|_| is_good)
}

/// Asks a service.
#[derive(Debug)]
pub struct Client {
    channel: Channel,
    peer: String,
    opener: Opener,
}

impl Client {
    /// Connects to the service at a path.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if nobody listens there in time;
    /// [`Denied`](ErrorKind::Denied) if it is neither our own user's nor root's.
    pub fn connect(path: &Path, patience: Duration) -> Result<Self> {
        let operation = "connect";
        let peer = path.display().to_string();
        let of_channel = |error| Error::of_channel(operation, error).with(&peer);
        let channel = Channel::connect(path, patience).map_err(of_channel)?;
        let who = channel.credentials().map_err(of_channel)?;
        // What it sends is mapped, and read as data.
        if who.user != 0 && who.user != Credentials::of_this_process().user {
            let detail = format!("the service belongs to user {}", who.user);
            return Err(Error::new(operation, ErrorKind::Denied, detail).with(&peer));
        }
        Ok(Self { channel, peer, opener: Opener::default() })
    }

    /// Asks for a handle.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown), [`Denied`](ErrorKind::Denied),
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed).
    pub fn handle(&self, name: &str, patience: Duration) -> Result<Handle> {
        let operation = "ask for shared memory";
        let fail = |kind, detail: &str| Err(Error::new(operation, kind, detail).with(&self.peer));
        if name.is_empty() || name.len() > LONGEST_NAME {
            return fail(ErrorKind::Malformed, "a name has 1 to 255 bytes");
        }
        let of_channel = |error| Error::of_channel(operation, error).with(&self.peer);
        let request = [&REQUEST[..], &VERSION.to_le_bytes(), name.as_bytes()].concat();
        // A service that turned us away has closed already; its answer says why, and comes
        // after the news that our request was not read.
        let sent = self.channel.send(&request, &[], patience);
        let received = self.channel.receive(patience).or_else(|error| match error {
            ChannelError::Closed => self.channel.receive(Duration::ZERO),
            other => Err(other),
        });
        let message = match (received, sent) {
            (Ok(message), _) => message,
            (Err(_), Err(error)) | (Err(error), Ok(())) => return Err(of_channel(error)),
        };
        let Some((verdict, rest)) = verdict_in(&message.bytes) else {
            return fail(ErrorKind::Malformed, "the answer is none");
        };
        match verdict {
            verdict if verdict == Verdict::Here as u8 => {
                Handle::from_parts(rest, message.descriptors).map_err(|e| e.with(&self.peer))
            }
            verdict if verdict == Verdict::Unknown as u8 => {
                fail(ErrorKind::Unknown, &format!("nothing is shared as \"{name}\""))
            }
            verdict if verdict == Verdict::Denied as u8 => {
                fail(ErrorKind::Denied, "the service does not serve this user")
            }
            verdict if verdict == Verdict::Full as u8 => {
                fail(ErrorKind::Failed, "the service has too many clients")
            }
            other => fail(ErrorKind::Failed, &format!("the service answers {other}")),
        }
    }

    /// Asks for a handle and opens it, for the device that it lies on or for another one.
    ///
    /// # Errors
    /// As for [asking](Self::handle) and for [opening](Opener::open).
    pub fn open(&self, name: &str, device: Option<&Device>, patience: Duration) -> Result<Opened> {
        self.opener.open(&self.handle(name, patience)?, device).map_err(|e| e.with(&self.peer))
    }
}

fn verdict_in(bytes: &[u8]) -> Option<(u8, &[u8])> {
    let rest = bytes.strip_prefix(ANSWER)?;
    let ([low, high, verdict], rest) = rest.split_first_chunk::<3>()?;
    (u16::from_le_bytes([*low, *high]) == VERSION).then_some((*verdict, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_a_name_and_nothing_else() {
        let request = |name: &[u8]| [&REQUEST[..], &VERSION.to_le_bytes(), name].concat();
        assert_eq!(name_in(&request(b"weights")), Some("weights"));
        assert_eq!(name_in(&request(b"")), None);
        assert_eq!(name_in(&request(&[b'x'; 256])), None);
        assert_eq!(name_in(&request(&[0xff, 0xfe])), None, "no text");
        assert_eq!(name_in(b"FcRQ\x02\x00weights"), None, "another version");
        assert_eq!(name_in(b"GET / HTTP/1.1"), None);
        assert_eq!(verdict_in(&answer(Verdict::Denied, b"x")), Some((2, &b"x"[..])));
        assert_eq!(verdict_in(b"FcAN"), None);
    }
}
