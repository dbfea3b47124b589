//! A Unix socket where other processes request shared memory by name.
//!
//! Clients are authenticated by the credentials that the kernel reports. One thread serves all and
//! waits for none: a client that cannot take its reply at once is disconnected.

mod client;
mod names;
mod process;
mod protocol;
mod token;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::{Channel, ChannelError, ChannelListener, ForkGeneration, Message};
use threads::lock;

use self::protocol::{Reply, Request};
use crate::admission::Admission;
use crate::error::{Error, ErrorKind, Result, failed};
use crate::share::{PIECES_PER_MESSAGE, SharedBuffer, check_fork};
use crate::socket_server::{Handler, SocketServer};

pub use client::ShareClient;
pub use names::{MAX_SHARED_NAME_LENGTH, SharedName, clean_names, shared_under_name};
pub use process::{Share, default_directory, open, open_of, share, share_with, wait_for_receivers};
pub use protocol::MAX_NAME_LENGTH;
pub use token::{SHORT_TOKEN_LENGTH, is_token};

/// Maximum of concurrent connections per user that hold no memory.
const MAX_PER_USER: usize = 16;
/// Maximum of connections that hold memory.
const MAX_HOLDING: usize = 1024;
/// In this time a receiver requests the descriptors that did not come with a handle.
const REQUEST_TIME: Duration = Duration::from_secs(1);
/// Maximum of memories that a connection holds.
const MAX_HELD: usize = 1 << 16;

#[derive(Debug)]
struct State {
    shared: Mutex<HashMap<String, Published>>,
    admission: Admission,
    is_over: AtomicBool,
    /// Until then a receiver of memory for one is expected to request further descriptors.
    request_until: Mutex<Option<Instant>>,
}

impl State {
    fn expect_request(&self) {
        *lock(&self.request_until) = Some(Instant::now() + REQUEST_TIME);
    }

    /// Ends the hold of the receiver of memory for one: after a use the memory is shared no more,
    /// otherwise it is available again, unless it was withdrawn.
    fn give_back(&self, name: &str, is_used: bool) {
        let mut shared = lock(&self.shared);
        if is_used {
            shared.remove(name);
        } else if let Some(published) = shared.get_mut(name) {
            published.is_taken = false;
        }
    }
}

#[derive(Debug, Clone)]
struct Published {
    buffer: Arc<SharedBuffer>,
    /// Not found by others once it is opened.
    is_for_one: bool,
    /// A receiver has it, which may give it back.
    is_taken: bool,
    /// Left to its receiver, by a share that is gone.
    is_left: bool,
}

impl Published {
    /// For any number of receivers.
    fn new(shared: SharedBuffer) -> Self {
        Self { buffer: Arc::new(shared), is_for_one: false, is_taken: false, is_left: false }
    }
}

/// Memory that a client holds.
#[derive(Debug)]
struct HeldMemory {
    buffer: Arc<SharedBuffer>,
    /// The name of memory for one receiver, which is available again if this one does not use it.
    name_of_one: Option<String>,
}

/// Memory that a client opened, by the numbers that it gave it.
type Held = HashMap<u64, HeldMemory>;

/// The requests of all connections. A connection that holds memory is a registered client.
struct Requests<'a> {
    state: &'a State,
    /// Connections that hold memory.
    holding: usize,
}

