//! Memory that agents register.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use gpu::{DEFAULT_TIMEOUT, Device, Memory, Slice};
use ipc::Interruption;
use pubsub::MemoryLocation;
use transfer::{Buffer, HostBuffer};

use crate::device;
use crate::exclusive::interrupted;
use crate::failure::{Failure, Operation, Result};
use crate::ffi::{CallerRange, Out, Text, export};
use crate::handle::{Handle, kind};
use crate::registry;
use crate::status::Status;
use crate::timeout::Timeout;

/// How often closing adopted memory checks whether it is still used.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Memory of the library, or adopted from the caller.
#[derive(Debug)]
pub(crate) struct OpenMemory {
    address: u64,
    length: u64,
    /// None from the start of its close on.
    buffer: Mutex<Option<Buffer>>,
    /// Exists as long as adopted memory is used.
    owner: Option<Weak<()>>,
}

kind!(OpenMemory, 9, "memory");

impl OpenMemory {
    fn new(buffer: Buffer, owner: Option<Weak<()>>) -> Self {
        let (address, length) = match &buffer {
            Buffer::Host(buffer) => (buffer.address(), buffer.length()),
            Buffer::Device(memory) => (memory.address(), memory.length()),
        };
        Self { address, length, buffer: Mutex::new(Some(buffer)), owner }
    }

    /// Allocates memory that peers can map.
    fn allocate(location: MemoryLocation, length: usize) -> Result<Self> {
        let buffer = match location {
            MemoryLocation::Host => HostBuffer::new(length as u64)?.into(),
            MemoryLocation::Device(name) => {
                Device::open(name)?.allocate_shared(length as u64, &[])?.into()
            }
        };
        Ok(Self::new(buffer, None))
    }

    fn adopt(operation: Operation, range: CallerRange<'_>) -> Result<Self> {
        let owner = Arc::new(());
        let weak = Arc::downgrade(&owner);
        Ok(Self::new(device::adopt_memory(operation, range, owner)?, Some(weak)))
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

    fn part(memory: &Memory, offset: usize, length: usize) -> Result<Slice> {
        Ok(memory.slice(offset as u64, length as u64)?)
    }

    fn write(&self, operation: Operation, offset: usize, data: &[u8]) -> Result<()> {
        match self.buffer(operation)? {
            Buffer::Host(buffer) => buffer.write(offset as u64, data)?,
            Buffer::Device(memory) => {
                let to = Self::part(&memory, offset, data.len())?;
                memory.mapped_for().default_stream()?.upload(&to, data, DEFAULT_TIMEOUT)?;
            }
        }
        Ok(())
    }

    fn read(&self, operation: Operation, offset: usize, into: &mut [u8]) -> Result<()> {
        match self.buffer(operation)? {
            Buffer::Host(buffer) => buffer.read(offset as u64, into)?,
            Buffer::Device(memory) => {
                let from = Self::part(&memory, offset, into.len())?;
                memory.mapped_for().default_stream()?.download(&from, into, DEFAULT_TIMEOUT)?;
            }
        }
        Ok(())
    }

    /// Ends its use, and waits until nothing uses adopted memory.
    fn end_use(&self, operation: Operation, timeout: Timeout) -> Result<()> {
        drop(self.lock().take());
        let Some(owner) = &self.owner else { return Ok(()) };
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
                "its {} bytes are used by a region, a route, or an operation in flight. Close these, \
                 and then the memory again",
                self.length
            );
            return Err(Failure::new(status, operation, detail));
        }
        Ok(())
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
        memory.put(registry::open(OPERATION, OpenMemory::allocate(location, length)?)?)
    }

    /// Adopts memory of the caller.
    fn fabricast_memory_adopt(
        pointer: CallerRange<'_>[length],
        memory: Out<'_, *mut OpenMemory>,
    ) -> i32, c"adopt memory" {
        memory.put(registry::open(OPERATION, OpenMemory::adopt(OPERATION, pointer)?)?)
    }

    /// Address and length of memory.
    fn fabricast_memory_address(
        memory: Handle<OpenMemory>,
        address: Out<'_, *mut c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get address of memory" {
        let memory = memory.find(OPERATION)?;
        address.put(ptr::with_exposed_provenance_mut(memory.address as usize))?;
        length.put(memory.length as usize)
    }

    /// Copies bytes into memory.
    fn fabricast_memory_write(
        memory: Handle<OpenMemory>,
        offset: usize,
        data: &[u8] [length],
    ) -> i32, c"write into memory" {
        memory.find(OPERATION)?.write(OPERATION, offset, data)
    }

    /// Copies bytes out of memory.
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
