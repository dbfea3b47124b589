//! Memory that several processes share without a copy, by a token.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use gpu::{DEFAULT_TIMEOUT, Device, DeviceName};
use pubsub::{MemoryLocation, NodeOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use transfer::{Buffer, ElementType, HostBuffer, OpenedBuffer, Share, SharedBuffer, Tensor};

use crate::array::{Array, Owner, Source, gather, zeroed};
use crate::closable::Closable;
use crate::data_type::DataType;
use crate::failure::{Failure, Result};
use crate::kept::{Kept, drop_unused};
use crate::layout::Layout;
use crate::memory::{OwnMemory, address_of, find};
use crate::release::drop_after;
use crate::streams::{UsingStreams, last_use};
use crate::torch_allocator::find_in_pool;
use crate::waits::{Timeout, interruptibly_or, wait_for_writers};

const SHARE: &str = "share memory";
const OPEN: &str = "open shared memory";

/// Memory that this process shares. Other processes open it by the token, until this is closed and
/// deleted. Processes that have opened it keep it.
#[pyclass(frozen, name = "Shared", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyShared {
    share: Closable<Share>,
}

#[pymethods]
impl PyShared {
    /// Bytes by which other processes open the memory, sent to them by any means.
    #[getter]
    fn token<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        self.share.with(SHARE, |share| PyBytes::new(py, share.token()))
    }

    /// Leaves the memory to one receiver, and returns the token for it: the memory is shared until it
    /// was opened once, or this process ends.
    fn for_one_receiver<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.share.take(SHARE)?.for_one_receiver()?))
    }

    /// Limits the memory to one receiver, before the token is sent.
    fn _limit_to_one(&self) -> Result<()> {
        Ok(self.share.with(SHARE, Share::limit_to_one)??)
    }

    /// Leaves the memory to its receiver, after the token was sent.
    fn _leave(&self) -> Result<()> {
        self.share.take(SHARE)?.leave();
        Ok(())
    }

    /// Ends the sharing. Processes that have opened the memory keep it.
    fn close(&self, py: Python<'_>) {
        let share = self.share.close();
        py.detach(move || drop(share));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

/// What the bytes mean, with the first element at this offset of the memory.
fn tensor_of(source: &Source, byte_offset: u64) -> Result<Tensor> {
    let (code, bits, lanes) = source.data_type().codes();
    let element = ElementType::new(code, bits, lanes)
        .ok_or_else(|| Failure::invalid(SHARE, "its elements cannot be shared"))?;
    let layout = source.layout();
    let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
    Ok(Tensor { element, shape, strides, byte_offset })
}

/// A copy of an array in new memory of the host.
fn copied(py: Python<'_>, source: &Source) -> Result<(Buffer, Tensor)> {
    // Also refuses elements that share bytes, in an array with gaps.
    let (first, extent) = source.extent(SHARE)?;
    let length = source.length();
    let buffer = HostBuffer::new(length.max(1))?;
    match source.cuda_device() {
        None => {
            let (from, data_type, layout) =
                (source.host_bytes(), source.data_type(), source.layout().clone());
            let target = buffer.address() as usize;
            // SAFETY: the caller has the source; the target is new memory of its length, which only
            // this function has.
            py.detach(move || unsafe {
                from.copy(data_type, &layout, ptr::with_exposed_provenance_mut(target));
            });
        }
        Some(number) => {
            wait_for_writers(py, SHARE, Some(number))?;
            let start = source.address().wrapping_add_signed(first);
            let device = Device::open(DeviceName::cuda(number))?;
            // SAFETY: the caller has the source, and the copy is waited for.
            let memory = unsafe { device.adopt(start, extent, ()) }?;
            let (mut reached, mut bytes) = (zeroed(SHARE, extent)?, zeroed(SHARE, length)?);
            let (data_type, layout) = (source.data_type(), source.layout().clone());
            py.detach(|| {
                let stream = device.default_stream()?;
                stream.download(&memory.whole(), &mut reached, DEFAULT_TIMEOUT)?;
                gather(data_type, &layout, &reached, &mut bytes);
                Ok::<_, Failure>(buffer.write(0, &bytes)?)
            })?;
        }
    }
    // The shape is that of the source.
    let layout = Layout::contiguous(source.layout().shape().to_vec()).unwrap_or_else(Layout::empty);
    let tensor = Tensor { strides: layout.strides().to_vec(), ..tensor_of(source, 0)? };
    Ok((buffer.into(), tensor))
}

fn shared(buffer: Buffer, tensor: &Tensor, is_read_only: bool) -> Result<SharedBuffer> {
    Ok(match is_read_only {
        true => SharedBuffer::read_only(buffer, tensor),
        false => SharedBuffer::new(buffer, tensor),
    }?)
}

/// Shares the memory of an array.
fn in_place(py: Python<'_>, source: Source, is_read_only: bool) -> Result<SharedBuffer> {
    let (first, length) = source.extent(SHARE)?;
    let start = source.address().wrapping_add_signed(first);
    if let Some((buffer, offset)) = find(start, length.max(1)) {
        let tensor = tensor_of(&source, offset.wrapping_add_signed(-first))?;
        wait_for_writers(py, SHARE, source.cuda_device())?;
        return shared(buffer, &tensor, is_read_only);
    }
    let Some(number) = source.cuda_device() else {
        let cause = "other processes cannot map this memory of the host. Use copy=True, or make the \
                     array in memory of fabricast.allocate, after a fork in the child itself";
        return Err(Failure::invalid(SHARE, cause));
    };
    wait_for_writers(py, SHARE, Some(number))?;
    if let Some(memory) = find_in_pool(number, start, length)
        && !is_read_only
    {
        let tensor = tensor_of(&source, source.address() - memory.address())?;
        return Ok(SharedBuffer::of_pool(&memory, &tensor, Kept::new(source))?);
    }
    let tensor = tensor_of(&source, first.unsigned_abs())?;
    let device = Device::open(DeviceName::cuda(number))?;
    // SAFETY: the memory of the source, which is kept as long as it is used.
    let memory = unsafe { device.adopt(start, length, Kept::new(source)) }?;
    py.detach(|| shared(memory.into(), &tensor, is_read_only))
}

/// Shares an array with other processes of this user on this machine, which open it by a token and
/// see the same memory: that of `allocate` or of an allocator of the library, or of a CUDA device.
/// With `copy` it shares a copy of any array, in memory of the host. With `readonly` others cannot
/// write to memory of the host, and promise not to write to memory of a device.
///
/// >>> import tempfile
/// >>> import fabricast
/// >>> directory = tempfile.TemporaryDirectory()
/// >>> weights = fabricast.allocate((2, 3), "float32")
/// >>> shared = fabricast.share(weights, directory=directory.name)
/// >>> opened = fabricast.open(shared.token)   # in another process
/// >>> opened
/// <fabricast.Array float32[2,3] on host>
/// >>> memoryview(weights)[1, 2] = 7.0
/// >>> memoryview(opened)[1, 2]
/// 7.0
/// >>> shared.close(); del opened
/// >>> directory.cleanup()
#[pyfunction]
#[pyo3(signature = (array, *, readonly=false, copy=false, directory=None))]
pub(crate) fn share(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
    readonly: bool,
    copy: bool,
    directory: Option<PathBuf>,
) -> Result<PyShared> {
    drop_unused(py);
    let source = Source::of(SHARE, array)?;
    let readonly = readonly || (source.is_read_only() && !copy);
    let buffer = match copy || source.length() == 0 {
        true => {
            let (buffer, tensor) = copied(py, &source)?;
            shared(buffer, &tensor, readonly)?
        }
        false => in_place(py, source, readonly)?,
    };
    let directory = directory.unwrap_or_else(NodeOptions::default_directory);
    let share = py.detach(|| transfer::share(&directory, buffer))?;
    Ok(PyShared { share: Closable::new("it is not shared any more", share) })
}

/// Memory of another process. The other process keeps it until work on the streams that use it is
/// done.
#[derive(Debug)]
struct OpenedMemory {
    opened: Option<OpenedBuffer>,
    own: OwnMemory,
    streams: UsingStreams,
}

impl Owner for OpenedMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.own.read(address, into)
    }

    fn used_by(&self, stream: u64) {
        self.streams.add(stream);
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        let Some(opened) = self.opened.take() else { return };
        let device = opened.memory().and_then(gpu::Memory::device);
        if let Some((point, stream)) = device.and_then(|device| last_use(device, &self.streams)) {
            // The last user does not wait for it.
            drop_after(point, (opened, stream));
        }
    }
}

