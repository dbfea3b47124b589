//! The service of a node: creates the node, admits processes, creates topics and pools, and
//! reclaims after dead processes.
//!
//! It runs in a thread of a dedicated process or of the first member. It may end or be killed at
//! any moment: members hold the descriptors of all segments, elect another service, and return them
//! to it.

mod connection;
pub(crate) mod election;
mod leftovers;
mod process;
pub(crate) mod protocol;
mod registry;
mod server;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use ipc::{ChannelListener, ForkGeneration};
use nix::sys::signal::{SigSet, Signal};

pub use self::leftovers::{Condition, check_directory, clean};
pub use self::process::ServiceProcess;
#[cfg(any(test, feature = "fuzzing"))]
pub use self::server::fuzzing::{ClientOutcome, run_clients};

use self::election::{LeaderLock, socket_path};
use self::server::Service;
use crate::budgets::Budgets;
use crate::error::{Error, Result};
use crate::ids::NodeId;
use crate::network_options::NetworkOptions;
use crate::wake::WakeFd;

const SERVING: &str = "serve node";

/// Options of a service.
#[derive(Debug, Clone)]
pub(crate) struct ServiceOptions {
    pub(crate) directory: PathBuf,
    pub(crate) label: String,
    pub(crate) budgets: Budgets,
    pub(crate) network: Option<NetworkOptions>,
    /// This process holds the [priority lock](election::PriorityLock): no other service takes over.
    pub(crate) has_priority: Arc<AtomicBool>,
    /// Until then no other service takes over, whatever its priority.
    pub(crate) min_term_until: Option<Instant>,
    /// Identity of the node, if the service creates it.
    pub(crate) identity: NodeId,
}

/// The service of a node; dropping it ends it.
#[derive(Debug)]
pub(crate) struct ServiceThread {
    /// True if it failed.
    thread: Option<JoinHandle<bool>>,
    is_over: Arc<AtomicBool>,
    bell: Arc<WakeFd>,
    fork_generation: ForkGeneration,
}

impl ServiceThread {
    /// Serves the node of a directory, unless another process does.
    pub(crate) fn start(options: ServiceOptions) -> Result<Option<Self>> {
        election::prepare(SERVING, &options.directory)?;
        let Some(leader_lock) = LeaderLock::take(SERVING, &options.directory)? else {
            return Ok(None);
        };
        let failed = |error: std::io::Error| Error::of(SERVING, error);
        let path = socket_path(&options.directory);
        let listener = listen(&path)?;
        let bell = Arc::new(WakeFd::new().map_err(failed)?);
        let is_over = Arc::new(AtomicBool::new(false));
        let service = Service::new(options, listener, Arc::clone(&bell), Arc::clone(&is_over))?;
        let thread = std::thread::Builder::new()
            .name("fabricast-node".into())
            .spawn(move || {
                block_file_size_signal();
                let has_failed = service.serve();
                // Only now may another process serve the node.
                drop(leader_lock);
                has_failed
            })
            .map_err(failed)?;
        Ok(Some(Self {
            thread: Some(thread),
            is_over,
            bell,
            fork_generation: ForkGeneration::current(),
        }))
    }

    /// Whether it has ended by itself.
    pub(crate) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends it, if it runs. True if it has failed.
    pub(crate) fn has_failed(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        if !self.fork_generation.is_current() {
            // In a forked child: the thread is the parent's.
            std::mem::forget(self.thread.take());
            return false;
        }
        self.is_over.store(true, Ordering::Release);
        self.bell.ring();
        let ended = self.thread.take().map_or(Ok(false), JoinHandle::join);
        ended.unwrap_or_else(|_| {
            tracing::error!("the thread of a node's service panicked");
            true
        })
    }
}

/// A provider that exceeds the file size limit in shared memory gets an error instead of a fatal
/// signal. Threads that this one starts inherit the mask.
fn block_file_size_signal() {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    if let Err(error) = signals.thread_block() {
        tracing::warn!(%error, "the thread of a node's service cannot block SIGXFSZ");
    }
}

/// Listens, as the holder of the leader lock. An existing socket is stale, even if a child of the
/// last service keeps it open.
fn listen(path: &Path) -> Result<ChannelListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        let _ = std::fs::remove_file(path);
    }
    ChannelListener::bind(path).map_err(|error| Error::of(SERVING, error).at(path.display()))
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.end();
    }
}
