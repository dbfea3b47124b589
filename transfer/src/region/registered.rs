//! Regions of this process.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use fabric::MemoryRegion;
use gpu::{Allocator, DeviceName, Memory, Uuid};
use ipc::ForkGeneration;

use super::descriptor::{FabricKey, MAX_PIECES, RegionDescriptor, Rights};
use crate::agent::LocalTarget;
use crate::error::{Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::lock;
use crate::path::{ExportObstacle, Exportability, MemoryType};
use crate::rail::RailHandle;

const REGISTER: &str = "register a region";

/// Memory that can be registered.
#[derive(Debug, Clone)]
pub enum Buffer {
    /// Memory of a device, or of the host as a device knows it.
    Device(Memory),
    /// Memory of the host that other processes can map.
    Host(HostBuffer),
}

impl From<Memory> for Buffer {
    fn from(memory: Memory) -> Self {
        Self::Device(memory)
    }
}

impl From<HostBuffer> for Buffer {
    fn from(buffer: HostBuffer) -> Self {
        Self::Host(buffer)
    }
}

impl<T: Clone + Into<Self>> From<&T> for Buffer {
    fn from(buffer: &T) -> Self {
        buffer.clone().into()
    }
}

impl Buffer {
    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.length(),
            Self::Host(buffer) => buffer.length(),
        }
    }

    /// What peers are told of it, but for its names, its rights, and what fabrics call it.
    fn describe(&self, local_target: &LocalTarget) -> Result<RegionDescriptor> {
        let of_device = |error| Error::of_device(REGISTER, error);
        let unexportable =
            |device, obstacle| unexportable_descriptor(local_target, self, device, obstacle);
        let memory = match self {
            Self::Host(buffer) if buffer.is_private() => {
                return Ok(unexportable(None, ExportObstacle::PrivateHostMemory));
            }
            Self::Host(_) => {
                let memory_type = MemoryType::Host(Exportability::ByDescriptors);
                return Ok(RegionDescriptor {
                    memory_type,
                    pieces: 1,
                    ..unexportable(None, ExportObstacle::LocalOnly)
                });
            }
            Self::Device(memory) => memory,
        };
        let Some(name) = memory.device() else {
            return Ok(unexportable(None, ExportObstacle::PrivateHostMemory));
        };
        let device = Some(name.uuid().map_err(of_device)?);
        match memory.pieces() {
            Ok(pieces) if pieces.lengths.len() as u64 > u64::from(MAX_PIECES) => {
                let detail = format!("{} pieces, {MAX_PIECES} at most", pieces.lengths.len());
                return Err(Error::new(REGISTER, ErrorKind::TooMany, detail));
            }
            Ok(found) => {
                let memory_type = MemoryType::Device(Exportability::ByDescriptors);
                let (offset, pieces) = (found.offset, found.lengths.len() as u32);
                let base = unexportable(device, ExportObstacle::LocalOnly);
                return Ok(RegionDescriptor { memory_type, offset, pieces, ..base });
            }
            Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {}
            Err(error) => return Err(of_device(error)),
        }
        let allocator = memory.mapped_for().attributes(memory.address());
        Ok(match allocator.map_err(of_device)?.allocator {
            Allocator::Plain => match memory.export_legacy() {
                Ok(handle) => {
                    let memory_type = MemoryType::Device(Exportability::ByLegacyHandle);
                    let (offset, legacy) = (handle.offset, Some(handle.bytes));
                    RegionDescriptor {
                        memory_type,
                        offset,
                        legacy,
                        ..unexportable(device, ExportObstacle::LocalOnly)
                    }
                }
                Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
                    unexportable(device, ExportObstacle::NoLegacyHandle)
                }
                Err(error) => return Err(of_device(error)),
            },
            Allocator::Mapped { .. } => unexportable(device, ExportObstacle::NotExportable),
            Allocator::Pool => unexportable(device, ExportObstacle::StreamOrderedPool),
            Allocator::Managed => unexportable(device, ExportObstacle::Managed),
            Allocator::Host => unexportable(None, ExportObstacle::PrivateHostMemory),
        })
    }

    /// Bytes of all pieces that it leaves in, which may be more than its own.
    pub(crate) fn exported_bytes(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.pieces().map_or(0, |pieces| pieces.lengths.iter().sum()),
            Self::Host(buffer) => buffer.length(),
        }
    }

    /// The descriptor and the length of a piece, for a peer with these rights. Memory of the host
    /// cannot be mapped for writing by it where they do not say so; devices know no such
    /// difference.
    pub(crate) fn export(&self, number: u32, rights: Rights) -> Result<(OwnedFd, u64)> {
        let operation = "export a region";
        match self {
            Self::Device(memory) => memory
                .export_piece(number as usize)
                .map_err(|error| Error::of_device(operation, error)),
            Self::Host(buffer) => Ok((buffer.export(rights.write)?, buffer.length())),
        }
    }
}

