//! Memory that several processes share without a copy, by a token.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use gpu::{DEFAULT_TIMEOUT, DeviceName};
use pubsub::{MemoryLocation, NodeOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use transfer::{
    Admission, Buffer, ElementType, ErrorKind, OpenedBuffer, Share, SharedBuffer, SharedName,
    Tensor,
};

use crate::array::{Array, Owner, Source, gather, zeroed};
use crate::closable::Closable;
use crate::data_type::DataType;
use crate::devices::open_device;
use crate::failure::{Failure, Result};
use crate::kept::{Kept, drop_unused};
use crate::layout::Layout;
use crate::memory::{OwnMemory, address_of, find, new_host_buffer};
use crate::release::drop_after;
use crate::streams::{UsingStreams, last_use};
use crate::torch_allocator::find_in_pool;
use crate::waits::{LONGEST_CALL, Timeout, wait_for_writers, with_signals};

const SHARE: &str = "share memory";
const OPEN: &str = "open shared memory";
/// The least time for the answer of the owner.
const SHORTEST_REQUEST: Duration = Duration::from_millis(200);
/// The elements of the memory of a structure: bytes that only this package reads.
const STRUCTURE: ElementType = ElementType::OPAQUE;

/// Memory that this process shares. Other processes open it by the token, until this is closed and
/// deleted. Processes that have opened it keep it.
#[pyclass(frozen, name = "Shared", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyShared {
    share: Closable<Share>,
    /// Removed at the end.
    name: Closable<Option<SharedName>>,
    /// What a structure has beside its own memory.
    parts: Vec<Py<PyShared>>,
    /// The array that others see, or the structure of arrays.
    #[pyo3(get)]
    value: Py<PyAny>,
}

