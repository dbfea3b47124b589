//! Memory that agents register.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpu::{DEFAULT_TIMEOUT, Device, Range, View};
use ipc::Interruption;
use pubsub::MemoryLocation;
use transfer::{Buffer, HostBuffer};

use crate::caller_memory;
use crate::exclusive::interrupted;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{Array, CallerRange, Out, OutArray, Text, UserData, export};
use crate::handle::{Handle, kind};
use crate::registry;
use crate::release::{OptionalReleaseCallback, Release};
use crate::status::Status;
use crate::timeout::Timeout;

/// How often closing adopted memory checks whether it is still used.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Whose memory it is.
#[derive(Debug)]
enum Owner {
    Library,
    /// The caller, for whom closing waits. The value exists as long as the memory is used.
    Waiting(Weak<()>),
    /// The caller, whose callback is called when the memory is not used any more.
    Notified,
}

/// Memory of the library, or adopted from the caller.
#[derive(Debug)]
pub(crate) struct OpenMemory {
    address: u64,
    length: u64,
    /// None from the start of its close on.
    buffer: Mutex<Option<Buffer>>,
    owner: Owner,
}

kind!(OpenMemory, 9, "memory");

impl OpenMemory {
    fn new(buffer: Buffer, owner: Owner) -> Self {
        let (address, length) = match &buffer {
            Buffer::Host(buffer) => (buffer.address(), buffer.length()),
            Buffer::Device(memory) => (memory.address(), memory.length()),
        };
        Self { address, length, buffer: Mutex::new(Some(buffer)), owner }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Buffer>> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another handle to the memory.
    pub(crate) fn buffer(&self, operation: Operation) -> Result<Buffer> {
        self.lock()
            .clone()
            .ok_or_else(|| Failure::new(Status::Closed, operation, "the memory is being closed"))
    }

    /// Another handle to memory that other processes can map.
    pub(crate) fn mappable(&self, operation: Operation) -> Result<Buffer> {
        match (self.buffer(operation)?, &self.owner) {
            (Buffer::Host(_), Owner::Waiting(_) | Owner::Notified) => {
                let detail = "other processes cannot map adopted memory of the host. Copy it into \
                              memory of fabricast_memory_allocate";
                Err(Failure::invalid(operation, detail))
            }
            (buffer, _) => Ok(buffer),
        }
    }

    fn write(&self, operation: Operation, offset: usize, data: &[u8]) -> Result<()> {
        match self.buffer(operation)? {
            Buffer::Host(buffer) => buffer.write(offset as u64, data)?,
            Buffer::Device(memory) => {
                let to = memory.slice(offset as u64, data.len() as u64)?;
                memory.mapped_for().default_stream()?.upload(&to, data, DEFAULT_TIMEOUT)?;
            }
        }
        Ok(())
    }

    fn read(&self, operation: Operation, offset: usize, into: &mut [u8]) -> Result<()> {
        match self.buffer(operation)? {
            Buffer::Host(buffer) => buffer.read(offset as u64, into)?,
            Buffer::Device(memory) => {
                let from = memory.slice(offset as u64, into.len() as u64)?;
                memory.mapped_for().default_stream()?.download(&from, into, DEFAULT_TIMEOUT)?;
            }
        }
        Ok(())
    }

    /// Ends its use, and waits until nothing uses adopted memory.
    fn end_use(&self, operation: Operation, timeout: Timeout) -> Result<()> {
        let buffer = self.lock().take();
        // Without the lock: a callback of the caller may be called.
        drop(buffer);
        let Owner::Waiting(owner) = &self.owner else { return Ok(()) };
        let (end, interruption) = (timeout.end(), Interruption::watch());
        while owner.strong_count() > 0 {
            let status = match timeout {
                Timeout::Now => Status::WouldBlock,
                _ if Instant::now() >= end => Status::DeadlineExceeded,
                _ if interruption.occurred() => return Err(interrupted(operation)),
                _ => {
                    ipc::sleep_interruptible(CHECK_INTERVAL);
                    continue;
                }
            };
            let detail = format!(
                "its {} bytes are used by a region, a route, a share, a process that opened it, or an \
                 operation in flight. Close these, and then the memory again",
                self.length
            );
            return Err(Failure::new(status, operation, detail));
        }
        Ok(())
    }
}

/// Closes handles that the caller does not get.
fn close_all(operation: Operation, opened: &[*mut OpenMemory]) {
    for raw in opened {
        let closed = Handle::of_pointer(operation, *raw)
            .and_then(|handle| registry::close(operation, Some(handle)));
        debug_assert!(closed.is_ok());
    }
}

export! {
    /// Allocates memory that peers can map.
    fn fabricast_memory_allocate(
        location: Text<'_>,
        length: usize,
        memory: Out<'_, *mut OpenMemory>,
    ) -> i32, c"allocate memory" {
        let location = location.get(OPERATION, "location")?.unwrap_or("host");
        let location: MemoryLocation = location.parse()?;
        if length == 0 || length > isize::MAX as usize {
            return Err(Failure::invalid(OPERATION, format_args!("memory of {length} bytes")));
        }
        let buffer = match location.device()? {
            None => HostBuffer::new(length as u64)?.into(),
            Some(name) => Device::open(name)?.allocate_shared(length as u64, &[])?.into(),
        };
        memory.put(registry::open(OPERATION, OpenMemory::new(buffer, Owner::Library))?)
    }

    fn fabricast_memory_adopt(
        pointer: CallerRange<'_>[length],
        memory: Out<'_, *mut OpenMemory>,
    ) -> i32, c"adopt memory" {
        let used = Arc::new(());
        let owner = Owner::Waiting(Arc::downgrade(&used));
        let buffer = caller_memory::adopt_memory(OPERATION, pointer, used)?;
        memory.put(registry::open(OPERATION, OpenMemory::new(buffer, owner))?)
    }

    /// Adopts memory of the caller, until the callback is called.
    fn fabricast_memory_adopt_with_release(
        pointer: CallerRange<'_>[length],
        release: OptionalReleaseCallback,
        user_data: UserData,
        memory: Out<'_, *mut OpenMemory>,
    ) -> i32, c"adopt memory" {
        let release = Arc::new(Release::new(OPERATION, release, user_data)?);
        let buffer = caller_memory::adopt_memory(OPERATION, pointer, Arc::clone(&release))?;
        let opened = registry::open(OPERATION, OpenMemory::new(buffer, Owner::Notified))?;
        release.arm();
        memory.put(opened)
    }

    /// Adopts many ranges of a device's memory, grouped by their allocations.
    fn fabricast_memory_adopt_views(
        ranges: Array<'_, Range>,
        count: usize,
        memories: OutArray<'_, *mut OpenMemory>,
        capacity: usize,
        adopted: Out<'_, usize>,
        views: OutArray<'_, View>,
    ) -> i32, c"adopt views of memory" {
        let ranges = ranges.get(OPERATION, "ranges", count)?;
        let (device, groups, places) = caller_memory::group_views(OPERATION, ranges)?;
        if groups.len() > capacity {
            let detail = format!("the ranges are in {} memories, memories has {capacity} elements", groups.len());
            return Err(Failure::new(Status::TooMany, OPERATION, detail));
        }
        views.put(OPERATION, "views", count, &places)?;
        let mut opened = Vec::new();
        for group in groups {
            let used = Arc::new(());
            let owner = Owner::Waiting(Arc::downgrade(&used));
            let open = caller_memory::adopt_range(&device, group, used)
                .and_then(|buffer| registry::open(OPERATION, OpenMemory::new(buffer, owner)));
            match open {
                Ok(handle) => opened.push(handle),
                Err(failure) => {
                    close_all(OPERATION, &opened);
                    return Err(failure);
                }
            }
        }
        memories.put(OPERATION, "memories", capacity, &opened).inspect_err(|_| close_all(OPERATION, &opened))?;
        adopted.put(opened.len())
    }

    fn fabricast_memory_address(
        memory: Handle<OpenMemory>,
        address: Out<'_, *mut c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get address of memory" {
        let memory = memory.find(OPERATION)?;
        address.put(ptr::with_exposed_provenance_mut(memory.address as usize))?;
        length.put(memory.length as usize)
    }

    fn fabricast_memory_write(
        memory: Handle<OpenMemory>,
        offset: usize,
        data: &[u8] [length],
    ) -> i32, c"write into memory" {
        memory.find(OPERATION)?.write(OPERATION, offset, data)
    }

    fn fabricast_memory_read(
        memory: Handle<OpenMemory>,
        offset: usize,
        into: &mut [u8] [length],
    ) -> i32, c"read memory" {
        memory.find(OPERATION)?.read(OPERATION, offset, into)
    }

    /// Closes memory. If adopted memory is still used, the handle stays open.
    fn fabricast_memory_close(
        memory: Option<Handle<OpenMemory>>,
        timeout: Timeout,
    ) -> i32, c"close memory" {
        let Some(memory) = memory else { return Ok(()) };
        memory.find(OPERATION)?.end_use(OPERATION, timeout)?;
        registry::close(OPERATION, Some(memory))
    }
}
