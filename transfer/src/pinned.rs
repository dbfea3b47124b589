//! Shared segments that devices copy from and to.
#![allow(unsafe_code)]

use gpu::{Device, HostMapping, Memory};
use ipc::{ReadOnlySegment, Segment};

use crate::error::{Context, Result};

/// A segment's body, mapped as long as this exists.
#[derive(Debug)]
struct PinnedSegment(Segment);

// SAFETY: a segment never moves or changes its size, and stays mapped as long as a handle to it
// exists, such as this one. Its bytes are accessed as atomics or through pointers only.
unsafe impl HostMapping for PinnedSegment {
    fn address(&self) -> u64 {
        self.0.body() as u64
    }

    fn length(&self) -> u64 {
        self.0.body_length() as u64
    }
}

/// The body of a read-only segment.
#[derive(Debug)]
struct PinnedReadOnlySegment(ReadOnlySegment);

// SAFETY: as above.
unsafe impl HostMapping for PinnedReadOnlySegment {
    fn address(&self) -> u64 {
        self.0.body() as u64
    }

    fn length(&self) -> u64 {
        self.0.body_length() as u64
    }

    fn is_read_only(&self) -> bool {
        true
    }
}

/// Gives devices read access to the body of a read-only segment. None if the device registers no
/// read-only memory.
pub(crate) fn pin_read_only(segment: &ReadOnlySegment, device: &Device) -> Result<Option<Memory>> {
    match device.register(PinnedReadOnlySegment(segment.clone())) {
        Err(error) if error.kind() == gpu::ErrorKind::NotSupported => Ok(None),
        pinned => pinned.map(Some).during("pin a segment"),
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
    device.register(PinnedSegment(segment.clone())).during("pin a segment")
}
