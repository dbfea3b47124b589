//! Options of an agent, and how it is started with them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fabric::{Caps, EndpointKind, Locality, Offer, Policy, Query, Requirements};
use ipc::limits::check_address_space;
use ipc::{ForkGeneration, WaitStrategy};

use super::event_queue::EventQueue;
use super::local_copies::LocalCopies;
use super::local_target::{self, LocalServer, LocalTarget};
use super::peers::Peers;
use super::published_regions::PublishedRegions;
use super::remote_transport::RemoteTransport;
use super::stream_order::DelayedTransfers;
use super::{Agent, START};
use crate::admission::Admission;
use crate::error::{Result, failed};
use crate::operations::Operations;
use crate::path::DeviceFabric;
use crate::rail::{CacheLimits, RailOptions};
use crate::wire::MAX_LABEL_LENGTH;

/// What an agent and each of its fabrics take of the address space, about: stacks of threads, segments
/// and objects of the provider (`net` takes 8 MiB, others more).
const AGENT_ADDRESS_SPACE: u64 = 8 << 20;
const FABRIC_ADDRESS_SPACE: u64 = 24 << 20;

/// Options of an agent.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    label: String,
    directory: Option<PathBuf>,
    admission: Admission,
    forces_remote: bool,
    first_reserved_tag: Option<u64>,
    wait_strategy: WaitStrategy,
    fabrics: Vec<Offer>,
    rails: RailOptions,
    device_fabric: Option<DeviceFabric>,
}

impl Agent {
    /// Starts an agent, with a thread that serves its local initiators.
    ///
    /// # Errors
    /// [`Failed`](crate::ErrorKind::Failed) if its directory is unusable, or a system resource is
    /// missing; [`Malformed`](crate::ErrorKind::Malformed) if `FABRICAST_DEVICE_FABRIC` has another
    /// value than `off`, `probe` or `on`.
    pub fn start(options: AgentOptions) -> Result<Self> {
        if options.label.len() > MAX_LABEL_LENGTH {
            return Err(failed(START)(format!("the label exceeds {MAX_LABEL_LENGTH} bytes")));
        }
        let fabrics = options.fabrics.len() as u64;
        check_address_space(AGENT_ADDRESS_SPACE + fabrics * FABRIC_ADDRESS_SPACE)
            .map_err(failed(START))?;
        let mut rails = options.rails;
        rails.device_fabric = match options.device_fabric {
            Some(setting) => setting,
            None => DeviceFabric::from_environment()?,
        };
        let local_target = Arc::new(LocalTarget::new(options.label, options.admission)?);
        let remote_transport = RemoteTransport::start(&options.fabrics, &local_target, rails)?;
        let mut agent = Self {
            local_target,
            local_server: None,
            published: PublishedRegions::default(),
            peers: Peers::new(),
            local_copies: LocalCopies::default(),
            remote_transport,
            operations: Operations::default(),
            wholes: HashMap::new(),
            delayed: DelayedTransfers::default(),
            events: EventQueue::new(options.first_reserved_tag),
            forces_remote: options.forces_remote,
            wait_strategy: options.wait_strategy,
            fork_generation: ForkGeneration::current(),
        };
        if let Some(directory) = options.directory {
            let server = LocalServer::start(&directory, &agent.local_target, agent.card())?;
            agent.local_server = Some(server);
        }
        local_target::add_to_process_list(&agent.local_target);
        Ok(agent)
    }
}

/// The best offer for agents by a policy, from this local address: `"auto"`, which accepts every
/// provider, or a [`Policy`], such as `"verbs"` or `"=tcp"`. Offers that reach other machines are
/// preferred.
///
/// ```
/// use transfer::{Agent, AgentOptions};
/// let offer = transfer::choose_fabric("auto", Some("127.0.0.1".parse()?))?;
/// let agent = Agent::start(AgentOptions::new("solver").fabric(&offer))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// `NoProvider` with the reason of every candidate; `InvalidArgument` for another text, and for a
/// policy that contradicts itself.
pub fn choose_fabric(policy: &str, source: Option<IpAddr>) -> fabric::Result<Offer> {
    let policy = match policy.trim() {
        "auto" => Policy::default(),
        policy => policy.parse()?,
    };
    let query = Query::new(EndpointKind::Rdm).caps(Caps::MESSAGE | Caps::RMA);
    let query = source.map_or(query.clone(), |source| query.interface(source));
    let choose = |locality| {
        let need = Requirements { immediate_bytes: 0, ..Requirements::ring(locality) };
        fabric::choose(&query, &need, &policy)
    };
    let chosen = match choose(Locality::OtherMachines) {
        Err(error) if error.kind() == fabric::ErrorKind::NoProvider => {
            choose(Locality::SameMachine)
        }
        chosen => chosen,
    };
    Ok(query.with_device_memory(chosen?.0))
}

