//! Memory that agents register: of the library, or adopted from other libraries.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::{Arc, Mutex};

use gpu::{DEFAULT_TIMEOUT, DeviceName, Range, View};
use ipc::PerProcess;
use pubsub::MemoryLocation;
use pyo3::prelude::*;
use threads::lock;
use transfer::{Buffer, HostBuffer};

use crate::arguments::{contiguous, data_type_of, shape_of};
use crate::array::{Array, Owner, Source};
use crate::data_type::DataType;
use crate::devices::open_device;
use crate::failure::{Failure, Result};
use crate::kept::{Kept, drop_unused};
use crate::waits::wait_for_work;

const ALLOCATE: &str = "allocate memory";
const REGISTER: &str = "register region";
/// Less memory than this is not checked: reading the limits would take longer than making it.
const MIN_CHECKED: u64 = 16 << 20;

/// Memory of this process that the library allocated or mapped, by its address, and how many have
/// it.
static MAPPED: PerProcess<Mutex<BTreeMap<u64, (Buffer, usize)>>> = PerProcess::new();

/// Memory of the library. Views of its arrays are found by their addresses as long as it exists.
#[derive(Debug)]
pub(crate) struct OwnMemory {
    buffer: Buffer,
    address: u64,
}

impl OwnMemory {
    pub(crate) fn new(buffer: Buffer) -> Self {
        let address = address_of(&buffer);
        lock(MAPPED.get()).entry(address).or_insert_with(|| (buffer.clone(), 0)).1 += 1;
        Self { buffer, address }
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        let mut mapped = lock(MAPPED.get());
        if let Some((_, users)) = mapped.get_mut(&self.address) {
            *users -= 1;
            if *users == 0 {
                let last = mapped.remove(&self.address);
                drop(mapped);
                drop(last);
            }
        }
    }
}

pub(crate) fn address_of(buffer: &Buffer) -> u64 {
    match buffer {
        Buffer::Host(buffer) => buffer.address(),
        Buffer::Device(memory) => memory.address(),
    }
}

/// The memory that contains these bytes, and their offset in it, if the library allocated or mapped
/// it.
pub(crate) fn find(address: u64, length: u64) -> Option<(Buffer, u64)> {
    let mapped = lock(MAPPED.get());
    let (start, (buffer, _)) = mapped.range(..=address).next_back()?;
    let offset = address - start;
    (offset.checked_add(length)? <= buffer.length()).then(|| (buffer.clone(), offset))
}

impl Owner for OwnMemory {
    /// Does nothing: the memory is the program's own, and nothing releases it while it is used, but
    /// the program.
    fn used_by(&self, _stream: u64) {}

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let offset = address - self.address;
        match &self.buffer {
            Buffer::Host(buffer) => Ok(buffer.read(offset, into)?),
            Buffer::Device(memory) => {
                let stream = memory.mapped_for().default_stream()?;
                let part = memory.slice(offset, into.len() as u64)?;
                Ok(stream.download(&part, into, DEFAULT_TIMEOUT)?)
            }
        }
    }

    fn buffer(&self) -> Option<Buffer> {
        Some(self.buffer.clone())
    }
}

/// Memory of the host for this many bytes, if there is as much: the system would promise more, and end
/// the process that writes it.
pub(crate) fn new_host_buffer(operation: &'static str, length: u64) -> Result<HostBuffer> {
    let available = (length >= MIN_CHECKED).then(ipc::memory::available).flatten();
    match available {
        Some(available) if available.bytes < length => {
            let cause = format!(
                "{length} bytes are more than the {} that are available {}",
                available.bytes, available.limit
            );
            Err(Failure::new("OutOfMemory", operation, cause))
        }
        _ => Ok(HostBuffer::new(length.max(1))?),
    }
}

