//! Routes: two joined regions and the path between them.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use gpu::{Device, DeviceName, Implementation, Memory, PeerAccess, Slice, Uuid};

use super::Agent;
use super::cpu_copy::CopyBuffer;
use super::explain::MemoryAttributes;
use super::peer::Peer;
use super::route_lane::RouteLane;
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::path::{Choice, DeviceAccess, Fabric, Locality, Operation, Path, Policy, choose};
use crate::region::{Buffer, Region, RegionDescriptor, RegisteredRegion};

pub(super) const JOIN: &str = "join two regions";

/// Two joined regions, one of this agent and one of a peer. The path is chosen and everything
/// mapped: a transfer only has to be started.
#[derive(Clone)]
pub struct Route(pub(super) Arc<RouteInner>);

/// Without mappings and keys, which give access to the memory.
impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RouteInner { local, remote, path, .. } = &*self.0;
        let mut shown = f.debug_struct("Route");
        shown.field("path", &path.name()).field("local", &local.descriptor);
        shown.field("remote", remote).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct RouteInner {
    pub(super) agent: [u8; 16],
    pub(super) peer: u32,
    /// Kept as long as transfers may use it.
    pub(super) local: Arc<RegisteredRegion>,
    pub(super) remote: RegionDescriptor,
    pub(super) choice: Choice,
    pub(super) path: Path,
    /// Why this is not a better path, if one was expected.
    pub(super) fallback: Option<&'static str>,
    pub(super) mover: DataMover,
}

/// How bytes are copied.
#[derive(Debug)]
pub(super) enum DataMover {
    /// A device's copy engines.
    Device { device: Device, local: Slice, remote: Slice },
    /// The calling CPU.
    Cpu { local: CopyBuffer, remote: HostBuffer },
    /// A fabric, by one or more rails.
    Rails(Vec<RouteLane>),
}

impl Route {
    /// The path of the bytes.
    #[must_use]
    pub fn path(&self) -> Path {
        self.0.path
    }

    /// The verdict on every path.
    #[must_use]
    pub fn choice(&self) -> &Choice {
        &self.0.choice
    }

    /// Why this is not a better path, if one was expected.
    #[must_use]
    pub fn fallback(&self) -> Option<&'static str> {
        self.0.fallback
    }
}

/// The name of a device in this process, by its UUID.
pub(super) fn device_named(uuid: Uuid) -> Option<DeviceName> {
    [Implementation::Cuda, Implementation::Emulated].into_iter().find_map(|implementation| {
        let count = Device::count(implementation).unwrap_or(0);
        let mut names = (0..count).map(|number| DeviceName { implementation, number });
        names.find(|name| name.uuid().is_ok_and(|found| found == uuid))
    })
}

/// The device that copies between local memory of one device and remote memory of another, and its
/// access to the remote memory.
pub(super) fn device_access(
    local_device: Option<Device>,
    remote_device: Option<Uuid>,
) -> Result<(DeviceAccess, Option<Device>)> {
    let of_device = |error| Error::of_device(JOIN, error);
    let Some(uuid) = remote_device else {
        let device_access =
            if local_device.is_some() { DeviceAccess::Same } else { DeviceAccess::NoDevice };
        return Ok((device_access, local_device));
    };
    let Some(name) = device_named(uuid) else { return Ok((DeviceAccess::Invisible, local_device)) };
    let Some(device) = local_device else {
        return Ok((DeviceAccess::Same, Some(Device::open(name).map_err(of_device)?)));
    };
    let device_access = if device.name() == name {
        DeviceAccess::Same
    } else if device.name().implementation != name.implementation {
        DeviceAccess::Foreign
    } else {
        match device.peer_access_to(name).map_err(of_device)? {
            PeerAccess::None => DeviceAccess::None,
            PeerAccess::Same | PeerAccess::Direct { .. } => DeviceAccess::Direct,
        }
    };
    Ok((device_access, Some(device)))
}

/// Fails unless the region belongs to the peer's agent.
pub(super) fn check_owner(peer: &Peer, region: &RegionDescriptor) -> Result<()> {
    if (region.agent, region.node) == (peer.card.identity, peer.card.node) {
        return Ok(());
    }
    let detail = "the region belongs to another agent, or to this one before a restart";
    Err(Error::new(JOIN, ErrorKind::Stale, detail))
}

/// Fails if the session with the peer has ended.
fn check_connected(peer: &mut Peer) -> Result<()> {
    let Some(local_session) = &mut peer.local_session else { return Ok(()) };
    local_session.refresh();
    match local_session.closed_cause() {
        Some(end) => Err(Error::new(JOIN, ErrorKind::Closed, end)),
        None => Ok(()),
    }
}

