//! The facts for the choice of a path, without registering or mapping memory.

use gpu::{Device, DeviceName, Implementation, PeerAccess, Uuid};

use super::JOIN;
use super::peers::{MappingKey, Peer, Peers};
use super::remote_transport::RemoteTransport;
use crate::device_memory::{DeviceFacts, FabricFacts, LocalEnd, MemoryEnd, obstacle};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::{
    CopyServiceState, DeviceAccess, Exportability, Facts, Locality, MemoryType, Operation,
    Registration,
};
use crate::region::{Region, RegionDescriptor};

pub(super) const EXPLAIN: &str = "explain path";

/// Memory at one end of a transfer, as far as the choice of a path depends on it: of a region, or
/// hypothetical memory.
#[derive(Debug, Clone)]
pub struct MemoryAttributes {
    memory_type: MemoryType,
    /// The device of the memory, or the device that copies.
    device: Option<Uuid>,
    source: MemorySource,
    region: Option<RegionDescriptor>,
}

/// Whose memory it is, and what is known about its registrations.
#[derive(Debug, Clone)]
enum MemorySource {
    Hypothetical,
    /// A region of this agent: by its rails.
    Own {
        registrations: Vec<Registration>,
        end: Option<MemoryEnd>,
    },
    /// A region of a peer: the domains of the peer that its keys are of.
    Peer(Vec<usize>),
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
        Self { memory_type, device, source: MemorySource::Hypothetical, region: None }
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

    /// Registration of the memory with a rail of this agent. Hypothetical memory counts as
    /// registered where it would be.
    fn local_registration(
        &self,
        rail: usize,
        facts: &FabricFacts,
        device: Option<&Device>,
    ) -> Registration {
        match (&self.source, self.memory_type, device) {
            (MemorySource::Own { registrations, .. }, ..) => {
                registrations.get(rail).cloned().unwrap_or(Registration::NotOffered)
            }
            (_, MemoryType::Device(_), Some(device)) => {
                let allocation = match self.end() {
                    Some(MemoryEnd::Device(_, allocation)) => Some(allocation),
                    _ => None,
                };
                let memory = DeviceFacts::assumed(device, allocation);
                obstacle(facts, &memory).unwrap_or(Registration::Works)
            }
            (_, MemoryType::Device(_), None) => Registration::NotOffered,
            (_, MemoryType::Host(_), _) => Registration::Works,
        }
    }

    /// Registration of the memory with a domain of the peer, as far as known here: the peer grants
    /// access to device memory when it is asked.
    fn remote_registration(&self, domain: usize, facts: &FabricFacts) -> Registration {
        match (&self.source, self.memory_type) {
            (_, MemoryType::Device(_)) => facts.of_remote_device(),
            (MemorySource::Peer(domains), _) if !domains.contains(&domain) => {
                Registration::NotOffered
            }
            _ => Registration::Works,
        }
    }

    /// The kind of memory, which verdicts of probes are about. None if no fabric accesses it.
    pub(super) fn end(&self) -> Option<MemoryEnd> {
        match &self.source {
            MemorySource::Own { end, .. } => *end,
            _ => MemoryEnd::of(self.memory_type, self.device),
        }
    }

    /// What a verdict of the driver on mapping it is about.
    pub(super) fn key(&self) -> MappingKey {
        MappingKey::new(self.memory_type, self.device)
    }

    fn region_number(&self) -> Option<u64> {
        self.region.as_ref().map(|region| region.number)
    }

    /// The memory's end of a probe.
    pub(super) fn local_end(&self) -> Result<Option<LocalEnd>> {
        match (self.memory_type, self.local_device()?) {
            (MemoryType::Device(exportability), Some(device)) => {
                Ok(LocalEnd::of_device(device, exportability))
            }
            _ => Ok(Some(LocalEnd::Host)),
        }
    }
}

impl From<&Region> for MemoryAttributes {
    fn from(region: &Region) -> Self {
        let device = region.buffer().memory().map(|it| it.mapped_for().properties().uuid);
        let end = LocalEnd::of(region.buffer()).ok().map(|end| end.end());
        let registrations = region.0.registrations().to_vec();
        let source = MemorySource::Own { registrations, end };
        Self { device, source, ..Self::from(region.descriptor()) }
    }
}

impl From<&RegionDescriptor> for MemoryAttributes {
    fn from(region: &RegionDescriptor) -> Self {
        let domains = region.keys.iter().map(|key| key.domain as usize).collect();
        let (memory_type, device) = (region.memory_type, region.device);
        let source = MemorySource::Peer(domains);
        Self { memory_type, device, source, region: Some(region.clone()) }
    }
}

/// The facts for a choice between local and remote memory, and the device that copies.
pub(super) fn facts(
    operation: Operation,
    (local, remote): (&MemoryAttributes, &MemoryAttributes),
    (local_device, copy_service): (Option<Device>, CopyServiceState),
    (number, peers): (u32, &Peers),
    remote_transport: &RemoteTransport,
) -> Result<(Facts, Option<Device>)> {
    let unknown = || Error::new(EXPLAIN, ErrorKind::Unknown, "unknown peer");
    let peer = peers.find(number).ok_or_else(unknown)?;
    let fabric = remote_transport.facts(
        number,
        peer.card(),
        |rail, facts| local.local_registration(rail, facts, local_device.as_ref()),
        |domain, facts| remote.remote_registration(domain, facts),
    );
    let ends = (local.end(), remote.end());
    let fabric = remote_transport.with_verdicts(fabric, number, ends, remote.region_number());
    let locality = peer.locality().clone();
    let may_map = locality == Locality::SameMachine;
    let (mut device_access, device) = device_access(local_device, remote.device, may_map)?;
    if device_access == DeviceAccess::NotTried
        && let Some(by) = &device
        && let Some(verdict) = peer.mapping_verdict(remote.key(), by.name())
    {
        device_access = verdict;
    }
    let (local, remote) = (local.memory_type, remote.memory_type);
    let facts = Facts { operation, locality, local, remote, device_access, copy_service, fabric };
    Ok((facts, device))
}

