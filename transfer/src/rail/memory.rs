//! Memory that the fabric reaches.
#![allow(unsafe_code)]

use std::sync::Arc;

use fabric::{Access, Domain, MemoryRegion, RegistrationOptions};

use crate::region::{Buffer, Rights};

/// Memory of the host, as the fabric knows it.
struct RegisteredBuffer(Arc<Buffer>);

// SAFETY: a buffer's memory stays where it is, mapped, until the last handle to it is gone, of which
// this keeps one; its bytes are reached by copying, never by reference.
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

/// Can it be registered? What lies on a device cannot: whether a completion means that the data
/// is there is not known of any provider.
pub(crate) fn can_be_registered(buffer: &Buffer) -> bool {
    match buffer {
        Buffer::Device(memory) => memory.device().is_none(),
        Buffer::Host(_) => true,
    }
}

/// What is done with memory that peers have these rights to, or that is for own use.
pub(super) fn access(rights: Option<Rights>) -> Access {
    let mut access = Access::LOCAL;
    if let Some(rights) = rights {
        access.set(Access::REMOTE_READ, rights.read);
        access.set(Access::REMOTE_WRITE, rights.write);
    }
    access
}

/// Registers it; it has to be [reachable](can_be_registered).
pub(super) fn register(
    domain: &Domain,
    buffer: Arc<Buffer>,
    options: impl Into<RegistrationOptions>,
) -> fabric::Result<MemoryRegion> {
    domain.register(RegisteredBuffer(buffer), options)
}
