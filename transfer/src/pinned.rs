//! Mapped host memory that devices copy from and to.
#![allow(unsafe_code)]

use std::sync::Arc;

use gpu::{Device, HostMapping, Memory};
use ipc::{ReadOnlySegment, Segment};

use crate::error::{Context, Result};
use crate::private_memory::PrivateMemory;

/// Mapped bytes.
#[derive(Debug)]
pub(crate) enum Backing {
    Shared(Segment),
    ReadOnly(ReadOnlySegment),
    /// Other processes cannot map it.
    PrivateMemory(PrivateMemory),
}

impl Backing {
    pub(crate) fn start(&self) -> *const u8 {
        match self {
            Self::Shared(segment) => segment.body(),
            Self::ReadOnly(segment) => segment.body(),
            Self::PrivateMemory(memory) => memory.start(),
        }
    }

    pub(crate) fn length(&self) -> u64 {
        let length = match self {
            Self::Shared(segment) => segment.body_length(),
            Self::ReadOnly(segment) => segment.body_length(),
            Self::PrivateMemory(memory) => memory.length(),
        };
        length as u64
    }
}

/// Mapped bytes that stay mapped as long as a device has them registered.
#[derive(Debug)]
pub(crate) struct Pinned(pub(crate) Arc<Backing>);

// SAFETY: a segment or private memory never moves or changes its size, and stays mapped as long as
// this holds its `Arc`. Its bytes are accessed as atomics or through pointers only.
unsafe impl HostMapping for Pinned {
    fn address(&self) -> u64 {
        self.0.start() as u64
    }

    fn length(&self) -> u64 {
        self.0.length()
    }

    fn is_read_only(&self) -> bool {
        matches!(*self.0, Backing::ReadOnly(_))
    }
}

/// Gives devices access to the body of a shared segment: copies run at full speed and
/// asynchronously.
///
/// Pinning is slow for each gibibyte, in each process: pin once, not for each message.
///
/// ```
/// use gpu::Device;
/// use ipc::{Layout, Segment};
/// let device = Device::open("emulated:0".parse()?)?;
/// let segment = Segment::create(Layout::new("example", 1), 1 << 20)?;
/// let pinned = transfer::pin(&segment, &device)?;
/// let stream = device.stream()?;
/// stream.fill(&pinned.slice(0, 100)?, 7)?;
/// stream.synchronize(gpu::DEFAULT_TIMEOUT)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Errors of the device, for example if the segment is pinned already.
pub fn pin(segment: &Segment, device: &Device) -> Result<Memory> {
    let pinned = Pinned(Arc::new(Backing::Shared(segment.clone())));
    device.register(pinned).during("pin segment")
}