impl Requests<'_> {
    /// Sends a handle, and holds its memory for the client from now on. False if the client cannot
    /// take it.
    fn open(&self, channel: &Channel, name: &str, number: u64, held: &mut Held) -> bool {
        let found = lock(&self.state.shared).get(name).cloned();
        let Some(Published { buffer, is_for_one, is_taken: false, .. }) = found else {
            return reply(channel, &Reply::Unknown, &[]);
        };
        if held.is_empty() && self.holding >= MAX_HOLDING {
            let cause = format!("{MAX_HOLDING} clients hold memory, the maximum");
            return reply(channel, &Reply::Failed(cause), &[]);
        }
        if held.len() >= MAX_HELD || held.contains_key(&number) {
            let cause = format!("a client holds {MAX_HELD} memories, the maximum");
            return reply(channel, &Reply::Failed(cause), &[]);
        }
        // Mostly the client has mapped the memory of a pool already. Other memory of few pieces is
        // complete with this reply, so that the client can map it after this process has ended.
        let descriptors = match buffer.metadata().is_of_pool {
            true => Vec::new(),
            false => match buffer.descriptors(0, PIECES_PER_MESSAGE) {
                Ok(descriptors) => descriptors,
                Err(error) => return reply(channel, &Reply::Failed(error.to_string()), &[]),
            },
        };
        let is_complete = descriptors.len() == buffer.metadata().pieces();
        let bytes = buffer.metadata().encode();
        let handle = Reply::Handle { bytes, is_for_one }.encode();
        match channel.send(&handle, &borrowed(&descriptors), Duration::ZERO) {
            Ok(()) => {}
            Err(ChannelError::Closed | ChannelError::DeadlineExceeded { .. }) => return false,
            Err(error) => return reply(channel, &Reply::Failed(error.to_string()), &[]),
        }
        let name_of_one = is_for_one.then(|| name.to_owned());
        if is_for_one {
            if let Some(published) = lock(&self.state.shared).get_mut(name) {
                published.is_taken = true;
            }
            if !is_complete {
                self.state.expect_request();
            }
        }
        held.insert(number, HeldMemory { buffer, name_of_one });
        true
    }

    /// Handles a request. False if the client cannot take the reply.
    fn answer(&self, channel: &Channel, request: Request, held: &mut Held) -> bool {
        match request {
            Request::Open(name, number) => self.open(channel, &name, number, held),
            Request::Pieces(number, first) => {
                let Some(memory) = held.get(&number) else {
                    return reply(channel, &Reply::Unknown, &[]);
                };
                let is_last =
                    first as usize + PIECES_PER_MESSAGE >= memory.buffer.metadata().pieces();
                if memory.name_of_one.is_some() && !is_last {
                    self.state.expect_request();
                }
                match memory.buffer.descriptors(first as usize, PIECES_PER_MESSAGE) {
                    Ok(descriptors) => reply(channel, &Reply::Pieces, &descriptors),
                    Err(error) => reply(channel, &Reply::Failed(error.to_string()), &[]),
                }
            }
            Request::Release(number, is_used) => {
                if let Some(HeldMemory { name_of_one: Some(name), .. }) = held.remove(&number) {
                    self.state.give_back(&name, is_used);
                }
                true
            }
        }
    }
}

fn borrowed(descriptors: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    descriptors.iter().map(AsFd::as_fd).collect()
}

/// False if the client cannot take it at once. If the system refuses the descriptors, the client
/// gets the reason: it keeps its connection, and what it holds.
fn reply(channel: &Channel, reply: &Reply, descriptors: &[OwnedFd]) -> bool {
    match channel.send(&reply.encode(), &borrowed(descriptors), Duration::ZERO) {
        Ok(()) => true,
        Err(ChannelError::Closed | ChannelError::DeadlineExceeded { .. }) => false,
        Err(error) if descriptors.is_empty() => {
            tracing::debug!(%error, "a reply was not sent");
            false
        }
        Err(error) => {
            let refused = Reply::Failed(error.to_string()).encode();
            channel.send(&refused, &[], Duration::ZERO).is_ok()
        }
    }
}

impl Handler for Requests<'_> {
    type Client = Held;

    fn handle(&mut self, channel: &Channel, client: &mut Option<Held>) -> bool {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return true,
            // Longer than a request can be: the client gets `Malformed`.
            Err(ChannelError::TooLong { .. }) => Message::default(),
            Err(_) => return false,
        };
        let Some(request) = Request::decode(&message.bytes) else {
            reply(channel, &Reply::Malformed, &[]);
            return false;
        };
        let was_holding = client.is_some();
        let mut held = client.take().unwrap_or_default();
        let is_open = self.answer(channel, request, &mut held);
        *client = Some(held).filter(|held| !held.is_empty());
        self.holding = self.holding + usize::from(client.is_some()) - usize::from(was_holding);
        is_open
    }

    fn disconnected(&mut self, held: Held) {
        for name in held.into_values().filter_map(|memory| memory.name_of_one) {
            self.state.give_back(&name, true);
        }
        self.holding -= 1;
    }
}

