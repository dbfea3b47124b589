//! How a process joined a node.

use std::path::PathBuf;
use std::time::Duration;

use gpu::Uuid;
use ipc::{Credentials, WaitStrategy};

use crate::error::{Error, ErrorKind, Result};
use crate::network_options::NetworkOptions;
use crate::settings::{Reserve, SharedLocation, device_error};

/// How a process joined a node.
///
/// ```
/// use pubsub::NodeOptions;
/// let options = NodeOptions { label: "camera".into(), ..NodeOptions::default() };
/// assert_eq!(options.directory, NodeOptions::default_directory());
/// ```
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Where the node's socket is. All processes that say the same are at one node.
    pub directory: PathBuf,
    /// What this process calls itself in reports; at most 64 bytes.
    pub label: String,
    /// Who serves the node.
    pub service: ServiceMode,
    /// How long to wait for the service: to join, to open a topic, to make a publisher, or to find
    /// another one when it has ended.
    pub service_timeout: Duration,
    /// How publishers and subscribers wait.
    pub waiting: WaitStrategy,
    /// Do waits of publishers and subscribers end when a signal handler has run in the waiting thread
    /// ([`Interrupted`](ErrorKind::Interrupted))? If not, as is usual, they go on.
    ///
    /// A handler is noticed while the thread sleeps, whatever `SA_RESTART` says of it, and not while
    /// it looks for what it waits for before it sleeps ([`waiting`](Self::waiting)).
    pub interruptible: bool,
    /// What the pools of a node that this process serves may grow to.
    pub budgets: Budgets,
    /// How the node is connected to others when this process serves it; not at all if None.
    pub network: Option<NetworkOptions>,
}

impl NodeOptions {
    /// Where a node is, if nothing else is said: `$FABRICAST_DIRECTORY`, or else a directory of
    /// this user's in `$XDG_RUNTIME_DIR`, `$TMPDIR` or `/tmp`.
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

/// Who serves the node that a process joined.
///
/// A node is served by one process at a time. One that does so in passing ([`Embedded`](Self::Embedded))
/// hands it over, as when it ends, as soon as another one comes that is there for it
/// ([`Dedicated`](Self::Standing)); messages go on meanwhile, and nothing is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ServiceMode {
    /// This process, if nobody does, in a thread, and until somebody comes who is there for it.
    #[default]
    Embedded,
    /// Always another process, as `fabricast node`.
    External,
    /// This process, as long as it is at the node: it takes the office from who serves in passing.
    /// If another one is standing there, it [does not join](crate::ErrorKind::AlreadyServed).
    Dedicated,
}

/// What the messages of all topics of a node may take of each memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// Of the host's; a quarter of it if nothing is said.
    pub host: Option<u64>,
    /// Of each device's; half of it if nothing is said.
    pub device: Option<u64>,
}

impl Budgets {
    /// The smallest that there can be, in bytes: what the smallest of all topics
    /// [reserves](crate::TopicSettings::reserves).
    pub const MIN: u64 = Reserve::MIN;

    /// Refuses budgets by which no topic could be made.
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
                    "a budget of {bytes} bytes of {place} memory, where the smallest topic reserves {}",
                    Self::MIN
                );
                let operation = "set memory budgets";
                return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
            }
        }
        Ok(())
    }

    /// What topics may take of the host's memory: what is said, or else a quarter of it.
    ///
    /// ```
    /// use pubsub::Budgets;
    /// assert_eq!(Budgets { host: Some(1 << 30), device: None }.of_host()?, 1 << 30);
    /// assert!(Budgets::default().of_host()? > 0);
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](crate::ErrorKind::Failed) if the system does not say how much there is.
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
