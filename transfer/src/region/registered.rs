//! Regions of this process.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use fabric::MemoryRegion;
use gpu::{Allocator, Memory, Uuid};
use ipc::ForkGeneration;
use threads::lock;

use super::descriptor::{MAX_PIECES, RegionDescriptor, Rights};
use crate::error::{Context, Error, ErrorKind, Result};
use crate::host_buffer::HostBuffer;
use crate::path::{ExportObstacle, Exportability, MemoryType, Registration};

pub(crate) const REGISTER: &str = "register region";

/// Memory that can be registered.
#[derive(Debug, Clone)]
pub enum Buffer {
    /// Memory of a device, or host memory that is registered with a device.
    Device(Memory),
    /// Host memory that other processes can map.
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

    /// Start address in this process.
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address(),
            Self::Host(buffer) => buffer.address(),
        }
    }

    pub(crate) fn memory(&self) -> Option<&Memory> {
        match self {
            Self::Device(memory) => Some(memory),
            Self::Host(_) => None,
        }
    }

    /// The descriptor without ticket, rights and fabric keys.
    pub(crate) fn describe(&self, agent: [u8; 16]) -> Result<RegionDescriptor> {
        let base = |device, exportability| self.base_descriptor(agent, device, exportability);
        let private_host = || base(None, Exportability::Not(ExportObstacle::PrivateHostMemory));
        let memory = match self {
            Self::Host(buffer) if buffer.is_private() => return Ok(private_host()),
            Self::Host(_) => {
                let described = base(None, Exportability::ByDescriptors);
                return Ok(RegionDescriptor { pieces: 1, ..described });
            }
            Self::Device(memory) => memory,
        };
        let device = memory.device_uuid().during(REGISTER)?;
        if device.is_none() {
            return Ok(private_host());
        }
        match memory.pieces() {
            Ok(found) => {
                let (offset, count) = (found.offset, found.lengths.len());
                if count as u64 > u64::from(MAX_PIECES) {
                    let detail = format!("{count} pieces, {MAX_PIECES} is the maximum");
                    return Err(Error::new(REGISTER, ErrorKind::TooMany, detail));
                }
                let described = base(device, Exportability::ByDescriptors);
                return Ok(RegionDescriptor { offset, pieces: count as u32, ..described });
            }
            Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {}
            Err(error) => return Err(error).during(REGISTER),
        }
        let obstacle =
            match memory.mapped_for().attributes(memory.address()).during(REGISTER)?.allocator {
                Allocator::Plain => match memory.export_legacy() {
                    Err(error) if error.kind() == gpu::ErrorKind::NotSupported => {
                        ExportObstacle::NoLegacyHandle
                    }
                    exported => {
                        let handle = exported.during(REGISTER)?;
                        let (offset, legacy) = (handle.offset, Some(handle.bytes));
                        let described = base(device, Exportability::ByLegacyHandle);
                        return Ok(RegionDescriptor { offset, legacy, ..described });
                    }
                },
                Allocator::Mapped { .. } => ExportObstacle::NotExportable,
                Allocator::Pool => ExportObstacle::StreamOrderedPool,
                Allocator::Managed => ExportObstacle::Managed,
                Allocator::Host => return Ok(private_host()),
            };
        Ok(base(device, Exportability::Not(obstacle)))
    }

    /// A descriptor without number, ticket, rights, exported memory and fabric keys, of memory of a
    /// device or of the host.
    pub(crate) fn base_descriptor(
        &self,
        agent: [u8; 16],
        device: Option<Uuid>,
        exportability: Exportability,
    ) -> RegionDescriptor {
        let memory_type = if device.is_some() { MemoryType::Device } else { MemoryType::Host };
        RegionDescriptor {
            agent,
            node: agent,
            number: 0,
            ticket: 0,
            length: self.length(),
            rights: Rights::NONE,
            memory_type: memory_type(exportability),
            device,
            offset: 0,
            pieces: 0,
            legacy: None,
            keys: Vec::new(),
        }
    }

    /// Bytes of all exported pieces, which may exceed the length of the memory.
    pub(crate) fn exported_bytes(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.pieces().map_or(0, |pieces| pieces.lengths.iter().sum()),
            Self::Host(buffer) => buffer.length(),
        }
    }

    /// The descriptor and the length of a piece, for a peer with these rights. Without the right to
    /// write, host memory is exported read-only; devices do not support that.
    pub(crate) fn export(&self, number: u32, rights: Rights) -> Result<(OwnedFd, u64)> {
        match self {
            Self::Device(memory) => memory.export_piece(number as usize).during("export region"),
            Self::Host(buffer) => Ok((buffer.export(rights.write)?, buffer.length())),
        }
    }
}