/// What is told of memory that does not leave its process, on this device or on the host.
fn unexportable_descriptor(
    local_target: &LocalTarget,
    buffer: &Buffer,
    device: Option<Uuid>,
    obstacle: ExportObstacle,
) -> RegionDescriptor {
    let memory_type = if device.is_some() { MemoryType::Device } else { MemoryType::Host };
    RegionDescriptor {
        agent: local_target.identity,
        node: local_target.identity,
        number: 0,
        ticket: 0,
        length: buffer.length(),
        rights: Rights::NONE,
        memory_type: memory_type(Exportability::Not(obstacle)),
        device,
        offset: 0,
        pieces: 0,
        legacy: None,
        keys: Vec::new(),
    }
}

/// Memory that peers may reach as long as this lives, or that is for own use. Copies of the
/// handle are the same region.
///
/// Dropping the last handle does not wait. Nothing more begins with the memory; where another process
/// still copies to or from it, it is kept until that copy is over or the process has ended. Then a
/// thread of the library drops it, and with it the owner of memory that was adopted. To use the memory
/// for something else, [withdraw](crate::Agent::withdraw) the region first: that waits.
#[derive(Debug, Clone)]
pub struct Region(pub(crate) Arc<RegisteredRegion>);

pub(crate) struct RegisteredRegion {
    pub(crate) buffer: Buffer,
    pub(crate) descriptor: RegionDescriptor,
    local_target: Arc<LocalTarget>,
    /// As the rails know it, by their numbers, until it is withdrawn.
    memories: Mutex<Vec<Option<MemoryRegion>>>,
    pub(crate) is_withdrawn: AtomicBool,
    fork_generation: ForkGeneration,
}

/// Without what lets others reach it: ticket and keys.
impl fmt::Debug for RegisteredRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:?}", self.descriptor.number, self.buffer)
    }
}

impl Drop for RegisteredRegion {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // The parent's: its board, its rails, and its registrations.
            std::mem::forget(std::mem::take(&mut *lock(&self.memories)));
            return;
        }
        self.local_target.withdraw(self.descriptor.number);
        self.retire();
        // Of what is for own use no peer knows.
        if self.descriptor.rights != Rights::NONE {
            self.local_target.release(self.descriptor.number, self.buffer.clone());
        }
    }
}

impl Region {
    pub(crate) fn new(
        local_target: &Arc<LocalTarget>,
        buffer: Buffer,
        rights: Rights,
    ) -> Result<Self> {
        let descriptor_base = buffer.describe(local_target)?;
        if !(rights.read || rights.write) {
            let detail = "a region that peers may neither read nor write";
            return Err(Error::new(REGISTER, ErrorKind::Malformed, detail));
        }
        let memories = register_with_rails(local_target, &buffer, Some(rights));
        let mut keys = Vec::new();
        for (domain, memory) in memories.iter().enumerate() {
            let Some(memory) = memory else { continue };
            let described = memory.describe().map_err(|error| Error::of_fabric(REGISTER, error))?;
            keys.push(FabricKey { domain: domain as u32, bytes: described.encode() });
        }
        let entered = local_target.add_region(|number, ticket| {
            let descriptor = RegionDescriptor { number, ticket, rights, keys, ..descriptor_base };
            Arc::new(RegisteredRegion::new(local_target, buffer, descriptor, memories))
        });
        entered.map(Self)
    }