/// Opens memory that another process shares, by its token: the array has the type, shape and strides
/// of the shared one, and is on the device where its memory is. `device` names a further device that
/// accesses it directly. The memory stays as long as the array or a view of it exists.
///
/// `directory` is that of this process, if its container shows the one of the other process
/// elsewhere.
#[pyfunction]
#[pyo3(signature = (token, *, device=None, timeout=30.0, directory=None))]
pub(crate) fn open(
    py: Python<'_>,
    token: Vec<u8>,
    device: Option<&str>,
    timeout: Option<f64>,
    directory: Option<PathBuf>,
) -> Result<Array> {
    let timeout = Timeout::new(OPEN, timeout)?.or(crate::waits::LONGEST_CALL);
    let device = device.map(str::parse::<MemoryLocation>).transpose()?;
    let device = device.map(MemoryLocation::device).transpose()?.flatten();
    let directory = directory.unwrap_or_else(NodeOptions::default_directory);
    let open = move || {
        let device = device.map(Device::open).transpose()?;
        Ok::<_, Failure>(transfer::open(&token, &directory, device.as_ref(), timeout)?)
    };
    // Memory for one receiver is not lost by Ctrl-C.
    let opened = interruptibly_or(py, OPEN, open, OpenedBuffer::give_back)?;
    let Tensor { element, shape, strides, .. } = opened.tensor().clone();
    let (code, bits, lanes) = element.codes();
    let described = format!("elements {element:?} in shape {shape:?} with strides {strides:?}");
    let unknown = || Failure::new("Malformed", OPEN, format!("{described}: unknown here"));
    let data_type = DataType::from_codes(code, bits, lanes).ok_or_else(unknown)?;
    let layout = Layout::strided(shape, strides).ok_or_else(unknown)?;
    // Also refuses elements that share bytes, in an array with gaps.
    layout.extent(data_type).ok_or_else(unknown)?;
    let resident = opened.memory().and_then(gpu::Memory::device);
    let offset = opened.tensor().byte_offset;
    let is_read_only = opened.is_read_only();
    let address = address_of(opened.buffer()) + offset;
    let own = OwnMemory::new(opened.buffer().clone());
    let owner = OpenedMemory { opened: Some(opened), own, streams: UsingStreams::default() };
    Ok(Array::new((address, resident), (data_type, layout), is_read_only, Arc::new(owner)))
}