impl AgentOptions {
    /// Options with the agent's label in reports.
    #[must_use]
    pub fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            directory: None,
            admission: Admission::own_user(),
            forces_remote: false,
            first_reserved_tag: None,
            wait_strategy: WaitStrategy::default(),
            fabrics: Vec::new(),
            rails: RailOptions::default(),
            device_fabric: None,
        }
    }

    /// Another label.
    #[must_use]
    pub fn label(mut self, label: &str) -> Self {
        label.clone_into(&mut self.label);
        self
    }

    /// Creates the agent's socket in this directory, for peers that see the directory and need no
    /// network. Without it, only agents of the same process can connect locally.
    ///
    /// The card file `agent-….card` exists beside the socket as long as the agent, for discovery and
    /// for `fabricast paths --explain`. Starting an agent removes the files of killed agents of the
    /// same user.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Users that may connect to it, and whose agents it connects to; by default the own user only.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// Treats all other agents as remote, whatever is possible between them: for tests of the paths
    /// between machines.
    #[must_use]
    pub fn force_remote(mut self) -> Self {
        self.forces_remote = true;
        self
    }

    /// Reserves the tags of notices from this one on for a library that shares the agent with its
    /// program: [`next_event`](super::Agent::next_event) never returns them, and
    /// [`next_reserved_event`](super::Agent::next_reserved_event) only them.
    #[must_use]
    pub fn reserve_tags_from(mut self, first: u64) -> Self {
        self.first_reserved_tag = Some(first);
        self
    }

    /// A fabric for bytes where no memory is shared. Fabrics of the same provider share the bytes;
    /// each has its own thread and domain. Use one per NIC, or several connections if one does not
    /// fill the wire.
    ///
    /// Agents send messages without tags and transfer bytes by one-sided operations: request
    /// [`Caps::MESSAGE`](fabric::Caps::MESSAGE) and [`Caps::RMA`](fabric::Caps::RMA). Without the
    /// first, as with ofi_mrail, [`Agent::start`](super::Agent::start) fails; without the second
    /// the fabric has no path.
    #[must_use]
    pub fn fabric(mut self, offer: &Offer) -> Self {
        self.fabrics.push(offer.clone());
        self
    }

    /// The timeout after which a silent peer on a fabric is lost: five seconds by default, a year
    /// at most. The agent pings it several times before.
    #[must_use]
    pub fn lost_after(mut self, time: Duration) -> Self {
        self.rails.lost_after = time;
        self
    }

    /// Permits fabrics to access device memory themselves, or not. Without this call the
    /// environment variable `FABRICAST_DEVICE_FABRIC` decides (`off`, `probe` or `on`); without
    /// both it is [`Probe`](DeviceFabric::Probe).
    ///
    /// The setting concerns fabrics whose offer was requested with
    /// [`Caps::DEVICE_MEMORY`](fabric::Caps::DEVICE_MEMORY). Others always copy device memory
    /// through the host.
    #[must_use]
    pub fn device_fabric(mut self, setting: DeviceFabric) -> Self {
        self.device_fabric = Some(setting);
        self
    }

    /// Limits of registrations that each fabric caches after
    /// [`register_local`](super::Agent::register_local), in bytes and in number: 64 GiB and 1024 by
    /// default. Registrations in use count too, and stay. Zero disables the cache.
    #[must_use]
    pub fn registration_cache_limits(mut self, bytes: u64, count: usize) -> Self {
        self.rails.cached = CacheLimits { bytes, count };
        self
    }

    /// Registers local-only memory even if the provider does not require it: to measure the cost.
    #[must_use]
    pub fn always_register_local(mut self) -> Self {
        self.rails.always_registers = true;
        self
    }

    /// The wait strategy.
    #[must_use]
    pub fn wait_strategy(mut self, wait_strategy: WaitStrategy) -> Self {
        self.wait_strategy = wait_strategy;
        self
    }
}
