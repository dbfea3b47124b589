//! Memory that agents register: of the library, or adopted from other libraries.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use gpu::{DEFAULT_TIMEOUT, Device, DeviceName};
use pubsub::MemoryLocation;
use pyo3::prelude::*;
use transfer::{Buffer, HostBuffer};

use crate::array::{Array, Owner, Source, SourceDevice, data_type_of};
use crate::data_type::DataType;
use crate::failure::{Failure, Result};
use crate::kept::Kept;
use crate::layout::Layout;

const ALLOCATE: &str = "allocate memory";
const REGISTER: &str = "register region";

/// Memory of the library.
#[derive(Debug)]
struct Allocated(Buffer);

impl Owner for Allocated {
    fn read(&self, into: &mut [u8]) -> Result<()> {
        match &self.0 {
            Buffer::Host(buffer) => Ok(buffer.read(0, into)?),
            Buffer::Device(memory) => {
                let stream = memory.mapped_for().default_stream()?;
                Ok(stream.download(&memory.slice(0, into.len() as u64)?, into, DEFAULT_TIMEOUT)?)
            }
        }
    }

    fn buffer(&self) -> Option<Buffer> {
        Some(self.0.clone())
    }

    /// It is the program's own: nothing releases it while it is used, but the program.
    fn used_by(&self, _stream: u64) -> Result<()> {
        Ok(())
    }
}

/// Allocates an array of zeros that peers can map: in host memory, or on a device such as `cuda:0`.
#[pyfunction]
#[pyo3(signature = (shape, dtype=None, *, device="host"))]
pub(crate) fn allocate(
    py: Python<'_>,
    shape: Vec<u64>,
    dtype: Option<&Bound<'_, PyAny>>,
    device: &str,
) -> Result<Array> {
    let data_type = dtype.map_or(Ok(DataType::UINT8), |dtype| data_type_of(ALLOCATE, dtype))?;
    let cause = format!("shape={shape:?}: at most 16 dimensions, and 2^63 elements, not empty");
    let layout = Layout::contiguous(shape);
    let length = layout.as_ref().and_then(|layout| data_type.bytes(layout.elements()));
    let (Some(layout), Some(length @ 1..)) = (layout, length) else {
        return Err(Failure::invalid(ALLOCATE, cause));
    };
    let (address, place, buffer) = match device.parse()? {
        MemoryLocation::Host => {
            let buffer = HostBuffer::new(length)?;
            (buffer.address(), None, Buffer::Host(buffer))
        }
        MemoryLocation::Device(name) => {
            let memory = py.detach(|| {
                let memory = Device::open(name)?.allocate_shared(length, &[])?;
                let stream = memory.mapped_for().stream()?;
                stream.fill(&memory.whole(), 0)?;
                stream.synchronize(DEFAULT_TIMEOUT)?;
                Ok::<_, Failure>(memory)
            })?;
            (memory.address(), Some(name), Buffer::Device(memory))
        }
    };
    let owner = Arc::new(Allocated(buffer));
    Ok(Array::new((address, place), (data_type, layout), false, owner))
}

/// The memory of an array, which stays as long as it is used.
pub(crate) fn buffer_of(array: &Bound<'_, PyAny>) -> Result<Buffer> {
    if let Ok(own) = array.cast::<Array>()
        && let Some(buffer) = own.get().buffer()
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
    match source.device() {
        SourceDevice::Host => {
            let start = ptr::with_exposed_provenance_mut(address as usize);
            // SAFETY: the memory of the source, which is kept as long as it is used. Programs of
            // Python have no references to it that Rust knows.
            Ok(unsafe { HostBuffer::adopt(start, length as usize, Kept::new(source)) }?.into())
        }
        SourceDevice::Cuda(number) => {
            let device = Device::open(DeviceName::cuda(number))?;
            // SAFETY: the memory of the source, which is kept as long as it is used.
            Ok(unsafe { device.adopt(address, length, Kept::new(source)) }?.into())
        }
    }
}
