//! What the driver knows of an address.

use crate::name::DeviceName;

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
pub struct Attributes {
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
