//! What the driver knows of an address.

use crate::device::Device;
use crate::device_name::DeviceName;
use crate::{cuda, emulated};

/// Who allocated memory, which decides how it can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Allocator {
    /// `cudaMalloc` and the like: whole, by a legacy handle.
    Plain,
    /// Physical memory that was created, then mapped: by a file descriptor, if it was
    /// created so.
    Mapped {
        /// Whether it can leave as a file descriptor.
        exportable: bool,
    },
    /// A stream-ordered pool: by neither.
    Pool,
    /// Memory that moves between host and device by itself.
    Managed,
    /// Memory of the host that was registered or allocated with the driver.
    Host,
}

/// What the driver knows of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointerAttributes {
    /// The device that it lies on; None for the host.
    pub device: Option<DeviceName>,
    /// Who allocated it.
    pub allocator: Allocator,
    /// The start of its allocation.
    pub base: u64,
    /// Length of its allocation, in bytes.
    pub length: u64,
    /// Names the allocation: another one at the same address has another number.
    pub buffer_id: u64,
}

impl PointerAttributes {
    /// What is known of an address in this process, on whichever device it lies. None if no driver
    /// knows it: then it is the host's, or nobody's.
    ///
    /// CUDA is asked if something in this process has loaded it, and is not loaded for that: without
    /// it there is no memory of its devices.
    ///
    /// ```
    /// use gpu::{Allocator, PointerAttributes, Device};
    /// let device = Device::open("emulated:0".parse()?)?;
    /// let memory = device.allocate(1 << 20)?;
    /// let found = PointerAttributes::of(memory.address() + 100).expect("a device's");
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
