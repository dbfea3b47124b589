//! Registration of memory with a fabric.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use fabric::{Access, Domain, MemoryKind, MemoryRegion, RegistrationFlags, RegistrationOptions};
use gpu::{DeviceName, Implementation, Memory};

use crate::region::{Buffer, Rights};

/// The driver exports dma-bufs of whole pages of the host.
const PAGE: u64 = 4096;

/// A buffer as memory of a fabric.
struct RegisteredBuffer(Arc<Buffer>);

// SAFETY: a buffer's memory stays mapped at its address until its last handle is dropped, and this
// keeps one; its bytes are copied, never borrowed.
unsafe impl fabric::Memory for RegisteredBuffer {
    fn as_ptr(&self) -> *mut u8 {
        let address = match &*self.0 {
            Buffer::Device(memory) => memory.address(),
            Buffer::Host(buffer) => buffer.address(),
        };
        address as *mut u8
    }

    fn len(&self) -> usize {
        self.0.length() as usize
    }

    fn kind(&self) -> MemoryKind {
        device_memory(&self.0).map_or(MemoryKind::Host, |(_, device)| kind_of(device))
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
pub fn device_memory(buffer: &Buffer) -> Option<(&Memory, DeviceName)> {
    match buffer {
        Buffer::Device(memory) => memory.device().map(|device| (memory, device)),
        Buffer::Host(_) => None,
    }
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
    let options = options.into();
    let Some((memory, _)) = device_memory(&buffer) else {
        return domain.register(RegisteredBuffer(buffer), options);
    };
    if domain.capabilities().takes_dma_buf()
        && let Some((file, offset)) = export(memory)
    {
        let registered = RegisteredBuffer(Arc::clone(&buffer));
        // SAFETY: the driver exported the memory's own pages, and this offset is its first byte.
        let registered =
            unsafe { domain.register_exported(registered, file.as_fd(), offset, options.clone()) };
        match registered {
            Ok(region) => return Ok(region),
            Err(error) => tracing::debug!(%error, "dma-buf refused: registering the address"),
        }
    }
    // Not every provider knows the flag, and their errors differ.
    let device_only = options.clone().flags(RegistrationFlags::DEVICE_ONLY);
    let registered = domain.register(RegisteredBuffer(Arc::clone(&buffer)), device_only);
    registered.or_else(|_| domain.register(RegisteredBuffer(buffer), options))
}

/// The dma-buf of the pages that contain the memory, and its offset in them. None if the device has
/// none, or the pages exceed the allocation.
fn export(memory: &Memory) -> Option<(OwnedFd, u64)> {
    let device = memory.mapped_for();
    if !device.properties().handle_types.dma_buf {
        return None;
    }
    let attributes = device.attributes(memory.address()).ok()?;
    let first = memory.address() / PAGE * PAGE;
    let end = (memory.address() + memory.length()).next_multiple_of(PAGE);
    // Of mapped memory the driver knows only the piece at the address.
    let is_inside = first >= attributes.base && end <= attributes.base + attributes.length;
    let is_whole = first == memory.address() && end == first + memory.length();
    if !is_inside && !is_whole {
        return None;
    }
    device.dma_buf(first, end - first).ok().map(|file| (file, memory.address() - first))
}
