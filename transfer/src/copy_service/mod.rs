//! A service that copies between memories of other processes of its machine.
//!
//! Kubernetes gives a container one GPU, and hides the others so completely that their memory cannot
//! be mapped there. A process that sees all GPUs can map the memory of both sides, which their owners
//! export to it, and copies at the speed of the link between them.
//!
//! ```text
//!   initiator                  service                    owner of the region
//!   ┌───────┐  pair, requests  ┌────────┐  region, ticket ┌──────────────┐
//!   │ Agent ├─────────────────►│ engine ├────────────────►│ local server │
//!   └───┬───┘  ◄── outcomes    └────────┘                 └──────────────┘
//!       └──────────────────── notice after the data ────────────►
//! ```
//!
//! The service takes nothing from a client but the name of a region and its ticket: length, rights
//! and memory are those that the owner describes, and each request is checked against them.

mod clients;
mod engine;
mod fair_queue;
mod openings;
mod owners;
mod shared;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ipc::{ChannelListener, ForkGeneration};

use self::engine::Engine;
use self::openings::{MAX_CLIENTS, Requests, refusal};
use self::shared::Shared;
use crate::admission::Admission;
use crate::copy_requests::socket_in;
use crate::error::{Error, ErrorKind, Result, failed};
use crate::socket_server::SocketServer;

const START: &str = "start copy service";
const HELLO_TIMEOUT: Duration = Duration::from_secs(2);

/// Copies for the agents of a directory, in a process that sees the devices of both sides: the path
/// `service-copied`. `fabricast node` runs one.
///
/// Agents find it by the directory that they have in common with it. It serves until it is dropped;
/// then agents wait two seconds for the next one, which repeats the copies in flight. Devices are
/// opened when they are first needed.
///
/// ```
/// use transfer::{Admission, CopyService};
/// let directory = std::env::temp_dir().join(format!("fabricast-doc-{}", std::process::id()));
/// std::fs::create_dir_all(&directory)?;
/// let service = CopyService::start(&directory, Admission::own_user())?;
/// assert_eq!((service.clients(), service.copied_bytes()), (0, 0));
/// drop(service);
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CopyService {
    socket: PathBuf,
    shared: Arc<Shared>,
    /// Ends the socket's thread, after the copies.
    is_closed: Arc<AtomicBool>,
    threads: Option<(JoinHandle<()>, JoinHandle<()>)>,
    fork_generation: ForkGeneration,
}

impl CopyService {
    /// Serves agents of these users in a directory.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if another service runs in the directory, or it does not exist.
    pub fn start(directory: &Path, admission: Admission) -> Result<Self> {
        let socket = socket_in(directory);
        let listener = ChannelListener::bind_with_mode(&socket, admission.mode())
            .map_err(|error| Error::of_listening_at(START, &socket, error))?;
        let shared = Arc::new(Shared::new(directory, admission.clone())?);
        let is_closed = Arc::new(AtomicBool::new(false));
        let engine = Engine::new(Arc::clone(&shared));
        let engine = threads::spawn("fabricast-copies", move || engine.run());
        let engine = engine.map_err(failed(START))?;
        let serve = {
            let (mut requests, is_over) =
                (Requests::new(Arc::clone(&shared)), Arc::clone(&is_closed));
            move || {
                let denied = "the copy service does not admit this user";
                let server = SocketServer {
                    listener: &listener,
                    admission: &admission,
                    is_over: &is_over,
                    max_per_user: MAX_CLIENTS,
                    register_timeout: HELLO_TIMEOUT,
                    denial: refusal(0, &Error::new(START, ErrorKind::Denied, denied)),
                };
                server.serve(&mut requests);
            }
        };
        let server = threads::spawn("fabricast-openings", serve).map_err(|error| {
            shared.end();
            failed(START)(error)
        })?;
        let threads = Some((engine, server));
        let fork_generation = ForkGeneration::current();
        Ok(Self { socket, shared, is_closed, threads, fork_generation })
    }

    /// The socket at which it listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Number of connected agents.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.shared.clients().count()
    }

    /// Bytes that it has copied.
    #[must_use]
    pub fn copied_bytes(&self) -> u64 {
        self.shared.copied_bytes()
    }
}

impl Drop for CopyService {
    fn drop(&mut self) {
        // A forked child has none of the threads.
        if !self.fork_generation.is_current() {
            return;
        }
        self.shared.end();
        let Some((engine, server)) = self.threads.take() else { return };
        let has_panicked = engine.join().is_err();
        self.is_closed.store(true, Ordering::Release);
        if server.join().is_err() || has_panicked {
            tracing::error!("a thread of the copy service panicked");
        }
    }
}
