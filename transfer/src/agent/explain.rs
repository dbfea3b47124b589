//! The facts for the choice of a path, without registering or mapping memory.

use gpu::{Device, DeviceName, Implementation, PeerAccess, Uuid};

use super::JOIN;
use super::peers::{Peer, Peers};
use super::remote_transport::RemoteTransport;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::{DeviceAccess, Exportability, Facts, MemoryType, Operation, Registration};
use crate::region::{Buffer, Region, RegionDescriptor};

pub(super) const EXPLAIN: &str = "explain path";

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

    /// The device of this process that has it or copies, if any.
    pub(super) fn local_device(&self) -> Result<Option<Device>> {
        let Some(uuid) = self.device else { return Ok(None) };
        let Some(name) = device_named(uuid) else {
            let detail = "this process does not see the device of the local memory";
            return Err(Error::new(EXPLAIN, ErrorKind::NoSuchDevice, detail));
        };
        Device::open(name).map(Some).during(EXPLAIN)
    }

    /// Fails if its region, if any, does not belong to the peer or was withdrawn.
    pub(super) fn check_region(&self, peer: &Peer) -> Result<()> {
        let Some(region) = &self.region else { return Ok(()) };
        peer.check_owner(region)?;
        if peer.local_session().is_some_and(|session| !session.has_region(region.number)) {
            return Err(Error::new(EXPLAIN, ErrorKind::Stale, "the region was withdrawn"));
        }
        Ok(())
    }

    /// Its registration with a domain of its agent. Hypothetical host memory counts as registered.
    ///
    /// Device memory is never registered, whatever the provider offers: providers that take it (shm
    /// of libfabric 2.1 with CUDA) complete writes before the data has arrived. See
    /// [`crate::rail::can_be_registered`].
    fn registration(&self, domain: usize, takes_devices: bool) -> Registration {
        match (&self.region, self.memory_type) {
            _ if self.domains.contains(&domain) => Registration::Works,
            (Some(_), MemoryType::Host(_)) => Registration::NotOffered,
            (None, MemoryType::Host(_)) => Registration::Works,
            (_, MemoryType::Device(_)) if takes_devices => Registration::NotSafe,
            (_, MemoryType::Device(_)) => Registration::NotOffered,
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

/// The facts for a choice between local and remote memory, and the device that copies.
pub(super) fn facts(
    operation: Operation,
    (local, remote): (&MemoryAttributes, &MemoryAttributes),
    local_device: Option<Device>,
    (number, peers): (u32, &Peers),
    remote_transport: &RemoteTransport,
) -> Result<(Facts, Option<Device>)> {
    let unknown = || Error::new(EXPLAIN, ErrorKind::Unknown, "unknown peer");
    let peer = peers.find(number).ok_or_else(unknown)?;
    let (device_access, device) = device_access(local_device, remote.device)?;
    let fabric = remote_transport.facts(
        (number, peer.card()),
        |rail, takes_devices| local.registration(rail, takes_devices),
        |domain, takes_devices| remote.registration(domain, takes_devices),
    );
    let locality = peer.locality().clone();
    let (local, remote) = (local.memory_type, remote.memory_type);
    Ok((Facts { operation, locality, local, remote, device_access, fabric }, device))
}

/// The name of a device in this process, by its UUID.
fn device_named(uuid: Uuid) -> Option<DeviceName> {
    [Implementation::Cuda, Implementation::Emulated].into_iter().find_map(|implementation| {
        let count = Device::count(implementation).unwrap_or(0);
        let mut names = (0..count).map(|number| DeviceName { implementation, number });
        names.find(|name| name.uuid().is_ok_and(|found| found == uuid))
    })
}

/// The device that copies between local memory of one device and remote memory of another, and its
/// access to the remote memory.
fn device_access(
    local_device: Option<Device>,
    remote_device: Option<Uuid>,
) -> Result<(DeviceAccess, Option<Device>)> {
    let device_access = match (&local_device, remote_device.map(device_named)) {
        (None, None) => DeviceAccess::NoDevice,
        (Some(_), None) => DeviceAccess::Same,
        (_, Some(None)) => DeviceAccess::Invisible,
        (None, Some(Some(name))) => {
            return Ok((DeviceAccess::Same, Some(Device::open(name).during(JOIN)?)));
        }
        (Some(device), Some(Some(name))) if device.name() == name => DeviceAccess::Same,
        (Some(device), Some(Some(name))) => {
            if device.name().implementation != name.implementation {
                DeviceAccess::Foreign
            } else if device.peer_access_to(name).during(JOIN)? == PeerAccess::None {
                DeviceAccess::None
            } else {
                DeviceAccess::Direct
            }
        }
    };
    Ok((device_access, local_device))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Agent, AgentOptions, HostBuffer};

    #[test]
    fn device_memory_is_never_registered() {
        let device = MemoryAttributes::on_device(Uuid([9; 16]), Exportability::ByDescriptors);
        assert_eq!(device.registration(0, true), Registration::NotSafe);
        assert_eq!(device.registration(0, false), Registration::NotOffered);
    }

    #[test]
    fn host_memory_of_a_region_counts_only_where_it_is_registered() {
        let hypothetical = MemoryAttributes::on_host(Exportability::ByDescriptors);
        assert_eq!(hypothetical.registration(0, false), Registration::Works);
        let agent = Agent::start(AgentOptions::new("one")).unwrap();
        let region = agent.register_local(HostBuffer::new(4096).unwrap()).unwrap();
        let unregistered = MemoryAttributes::from(&region);
        assert_eq!(unregistered.registration(0, true), Registration::NotOffered);
        let registered = MemoryAttributes { domains: vec![0], ..unregistered };
        assert_eq!(registered.registration(0, false), Registration::Works);
    }
}
