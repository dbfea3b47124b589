//! Registration of memory with a fabric.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fabric::{Access, Domain, MemoryKind, MemoryRegion, RegistrationFlags, RegistrationOptions};
use gpu::{DeviceName, Implementation, Memory};

use crate::region::{Buffer, Rights};

/// The driver exports dma-bufs of whole pages of the host.
const PAGE: u64 = 4096;

/// A range of a buffer as memory of a fabric. Mapped memory may grow: the range does not.
struct RegisteredBuffer {
    buffer: Arc<Buffer>,
    offset: u64,
    length: u64,
}

// SAFETY: the range lies in the buffer, whose memory stays mapped at its address until its last handle
// is dropped, and never gets shorter; this keeps a handle. Its bytes are copied, never borrowed.
unsafe impl fabric::Memory for RegisteredBuffer {
    fn as_ptr(&self) -> *mut u8 {
        (self.buffer.address() + self.offset) as *mut u8
    }

    fn len(&self) -> usize {
        self.length as usize
    }

    fn kind(&self) -> MemoryKind {
        device_memory(&self.buffer).map_or(MemoryKind::Host, |(_, device)| kind_of(device))
    }
}

fn kind_of(device: DeviceName) -> MemoryKind {
    let number = device.number.cast_signed();
    match device.implementation {
        Implementation::Cuda => MemoryKind::Cuda(number),
        Implementation::Emulated => MemoryKind::Emulated(number),
    }
}

/// The memory and its device; None for host memory.
pub(crate) fn device_memory(buffer: &Buffer) -> Option<(&Memory, DeviceName)> {
    let memory = buffer.memory()?;
    memory.device().map(|device| (memory, device))
}

/// The access of peers with these rights, or of local-only memory.
pub(crate) fn access(rights: Option<Rights>) -> Access {
    let mut access = Access::LOCAL;
    if let Some(rights) = rights {
        access.set(Access::REMOTE_READ, rights.read);
        access.set(Access::REMOTE_WRITE, rights.write);
    }
    access
}

/// Registers a buffer. Device memory needs a domain that registers it.
///
/// # Errors
/// Those of the provider.
pub fn register(
    domain: &Domain,
    buffer: Arc<Buffer>,
    options: impl Into<RegistrationOptions>,
) -> fabric::Result<MemoryRegion> {
    let range = 0..buffer.length();
    register_range(domain, buffer, range, options)
}

/// Registers the bytes of a buffer that lie in this range.
///
/// # Errors
/// Those of the provider.
pub fn register_range(
    domain: &Domain,
    buffer: Arc<Buffer>,
    range: Range<u64>,
    options: impl Into<RegistrationOptions>,
) -> fabric::Result<MemoryRegion> {
    let options = options.into();
    let offset = range.start.min(buffer.length());
    let length = range.end.min(buffer.length()).saturating_sub(offset);
    let registered = || RegisteredBuffer { buffer: Arc::clone(&buffer), offset, length };
    let Some((memory, _)) = device_memory(&buffer) else {
        return domain.register(registered(), options);
    };
    if domain.capabilities().takes_dma_buf()
        && let Some((file, first)) = export(memory, offset, length)
    {
        // SAFETY: the driver exported the memory's own pages, and this offset is its first byte.
        let exported =
            unsafe { domain.register_exported(registered(), file.as_fd(), first, options.clone()) };
        match exported {
            Ok(region) => return Ok(region),
            Err(error) => tracing::debug!(%error, "dma-buf refused: registering the address"),
        }
    }
    // Not every provider knows the flag, and their errors differ.
    let device_only = options.clone().flags(RegistrationFlags::DEVICE_ONLY);
    domain.register(registered(), device_only).or_else(|_| domain.register(registered(), options))
}

/// The dma-buf of the pages that contain a range of memory, and its offset in them. None if the device
/// has none, or the pages exceed the allocation.
fn export(memory: &Memory, offset: u64, length: u64) -> Option<(OwnedFd, u64)> {
    let device = memory.mapped_for();
    if !device.properties().handle_types.dma_buf {
        return None;
    }
    let address = memory.address() + offset;
    let attributes = device.attributes(address).ok()?;
    let first = address / PAGE * PAGE;
    let end = (address + length).next_multiple_of(PAGE);
    // Of mapped memory the driver knows only the piece at the address.
    let is_inside = first >= attributes.base && end <= attributes.base + attributes.length;
    let is_whole = first == address && end == first + length;
    if !is_inside && !is_whole {
        return None;
    }
    device.dma_buf(first, end - first).ok().map(|file| (file, address - first))
}