impl Agent {
    /// Joins two regions: chooses a path and prepares it.
    pub(super) fn join_with(
        &mut self,
        number: u32,
        region: &Region,
        remote: RegionDescriptor,
        policy: &Policy,
        end: Instant,
    ) -> Result<Route> {
        let local = &region.0;
        let peer = self.peer(number, JOIN)?;
        check_owner(peer, &remote)?;
        check_connected(peer)?;
        // Earlier failures of the fabric do not count.
        peer.fabric_error = None;
        let local_device = match &local.buffer {
            Buffer::Device(memory) => Some(memory.mapped_for().clone()),
            Buffer::Host(_) => None,
        };
        let ends = (&MemoryAttributes::from(region), &MemoryAttributes::from(&remote));
        let (mut facts, device) = self.facts(number, Operation::Put, ends, local_device)?;
        loop {
            let choice = choose(&facts, policy);
            let Some(path) = choice.taken() else {
                return Err(Error::new(JOIN, ErrorKind::NoPath, choice.reasons()));
            };
            let made = if path.is_local() {
                self.map_regions(path, number, (local, &remote), device.as_ref(), end)
            } else {
                self.open_route_lanes(number, local, &remote, end)
            };
            let made = made.or_else(|error| match error.kind() {
                // It may have ended meanwhile, which is not a fact about paths.
                ErrorKind::Closed | ErrorKind::Failed | ErrorKind::Stale => {
                    check_connected(self.peer(number, JOIN)?).and(Err(error))
                }
                _ => Err(error),
            });
            // Obstacles that show only when the path is tried become facts too.
            match made {
                Ok(mover) => {
                    let fallback = choice.fallback().map(|(_, reason)| reason.name());
                    let local = Arc::clone(local);
                    let inner = RouteInner {
                        agent: self.local_target.identity,
                        peer: number,
                        local,
                        remote,
                        choice,
                        path,
                        fallback,
                        mover,
                    };
                    return Ok(Route(Arc::new(inner)));
                }
                Err(error) if error.kind() == ErrorKind::NoPeerAccess => {
                    facts.device_access = DeviceAccess::None;
                }
                Err(error) if error.kind() == ErrorKind::NoSuchDevice => {
                    facts.device_access = DeviceAccess::Invisible;
                }
                Err(error) if error.kind() == ErrorKind::Failed && path.is_local() => {
                    facts.locality = Locality::NoDescriptorPassing { cause: error.to_string() };
                }
                // The peer does not answer by the fabric: recorded by `open_route_lanes`.
                Err(error)
                    if !path.is_local() && self.peer(number, JOIN)?.fabric_error.is_some() =>
                {
                    facts.fabric = Fabric::None { cause: error.to_string() };
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Agent {
    /// Maps the memory for a path on this machine.
    fn map_regions(
        &mut self,
        path: Path,
        peer: u32,
        (local, remote): (&Arc<RegisteredRegion>, &RegionDescriptor),
        device: Option<&Device>,
        end: Instant,
    ) -> Result<DataMover> {
        let of_device = |error| Error::of_device(JOIN, error);
        let in_process_buffer = match self.peer(peer, JOIN)?.in_process_region(remote) {
            Some(region) if region.descriptor.rights.allow(remote.rights) => {
                Some(region.buffer.clone())
            }
            Some(_) => {
                let detail = "the descriptor claims rights that the region does not grant";
                return Err(Error::new(JOIN, ErrorKind::NotAllowed, detail));
            }
            None if path == Path::SameProcess => {
                let detail = "the region was withdrawn or never existed";
                return Err(Error::new(JOIN, ErrorKind::Stale, detail));
            }
            None => None,
        };
        let Some(device) = device else {
            let Buffer::Host(local_buffer) = &local.buffer else {
                return Err(Error::new(
                    JOIN,
                    ErrorKind::NoPath,
                    "no device takes part in this transfer",
                ));
            };
            let remote = match in_process_buffer {
                Some(Buffer::Host(buffer)) => buffer,
                Some(Buffer::Device(_)) => {
                    return Err(Error::new(
                        JOIN,
                        ErrorKind::NoPath,
                        "no device takes part in this transfer",
                    ));
                }
                None => self.map_host(peer, remote, end)?,
            };
            return Ok(DataMover::Cpu { local: CopyBuffer::Host(local_buffer.clone()), remote });
        };
        let whole = |memory: &Memory, length| memory.slice(0, length).map_err(of_device);
        let remote_memory = match in_process_buffer {
            Some(Buffer::Device(memory)) => {
                if memory.device().is_some_and(|resident| resident != device.name()) {
                    device.enable_peer(memory.mapped_for()).map_err(of_device)?;
                }
                memory
            }
            Some(Buffer::Host(buffer)) => buffer.pinned_for(device)?,
            None if remote.memory_type.is_device() => self.map_for(peer, remote, device, end)?,
            None => {
                let mapped = self.map_host(peer, remote, end)?;
                match (mapped.pinned_if_possible(device)?, &local.buffer) {
                    (Some(memory), _) => memory,
                    (None, Buffer::Host(local_buffer)) => {
                        let local = CopyBuffer::Host(local_buffer.clone());
                        return Ok(DataMover::Cpu { local, remote: mapped });
                    }
                    (None, Buffer::Device(local_buffer)) => {
                        let local = CopyBuffer::device(
                            whole(local_buffer, local.descriptor.length)?,
                            device,
                        )?;
                        return Ok(DataMover::Cpu { local, remote: mapped });
                    }
                }
            }
        };
        let local_memory = match &local.buffer {
            Buffer::Device(memory) => memory.clone(),
            Buffer::Host(buffer) => buffer.pinned_for(device)?,
        };
        for memory in [&local_memory, &remote_memory] {
            if !memory.is_reachable_from(device) {
                let detail = format!("{:?} does not reach {memory:?}", device.name());
                return Err(Error::new(JOIN, ErrorKind::NoPeerAccess, detail));
            }
        }
        Ok(DataMover::Device {
            device: device.clone(),
            local: whole(&local_memory, local.descriptor.length)?,
            remote: whole(&remote_memory, remote.length)?,
        })
    }
}
