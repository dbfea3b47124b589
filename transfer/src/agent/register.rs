//! Registers regions, and connects them with their agent.

use std::sync::Arc;

use fabric::MemoryRegion;
use gpu::Memory;

use super::local_target::LocalTarget;
use crate::device_memory::device_memory;
use crate::error::{Context, Error, ErrorKind, Result};
use crate::path::{ExportObstacle, Exportability};
use crate::rail::RailHandle;
use crate::region::{
    Buffer, FabricKey, REGISTER, RailMemory, Region, RegionDescriptor, RegionOwner,
    RegisteredRegion, Rights,
};

impl LocalTarget {
    pub(crate) fn register(self: &Arc<Self>, buffer: Buffer, rights: Rights) -> Result<Region> {
        let descriptor_base = buffer.describe(self.identity)?;
        if !(rights.read || rights.write) {
            let detail = "no rights. Use register_local for local-only memory";
            return Err(Error::new(REGISTER, ErrorKind::Malformed, detail));
        }
        let memories = self.register_with_rails(&buffer, Some(rights));
        let mut keys = Vec::new();
        for (domain, memory) in memories.iter().enumerate() {
            let Ok(memory) = memory else { continue };
            // The key of device memory is granted to each peer after a probe.
            if memory.kind().is_device() {
                continue;
            }
            let bytes = memory.describe().during(REGISTER)?.encode();
            keys.push(FabricKey { domain: domain as u32, bytes });
        }
        let entered = self.add_region(|number, ticket| {
            let descriptor = RegionDescriptor { number, ticket, rights, keys, ..descriptor_base };
            Arc::new(RegisteredRegion::new(self.clone(), buffer, descriptor, memories))
        });
        entered.map(Region)
    }

    /// Registers a local-only region: it is not in the region table, and has no keys.
    pub(super) fn register_local(self: &Arc<Self>, buffer: Buffer) -> Result<Region> {
        let device = buffer.memory().map(Memory::device_uuid).transpose().during(REGISTER)?;
        let device = device.flatten();
        let memories = self.register_with_rails(&buffer, None);
        let local_only = Exportability::Not(ExportObstacle::LocalOnly);
        let descriptor_base = buffer.base_descriptor(self.identity, device, local_only);
        let descriptor = RegionDescriptor { number: self.next_region_number(), ..descriptor_base };
        Ok(Region(Arc::new(RegisteredRegion::new(self.clone(), buffer, descriptor, memories))))
    }

    /// Registers memory with the rails: with rights for peers, or local-only.
    fn register_with_rails(&self, buffer: &Buffer, rights: Option<Rights>) -> Vec<RailMemory> {
        let register = |handle: &RailHandle| handle.register(buffer, rights);
        let memories: Vec<_> = self.rail_handles().iter().map(register).collect();
        if let Some((memory, _)) = device_memory(buffer)
            && memories.iter().any(RailMemory::is_ok)
            && let Err(error) = memory.set_sync_memops()
        {
            // Of mapped memory. Its owner has to wait for its copies before a transfer, as always.
            tracing::trace!(%error, "synchronous copies are not set");
        }
        memories
    }
}

impl RegionOwner for LocalTarget {
    fn retire(&self, region: u64, memories: Vec<Option<MemoryRegion>>, buffer: &Buffer) {
        for (handle, memory) in self.rail_handles().iter().zip(memories) {
            handle.retire(region, memory, buffer.clone());
        }
    }

    fn dropped(self: Arc<Self>, region: &RegisteredRegion) {
        self.withdraw(region.descriptor.number);
        region.retire();
        // No peer knows a local-only region.
        if region.descriptor.rights != Rights::NONE {
            self.release(region.descriptor.number, region.buffer.clone());
        }
    }
}
