//! Memory of the host that other processes can map.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use gpu::{Device, Implementation, Memory};
use ipc::{Layout, Segment};

use crate::error::{Error, ErrorKind, Result};
use crate::lock;
use crate::pinned::pin;

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
    segment: Segment,
    length: u64,
    /// Pinned for all devices of an implementation, when one first needs it.
    pinned: Mutex<HashMap<Implementation, Memory>>,
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
        Ok(Self(Arc::new(Inner { segment, length, pinned: Mutex::default() })))
    }

    /// Of another process.
    pub(crate) fn open(file: OwnedFd, length: u64) -> Result<Self> {
        let operation = "map host memory";
        let wrong = |why: String| Error::new(operation, ErrorKind::WrongMemory, why);
        let segment = Segment::open(file, LAYOUT).map_err(|error| wrong(error.to_string()))?;
        let there = segment.body_length() as u64;
        if length == 0 || length > there {
            return Err(wrong(format!("{length} bytes, where {there} are")));
        }
        Ok(Self(Arc::new(Inner { segment, length, pinned: Mutex::default() })))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.segment.as_fd()
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// Where it starts in this process's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.segment.body() as u64
    }

    /// A number that no other buffer has as long as this lives.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Has anybody else a handle to it?
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// As memory that a device copies from and to.
    pub(crate) fn pinned_for(&self, device: &Device) -> Result<Memory> {
        let mut pinned = lock(&self.0.pinned);
        let implementation = device.name().implementation;
        if let Some(memory) = pinned.get(&implementation) {
            return Ok(memory.clone());
        }
        let memory = pin(&self.0.segment, device)?;
        pinned.insert(implementation, memory.clone());
        Ok(memory)
    }

    /// Copies the caller's bytes in.
    ///
    /// # Errors
    /// [`OutOfBounds`](ErrorKind::OutOfBounds).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.place("write host memory", offset, bytes.len() as u64)?;
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
        let to = self.place(operation, offset, length)?;
        let from = from.place(operation, from_offset, length)?;
        // SAFETY: as in `write`, for both.
        unsafe { copy(to, from, length as usize) };
        Ok(())
    }

    fn place(&self, operation: &'static str, offset: u64, length: u64) -> Result<*mut u8> {
        if offset.checked_add(length).is_none_or(|end| end > self.0.length) {
            let detail = format!("{length} bytes from {offset} on, of {}", self.0.length);
            return Err(Error::new(operation, ErrorKind::OutOfBounds, detail));
        }
        // SAFETY: inside of the body, or one behind its end.
        Ok(unsafe { self.0.segment.body().add(offset as usize) })
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
