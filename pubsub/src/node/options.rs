//! Options of a process that joins a node.

use std::path::PathBuf;
use std::time::Duration;

use gpu::Uuid;
use ipc::{Credentials, WaitStrategy};

use crate::error::{Error, ErrorKind, Result};
use crate::network_options::NetworkOptions;
use crate::settings::{Reserve, SharedLocation, device_error};

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
    /// Whether waits of publishers and subscribers end when a signal handler has run in the waiting
    /// thread ([`Interrupted`](ErrorKind::Interrupted)). By default they continue.
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
    /// `$XDG_RUNTIME_DIR`, `$TMPDIR` or `/tmp`.
    #[must_use]
    pub fn default_directory() -> PathBuf {
        let named = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(directory) = named("FABRICAST_DIRECTORY") {
            return directory.into();
        }
        match named("XDG_RUNTIME_DIR") {
            Some(directory) => PathBuf::from(directory).join("fabricast"),
            None => {
                let user = Credentials::of_this_process().user;
                std::env::temp_dir().join(format!("fabricast-{user}"))
            }
        }
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

/// Limits of the messages of all topics of a node, by memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// For host memory; by default a quarter of it.
    pub host: Option<u64>,
    /// For memory of each device; by default half of it.
    pub device: Option<u64>,
}

impl Budgets {
    /// The smallest valid budget, in bytes: the [reservation](crate::TopicSettings::reserves) of
    /// the smallest topic.
    pub const MIN: u64 = Reserve::MIN;

    /// Rejects budgets that are too small for any topic.
    ///
    /// # Errors
    /// Of the kind [`InvalidArgument`](crate::ErrorKind::InvalidArgument), with the figures.
    ///
    /// ```
    /// use pubsub::{Budgets, ErrorKind};
    /// assert!(Budgets { host: Some(Budgets::MIN), device: None }.check().is_ok());
    /// let error = Budgets { host: Some(0), device: None }.check().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    /// ```
    pub fn check(&self) -> Result<()> {
        for (place, budget) in [("the host's", self.host), ("a device's", self.device)] {
            if let Some(bytes) = budget.filter(|bytes| *bytes < Self::MIN) {
                let detail = format!(
                    "a budget of {bytes} bytes of {place} memory, but the smallest topic reserves {}",
                    Self::MIN
                );
                let operation = "set memory budgets";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            }
        }
        Ok(())
    }

    /// The budget of host memory, by default a quarter of it.
    ///
    /// ```
    /// use pubsub::Budgets;
    /// assert_eq!(Budgets { host: Some(1 << 30), device: None }.of_host()?, 1 << 30);
    /// assert!(Budgets::default().of_host()? > 0);
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](crate::ErrorKind::Failed) if the system does not report its memory.
    pub fn of_host(&self) -> Result<u64> {
        match self.host {
            Some(bytes) => Ok(bytes),
            None => Ok(host_memory()? / 4),
        }
    }

    pub(crate) fn of(&self, place: SharedLocation) -> Result<u64> {
        let operation = "compute the memory of a topic";
        match place {
            SharedLocation::Host => self.of_host(),
            SharedLocation::Device(bytes) => match self.device {
                Some(bytes) => Ok(bytes),
                None => {
                    let device = gpu::Device::find(Uuid(bytes))
                        .map_err(|cause| device_error(operation, cause))?;
                    Ok(device.properties().total_memory / 2)
                }
            },
        }
    }
}

fn host_memory() -> Result<u64> {
    let operation = "read the size of host memory";
    let text =
        std::fs::read_to_string("/proc/meminfo").map_err(|error| Error::of(operation, error))?;
    let total = text.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    total
        .map(|kibibytes| kibibytes << 10)
        .ok_or_else(|| Error::new(operation, ErrorKind::Failed, "/proc/meminfo has no MemTotal"))
}
