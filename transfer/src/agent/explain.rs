//! By which path bytes would go, and why, without registering or mapping anything.

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

/// Memory at one end of a transfer, as far as a choice depends on it: that of a region, or
/// memory that is only supposed.
#[derive(Debug, Clone)]
pub struct MemoryAttributes {
    memory_type: MemoryType,
    /// The device that it lies on, or that copies from and to it.
    device: Option<Uuid>,
    /// With which domains of its agent it is registered.
    domains: Vec<usize>,
    region: Option<RegionDescriptor>,
}

impl MemoryAttributes {
    /// Memory of a device, if there were some.
    #[must_use]
    pub fn on_device(device: Uuid, exportability: Exportability) -> Self {
        Self::assumed(MemoryType::Device(exportability), Some(device))
    }

    /// Memory of the host, if there were some.
    #[must_use]
    pub fn on_host(exportability: Exportability) -> Self {
        Self::assumed(MemoryType::Host(exportability), None)
    }

    fn assumed(memory_type: MemoryType, device: Option<Uuid>) -> Self {
        Self { memory_type, device, domains: Vec::new(), region: None }
    }

    /// Whether a domain of its agent reaches it. Of memory that is only supposed it is supposed
    /// that host memory is registered, and a device's is not.
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
    /// What the agent and a peer can give each other.
    #[must_use]
    pub fn locality(&self, peer: PeerId) -> Option<&Locality> {
        self.peers.get(&peer.0).map(|peer| &peer.locality)
    }

    /// Gets to know a peer by a fabric at once, and not only when the first regions are joined by
    /// it, so that [`explain`](Self::explain) knows whether it answers. Where no fabric leads to
    /// it nothing is done.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) peer; what the fabric says. That the peer does not answer is
    /// none: it is the reason for what is refused.
    pub fn connect_fabrics(&mut self, peer: PeerId, timeout: Duration) -> Result<()> {
        check_fork(self.fork_generation, EXPLAIN)?;
        let end = ipc::deadline(timeout);
        self.peer(peer.0, EXPLAIN)?;
        self.connect_fabric(peer.0, end)
    }

    /// The verdict on every path between two ends, from the facts that
    /// [joining](Self::join) asks for, too. What shows only when memory is mapped is not
    /// found out: nothing is.
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
    /// [`Stale`](ErrorKind::Stale) if the region is gone, or its agent was started anew;
    /// [`NoSuchDevice`](ErrorKind::NoSuchDevice) if the local memory lies on a device that this
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
        let own = local.device.map(device_of).transpose()?;
        let (facts, _) = self.facts(peer.0, operation, (local, remote), own)?;
        Ok(choose(&facts, policy))
    }

    /// What a choice depends on, between memory of a device of ours, if it is one's, and a peer's; and
    /// the device that copies.
    pub(super) fn facts(
        &self,
        peer: u32,
        operation: Operation,
        (local, remote): (&MemoryAttributes, &MemoryAttributes),
        own: Option<Device>,
    ) -> Result<(Facts, Option<Device>)> {
        let Some(peer) = self.peers.get(&peer) else {
            return Err(Error::new(EXPLAIN, ErrorKind::Unknown, "no such peer"));
        };
        let (device_access, device) = device_access(own, remote.device)?;
        let rails = &self.remote_transport.rails;
        let fabric = self.remote_transport.facts(
            peer,
            |rail| local.registration(rail, rails[rail].has(Caps::DEVICE_MEMORY)),
            // The peer's rail is of the same provider.
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