    /// A region that no peer reaches: it is not in the list of regions, and has no keys.
    pub(crate) fn local_only(local_target: &Arc<LocalTarget>, buffer: Buffer) -> Result<Self> {
        let device = match &buffer {
            Buffer::Device(memory) => memory.device(),
            Buffer::Host(_) => None,
        };
        let device = device.map(DeviceName::uuid).transpose();
        let device = device.map_err(|error| Error::of_device(REGISTER, error))?;
        let memories = register_with_rails(local_target, &buffer, None);
        let descriptor_base =
            unexportable_descriptor(local_target, &buffer, device, ExportObstacle::LocalOnly);
        let descriptor = RegionDescriptor { number: local_target.number(), ..descriptor_base };
        Ok(Self(Arc::new(RegisteredRegion::new(local_target, buffer, descriptor, memories))))
    }

    /// What it was made of.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.0.buffer
    }

    /// What a peer needs to reach it; [encode](RegionDescriptor::encode) it to send it.
    #[must_use]
    pub fn descriptor(&self) -> &RegionDescriptor {
        &self.0.descriptor
    }
}

/// Has the rails register memory: for peers with these rights, or for own use.
fn register_with_rails(
    local_target: &LocalTarget,
    buffer: &Buffer,
    rights: Option<Rights>,
) -> Vec<Option<MemoryRegion>> {
    let register = |handle: &RailHandle| {
        handle.register(buffer, rights).unwrap_or_else(|error| {
            // Then it is staged; the table says so.
            tracing::warn!(%error, "a provider cannot register this memory: it will be staged");
            None
        })
    };
    local_target.rail_handles().iter().map(register).collect()
}

impl RegisteredRegion {
    fn new(
        local_target: &Arc<LocalTarget>,
        buffer: Buffer,
        descriptor: RegionDescriptor,
        memories: Vec<Option<MemoryRegion>>,
    ) -> Self {
        Self {
            buffer,
            descriptor,
            local_target: Arc::clone(local_target),
            memories: Mutex::new(memories),
            is_withdrawn: AtomicBool::new(false),
            fork_generation: ForkGeneration::current(),
        }
    }

    /// As a rail knows it.
    pub(crate) fn memory(&self, rail: usize) -> Option<MemoryRegion> {
        lock(&self.memories).get(rail).cloned().flatten()
    }

    /// The rails that know it.
    pub(crate) fn domains(&self) -> Vec<usize> {
        let memories = lock(&self.memories);
        (0..memories.len()).filter(|rail| memories[*rail].is_some()).collect()
    }

    /// Has the rails let go of it, when peers know that it is gone.
    pub(crate) fn retire(&self) {
        self.is_withdrawn.store(true, Ordering::Release);
        let memories = std::mem::take(&mut *lock(&self.memories));
        // Of what is for own use no peer knows; transfers that are under way have handles.
        if self.descriptor.rights == Rights::NONE {
            return;
        }
        for (handle, memory) in self.local_target.rail_handles().iter().zip(memories) {
            handle.retire(self.descriptor.number, memory, self.buffer.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::MemoryAttributes;
    use crate::{Agent, AgentOptions};

    #[test]
    fn printed_regions_do_not_show_how_they_are_reached() {
        let agent = Agent::start(AgentOptions::new("one")).unwrap();
        let region = agent.register(HostBuffer::new(4096).unwrap(), Rights::ALL).unwrap();
        let mut descriptor = region.descriptor().clone();
        descriptor.keys.push(FabricKey { domain: 0, bytes: vec![5; 3] });
        let there = MemoryAttributes::from(&descriptor);
        let texts = [
            format!("{region:?} {descriptor:?} {there:?}"),
            format!("{region:#?} {descriptor:#?} {there:#?}"),
        ];
        for text in texts {
            assert!(!text.contains(&descriptor.ticket.to_string()), "{text}");
            assert!(!text.contains("FabricKey"), "{text}");
            assert!(text.contains(&descriptor.number.to_string()), "{text}");
        }
    }
}
