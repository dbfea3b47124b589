//! The path of a transfer and its reasons, without registering or mapping memory.

use std::time::Duration;

use fabric::Caps;
use gpu::{Device, Uuid};

use super::peer::LocalSession;
use super::route::{check_owner, device_access, device_named};
use super::route_lane::registration;
use super::{Agent, PeerId};
use crate::error::{Error, ErrorKind, Result};
use crate::path::{
    Choice, Exportability, Facts, Locality, MemoryType, Operation, Policy, Registration, choose,
};
use crate::region::{Buffer, Region, RegionDescriptor};
use crate::share::check_fork;

const EXPLAIN: &str = "explain a path";

/// Memory at one end of a transfer, as far as the choice of a path depends on it: of a region, or
/// hypothetical memory.
#[derive(Debug, Clone)]
pub struct MemoryAttributes {
    memory_type: MemoryType,
    /// The device of the memory, or the device that copies.
    device: Option<Uuid>,
    /// The domains of its agent that registered it.
    domains: Vec<usize>,
    region: Option<RegionDescriptor>,
}

impl MemoryAttributes {
    /// Hypothetical memory of a device.
    #[must_use]
    pub fn on_device(device: Uuid, exportability: Exportability) -> Self {
        Self::assumed(MemoryType::Device(exportability), Some(device))
    }

    /// Hypothetical memory of the host.
    #[must_use]
    pub fn on_host(exportability: Exportability) -> Self {
        Self::assumed(MemoryType::Host(exportability), None)
    }

    fn assumed(memory_type: MemoryType, device: Option<Uuid>) -> Self {
        Self { memory_type, device, domains: Vec::new(), region: None }
    }

    /// Its registration with a domain of its agent. Hypothetical host memory counts as registered,
    /// device memory as the provider supports it.
    fn registration(&self, domain: usize, takes_devices: bool) -> Registration {
        match (&self.region, self.memory_type) {
            _ if self.domains.contains(&domain) => Registration::Works,
            (Some(_), MemoryType::Host(_)) => Registration::NotOffered,
            (None, MemoryType::Host(_)) => Registration::Works,
            (_, MemoryType::Device(_)) => registration(false, true, takes_devices),
        }
    }
}

impl From<&Region> for MemoryAttributes {
    fn from(region: &Region) -> Self {
        let device = match region.buffer() {
            Buffer::Device(memory) => Some(memory.mapped_for().properties().uuid),
            Buffer::Host(_) => None,
        };
        Self { device, domains: region.0.domains(), ..Self::from(region.descriptor()) }
    }
}

impl From<&RegionDescriptor> for MemoryAttributes {
    fn from(region: &RegionDescriptor) -> Self {
        let domains = region.keys.iter().map(|key| key.domain as usize).collect();
        let (memory_type, device) = (region.memory_type, region.device);
        Self { memory_type, device, domains, region: Some(region.clone()) }
    }
}

impl Agent {
    /// What the agent and a peer can pass to each other.
    #[must_use]
    pub fn locality(&self, peer: PeerId) -> Option<&Locality> {
        self.peers.get(&peer.0).map(|peer| &peer.locality)
    }

    /// Connects to a peer by a fabric now, not only when the first regions are joined, so that
    /// [`explain`](Self::explain) knows whether the peer answers. Does nothing if they have no
    /// fabric in common.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) peer; errors of the fabric. A peer that does not answer is
    /// not an error here: `explain` reports it as a reason.
    pub fn connect_fabrics(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        check_fork(self.fork_generation, EXPLAIN)?;
        let end = ipc::deadline(timeout);
        self.peer(peer.0, EXPLAIN)?;
        self.connect_fabric(peer.0, end)
    }

    /// The verdict on every path between two ends, from the same facts as [joining](Self::join).
    /// Obstacles that only mapping would show are not found.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use transfer::path::{Exportability, Operation, Path, Policy};
    /// use transfer::{Agent, AgentOptions, MemoryAttributes};
    /// let mut here = Agent::start(AgentOptions::new("here"))?;
    /// let there = Agent::start(AgentOptions::new("there"))?;
    /// let peer = here.connect(&there.card().encode()?, Duration::from_secs(1))?;
    /// let host = MemoryAttributes::on_host(Exportability::ByDescriptors);
    /// let choice = here.explain(peer, Operation::Put, &host, &host, &Policy::default())?;
    /// assert_eq!(choice.taken(), Some(Path::SameProcess));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Stale`](ErrorKind::Stale) if the region was withdrawn, or its agent was restarted;
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if the local memory is on a device that this
    /// process does not see.
    pub fn explain(
        &self,
        peer: PeerId,
        operation: Operation,
        local: &MemoryAttributes,
        remote: &MemoryAttributes,
        policy: &Policy,
    ) -> Result<Choice> {
        check_fork(self.fork_generation, EXPLAIN)?;
        policy.check()?;
        let other = self.peers.get(&peer.0);
        if let (Some(other), Some(region)) = (other, &remote.region) {
            check_owner(other, region).map_err(|error| error.with(&other.card.label))?;
            let is_gone =
                |local_session: &LocalSession| !local_session.region_table.contains(region.number);
            if other.local_session.as_deref().is_some_and(is_gone) {
                let error = Error::new(EXPLAIN, ErrorKind::Stale, "the region was withdrawn");
                return Err(error.with(&other.card.label));
            }
        }
        let local_device = local.device.map(device_of).transpose()?;
        let (facts, _) = self.facts(peer.0, operation, (local, remote), local_device)?;
        Ok(choose(&facts, policy))
    }

    /// The facts for a choice between local and remote memory, and the device that copies.
    pub(super) fn facts(
        &self,
        peer: u32,
        operation: Operation,
        (local, remote): (&MemoryAttributes, &MemoryAttributes),
        local_device: Option<Device>,
    ) -> Result<(Facts, Option<Device>)> {
        let Some(peer) = self.peers.get(&peer) else {
            return Err(Error::new(EXPLAIN, ErrorKind::Unknown, "unknown peer"));
        };
        let (device_access, device) = device_access(local_device, remote.device)?;
        let rails = &self.remote_transport.rails;
        let fabric = self.remote_transport.facts(
            peer,
            |rail| local.registration(rail, rails[rail].has(Caps::DEVICE_MEMORY)),
            // The peer's rail has the same provider.
            |domain| {
                remote.registration(domain, rails.iter().any(|rail| rail.has(Caps::DEVICE_MEMORY)))
            },
        );
        let locality = peer.locality.clone();
        let (local, remote) = (local.memory_type, remote.memory_type);
        Ok((Facts { operation, locality, local, remote, device_access, fabric }, device))
    }
}

fn device_of(uuid: Uuid) -> Result<Device> {
    let Some(name) = device_named(uuid) else {
        let detail = "this process does not see the device of the local memory";
        return Err(Error::new(EXPLAIN, ErrorKind::NoSuchDevice, detail));
    };
    Device::open(name).map_err(|error| Error::of_device(EXPLAIN, error))
}
