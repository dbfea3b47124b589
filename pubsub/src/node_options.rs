//! Options of a process that joins a node.

use std::path::PathBuf;
use std::time::Duration;

use ipc::WaitStrategy;

use crate::budgets::Budgets;
use crate::network_options::NetworkOptions;

/// Options of a process that joins a node.
///
/// ```
/// use pubsub::NodeOptions;
/// let options = NodeOptions { label: "camera".into(), ..NodeOptions::default() };
/// assert_eq!(options.directory, NodeOptions::default_directory());
/// ```
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Directory of the node's socket. All processes with the same directory share a node.
    pub directory: PathBuf,
    /// Label of this process in reports; at most 64 bytes.
    pub label: String,
    /// Which process serves the node.
    pub service: ServiceMode,
    /// Timeout for calls to the service: to join, to open a topic, to create a publisher, and to
    /// find another service when it has ended.
    pub service_timeout: Duration,
    /// Wait strategy of publishers and subscribers.
    pub waiting: WaitStrategy,
    /// True if waits of publishers and subscribers end when a signal handler has run in the waiting
    /// thread ([`Interrupted`](crate::ErrorKind::Interrupted)). By default they continue.
    ///
    /// A handler ends the wait only while the thread sleeps, whatever `SA_RESTART` says. The thread
    /// polls before it sleeps ([`waiting`](Self::waiting)).
    pub interruptible: bool,
    /// Limits of the pools of a node that this process serves.
    pub budgets: Budgets,
    /// Network options of a node that this process serves; None: no other nodes.
    pub network: Option<NetworkOptions>,
}

impl NodeOptions {
    /// The default directory: `$FABRICAST_DIRECTORY`, or else a directory of this user in
    /// `$XDG_RUNTIME_DIR`, if that exists, `$TMPDIR` or `/tmp`.
    ///
    /// Batch systems pass `$XDG_RUNTIME_DIR` on to machines that do not have it.
    #[must_use]
    pub fn default_directory() -> PathBuf {
        transfer::default_directory()
    }
}

impl Default for NodeOptions {
    fn default() -> Self {
        let program = std::env::current_exe().ok();
        let name = program.as_deref().and_then(|path| path.file_name());
        let label = name.map(|name| name.to_string_lossy().chars().take(16).collect());
        Self {
            directory: Self::default_directory(),
            label: label.unwrap_or_default(),
            service: ServiceMode::Embedded,
            service_timeout: Duration::from_secs(20),
            waiting: WaitStrategy::default(),
            interruptible: false,
            budgets: Budgets::default(),
            network: None,
        }
    }
}

/// Which process serves the node that a process joined.
///
/// One process at a time serves a node. An embedded service hands the node over when a
/// [dedicated](Self::Dedicated) one joins, as when it ends. Messages continue in the meantime, and
/// none is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ServiceMode {
    /// This process, in a thread, if no other serves the node, until a dedicated service joins.
    #[default]
    Embedded,
    /// Always another process, as `fabricast node`.
    External,
    /// This process, while it is a member: it takes the node over from an embedded service. If
    /// another dedicated service is a member, it [does not join](crate::ErrorKind::AlreadyServed).
    Dedicated,
}
