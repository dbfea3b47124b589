//! The service of a node: creates the node, admits processes, creates topics and pools, and
//! reclaims after dead processes.
//!
//! The service runs in a thread of a dedicated process or of the first member. It may end or be
//! killed at any moment: members hold the descriptors of all segments, elect another service, and
//! return them to it.

mod connection;
pub(crate) mod election;
mod leftovers;
mod process;
pub(crate) mod protocol;
mod registry;
mod server;

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use ipc::{ChannelListener, ForkGeneration};

pub use self::leftovers::{Condition, check_directory, clean, remove_directory};
pub use self::process::ServiceProcess;
pub(crate) use self::process::describe_process;
#[cfg(any(test, feature = "fuzzing"))]
pub use self::server::fuzzing::{ClientOutcome, run_clients};

use self::election::{LeaderLock, socket_path};
use self::server::Service;
use crate::error::Result;
use crate::error_mapping::{During, On};
use crate::node_options::NodeOptions;
use crate::wake::WakeFd;

const SERVING: &str = "serve node";

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
    /// Serves the node of a directory, unless another process does. No other service takes over
    /// while this process holds the [priority lock](election::PriorityLock), nor before the end of
    /// the minimum term.
    pub(crate) fn start(
        options: NodeOptions,
        has_priority: Arc<AtomicBool>,
        min_term_until: Option<Instant>,
    ) -> Result<Option<Self>> {
        election::prepare(SERVING, &options.directory)?;
        let Some(leader_lock) = LeaderLock::take(SERVING, &options.directory)? else {
            return Ok(None);
        };
        let listener = listen(&socket_path(&options.directory))?;
        let bell = Arc::new(WakeFd::new().during(SERVING)?);
        let is_over = Arc::new(AtomicBool::new(false));
        let (bell_of, end_of) = (Arc::clone(&bell), Arc::clone(&is_over));
        let directory = options.directory.clone();
        let service =
            Service::new(options, has_priority, min_term_until, listener, bell_of, end_of)?;
        // With all signals blocked: a provider that exceeds the file size limit in shared memory
        // gets an error instead of a fatal signal.
        let thread = threads::spawn("fabricast-node", move || {
            let has_failed = service.serve(|| leader_lock.is_in_place(&directory));
            // Only now may another process serve the node.
            drop(leader_lock);
            has_failed
        })
        .during(SERVING)?;
        Ok(Some(Self {
            thread: Some(thread),
            is_over,
            bell,
            fork_generation: ForkGeneration::current(),
        }))
    }

    /// Returns true if the service has ended by itself.
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

/// Listens, as the holder of the leader lock. An existing socket is stale, even if a child of the
/// last service keeps it open.
fn listen(path: &Path) -> Result<ChannelListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        let _ = std::fs::remove_file(path);
    }
    ChannelListener::bind(path).during(SERVING).at(path.display())
}

impl Drop for ServiceThread {
    fn drop(&mut self) {
        self.end();
    }
}
