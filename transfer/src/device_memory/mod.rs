//! Device memory that a fabric accesses itself, for agents and for topics.
//!
//! `registration_policy` decides by facts whether memory is registered at all, and `registration`
//! does it. A probe of its user tries whether transfers with it are right, with bytes of a
//! [`Pattern`]. `written_devices` are those whose writes are flushed.

mod allocation;
mod pattern;
pub(crate) mod registration;
mod registration_policy;
mod written_devices;

pub use allocation::Allocation;
pub use pattern::{Part, Pattern};
pub(crate) use registration::device_memory;
pub use registration::{register, register_range};
pub use registration_policy::{DeviceFacts, FabricFacts, obstacle};
pub(crate) use written_devices::WrittenDevices;
pub use written_devices::flush;

use gpu::{Device, Uuid};
use serde::{Deserialize, Serialize};

use crate::path::{Exportability, MemoryType, Registration};
use crate::region::Buffer;

/// The kind of memory at one end of a transfer: transfers between two kinds have one verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemoryEnd {
    Host,
    Device(Uuid, Allocation),
}

impl MemoryEnd {
    /// The memory of a peer's region, or hypothetical memory. None for memory that is never
    /// registered.
    pub fn of(memory_type: MemoryType, device: Option<Uuid>) -> Option<Self> {
        match (memory_type, device) {
            (MemoryType::Host(_), _) => Some(Self::Host),
            (MemoryType::Device(exportability), Some(device)) => {
                Allocation::of_exported(exportability).map(|of| Self::Device(device, of))
            }
            (MemoryType::Device(_), None) => None,
        }
    }
}

/// An end in this process, with the device of its memory.
#[derive(Debug, Clone)]
pub enum LocalEnd {
    Host,
    Device(Device, Allocation),
}

impl LocalEnd {
    /// The end of a buffer, or why no fabric accesses it.
    pub fn of(buffer: &Buffer) -> Result<Self, Registration> {
        let Some(facts) = DeviceFacts::of(buffer)? else { return Ok(Self::Host) };
        let Buffer::Device(memory) = buffer else { return Ok(Self::Host) };
        match Allocation::of(facts.allocator()) {
            Some(allocation) => Ok(Self::Device(memory.mapped_for().clone(), allocation)),
            None => Err(facts.wrong_allocator()),
        }
    }

    /// Hypothetical memory of a device.
    pub fn of_device(device: Device, exportability: Exportability) -> Option<Self> {
        Allocation::of_exported(exportability).map(|allocation| Self::Device(device, allocation))
    }

    pub fn end(&self) -> MemoryEnd {
        match self {
            Self::Host => MemoryEnd::Host,
            Self::Device(device, allocation) => {
                MemoryEnd::Device(device.properties().uuid, *allocation)
            }
        }
    }

    /// Makes writes of network cards to it visible, before they are announced.
    pub fn flush(&self) -> gpu::Result<()> {
        match self {
            Self::Host => Ok(()),
            Self::Device(device, _) => flush(device),
        }
    }
}
