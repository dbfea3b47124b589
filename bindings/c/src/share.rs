//! Memory that several processes use without a copy: shared and opened by a token.

use std::ffi::{CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu::Device;
use pubsub::{MemoryLocation, NodeOptions};
use transfer::{Buffer, OpenedBuffer, Share, SharedBuffer, Tensor};

use crate::failure::{Failure, Operation, Result, c_text};
use crate::ffi::{Out, OutStruct, Text, export, put_bytes};
use crate::handle::{Handle, kind};
use crate::layout::{RawTensor, flag};
use crate::memory::OpenMemory;
use crate::registry::{self, export_close};
use crate::timeout::Timeout;

/// Memory that this process shares.
#[derive(Debug)]
pub(crate) struct OpenShare {
    token: Vec<u8>,
    /// None after it was left to one receiver.
    share: Mutex<Option<Share>>,
}

kind!(OpenShare, 13, "share");
export_close!(OpenShare, fabricast_share_close, c"close share");

impl OpenShare {
    fn new(share: Share) -> Self {
        Self { token: share.token().to_vec(), share: Mutex::new(Some(share)) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Share>> {
        self.share.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Limits the share to one opening.
    fn limit_to_one(&self) -> transfer::Result<()> {
        self.lock().as_ref().map_or(Ok(()), Share::limit_to_one)
    }
}

/// Memory of another process.
#[derive(Debug)]
pub(crate) struct OpenedMemory {
    opened: OpenedBuffer,
    location: CString,
}

kind!(OpenedMemory, 14, "shared memory");
export_close!(OpenedMemory, fabricast_opened_close, c"close shared memory");

impl OpenedMemory {
    fn new(opened: OpenedBuffer) -> Self {
        let device = opened.memory().and_then(gpu::Memory::device);
        let location = device.map_or(MemoryLocation::Host, MemoryLocation::Device);
        Self { opened, location: c_text(location.to_string()) }
    }
}

fn directory(operation: Operation, text: Text<'_>) -> Result<PathBuf> {
    let text = text.get(operation, "directory")?;
    Ok(text.map_or_else(NodeOptions::default_directory, PathBuf::from))
}

/// A further device that accesses the memory; None for NULL and for the host.
fn user(operation: Operation, text: Text<'_>) -> Result<Option<Device>> {
    let location = text.get(operation, "device")?.map(str::parse::<MemoryLocation>).transpose()?;
    let name = location.map(MemoryLocation::device).transpose()?.flatten();
    Ok(name.map(Device::open).transpose()?)
}

export! {
    fn fabricast_tensor_init(
        tensor: OutStruct<'_, RawTensor<'_>>[size],
    ) -> i32, c"initialize tensor" {
        tensor.put_defaults()
    }

    fn fabricast_memory_share(
        memory: Handle<OpenMemory>,
        tensor: Option<RawTensor<'_>>,
        read_only: u32,
        directory: Text<'_>,
        share: Out<'_, *mut OpenShare>,
    ) -> i32, c"share memory" {
        let memory = memory.find(OPERATION)?;
        let buffer = memory.mappable(OPERATION)?;
        let tensor = match tensor {
            Some(tensor) => tensor.to_tensor(OPERATION)?,
            None => Tensor::bytes(buffer.length()),
        };
        let is_read_only = flag(OPERATION, "read_only", read_only)?;
        let directory = self::directory(OPERATION, directory)?;
        let shared = match is_read_only {
            true => SharedBuffer::read_only(buffer, &tensor),
            false => SharedBuffer::new(buffer, &tensor),
        }?;
        let opened = OpenShare::new(transfer::share(&directory, shared)?);
        share.put(registry::open(OPERATION, opened)?)
    }

    fn fabricast_share_token(
        share: Handle<OpenShare>,
        buffer: &mut [u8] [capacity],
        length: Out<'_, usize>,
    ) -> i32, c"get token of share" {
        length.put(put_bytes(OPERATION, &share.find(OPERATION)?.token, buffer)?)
    }

    fn fabricast_share_limit_to_one(
        share: Handle<OpenShare>,
    ) -> i32, c"limit share to one receiver" {
        Ok(share.find(OPERATION)?.limit_to_one()?)
    }

    /// Leaves a share to one receiver. Without a buffer the share is unchanged.
    fn fabricast_share_for_one_receiver(
        share: Handle<OpenShare>,
        buffer: &mut [u8] [capacity],
        length: Out<'_, usize>,
    ) -> i32, c"leave share to receiver" {
        let is_left = !buffer.is_empty();
        let found = share.find(OPERATION)?;
        let count = put_bytes(OPERATION, &found.token, buffer)?;
        if is_left {
            found.limit_to_one()?;
            if let Some(share) = share.close(OPERATION)?.lock().take() {
                share.leave();
            }
        }
        length.put(count)
    }

    fn fabricast_shared_memory_open(
        token: &[u8] [length],
        directory: Text<'_>,
        device: Text<'_>,
        timeout: Timeout,
        opened: Out<'_, *mut OpenedMemory>,
    ) -> i32, c"open shared memory" {
        let directory = self::directory(OPERATION, directory)?;
        let device = user(OPERATION, device)?;
        let found = transfer::open(token, &directory, device.as_ref(), timeout.as_duration());
        let found = found.map_err(|error| Failure::of_wait(timeout, None, error))?;
        opened.put(registry::open(OPERATION, OpenedMemory::new(found))?)
    }

    fn fabricast_opened_address(
        opened: Handle<OpenedMemory>,
        address: Out<'_, *mut c_void>,
        length: Out<'_, usize>,
    ) -> i32, c"get address of shared memory" {
        let (start, count) = match opened.find(OPERATION)?.opened.buffer() {
            Buffer::Host(buffer) => (buffer.address(), buffer.length()),
            Buffer::Device(memory) => (memory.address(), memory.length()),
        };
        address.put(ptr::with_exposed_provenance_mut(start as usize))?;
        length.put(count as usize)
    }

    fn fabricast_opened_location(
        opened: Handle<OpenedMemory>,
        location: Out<'_, *const c_char>,
    ) -> i32, c"get location of shared memory" {
        location.put(opened.find(OPERATION)?.location.as_ptr())
    }

    fn fabricast_opened_tensor(
        opened: Handle<OpenedMemory>,
        tensor: OutStruct<'_, RawTensor<'_>>[size],
    ) -> i32, c"get tensor of shared memory" {
        let opened = opened.find(OPERATION)?;
        let size = tensor.size();
        tensor.put(RawTensor::of(size, opened.opened.tensor()))
    }

    /// Did the owner share it for readers only?
    fn fabricast_opened_is_read_only(
        opened: Handle<OpenedMemory>,
        is_read_only: Out<'_, u64>,
    ) -> i32, c"get rights of shared memory" {
        is_read_only.put(u64::from(opened.find(OPERATION)?.opened.is_read_only()))
    }
}