impl PyShared {
    fn new(share: Share, name: Option<SharedName>, parts: Vec<Py<Self>>, value: Py<PyAny>) -> Self {
        let closed = "it is not shared any more";
        let shared_name = Closable::new(closed, name);
        Self { share: Closable::new(closed, share), name: shared_name, parts, value }
    }
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
        self._limit_to_one()?;
        let token = self.token(py)?;
        self._leave(py)?;
        Ok(token)
    }

    /// Limits the memory to one receiver, before the token is sent.
    fn _limit_to_one(&self) -> Result<()> {
        self.share.with(SHARE, Share::limit_to_one)??;
        self.parts.iter().try_for_each(|part| part.get()._limit_to_one())
    }

    /// Leaves the memory to its receiver, after the token was sent.
    fn _leave(&self, py: Python<'_>) -> Result<()> {
        self.share.take(SHARE)?.leave();
        let name = self.name.close();
        py.detach(move || drop(name));
        self.parts.iter().try_for_each(|part| part.get()._leave(py))
    }

    /// Ends the sharing. Processes that have opened the memory keep it.
    fn close(&self, py: Python<'_>) {
        let ended = (self.name.close(), self.share.close());
        py.detach(move || drop(ended));
        self.parts.iter().for_each(|part| part.get().close(py));
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

/// Copies an array to this address of the host, where only the caller writes, and memory of its length
/// is.
fn copy_to_host(py: Python<'_>, source: &Source, target: u64) -> Result<()> {
    // Also refuses elements that share bytes, in an array with gaps.
    let (first, extent) = source.extent(SHARE)?;
    let length = source.length() as usize;
    let (data_type, layout) = (source.data_type(), source.layout().clone());
    match source.cuda_device() {
        None => {
            let from = source.host_bytes();
            // SAFETY: the caller has the source, and the memory of the target.
            py.detach(move || unsafe {
                from.copy(data_type, &layout, ptr::with_exposed_provenance_mut(target as usize));
            });
        }
        Some(number) => {
            wait_for_writers(py, SHARE, Some(number))?;
            let start = source.address().wrapping_add_signed(first);
            let device = open_device(DeviceName::cuda(number))?;
            // SAFETY: the caller has the source, and the copy is waited for.
            let memory = unsafe { device.adopt(start, extent, ()) }?;
            let (mut reached, mut bytes) = (zeroed(SHARE, extent)?, zeroed(SHARE, length as u64)?);
            py.detach(|| {
                let stream = device.default_stream()?;
                stream.download(&memory.whole(), &mut reached, DEFAULT_TIMEOUT)?;
                gather(data_type, &layout, &reached, &mut bytes);
                let target = ptr::with_exposed_provenance_mut(target as usize);
                // SAFETY: the target has this length, and only the caller writes there.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, length) };
                Ok::<_, Failure>(())
            })?;
        }
    }
    Ok(())
}

/// A copy of an array in new memory of the host.
fn copied(py: Python<'_>, source: &Source) -> Result<(Buffer, Tensor)> {
    // The shape is that of the source.
    let layout = Layout::contiguous(source.layout().shape().to_vec()).unwrap_or_else(Layout::empty);
    let tensor = Tensor { strides: layout.strides().to_vec(), ..tensor_of(source, 0)? };
    let buffer = new_host_buffer(SHARE, source.length())?;
    copy_to_host(py, source, buffer.address())?;
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
    let device = open_device(DeviceName::cuda(number))?;
    // SAFETY: the memory of the source, which is kept as long as it is used.
    let memory = unsafe { device.adopt(start, length, Kept::new(source)) }?;
    py.detach(|| shared(memory.into(), &tensor, is_read_only))
}

/// The directory of sockets, or the default one.
#[pyfunction]
#[pyo3(signature = (directory=None))]
pub(crate) fn _directory(directory: Option<PathBuf>) -> PathBuf {
    directory.unwrap_or_else(NodeOptions::default_directory)
}

/// A name that no memory can have is an argument of the caller.
fn of_name(error: transfer::Error) -> Failure {
    match error.kind() {
        ErrorKind::Malformed => Failure::from(error).with_class("InvalidArgument"),
        _ => error.into(),
    }
}

/// Where memory is found, and by whom: the directory, the name, and further users and groups.
#[derive(FromPyObject)]
pub(crate) struct Audience(Option<PathBuf>, Option<String>, Vec<u32>, Vec<u32>);

impl Audience {
    /// Shares memory with it: the share, and its name.
    fn share(self, py: Python<'_>, buffer: SharedBuffer) -> Result<(Share, Option<SharedName>)> {
        let Self(directory, name, users, groups) = self;
        let own = Admission::own_user();
        let admission = Admission { users: [own.users, users].concat(), groups };
        py.detach(|| {
            let share = transfer::share_with(&_directory(directory), buffer, &admission)?;
            let publish = |name: String| share.publish_name(&name).map_err(of_name);
            let name = name.map(publish).transpose()?;
            Ok((share, name))
        })
    }
}

/// Shares an array, as `fabricast.share` says.
#[pyfunction]
#[pyo3(signature = (array, copy, readonly, audience))]
pub(crate) fn _share(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
    copy: bool,
    readonly: bool,
    audience: Audience,
) -> Result<PyShared> {
    drop_unused(py);
    let source = Source::of(SHARE, array)?;
    let readonly = readonly || (source.is_read_only() && !copy);
    let mut value = array.clone().unbind();
    let buffer = match copy || source.length() == 0 {
        true => {
            let (buffer, tensor) = copied(py, &source)?;
            let owner = Arc::new(OwnMemory::new(buffer.clone()));
            let layout = Layout::contiguous(source.layout().shape().to_vec());
            let kind = (source.data_type(), layout.unwrap_or_else(Layout::empty));
            let array = Array::new((address_of(&buffer), None), kind, false, owner);
            value = Py::new(py, array)?.into_any();
            shared(buffer, &tensor, readonly)?
        }
        false => in_place(py, source, readonly)?,
    };
    let (share, name) = audience.share(py, buffer)?;
    Ok(PyShared::new(share, name, Vec::new(), value))
}

/// Shares the memory of a structure, which begins with its description, and the memories that this
/// names.
#[pyfunction]
#[pyo3(signature = (memory, parts, value, readonly, audience))]
pub(crate) fn _share_structure(
    py: Python<'_>,
    memory: &Bound<'_, Array>,
    parts: Vec<Py<PyShared>>,
    value: Py<PyAny>,
    readonly: bool,
    audience: Audience,
) -> Result<PyShared> {
    let Some(buffer) = memory.get().buffer() else {
        return Err(Failure::invalid(SHARE, "the memory of the structure was not allocated"));
    };
    let tensor = Tensor::contiguous(STRUCTURE, &[buffer.length()]);
    let buffer = shared(buffer, &tensor, readonly)?;
    let (share, name) = audience.share(py, buffer)?;
    Ok(PyShared::new(share, name, parts, value))
}

/// Type, shape and strides in elements of an array, its length in bytes, the memory of the library
/// that contains it and its offset there, and whether it is on a CUDA device.
#[pyfunction]
#[allow(clippy::type_complexity)] // for a caller in Python
pub(crate) fn _describe(
    array: &Bound<'_, PyAny>,
) -> Result<(String, Vec<u64>, Vec<i64>, u64, Option<Array>, u64, bool)> {
    let source = Source::of(SHARE, array)?;
    let (first, length) = source.extent(SHARE)?;
    let found = match source.cuda_device() {
        None => find(source.address().wrapping_add_signed(first), length.max(1)),
        Some(_) => None,
    };
    let (memory, offset) = match found {
        Some((buffer, offset)) => {
            let is_read_only = matches!(&buffer, Buffer::Host(host) if host.is_read_only());
            let (address, layout) =
                (address_of(&buffer), Layout::contiguous(vec![buffer.length()]));
            let kind = (DataType::UINT8, layout.unwrap_or_else(Layout::empty));
            let owner = Arc::new(OwnMemory::new(buffer));
            let memory = Array::new((address, None), kind, is_read_only, owner);
            (Some(memory), offset.wrapping_add_signed(-first))
        }
        None => (None, 0),
    };
    let layout = source.layout();
    let (shape, strides) = (layout.shape().to_vec(), layout.strides().to_vec());
    let is_cuda = source.cuda_device().is_some();
    Ok((source.data_type().to_string(), shape, strides, source.length(), memory, offset, is_cuda))
}

/// Copies an array into one of memory of the host, of the same type and shape.
#[pyfunction]
pub(crate) fn _copy(
    py: Python<'_>,
    array: &Bound<'_, PyAny>,
    target: &Bound<'_, Array>,
) -> Result<()> {
    let (source, target) = (Source::of(SHARE, array)?, target.get());
    let Some(address) = target.writable_host_bytes(source.length()) else {
        return Err(Failure::invalid(SHARE, "the target of a copy is no memory of its length"));
    };
    copy_to_host(py, &source, address)
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

/// Waits until what this process left to one receiver each was opened. False after the timeout.
#[pyfunction]
pub(crate) fn _wait_for_receivers(py: Python<'_>, timeout: f64) -> Result<bool> {
    let timeout = Timeout::new(SHARE, Some(timeout))?.or(LONGEST_CALL);
    with_signals(py, |goes_on| transfer::wait_for_receivers(timeout, goes_on))
}

/// The token of the memory that a process shares under this name; None if there is none.
#[pyfunction]
#[pyo3(signature = (name, directory=None))]
pub(crate) fn _token_of_name<'py>(
    py: Python<'py>,
    name: &str,
    directory: Option<PathBuf>,
) -> Result<Option<Bound<'py, PyBytes>>> {
    let found = transfer::shared_under_name(&_directory(directory), name).map_err(of_name)?;
    Ok(found.map(|token| PyBytes::new(py, &token)))
}

