//! The driver's information about an address.

use crate::device_name::DeviceName;

/// The allocator of memory, which decides how it can be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Allocator {
    /// `cudaMalloc` and similar calls: exported whole, by a legacy handle.
    Plain,
    /// Physical memory that was created, then mapped: exported by a file descriptor, if it was
    /// created with that handle type.
    Mapped {
        /// True if it can be exported as a file descriptor.
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
    /// A number that no other allocation of this process has or had; 0 if the driver gives none.
    pub id: u64,
}