/// Hands out handles of shared memory by name, until dropped.
///
/// A service belongs to the process that started it: in a forked child it does nothing, and
/// dropping it there does not affect the parent's service.
///
/// ```
/// # use std::time::Duration;
/// # use gpu::Device;
/// # use transfer::{Admission, ShareClient, SharedBuffer, ShareService, Tensor};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// # let path = directory.join("share");
/// # let device = Device::open("emulated:0".parse()?)?;
/// # let memory = device.allocate_shared(4096, &[])?;
/// let service = ShareService::start(&path, Admission::own_user())?;
/// service.publish("weights", SharedBuffer::new(&memory, &Tensor::bytes(4096))?)?;
/// // In another process, container or not:
/// let client = ShareClient::connect(&path, Duration::from_secs(1))?;
/// let opened = client.open("weights", None, Duration::from_secs(1))?;
/// assert_eq!(opened.buffer().length(), memory.length());
/// # drop(service);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShareService {
    path: PathBuf,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
    fork_generation: ForkGeneration,
}

impl ShareService {
    /// Listens at a path, in its own thread.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if another process listens there already, or the path is
    /// invalid.
    pub fn start(path: &Path, admission: Admission) -> Result<Self> {
        let operation = "listen";
        let listener = ChannelListener::bind_with_mode(path, admission.mode())
            .map_err(|error| Error::of_listening_at(operation, path, error))?;
        let state = Arc::new(State {
            shared: Mutex::default(),
            admission,
            is_over: AtomicBool::new(false),
            request_until: Mutex::default(),
        });
        let thread_state = Arc::clone(&state);
        let accepting = threads::spawn("fabricast-share", move || {
            let server = SocketServer {
                listener: &listener,
                admission: &thread_state.admission,
                is_over: &thread_state.is_over,
                max_per_user: MAX_PER_USER,
                register_timeout: Duration::MAX,
                denial: Reply::Denied.encode(),
            };
            server.serve(&mut Requests { state: &thread_state, holding: 0 });
        })
        .map_err(|error| failed(operation)(error).at(path))?;
        let (path, fork_generation) = (path.to_owned(), ForkGeneration::current());
        Ok(Self { path, state, accepting: Some(accepting), fork_generation })
    }

    /// The path of its socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Publishes memory under a name, and returns what the name stood for before.
    ///
    /// The memory is kept as long as it is published, and as long as a process that opened it uses
    /// it.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) for a name that is empty or longer than
    /// [`MAX_NAME_LENGTH`]; [`Forked`](ErrorKind::Forked).
    pub fn publish(&self, name: &str, shared: SharedBuffer) -> Result<Option<Arc<SharedBuffer>>> {
        self.add(name, Published::new(shared))
    }

    fn add(&self, name: &str, published: Published) -> Result<Option<Arc<SharedBuffer>>> {
        let operation = "publish shared memory";
        check_fork(self.fork_generation, operation)?;
        if !protocol::is_name(name) {
            let detail = "a name has 1 to 255 bytes";
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        let before = lock(&self.state.shared).insert(name.to_owned(), published);
        Ok(before.map(|before| before.buffer))
    }

    /// Is memory left to a receiver that has not opened it, or has not got all of its descriptors?
    fn has_left(&self) -> bool {
        let is_waiting = |it: &Published| it.is_left && it.is_for_one && !it.is_taken;
        let is_expected = lock(&self.state.request_until).is_some_and(|end| Instant::now() < end);
        is_expected || lock(&self.state.shared).values().any(is_waiting)
    }

    /// Stops publishing a name. Processes that opened the memory keep it.
    ///
    /// # Errors
    /// [`Forked`](ErrorKind::Forked).
    pub fn withdraw(&self, name: &str) -> Result<Option<Arc<SharedBuffer>>> {
        check_fork(self.fork_generation, "withdraw shared memory")?;
        Ok(lock(&self.state.shared).remove(name).map(|published| published.buffer))
    }
}

impl Drop for ShareService {
    fn drop(&mut self) {
        let Some(accepting) = self.accepting.take() else { return };
        if !self.fork_generation.is_current() {
            // The thread exists in the parent only: nothing to join here.
            std::mem::forget(accepting);
            return;
        }
        self.state.is_over.store(true, Ordering::Release);
        let _ = accepting.join();
    }
}
