//! Memory of the host that other processes can map.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use gpu::{Device, Implementation, Memory};
use ipc::{Layout, ReadOnlySegment, Segment};

use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::pinned::{pin, pin_read_only};

const LAYOUT: Layout = Layout::new("host buffer", 1);

/// Memory of the host that other processes can map. Copies of the handle are the same
/// memory.
///
/// Its bytes may change at any time by a peer's hand, so they are copied out and in, never
/// borrowed.
///
/// ```
/// use transfer::HostBuffer;
/// let buffer = HostBuffer::new(1 << 20)?;
/// buffer.write(4096, b"halo")?;
/// let mut found = [0; 4];
/// buffer.read(4096, &mut found)?;
/// assert_eq!(&found, b"halo");
/// # Ok::<(), transfer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct HostBuffer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    body: Body,
    length: u64,
    /// Pinned for all devices of an implementation, when one first needs it.
    pinned: Mutex<HashMap<Implementation, Memory>>,
}

/// Its bytes, mapped.
#[derive(Debug)]
enum Body {
    Shared(Segment),
    ReadOnly(ReadOnlySegment),
}

impl Body {
    fn start(&self) -> *const u8 {
        match self {
            Self::Shared(segment) => segment.body(),
            Self::ReadOnly(segment) => segment.body(),
        }
    }

    fn length(&self) -> u64 {
        let length = match self {
            Self::Shared(segment) => segment.body_length(),
            Self::ReadOnly(segment) => segment.body_length(),
        };
        length as u64
    }
}

impl HostBuffer {
    /// Zeroed memory. Its pages are made when they are first touched.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if there is not so much.
    pub fn new(length: u64) -> Result<Self> {
        let operation = "allocate host memory";
        let failed = |why: &dyn ToString| Error::new(operation, ErrorKind::Failed, why.to_string());
        let bytes = usize::try_from(length).map_err(|error| failed(&error))?;
        if bytes == 0 {
            return Err(failed(&"0 bytes"));
        }
        let segment = Segment::create(LAYOUT, bytes).map_err(|error| failed(&error))?;
        segment.mark_ready();
        let body = Body::Shared(segment);
        Ok(Self(Arc::new(Inner { body, length, pinned: Mutex::default() })))
    }

    /// Of another process, which may have exported it read-only.
    pub(crate) fn open(file: OwnedFd, length: u64, is_writable: bool) -> Result<Self> {
        let operation = "map host memory";
        let wrong = |why: String| Error::new(operation, ErrorKind::WrongMemory, why);
        let opened = match is_writable {
            true => Segment::open(file, LAYOUT).map(Body::Shared),
            false => ReadOnlySegment::open(file, LAYOUT).map(Body::ReadOnly),
        };
        let body = opened.map_err(|error| wrong(error.to_string()))?;
        let there = body.length();
        if length == 0 || length > there {
            return Err(wrong(format!("{length} bytes, where {there} are")));
        }
        Ok(Self(Arc::new(Inner { body, length, pinned: Mutex::default() })))
    }

    /// A descriptor for another process, by which it can be written only if that is said.
    pub(crate) fn export(&self, is_writable: bool) -> Result<OwnedFd> {
        let failed = |why: &dyn ToString| {
            Error::new("export host memory", ErrorKind::Failed, why.to_string())
        };
        match &self.0.body {
            Body::ReadOnly(_) => Err(failed(&"it is another process's")),
            Body::Shared(segment) if is_writable => {
                segment.as_fd().try_clone_to_owned().map_err(|error| failed(&error))
            }
            Body::Shared(segment) => segment.read_only().map_err(|error| failed(&error)),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// Where it starts in this process's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.body.start() as u64
    }

    /// A number that no other buffer has as long as this lives.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Has anybody else a handle to it?
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Did its owner export it read-only?
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.0.body, Body::ReadOnly(_))
    }

    /// As memory that a device copies from and to.
    pub(crate) fn pinned_for(&self, device: &Device) -> Result<Memory> {
        self.pinned_if_possible(device)?.ok_or_else(|| {
            let detail = "the device cannot register memory that can only be read";
            Error::new("pin a segment", ErrorKind::Failed, detail)
        })
    }

    /// The same, or None if it can only be read and the device registers no such memory.
    pub(crate) fn pinned_if_possible(&self, device: &Device) -> Result<Option<Memory>> {
        let mut pinned = lock(&self.0.pinned);
        let implementation = device.name().implementation;
        if let Some(memory) = pinned.get(&implementation) {
            return Ok(Some(memory.clone()));
        }
        let memory = match &self.0.body {
            Body::Shared(segment) => Some(pin(segment, device)?),
            Body::ReadOnly(segment) => pin_read_only(segment, device)?,
        };
        pinned.extend(memory.clone().map(|memory| (implementation, memory)));
        Ok(memory)
    }

    /// Copies the caller's bytes in.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.writable("write host memory", offset, bytes.len() as u64)?;
        // SAFETY: inside of the segment, which stays mapped; no reference to its bytes
        // exists anywhere.
        unsafe { copy(to, bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.place("read host memory", offset, bytes.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { copy(bytes.as_mut_ptr(), from, bytes.len()) };
        Ok(())
    }

    /// Copies between two buffers, or within one.
    pub(crate) fn copy(
        &self,
        offset: u64,
        from: &Self,
        from_offset: u64,
        length: u64,
    ) -> Result<()> {
        let operation = "copy host memory";
        let to = self.writable(operation, offset, length)?;
        let from = from.place(operation, from_offset, length)?;
        // SAFETY: as in `write`, for both.
        unsafe { copy(to, from, length as usize) };
        Ok(())
    }

    fn writable(&self, operation: &'static str, offset: u64, length: u64) -> Result<*mut u8> {
        if self.is_read_only() {
            let detail = "its owner exported it read-only";
            return Err(Error::new(operation, ErrorKind::NotAllowed, detail));
        }
        self.place(operation, offset, length).map(<*const u8>::cast_mut)
    }

    fn place(&self, operation: &'static str, offset: u64, length: u64) -> Result<*const u8> {
        if offset.checked_add(length).is_none_or(|end| end > self.0.length) {
            let detail = format!("{length} bytes from {offset} on, of {}", self.0.length);
            return Err(Error::new(operation, ErrorKind::OutOfBounds, detail));
        }
        // SAFETY: inside of the body, or one behind its end.
        Ok(unsafe { self.0.body.start().add(offset as usize) })
    }
}

/// Others may write the same bytes at the same time; what is there then is up to chance, as
/// with any memory that is shared. So the copy is left to the C library, of which the
/// compiler supposes nothing.
///
/// # Safety
/// Both ranges are mapped, and nobody holds references to their bytes but the caller.
unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::memmove(to.cast(), from.cast(), length) };
}
