//! A Unix socket where other processes request shared memory by name.
//!
//! Clients are authenticated by the credentials that the kernel reports. One thread serves all and
//! waits for none: a client that cannot take its reply at once is disconnected.

mod client;
mod protocol;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ipc::{Channel, ChannelError, ChannelListener, ForkGeneration, Message};

use self::protocol::{Reply, read_request};
use crate::admission::Admission;
use crate::error::{Error, ErrorKind, Result, failed};
use crate::lock;
use crate::share::{SharedBuffer, check_fork};
use crate::socket_server::{Handler, SocketServer};

pub use client::ShareClient;
pub use protocol::MAX_NAME_LENGTH;

/// Maximum of concurrent connections per user.
const MAX_PER_USER: usize = 16;

#[derive(Debug)]
struct State {
    shared: Mutex<HashMap<String, Arc<SharedBuffer>>>,
    admission: Admission,
    is_over: AtomicBool,
}

/// No client registers.
impl Handler for &State {
    type Client = ();

    fn handle(&mut self, channel: &Channel, _: &mut Option<()>) -> bool {
        let message = match channel.receive(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::DeadlineExceeded { .. }) => return true,
            // Longer than a request can be: the client gets `Malformed`.
            Err(ChannelError::TooLong { .. }) => Message::default(),
            Err(_) => return false,
        };
        let Some(name) = read_request(&message.bytes) else {
            let _ = channel.send(&Reply::Malformed.encode(), &[], Duration::ZERO);
            return false;
        };
        let shared = lock(&self.shared).get(&name).cloned();
        let (reply, descriptors) = match shared.map(|shared| shared.handle()) {
            Some(Ok(handle)) => (Reply::Handle(handle.metadata.encode()), handle.descriptors),
            Some(Err(_)) => (Reply::Failed, Vec::new()),
            None => (Reply::Unknown, Vec::new()),
        };
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        channel.send(&reply.encode(), &descriptors, Duration::ZERO).is_ok()
    }
}

/// Hands out handles of shared memory by name, until dropped.
///
/// It belongs to the process that started it: in a forked child it does nothing, and dropping it
/// there does not affect the parent's service.
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
/// assert_eq!(opened.memory.length(), memory.length());
/// # drop(service);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ShareService {
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
            .map_err(|error| Error::of_channel_at(operation, path, error))?;
        let state = Arc::new(State {
            shared: Mutex::default(),
            admission,
            is_over: AtomicBool::new(false),
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
            server.serve(&mut &*thread_state);
        })
        .map_err(|error| failed(operation)(error).at(path))?;
        Ok(Self { state, accepting: Some(accepting), fork_generation: ForkGeneration::current() })
    }

    /// Publishes memory under a name, and returns what the name stood for before.
    ///
    /// # Errors
    /// [`Malformed`](ErrorKind::Malformed) for a name that is empty or longer than
    /// [`MAX_NAME_LENGTH`]; [`Forked`](ErrorKind::Forked).
    pub fn publish(&self, name: &str, shared: SharedBuffer) -> Result<Option<Arc<SharedBuffer>>> {
        let operation = "publish shared memory";
        check_fork(self.fork_generation, operation)?;
        if !protocol::is_name(name) {
            let detail = "a name has 1 to 255 bytes";
            return Err(Error::new(operation, ErrorKind::Malformed, detail));
        }
        Ok(lock(&self.state.shared).insert(name.to_owned(), Arc::new(shared)))
    }

    /// Stops publishing a name. Processes that opened the memory keep it.
    ///
    /// # Errors
    /// [`Forked`](ErrorKind::Forked).
    pub fn withdraw(&self, name: &str) -> Result<Option<Arc<SharedBuffer>>> {
        check_fork(self.fork_generation, "withdraw shared memory")?;
        Ok(lock(&self.state.shared).remove(name))
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
