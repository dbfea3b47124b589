//! The properties of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Identifies a device in every process of the machine, and in its containers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Uuid(pub [u8; 16]);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The position of a device on the PCI bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PciAddress {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device.
    pub device: u32,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.0", self.domain, self.bus, self.device)
    }
}

/// How a device's memory can be exported from its process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandleTypes {
    /// As a file descriptor: memory that was allocated as shareable.
    pub file_descriptor: bool,
    /// As 64 bytes: `cuMemAlloc` memory.
    pub legacy: bool,
    /// As a fabric handle, to another machine of the same NVLink domain.
    pub fabric: bool,
    /// As a dma-buf, for network cards.
    pub dma_buf: bool,
}

/// The properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The product name.
    pub product: String,
    /// Its UUID, valid on the whole machine.
    pub uuid: Uuid,
    /// Its PCI position; None for an emulated device.
    pub pci: Option<PciAddress>,
    /// Its NUMA node, if the system knows it.
    pub numa_node: Option<u32>,
    /// Its total memory, in bytes.
    pub total_memory: u64,
    /// Shareable memory comes in multiples of this, in bytes.
    pub granularity: u64,
    /// Engines that copy while kernels run.
    pub copy_engines: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// The CUDA version of its driver, as `13.0`.
    pub driver: String,
    /// How memory can be exported from the process.
    pub handle_types: HandleTypes,
}

/// How a device accesses another one's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// They are the same device.
    Same,
    /// Directly: by NVLink or PCIe.
    Direct {
        /// Whether atomic operations work over the link, as with NVLink.
        atomics: bool,
    },
    /// No direct access: every byte would pass through the host.
    None,
}
