//! How an agent is started.

use std::path::{Path, PathBuf};
use std::time::Duration;

use fabric::Offer;
use ipc::WaitStrategy;

use crate::rail::{CacheLimits, RailOptions};
use crate::share_service::Admission;

/// How an agent is started.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    pub(super) label: String,
    pub(super) directory: Option<PathBuf>,
    pub(super) admission: Admission,
    pub(super) forces_remote: bool,
    pub(super) wait_strategy: WaitStrategy,
    pub(super) fabrics: Vec<Offer>,
    pub(super) rails: RailOptions,
}

impl AgentOptions {
    /// With what people are to call it.
    #[must_use]
    pub fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            directory: None,
            admission: Admission::own_user(),
            forces_remote: false,
            wait_strategy: WaitStrategy::default(),
            fabrics: Vec::new(),
            rails: RailOptions::default(),
        }
    }

    /// Where its socket is to be: a directory that those see who are to reach it without
    /// a network. Without one nobody does, except agents of this process.
    ///
    /// Its card lies beside the socket, as `agent-….card`, as long as it lives: for
    /// `fabricast paths --explain`, and whoever else wants to find it by looking. What agents
    /// of the same user left there that were killed is removed when it starts.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Who may visit it, and whose agents it visits; the own user only, otherwise.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Takes all others for remote, whatever is possible between them: to try out what
    /// happens between machines.
    #[must_use]
    pub fn force_remote(mut self) -> Self {
        self.forces_remote = true;
        self
    }

    /// A fabric that carries bytes where no memory is shared. Those of the same provider share the
    /// bytes, each with a thread and a domain of its own: one for each card, or several
    /// connections where one does not fill the wire.
    ///
    /// Agents talk by messages without tags, and bytes go by one-sided operations: ask for
    /// [`Caps::MESSAGE`](fabric::Caps::MESSAGE) and [`Caps::RMA`](fabric::Caps::RMA). Without the
    /// first, as of ofi_mrail, [`Agent::start`](super::Agent::start) fails; without the second
    /// no path leads by the fabric.
    #[must_use]
    pub fn fabric(mut self, offer: &Offer) -> Self {
        self.fabrics.push(offer.clone());
        self
    }

    /// A peer that is reached by a fabric and was not heard of for so long is lost; five seconds,
    /// otherwise, and a year at most. It is asked whether it is there several times before.
    #[must_use]
    pub fn lost_after(mut self, time: Duration) -> Self {
        self.rails.lost_after = time;
        self
    }

    /// How much memory stays registered with each fabric after
    /// [`register_local`](super::Agent::register_local), so that it need not be registered again:
    /// bytes, and how often memory was registered; 64 GiB in 1024 registrations, otherwise.
    /// What is in use counts, too, and stays. Zero turns it off.
    #[must_use]
    pub fn registration_cache_limits(mut self, bytes: u64, count: usize) -> Self {
        self.rails.cached = CacheLimits { bytes, count };
        self
    }

    /// Registers memory for own use also where the provider does not ask for it: to try out
    /// what registering costs.
    #[must_use]
    pub fn always_register_local(mut self) -> Self {
        self.rails.always_registers = true;
        self
    }

    /// How it waits.
    #[must_use]
    pub fn wait_strategy(mut self, wait_strategy: WaitStrategy) -> Self {
        self.wait_strategy = wait_strategy;
        self
    }
}