/// The name of a device in this process, by its UUID.
fn device_named(uuid: Uuid) -> Option<DeviceName> {
    [Implementation::Cuda, Implementation::Emulated].into_iter().find_map(|implementation| {
        let count = Device::count(implementation).unwrap_or(0);
        let mut names = (0..count).map(|number| DeviceName { implementation, number });
        names.find(|name| name.uuid().is_ok_and(|found| found == uuid))
    })
}

/// Is the other device, which this process does not see, of another implementation?
fn is_foreign(device: &Device, other: Uuid) -> bool {
    let is_emulated = device.name().implementation == Implementation::Emulated;
    is_emulated != gpu::emulated::has_uuid(other)
}

/// The device that copies between local memory of one device and remote memory of another, and its
/// access to the remote memory, which may be mapped on the same machine only.
fn device_access(
    local_device: Option<Device>,
    remote_device: Option<Uuid>,
    may_map: bool,
) -> Result<(DeviceAccess, Option<Device>)> {
    let Some(uuid) = remote_device else {
        let access =
            if local_device.is_some() { DeviceAccess::Same } else { DeviceAccess::NoDevice };
        return Ok((access, local_device));
    };
    let device_access = match (&local_device, device_named(uuid)) {
        (_, None) if !may_map => DeviceAccess::NotTried,
        (Some(device), None) if is_foreign(device, uuid) => DeviceAccess::Foreign,
        (Some(_), None) => DeviceAccess::NotTried,
        (None, None) => {
            return match Device::for_memory_of(uuid) {
                Err(error) if error.kind() == gpu::ErrorKind::NoSuchDevice => {
                    Ok((DeviceAccess::NoLocalDevice, None))
                }
                device => Ok((DeviceAccess::NotTried, Some(device.during(JOIN)?))),
            };
        }
        (None, Some(name)) => {
            return Ok((DeviceAccess::Same, Some(Device::open(name).during(JOIN)?)));
        }
        (Some(device), Some(name)) if device.name() == name => DeviceAccess::Same,
        (Some(device), Some(name)) => {
            if device.name().implementation != name.implementation {
                DeviceAccess::Foreign
            } else if device.peer_access(name).during(JOIN)? == PeerAccess::None {
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
    use crate::path::{DeviceFabric, ExportObstacle};
    use crate::{Agent, AgentOptions, HostBuffer};

    fn rail(setting: DeviceFabric, registers_devices: bool) -> FabricFacts {
        FabricFacts::new(setting, registers_devices, None)
    }

    #[test]
    fn hypothetical_device_memory_is_registered_where_it_would_be() {
        let device = Device::open("emulated:0".parse().unwrap()).unwrap();
        let uuid = device.properties().uuid;
        let memory = MemoryAttributes::on_device(uuid, Exportability::ByDescriptors);
        let local = |facts: &FabricFacts| memory.local_registration(0, facts, Some(&device));
        let remote = |facts: &FabricFacts| memory.remote_registration(0, facts);
        let (probe, off) = (DeviceFabric::Probe, DeviceFabric::Off);
        for (facts, expected) in [
            (rail(probe, true), Registration::Works),
            (rail(probe, false), Registration::NotOffered),
            (rail(off, true), Registration::Off),
        ] {
            assert_eq!((local(&facts), remote(&facts)), (expected.clone(), expected));
        }
        let pool = Exportability::Not(ExportObstacle::StreamOrderedPool);
        let pool = MemoryAttributes::on_device(uuid, pool);
        let found = pool.local_registration(0, &rail(probe, true), Some(&device));
        assert!(matches!(found, Registration::Refused { .. }), "{found:?}");
        assert_eq!(pool.end(), None);
    }

    #[test]
    fn host_memory_of_a_region_counts_only_where_it_is_registered() {
        let facts = rail(DeviceFabric::Probe, false);
        let hypothetical = MemoryAttributes::on_host(Exportability::ByDescriptors);
        assert_eq!(hypothetical.local_registration(0, &facts, None), Registration::Works);
        assert_eq!(hypothetical.remote_registration(0, &facts), Registration::Works);
        let agent = Agent::start(AgentOptions::new("one")).unwrap();
        let region = agent.register_local(HostBuffer::new(4096).unwrap()).unwrap();
        let own = MemoryAttributes::from(&region);
        assert_eq!(own.local_registration(0, &facts, None), Registration::NotOffered);
        let registrations = vec![Registration::Works];
        let source = MemorySource::Own { registrations, end: own.end() };
        let registered = MemoryAttributes { source, ..own };
        assert_eq!(registered.local_registration(0, &facts, None), Registration::Works);
        let region = agent.register(HostBuffer::new(4096).unwrap(), crate::Rights::ALL).unwrap();
        let of_peer = MemoryAttributes::from(region.descriptor());
        assert_eq!(of_peer.remote_registration(0, &facts), Registration::NotOffered);
    }
}
