//! The driver's information about an address.

use crate::device::Device;
use crate::device_name::DeviceName;
use crate::{cuda, emulated};

/// The allocator of memory, which decides how it can be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Allocator {
    /// `cudaMalloc` and similar calls: exported whole, by a legacy handle.
    Plain,
    /// Physical memory that was created, then mapped: exported by a file descriptor, if it was
    /// created with that handle type.
    Mapped {
        /// Whether it can be exported as a file descriptor.
        exportable: bool,
    },
    /// A stream-ordered pool: not exportable.
    Pool,
    /// Managed memory, which moves between host and device.
    Managed,
    /// Host memory that was registered or allocated with the driver.
    Host,
}

/// The driver's information about an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointerAttributes {
    /// The device that it is located on; None for the host.
    pub device: Option<DeviceName>,
    /// The allocator.
    pub allocator: Allocator,
    /// The start of its allocation.
    pub base: u64,
    /// Length of its allocation, in bytes.
    pub length: u64,
    /// Identifies the allocation: another allocation at the same address has another number.
    pub buffer_id: u64,
}

impl PointerAttributes {
    /// Information about an address in this process, on any device. None if no driver knows it:
    /// then it is host memory or unmapped.
    ///
    /// CUDA is queried only if a library in this process has loaded it, and is not loaded for
    /// that: without it there is no memory of its devices.
    ///
    /// ```
    /// use gpu::{Allocator, PointerAttributes, Device};
    /// let device = Device::open("emulated:0".parse()?)?;
    /// let memory = device.allocate(1 << 20)?;
    /// let found = PointerAttributes::of(memory.address() + 100).expect("memory of a device");
    /// assert_eq!((found.device, found.base), (Some(device.name()), memory.address()));
    /// let on_the_host = 7_u8;
    /// assert_eq!(PointerAttributes::of(&raw const on_the_host as u64), None);
    /// # Ok::<(), gpu::Error>(())
    /// ```
    #[must_use]
    pub fn of(address: u64) -> Option<Self> {
        if let Some(found) = emulated::attributes(address) {
            return Some(found);
        }
        let name = match cuda::locate(address)? {
            cuda::PointerLocation::Host { base, length } => {
                let allocator = Allocator::Host;
                return Some(Self { device: None, allocator, base, length, buffer_id: 0 });
            }
            cuda::PointerLocation::Device(number) => DeviceName::cuda(number),
        };
        Device::open(name).and_then(|device| device.attributes(address)).ok()
    }
}
