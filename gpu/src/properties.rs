//! What is known of a device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names a device for every process of the machine, and in its containers.
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

/// Where a device sits on the PCI bus.
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

/// How a device's memory can leave its process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandleTypes {
    /// As a file descriptor: memory that was allocated to be shared.
    pub file_descriptor: bool,
    /// As 64 bytes: memory that was allocated the plain way.
    pub legacy: bool,
    /// As a fabric handle, to another machine of the same NVLink domain.
    pub fabric: bool,
    /// As a dma-buf, for network cards.
    pub dma_buf: bool,
}

/// What is known of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The product's name.
    pub product: String,
    /// Its name on this machine.
    pub uuid: Uuid,
    /// Where it sits; None for one that sits nowhere.
    pub pci: Option<PciAddress>,
    /// The NUMA node that it sits at, if the system knows.
    pub numa_node: Option<u32>,
    /// All of its memory, in bytes.
    pub total_memory: u64,
    /// Shareable memory comes in multiples of this, in bytes.
    pub granularity: u64,
    /// Engines that copy while it computes.
    pub copy_engines: u32,
    /// Processors.
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Its driver, as `13.0`.
    pub driver: String,
    /// How memory can leave the process.
    pub handle_types: HandleTypes,
}

/// How a device reaches another one's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// They are the same device.
    Same,
    /// Directly: by NVLink or PCIe.
    Direct {
        /// Whether atomic operations work over the link, as NVLink's do.
        atomics: bool,
    },
    /// Not at all: every byte would pass through the host.
    None,
}