/// A region: registered memory that peers may access as long as this exists, or local-only memory.
/// Clones of the handle are the same region.
///
/// Dropping the last handle does not wait. No new operation starts; while another process still
/// copies to or from the memory, it is kept until the copy or the process has ended. Then a thread
/// of the library frees it, and drops the owner of adopted memory. To reuse the memory,
/// [withdraw](crate::Agent::withdraw) the region first: that waits.
#[derive(Debug, Clone)]
pub struct Region(pub(crate) Arc<RegisteredRegion>);

/// The registration of a region with a rail, or why there is none.
pub(crate) type RailMemory = std::result::Result<MemoryRegion, Registration>;

/// The agent of a region.
pub(crate) trait RegionOwner: Send + Sync {
    /// Notifies peers of a withdrawal. The memory and its registrations with the rails are kept
    /// until peers have confirmed it.
    fn retire(&self, region: u64, memories: Vec<Option<MemoryRegion>>, buffer: &Buffer);

    /// The last handle of a region is dropped.
    fn dropped(self: Arc<Self>, region: &RegisteredRegion);
}

pub(crate) struct RegisteredRegion {
    pub(crate) buffer: Buffer,
    pub(crate) descriptor: RegionDescriptor,
    owner: Arc<dyn RegionOwner>,
    /// The region's registrations, by the numbers of the rails, until it is withdrawn.
    memories: Mutex<Vec<Option<MemoryRegion>>>,
    /// The outcome of its registrations, by the numbers of the rails.
    registrations: Vec<Registration>,
    is_withdrawn: AtomicBool,
    fork_generation: ForkGeneration,
}

/// Without secrets: ticket and keys.
impl fmt::Debug for RegisteredRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:?}", self.descriptor.number, self.buffer)
    }
}

impl Drop for RegisteredRegion {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            // Region table, rails and registrations are the parent's.
            std::mem::forget(std::mem::take(&mut *lock(&self.memories)));
            return;
        }
        Arc::clone(&self.owner).dropped(self);
    }
}

impl Region {
    /// The registered memory.
    #[must_use]
    pub fn buffer(&self) -> &Buffer {
        &self.0.buffer
    }

    /// The descriptor for peers; [encode](RegionDescriptor::encode) it to send it.
    #[must_use]
    pub fn descriptor(&self) -> &RegionDescriptor {
        &self.0.descriptor
    }
}

impl RegisteredRegion {
    pub(crate) fn new(
        owner: Arc<dyn RegionOwner>,
        buffer: Buffer,
        descriptor: RegionDescriptor,
        memories: Vec<RailMemory>,
    ) -> Self {
        let outcome = |memory: &RailMemory| memory.as_ref().err().cloned();
        let registrations = memories.iter().map(outcome);
        let registrations = registrations.map(|it| it.unwrap_or(Registration::Works)).collect();
        Self {
            buffer,
            descriptor,
            owner,
            registrations,
            memories: Mutex::new(memories.into_iter().map(std::result::Result::ok).collect()),
            is_withdrawn: AtomicBool::new(false),
            fork_generation: ForkGeneration::current(),
        }
    }

    /// The region's registration with a rail.
    pub(crate) fn memory(&self, rail: usize) -> Option<MemoryRegion> {
        lock(&self.memories).get(rail).cloned().flatten()
    }

    /// The outcome of its registrations, by the numbers of the rails.
    pub(crate) fn registrations(&self) -> &[Registration] {
        &self.registrations
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.is_withdrawn.load(Ordering::Acquire)
    }

    /// Unregisters it from the rails, after peers were notified of its withdrawal.
    pub(crate) fn retire(&self) {
        self.is_withdrawn.store(true, Ordering::Release);
        let memories = std::mem::take(&mut *lock(&self.memories));
        // No peer knows a local-only region; transfers in flight hold handles.
        if self.descriptor.rights == Rights::NONE {
            return;
        }
        self.owner.retire(self.descriptor.number, memories, &self.buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FabricKey;
    use crate::agent::MemoryAttributes;
    use crate::{Agent, AgentOptions};

    #[test]
    fn debug_output_of_a_region_shows_no_secrets() {
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
