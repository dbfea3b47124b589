//! The properties of a device.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// Identifies a device in every process of the machine, and in its containers.
///
/// ```
/// let text = "66616272-6963-6173-742d-686f73742d30";
/// let uuid: gpu::Uuid = format!("GPU-{text}").parse()?;
/// assert_eq!(uuid.to_string(), text);
/// assert!("GPU-66616272".parse::<gpu::Uuid>().is_err());
/// # Ok::<(), gpu::Error>(())
/// ```
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

/// With or without `GPU-`, which `nvidia-smi` and `CUDA_VISIBLE_DEVICES` put in front.
impl FromStr for Uuid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bare = text.strip_prefix("GPU-").unwrap_or(text);
        let mut bytes = [0; 16];
        let parsed = u128::from_str_radix(&bare.replace('-', ""), 16).ok();
        bytes.copy_from_slice(&parsed.unwrap_or_default().to_be_bytes());
        let uuid = Self(bytes);
        if uuid.to_string().eq_ignore_ascii_case(bare) {
            return Ok(uuid);
        }
        let detail = format!("\"{text}\" is not the UUID of a device, as nvidia-smi -L prints it");
        Err(Error::new("parse UUID of device", ErrorKind::InvalidArgument, detail))
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
    /// By a file descriptor: memory that was allocated as shareable.
    pub file_descriptor: bool,
    /// By 64 bytes: `cuMemAlloc` memory.
    pub legacy: bool,
    /// By a fabric handle, to another machine of the same NVLink domain: memory that was allocated
    /// as shareable, if this process may create such handles (a channel of IMEX).
    pub fabric: bool,
    /// By a dma-buf, for network cards.
    pub dma_buf: bool,
}

/// Which devices see the writes of network cards to the memory of a device without a
/// [flush](crate::Device::flush_remote_writes).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// None: they may arrive after a notice that was sent later.
    #[default]
    None,
    /// The device itself.
    Owner,
    /// All devices.
    AllDevices,
}

/// How network cards access the memory of a device (GPUDirect RDMA).
///
/// ```
/// use gpu::{GpuDirect, WritesOrdering};
/// let unordered = GpuDirect { rdma: true, can_flush: false, ..GpuDirect::default() };
/// assert!(!unordered.makes_writes_visible());
/// let ordered = GpuDirect { writes_ordering: WritesOrdering::AllDevices, ..unordered };
/// assert!(ordered.makes_writes_visible() && !ordered.needs_flush());
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuDirect {
    /// Can they access memory of `cuMemAlloc`?
    pub rdma: bool,
    /// Can they access mapped (VMM) memory?
    pub rdma_mapped: bool,
    /// Can the driver flush their writes?
    pub can_flush: bool,
    /// Which devices see their writes without a flush.
    pub writes_ordering: WritesOrdering,
}

impl GpuDirect {
    /// Must the writes of network cards be flushed before they are announced? Peer devices may read
    /// them, so an order for the device itself is not enough.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        self.writes_ordering < WritesOrdering::AllDevices
    }

    /// Can the writes of network cards be made visible, by their order or by a flush?
    #[must_use]
    pub fn makes_writes_visible(&self) -> bool {
        self.can_flush || !self.needs_flush()
    }
}

/// The properties of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// The product name.
    pub product: String,
    /// The device's UUID, valid on the whole machine.
    pub uuid: Uuid,
    /// The device's PCI position; None for an emulated device.
    pub pci: Option<PciAddress>,
    /// The device's NUMA node, if the system knows it.
    pub numa_node: Option<u32>,
    /// The device's total memory, in bytes.
    pub total_memory: u64,
    /// Shareable memory comes in multiples of this, in bytes.
    pub granularity: u64,
    /// The CUDA version of its driver, as `13.0`.
    pub driver: String,
    /// How memory can be exported from the process.
    pub handle_types: HandleTypes,
    /// How network cards access its memory.
    pub gpu_direct: GpuDirect,
}

/// How a device accesses another one's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAccess {
    /// They are the same device.
    Same,
    /// Directly: by NVLink or PCIe.
    Direct,
    /// No direct access: every byte would pass through the host.
    None,
}