/// Opens memory as `fabricast.open` says: its array, and whether it is the memory of a structure.
#[pyfunction]
#[pyo3(signature = (token, device, timeout, directory, owners))]
pub(crate) fn _open(
    py: Python<'_>,
    token: Vec<u8>,
    device: Option<&str>,
    timeout: Option<f64>,
    directory: Option<PathBuf>,
    owners: Vec<u32>,
) -> Result<(Array, bool)> {
    // A request takes some time, also for a caller that does not wait.
    let timeout = Timeout::new(OPEN, timeout)?.or(LONGEST_CALL).max(SHORTEST_REQUEST);
    let device = device.map(str::parse::<MemoryLocation>).transpose()?;
    let device = device.map(MemoryLocation::device).transpose()?.flatten();
    let directory = _directory(directory);
    let device = py.detach(|| device.map(open_device).transpose())?;
    let opened = with_signals(py, |goes_on| {
        transfer::open_of(&token, &directory, &owners, device.as_ref(), timeout, goes_on)
    })??;
    let Tensor { element, shape, strides, .. } = opened.tensor().clone();
    let is_structure = element == STRUCTURE;
    let (code, bits, lanes) = if is_structure { DataType::UINT8.codes() } else { element.codes() };
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
    let array = Array::new((address, resident), (data_type, layout), is_read_only, Arc::new(owner));
    Ok((array, is_structure))
}
