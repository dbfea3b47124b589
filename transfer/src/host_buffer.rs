//! Host memory that other processes can map.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use gpu::{Block, Device, Implementation, Memory};
use ipc::{Layout, LimitReached, ReadOnlySegment, Segment};
use threads::lock;

use crate::blocks::Run;
use crate::error::{Context, Error, ErrorKind, Result, failed};
use crate::host_copy::{CacheUse, copy, copy_rows};
use crate::pinned::{Backing, Pinned};
use crate::private_memory::PrivateMemory;

const LAYOUT: Layout = Layout::new("host buffer", 1);

/// Host memory that other processes can map. Clones of the handle share the memory.
///
/// A peer may change the bytes at any time, so they are copied in and out, never borrowed.
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
    body: Arc<Backing>,
    length: u64,
    /// Pinned for all devices of an implementation, at the first use by one of them.
    pinned: Mutex<HashMap<Implementation, Memory>>,
}

/// A handle that does not keep the buffer.
#[derive(Debug)]
pub(crate) struct WeakHostBuffer(Weak<Inner>);

impl WeakHostBuffer {
    pub(crate) fn upgrade(&self) -> Option<HostBuffer> {
        self.0.upgrade().map(HostBuffer)
    }
}

impl HostBuffer {
    /// Allocates zeroed memory. Pages are allocated when they are first touched.
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) if there is not enough memory.
    pub fn new(length: u64) -> Result<Self> {
        let operation = "allocate host memory";
        let bytes = usize::try_from(length).map_err(failed(operation))?;
        if bytes == 0 {
            return Err(failed(operation)("0 bytes"));
        }
        let segment = Segment::create(LAYOUT, bytes).map_err(failed(operation))?;
        segment.mark_ready();
        Ok(Self::of(Backing::Shared(segment), length))
    }

    fn of(body: impl Into<Arc<Backing>>, length: u64) -> Self {
        Self(Arc::new(Inner { body: body.into(), length, pinned: Mutex::default() }))
    }

    /// Wraps existing memory: the bytes of a vector, which [`into_vec`](Self::into_vec) returns.
    /// Only this process can map them. Agents of the same process reach them, and peers through a
    /// fabric whose provider registers such memory.
    ///
    /// ```
    /// use transfer::{Agent, AgentOptions, HostBuffer};
    /// let agent = Agent::start(AgentOptions::new("solver"))?;
    /// let field = HostBuffer::from_vec(vec![0; 1 << 16])?;
    /// let region = agent.register_local(&field)?;
    /// // … put from it, get into it …
    /// drop(region);
    /// agent.close(std::time::Duration::from_secs(1))?;
    /// let field: Vec<u8> = field.into_vec().expect("nothing else has it");
    /// assert_eq!(field.len(), 1 << 16);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) for an empty vector.
    pub fn from_vec(bytes: Vec<u8>) -> Result<Self> {
        Self::private(bytes.len(), || PrivateMemory::of_vec(bytes))
    }

    /// Wraps memory that the caller keeps: of MPI, of another allocator, of a library.
    ///
    /// ```
    /// use transfer::HostBuffer;
    /// let mut memory = vec![7_u8; 4096];
    /// // SAFETY: the buffer is dropped before the vector, which nothing else uses meanwhile.
    /// let buffer = unsafe { HostBuffer::from_pointer(memory.as_mut_ptr(), memory.len()) }?;
    /// let mut found = [0; 3];
    /// buffer.read(100, &mut found)?;
    /// assert_eq!(found, [7; 3]);
    /// drop(buffer);
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) for no bytes.
    ///
    /// # Safety
    /// All bytes from `start` on stay readable and writable until the last handle to this buffer is
    /// dropped. Regions hold handles until they are [withdrawn](crate::Agent::withdraw) and
    /// dropped; local-only and other regions until their agent was [closed](crate::Agent::close)
    /// without an error. No references to the bytes are used meanwhile.
    pub unsafe fn from_pointer(start: *mut u8, length: usize) -> Result<Self> {
        // SAFETY: the caller's promise.
        unsafe { Self::adopt(start, length, ()) }
    }

    /// Like [`from_pointer`](Self::from_pointer), for memory that `owner` keeps: it is dropped when
    /// nothing uses the memory any more, by whichever thread releases it last.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use transfer::{Agent, AgentOptions, HostBuffer};
    /// let mut memory = vec![7_u8; 4096];
    /// let (start, length) = (memory.as_mut_ptr(), memory.len());
    /// let owner = Arc::new(Mutex::new(memory)); // keeps the bytes, and is not used
    /// let weak = Arc::downgrade(&owner);
    /// let agent = Agent::start(AgentOptions::new("solver"))?;
    /// // SAFETY: the vector lives as long as the owner.
    /// let region = agent.register_local(unsafe { HostBuffer::adopt(start, length, owner) }?)?;
    /// assert!(weak.upgrade().is_some());
    /// drop(region);
    /// assert!(weak.upgrade().is_none());
    /// # Ok::<(), transfer::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](ErrorKind::Failed) for no bytes.
    ///
    /// # Safety
    /// All bytes from `start` on stay readable and writable until `owner` is dropped. No references
    /// to the bytes are used meanwhile.
    pub unsafe fn adopt(
        start: *mut u8,
        length: usize,
        owner: impl fmt::Debug + Send + Sync + 'static,
    ) -> Result<Self> {
        // SAFETY: the caller's promise.
        Self::private(length, || unsafe {
            PrivateMemory::of_pointer(start, length, Box::new(owner))
        })
    }

    fn private(length: usize, make: impl FnOnce() -> PrivateMemory) -> Result<Self> {
        if length == 0 {
            return Err(failed("wrap caller memory")("0 bytes"));
        }
        Ok(Self::of(Backing::PrivateMemory(make()), length as u64))
    }

    /// The vector that the buffer was [made of](Self::from_vec).
    ///
    /// # Errors
    /// The buffer, if it was not made of a vector, or if other handles exist: a region that was not
    /// dropped, or an agent that caches a local-only registration of it and was not closed.
    pub fn into_vec(self) -> std::result::Result<Vec<u8>, Self> {
        let Inner { body, length, pinned } = Arc::try_unwrap(self.0).map_err(Self)?;
        // Devices release it first.
        drop(pinned);
        match Arc::try_unwrap(body) {
            Ok(Backing::PrivateMemory(memory)) => {
                memory.into_vec().map_err(|memory| Self::of(Backing::PrivateMemory(memory), length))
            }
            Ok(body) => Err(Self::of(body, length)),
            Err(body) => Err(Self::of(body, length)),
        }
    }

    pub(crate) fn is_private(&self) -> bool {
        matches!(*self.0.body, Backing::PrivateMemory(_))
    }

    /// Maps memory of another process, which may have exported it read-only.
    pub(crate) fn open(file: OwnedFd, length: u64, is_writable: bool) -> Result<Self> {
        let operation = "map host memory";
        let wrong = |cause: String| Error::new(operation, ErrorKind::WrongMemory, cause);
        let opened = match is_writable {
            true => Segment::open(file, LAYOUT).map(Backing::Shared),
            false => ReadOnlySegment::open(file, LAYOUT).map(Backing::ReadOnly),
        };
        let body = opened.map_err(|error| wrong(error.to_string()))?;
        let available = body.length();
        if length == 0 || length > available {
            return Err(wrong(format!("{length} bytes described, {available} available")));
        }
        Ok(Self::of(body, length))
    }

    /// A descriptor for another process, read-only unless `is_writable`.
    pub(crate) fn export(&self, is_writable: bool) -> Result<OwnedFd> {
        let operation = "export host memory";
        match &*self.0.body {
            Backing::ReadOnly(_) => Err(failed(operation)(
                "it was opened for reading only: pass on the token by which it was opened",
            )),
            Backing::PrivateMemory(_) => Err(failed(operation)("other processes cannot map it")),
            Backing::Shared(segment) if is_writable => segment
                .as_fd()
                .try_clone_to_owned()
                .map_err(LimitReached::explain)
                .map_err(failed(operation)),
            Backing::Shared(segment) => segment.read_only().map_err(failed(operation)),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.0.length
    }

    /// Start address in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.0.body.start() as u64
    }

    pub(crate) fn downgrade(&self) -> WeakHostBuffer {
        WeakHostBuffer(Arc::downgrade(&self.0))
    }

    /// A number that is unique as long as this buffer exists.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Do other handles to it exist?
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Did its owner export it read-only?
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(*self.0.body, Backing::ReadOnly(_))
    }

    /// Pins the memory for a device.
    pub(crate) fn pinned_for(&self, device: &Device) -> Result<Memory> {
        let detail = "the device cannot register memory that can only be read";
        self.pinned_if_possible(device)?.ok_or(detail).map_err(failed("pin segment"))
    }

    /// Like [`pinned_for`](Self::pinned_for), but returns None if the memory is read-only and the
    /// device registers no such memory.
    pub(crate) fn pinned_if_possible(&self, device: &Device) -> Result<Option<Memory>> {
        let mut pinned = lock(&self.0.pinned);
        let implementation = device.name().implementation;
        if let Some(memory) = pinned.get(&implementation) {
            return Ok(Some(memory.clone()));
        }
        let operation = if self.is_private() { "pin caller memory" } else { "pin segment" };
        let memory = match device.register(Pinned(Arc::clone(&self.0.body))) {
            Err(error) if self.is_read_only() && error.kind() == gpu::ErrorKind::NotSupported => {
                return Ok(None);
            }
            registered => registered.during(operation)?,
        };
        pinned.insert(implementation, memory.clone());
        Ok(Some(memory))
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
        let from = self.checked_pointer("read host memory", offset, bytes.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { copy(bytes.as_mut_ptr(), from, bytes.len()) };
        Ok(())
    }

    /// Copies rows between two buffers, or within one.
    pub(crate) fn copy_rows(&self, from: &Self, rows: &Run, cache_use: CacheUse) -> Result<()> {
        let operation = "copy host memory";
        let Run { first: Block { to, from: start, length }, count, .. } = *rows;
        let span = |stride: u64| {
            let distance = stride.checked_mul(count.checked_sub(1)?)?;
            distance.checked_add(length)
        };
        let (Some(to_span), Some(from_span)) = (span(rows.to_stride), span(rows.from_stride))
        else {
            let detail = format!("{count} rows of {length} bytes exceed 2^64");
            return Err(Error::new(operation, ErrorKind::OutOfBounds, detail));
        };
        let to = self.writable(operation, to, to_span)?;
        let from = from.checked_pointer(operation, start, from_span)?;
        // SAFETY: as in `write`, for both: all rows are inside.
        unsafe { copy_rows(to, from, rows, cache_use) };
        Ok(())
    }

    fn writable(&self, operation: &'static str, offset: u64, length: u64) -> Result<*mut u8> {
        if self.is_read_only() {
            let detail = "its owner exported it read-only";
            return Err(Error::new(operation, ErrorKind::NotAllowed, detail));
        }
        self.checked_pointer(operation, offset, length).map(<*const u8>::cast_mut)
    }

    fn checked_pointer(
        &self,
        operation: &'static str,
        offset: u64,
        length: u64,
    ) -> Result<*const u8> {
        if offset.checked_add(length).is_none_or(|end| end > self.0.length) {
            let detail = format!("{length} bytes at offset {offset} of {}", self.0.length);
            return Err(Error::new(operation, ErrorKind::OutOfBounds, detail));
        }
        // SAFETY: inside of the body, or one byte past its end.
        Ok(unsafe { self.0.body.start().add(offset as usize) })
    }
}