/// Allocates an array of zeros, of float64 by default, that peers can map: in host memory, or on a
/// device such as `cuda:0`.
#[pyfunction]
#[pyo3(signature = (shape, dtype=None, *, device="host"))]
pub(crate) fn allocate(
    py: Python<'_>,
    shape: &Bound<'_, PyAny>,
    dtype: Option<&Bound<'_, PyAny>>,
    device: &str,
) -> Result<Array> {
    let data_type = dtype.map_or(Ok(DataType::FLOAT64), |dtype| data_type_of(ALLOCATE, dtype))?;
    let (layout, bytes) = contiguous(ALLOCATE, data_type, shape_of(ALLOCATE, shape)?)?;
    // Also an array without elements has an address of its own.
    let length = bytes.max(1);
    let (place, buffer) = match device.parse::<MemoryLocation>()?.device()? {
        None => (None, new_host_buffer(ALLOCATE, length)?.into()),
        Some(name) => {
            let (memory, stream) = py.detach(|| {
                let memory = open_device(name)?.allocate_shared(length, &[])?;
                let stream = memory.mapped_for().stream()?;
                stream.fill(&memory.whole(), 0)?;
                Ok::<_, Failure>((memory, stream))
            })?;
            wait_for_work(py, ALLOCATE, &stream)?;
            (Some(name), memory.into())
        }
    };
    let owner = Arc::new(OwnMemory::new(buffer));
    Ok(Array::new((owner.address, place), (data_type, layout), false, owner))
}

/// The memory of an array, which stays as long as it is used.
pub(crate) fn buffer_of(array: &Bound<'_, PyAny>) -> Result<Buffer> {
    drop_unused(array.py());
    if let Ok(own) = array.cast::<Array>()
        && let Some(buffer) = own.get().buffer()
        && own.get().is_all_of(address_of(&buffer), buffer.length())
    {
        return Ok(buffer);
    }
    let source = Source::of(REGISTER, array)?;
    let refused = |cause: &str| Err(Failure::invalid(REGISTER, cause));
    if source.is_read_only() {
        return refused("the array is read-only, and an agent may write to it: copy it");
    }
    if !source.layout().is_contiguous() || source.length() == 0 {
        return refused("the array is empty or has gaps: a region is contiguous");
    }
    let (address, length) = (source.address(), source.length());
    match source.cuda_device() {
        None => {
            let start = ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: the memory of the source, which is kept as long as it is used. Programs of
            // Python have no references to it that Rust knows.
            Ok(unsafe { HostBuffer::adopt(start, length as usize, Kept::new(source)) }?.into())
        }
        Some(number) => {
            let device = open_device(DeviceName::cuda(number))?;
            // SAFETY: the memory of the source, which is kept as long as it is used.
            Ok(unsafe { device.adopt(address, length, Kept::new(source)) }?.into())
        }
    }
}

/// The memories of many arrays on one GPU, which stay as long as they are used: one for each group of
/// arrays that share allocations. And the place of each array in these.
pub(crate) fn memories_of(arrays: &Bound<'_, PyAny>) -> Result<(Vec<Buffer>, Vec<View>)> {
    const OPERATION: &str = "register views";
    drop_unused(arrays.py());
    let (mut sources, mut ranges, mut device) = (Vec::new(), Vec::new(), None);
    for (index, array) in arrays.try_iter()?.enumerate() {
        let refused =
            |cause: &str| Err(Failure::invalid(OPERATION, format!("array {index} {cause}")));
        let source = Source::of(OPERATION, &array?)?;
        let Some(number) = source.cuda_device() else {
            return refused("is not on a GPU: register it, or the array that it is a view of");
        };
        if *device.get_or_insert(number) != number {
            return refused("is on another GPU than the first");
        }
        if source.is_read_only() {
            return refused("is read-only, and an agent may write to it: copy it");
        }
        if !source.layout().is_contiguous() || source.length() == 0 {
            return refused("is empty or has gaps: a view is contiguous");
        }
        ranges.push(Range { address: source.address(), length: source.length() });
        sources.push(source);
    }
    let Some(number) = device else { return Ok((Vec::new(), Vec::new())) };
    let device = open_device(DeviceName::cuda(number))?;
    // SAFETY: the memory of the sources, which are kept as long as it is used, and with them all of
    // their allocations.
    let adopted = unsafe { device.adopt_views(&ranges, Kept::all(sources)) }?;
    let memories = adopted.memories().iter().cloned().map(Buffer::from).collect();
    Ok((memories, adopted.views().to_vec()))
}

/// Are these bytes in memory that the library allocated or mapped, and that can be shared?
#[pyfunction]
pub(crate) fn _is_mapped(address: u64, length: u64) -> bool {
    match find(address, length) {
        Some((Buffer::Host(buffer), _)) => !buffer.is_read_only(),
        Some(_) => true,
        None => false,
    }
}
