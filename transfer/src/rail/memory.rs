//! Registration of memory with a fabric.
#![allow(unsafe_code)]

use std::sync::Arc;

use fabric::{Access, Domain, MemoryRegion, RegistrationOptions};

use crate::region::{Buffer, Rights};

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
}

/// Can it be registered? Device memory cannot: no provider is known to deliver data before its
/// completion.
pub(crate) fn can_be_registered(buffer: &Buffer) -> bool {
    match buffer {
        Buffer::Device(memory) => memory.device().is_none(),
        Buffer::Host(_) => true,
    }
}

/// The access of peers with these rights, or of local-only memory.
pub(super) fn access(rights: Option<Rights>) -> Access {
    let mut access = Access::LOCAL;
    if let Some(rights) = rights {
        access.set(Access::REMOTE_READ, rights.read);
        access.set(Access::REMOTE_WRITE, rights.write);
    }
    access
}

/// Registers a buffer that [can be registered](can_be_registered).
pub(super) fn register(
    domain: &Domain,
    buffer: Arc<Buffer>,
    options: impl Into<RegistrationOptions>,
) -> fabric::Result<MemoryRegion> {
    domain.register(RegisteredBuffer(buffer), options)
}
