//! Options of a group.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Result};
use fabric::Policy;
use pubsub::{NodeOptions, Settings};
use transfer::AgentOptions;

use crate::mailbox::FIRST_TAG;

/// For which peers the agents of a group use a fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FabricUse {
    /// For ranks of other machines. A job on one machine opens no fabric, which saves the time to
    /// load libfabric; host memory that peers cannot map is not reached then.
    #[default]
    BetweenMachines,
    /// Also for a job on one machine.
    Always,
    /// For none: ranks of other machines are not reached.
    Never,
}

/// Options of a [`Group`](crate::Group). Ranks may differ in label and directory only.
///
/// ```
/// use std::time::Duration;
/// use launch::{Group, GroupOptions};
/// let options = GroupOptions::new().label("solver").timeout(Duration::from_secs(60));
/// let group = Group::start_with(options)?;
/// assert!(group.rank() < group.size());
/// # Ok::<(), launch::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GroupOptions {
    label: Option<String>,
    timeout: Duration,
    directory: PathBuf,
    fabric_use: FabricUse,
    providers: Policy,
    source: Option<IpAddr>,
    insecure: bool,
    forces_remote: bool,
    agent: AgentOptions,
}

impl Default for GroupOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl GroupOptions {
    pub(crate) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

    /// Options with a timeout of 30 seconds, the default directory of nodes, and the best provider
    /// that reaches other machines.
    #[must_use]
    pub fn new() -> Self {
        Self {
            label: None,
            timeout: Self::DEFAULT_TIMEOUT,
            directory: NodeOptions::default_directory(),
            fabric_use: FabricUse::default(),
            providers: Policy::default(),
            source: None,
            insecure: false,
            forces_remote: false,
            agent: AgentOptions::new(""),
        }
    }

    /// The options of [`new`](Self::new), changed by these variables of the environment: those of
    /// [`NodeOptions::from_environment`] with the same meaning. A provider is required, not preferred:
    /// ranks with different providers do not reach each other.
    ///
    /// | variable | sets |
    /// |---|---|
    /// | `FABRICAST_DIRECTORY`, `FABRICAST_LABEL` | [`directory`](Self::directory), [`label`](Self::label) |
    /// | `FABRICAST_SOURCE`, `FABRICAST_PROVIDER` | [`source`](Self::source), [`providers`](Self::providers) |
    /// | `FABRICAST_INSECURE` | `true`: [`insecure`](Self::insecure) |
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), with the variable.
    pub fn from_environment() -> Result<Self> {
        let invalid = |error: pubsub::Error| {
            Error::caused_by("read group options", ErrorKind::InvalidArgument, error)
        };
        let settings = Settings::from_environment().map_err(invalid)?;
        let (node, network) = (settings.node_options(), settings.network);
        let mut options = Self::new().directory(&node.directory).label(&node.label);
        options.providers = network.policy().map_err(invalid)?;
        (options.source, options.insecure) = (network.source, network.insecure);
        Ok(options)
    }

    /// The name of the ranks in reports: `label 3`; by default the program's.
    #[must_use]
    pub fn label(mut self, label: &str) -> Self {
        self.label = Some(label.to_owned());
        self
    }

    /// How long [`Group::start_with`](crate::Group::start_with) waits for the other ranks, after it
    /// has connected to the launcher within the same time.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Directory of the agents' sockets: ranks of a machine that see the same directory reach each
    /// other's memory. It is created with its parents.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.directory = directory.to_owned();
        self
    }

    /// When agents use a fabric.
    #[must_use]
    pub fn fabric_use(mut self, fabric_use: FabricUse) -> Self {
        self.fabric_use = fabric_use;
        self
    }

    /// The providers of fabrics and rings that may be used. A required one is used for rings within a
    /// machine, too, or they fail. Memory of the machine that ranks share needs no provider.
    #[must_use]
    pub fn providers(mut self, providers: Policy) -> Self {
        self.providers = providers;
        self
    }

    /// The address of this machine for ranks of others; by default that of its first interface
    /// beyond loopback.
    #[must_use]
    pub fn source(mut self, source: IpAddr) -> Self {
        self.source = Some(source);
        self
    }

    /// Allows rings and topics between machines, although nothing is authenticated or encrypted yet:
    /// as [`RingSetup::insecure`](fabric::ring::RingSetup::insecure) and
    /// [`NetworkOptions::insecure`](pubsub::NetworkOptions::insecure).
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// Treats all ranks as ranks of other machines: for tests of the paths between machines.
    #[must_use]
    pub fn force_remote(mut self) -> Self {
        self.forces_remote = true;
        self.fabric_use = FabricUse::Always;
        self
    }

    /// Further options of the agent: wait strategy, limits. The group sets label, directory, fabrics
    /// and reserved tags.
    #[must_use]
    pub fn agent(mut self, agent: AgentOptions) -> Self {
        self.agent = agent;
        self
    }

    pub(crate) fn start_timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn directory_path(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn uses_fabric(&self, is_one_machine: bool) -> bool {
        match self.fabric_use {
            FabricUse::BetweenMachines => !is_one_machine,
            FabricUse::Always => true,
            FabricUse::Never => false,
        }
    }

    pub(crate) fn provider_policy(&self) -> &Policy {
        &self.providers
    }

    pub(crate) fn source_address(&self) -> Option<IpAddr> {
        self.source
    }

    pub(crate) fn forces_remote(&self) -> bool {
        self.forces_remote
    }

    pub(crate) fn is_insecure(&self) -> bool {
        self.insecure
    }

    pub(crate) fn agent_options(&self, rank: u32) -> AgentOptions {
        let label = self.label.clone().unwrap_or_else(|| NodeOptions::default().label);
        let agent = self.agent.clone().label(&format!("{label} {rank}"));
        let agent = agent.directory(&self.directory).reserve_tags_from(FIRST_TAG);
        if self.forces_remote { agent.force_remote() } else { agent }
    }
}
