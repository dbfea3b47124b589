//! Agents whose regions the service has mapped.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use gpu::{Device, DeviceName, Memory, WeakMemory};
use threads::lock;

use crate::admission::Admission;
use crate::agent::{LocalTarget, RegionChannel, RegionOwnerSession};
use crate::copy_requests::RegionName;
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::{HostBuffer, WeakHostBuffer};
use crate::region::RegionDescriptor;

/// Device memory of another process, mapped for a device of the service, or its host memory.
pub(super) enum MappedRegion {
    Device(Memory),
    Host(HostBuffer),
}

/// An agent with regions that the service has mapped.
#[derive(Debug)]
pub(super) struct Owner {
    session: Mutex<RegionOwnerSession>,
    /// One exchange at a time: it may wait for the owner, and copies do not wait for it.
    exchange: Mutex<RegionChannel>,
    mapped: Mutex<HashMap<(u64, DeviceName), WeakMemory>>,
    mapped_hosts: Mutex<HashMap<(u64, bool), WeakHostBuffer>>,
}

/// The owners of all mapped regions. A session ends with its last mapping.
#[derive(Debug)]
pub(super) struct Owners {
    directory: PathBuf,
    local_target: LocalTarget,
    all: Mutex<HashMap<[u8; 16], Weak<Owner>>>,
}

impl Owners {
    pub(super) fn new(directory: PathBuf, admission: Admission) -> Result<Self> {
        let local_target = LocalTarget::of_copy_service(admission)?;
        Ok(Self { directory, local_target, all: Mutex::default() })
    }

    /// The identity of the service.
    pub(super) fn local_target(&self) -> &LocalTarget {
        &self.local_target
    }

    /// The owner with this identity, connected now or before.
    pub(super) fn find(&self, identity: [u8; 16], end: Instant) -> Result<Arc<Owner>> {
        let known = lock(&self.all).get(&identity).and_then(Weak::upgrade);
        if let Some(owner) = known.filter(|owner| owner.obstacle().is_none()) {
            return Ok(owner);
        }
        let session =
            RegionOwnerSession::connect(&self.local_target, &self.directory, identity, end)?;
        let channel = session.channel()?;
        let owner = Arc::new(Owner {
            session: Mutex::new(session),
            exchange: Mutex::new(channel),
            mapped: Mutex::default(),
            mapped_hosts: Mutex::default(),
        });
        let mut all = lock(&self.all);
        all.retain(|_, owner| owner.strong_count() > 0);
        all.insert(identity, Arc::downgrade(&owner));
        Ok(owner)
    }

    /// Checks the processes of all owners, and the connections to them.
    pub(super) fn refresh(&self) {
        let owners: Vec<_> = lock(&self.all).values().filter_map(Weak::upgrade).collect();
        owners.iter().for_each(|owner| lock(&owner.session).refresh());
    }
}

impl Owner {
    /// The region with this number and ticket, as the owner describes it.
    pub(super) fn describe(&self, region: &RegionName, end: Instant) -> Result<RegionDescriptor> {
        lock(&self.exchange).describe(region.number(), region.ticket(), end)
    }

    /// Maps a region that the owner described, once: device memory for a device of the service.
    pub(super) fn map(
        &self,
        region: &RegionDescriptor,
        device: &Device,
        end: Instant,
    ) -> Result<MappedRegion> {
        let exchange = lock(&self.exchange);
        if !region.memory_type.is_device() {
            let key = (region.number, region.rights.write);
            let known = lock(&self.mapped_hosts).get(&key).and_then(WeakHostBuffer::upgrade);
            if let Some(buffer) = known {
                return Ok(MappedRegion::Host(buffer));
            }
            let buffer = exchange.map_host(region, end)?;
            let mut mapped = lock(&self.mapped_hosts);
            mapped.retain(|_, buffer| buffer.upgrade().is_some());
            mapped.insert(key, buffer.downgrade());
            return Ok(MappedRegion::Host(buffer));
        }
        let key = (region.number, device.name());
        if let Some(memory) = lock(&self.mapped).get(&key).and_then(WeakMemory::upgrade) {
            return Ok(MappedRegion::Device(memory));
        }
        let memory = exchange.map_for(region, device, end)?;
        let mut mapped = lock(&self.mapped);
        mapped.retain(|_, memory| memory.upgrade().is_some());
        mapped.insert(key, memory.downgrade());
        Ok(MappedRegion::Device(memory))
    }

    /// Announces a copy with a region; an error if the region or its agent is gone.
    pub(super) fn begin_copy(
        &self,
        region: u64,
    ) -> std::result::Result<u64, (ErrorKind, &'static str)> {
        lock(&self.session).begin_copy(region)
    }

    pub(super) fn end_copy(&self, number: u64) {
        lock(&self.session).end_copy(number);
    }

    fn obstacle(&self) -> Option<(ErrorKind, &'static str)> {
        lock(&self.session).obstacle()
    }

    /// Why nothing can be copied to or from a region any more, as of the last
    /// [`refresh`](Owners::refresh).
    pub(super) fn known_obstacle(&self, region: u64) -> Option<(ErrorKind, &'static str)> {
        lock(&self.session).known_obstacle(region)
    }
}

/// The memory of a mapped region as a device sees it.
pub(super) fn memory_for(
    operation: &'static str,
    mapped: MappedRegion,
    device: &Device,
) -> Result<Memory> {
    let memory = match mapped {
        MappedRegion::Device(memory) => memory,
        MappedRegion::Host(buffer) => buffer.pinned_for(device)?,
    };
    if memory.is_reachable_from(device) {
        return Ok(memory);
    }
    let detail = format!("{} does not reach {memory:?}", device.name());
    Err(Error::new(operation, ErrorKind::NoPeerAccess, detail))
}
