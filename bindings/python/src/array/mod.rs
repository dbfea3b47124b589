//! Arrays: memory of messages, as DLPack, the buffer protocol and the array interfaces show it.
//!
//! Modules, each importing only those before it: `dlpack`, `buffer`, `source`.
//!
//! Import cycle with `buffer`, `dlpack`, `source`: the fields of an array are private, and each of its
//! protocols needs them.

mod buffer;
mod dlpack;
mod source;

use std::fmt;
use std::sync::Arc;

use gpu::{DeviceName, Implementation};
use pyo3::basic::CompareOp;
use pyo3::call::PyCallArgs;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyIterator, PyString, PyTuple};

use crate::data_type::DataType;
use crate::failure::{Failure, Result};
use crate::layout::Layout;
use crate::waits::wait_for_writers;

pub(crate) use source::{ArrayCall, Operand, Source, gather};

const READ: &str = "read array";

/// Zeros on the host. A length that comes from a shape may be more than there is.
pub(crate) fn zeroed(operation: &'static str, length: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    match bytes.try_reserve_exact(length as usize) {
        Ok(()) => {
            bytes.extend(std::iter::repeat_n(0, length as usize));
            Ok(bytes)
        }
        Err(_) => {
            let cause = format!("the host has no {length} bytes for a copy");
            Err(Failure::new("OutOfMemory", operation, cause))
        }
    }
}

/// What keeps the memory of arrays, until the last of them and of their views is gone.
pub(crate) trait Owner: fmt::Debug + Send + Sync {
    /// Copies bytes from this address on, which are in the memory.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()>;
    /// The memory, if it can be registered as it is.
    fn buffer(&self) -> Option<transfer::Buffer> {
        None
    }
    /// Work on this CUDA stream uses the memory from now on: it is kept until that work is done.
    fn used_by(&self, stream: u64);
}

/// An array in memory of a message or a shared buffer. NumPy, PyTorch, CuPy and JAX read
/// it in place: `numpy.asarray(array)`, `torch.from_dlpack(array)`.
///
/// An index returns what NumPy returns, a view or an element, and an assignment writes the memory:
/// `array[...] = 0`. For memory of a CUDA device PyTorch or CuPy does that, if it was imported.
///
/// The memory stays as long as the array or one of its views exists.
///
/// >>> import fabricast
/// >>> weights = fabricast.allocate((2, 3), "float32")
/// >>> weights[1] = [1, 2, 3]
/// >>> weights
/// fabricast.Array([[0., 0., 0.],
///                  [1., 2., 3.]], dtype=float32)
/// >>> weights[1].sum()
/// np.float32(6.0)
#[pyclass(frozen, weakref, module = "fabricast")]
#[derive(Debug)]
pub(crate) struct Array {
    address: u64,
    data_type: DataType,
    layout: Layout,
    /// None for host memory.
    device: Option<DeviceName>,
    is_read_only: bool,
    owner: Arc<dyn Owner>,
}

/// Bytes that were copied.
#[derive(Debug)]
struct CopiedBytes(Box<[u8]>);

impl Owner for CopiedBytes {
    fn used_by(&self, _stream: u64) {}

    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let start = (address - self.0.as_ptr().addr() as u64) as usize;
        into.copy_from_slice(&self.0[start..start + into.len()]);
        Ok(())
    }
}

impl Array {
    /// The owner keeps the bytes of the layout's extent, from this address of the first element on.
    pub(crate) fn new(
        (address, device): (u64, Option<DeviceName>),
        (data_type, layout): (DataType, Layout),
        is_read_only: bool,
        owner: Arc<dyn Owner>,
    ) -> Self {
        Self { address, data_type, layout, device, is_read_only, owner }
    }

    /// The memory, if it can be registered as it is.
    pub(crate) fn buffer(&self) -> Option<transfer::Buffer> {
        self.owner.buffer()
    }

    /// Does it have all bytes of this memory?
    pub(crate) fn is_all_of(&self, address: u64, length: u64) -> bool {
        self.address == address && self.length() as u64 == length
    }

    /// Where this many bytes of the host can be written; None if the array has not this length.
    pub(crate) fn writable_host_bytes(&self, length: u64) -> Option<u64> {
        let is_writable = !self.is_read_only && self.cuda_device().is_none();
        (is_writable && self.layout.is_contiguous() && self.length() as u64 == length)
            .then_some(self.address)
    }

    fn length(&self) -> usize {
        // Checked when it was made.
        self.data_type.bytes(self.layout.elements()).unwrap_or(0) as usize
    }

    /// Number of its CUDA device; None for memory that the host accesses, such as that of an
    /// emulated device.
    fn cuda_device(&self) -> Option<u32> {
        let is_cuda = |device: &DeviceName| device.implementation == Implementation::Cuda;
        self.device.filter(is_cuda).map(|device| device.number)
    }

    /// Copies the elements, without gaps.
    fn read(&self, into: &mut [u8]) -> Result<()> {
        match self.layout.extent(self.data_type) {
            Some((first, length)) if !self.layout.is_contiguous() => {
                let mut bytes = zeroed(READ, length)?;
                self.owner.read(self.address.wrapping_add_signed(first), &mut bytes)?;
                gather(self.data_type, &self.layout, &bytes, into);
                Ok(())
            }
            _ if into.is_empty() => Ok(()),
            _ => self.owner.read(self.address, into),
        }
    }

    fn copy(&self, py: Python<'_>) -> Result<Self> {
        wait_for_writers(py, READ, self.cuda_device())?;
        let mut bytes = zeroed("copy array", self.length() as u64)?.into_boxed_slice();
        py.detach(|| self.read(&mut bytes))?;
        Ok(Self {
            address: bytes.as_ptr().addr() as u64,
            data_type: self.data_type,
            // A shape that an array has already.
            layout: Layout::contiguous(self.layout.shape().to_vec()).unwrap_or_else(Layout::empty),
            device: None,
            is_read_only: false,
            owner: Arc::new(CopiedBytes(bytes)),
        })
    }

    /// The type of the elements in array interfaces.
    fn interface_type(&self, name: &str) -> PyResult<&'static str> {
        self.data_type.array_interface().ok_or_else(|| {
            let cause = format!("{} has no {name}. Use DLPack", self.data_type);
            PyAttributeError::new_err(cause)
        })
    }

    /// What both array interfaces have in common.
    fn interface<'py>(&self, py: Python<'py>, type_name: &str) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, self.layout.shape())?)?;
        interface.set_item("typestr", type_name)?;
        interface.set_item("data", (self.address, self.is_read_only))?;
        match self.data_type.item_size() {
            Some(size) if !self.layout.is_contiguous() => {
                let strides = self.layout.strides().iter().map(|stride| stride * size as i64);
                interface.set_item("strides", PyTuple::new(py, strides.collect::<Vec<_>>())?)?;
            }
            _ => interface.set_item("strides", py.None())?,
        }
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

/// Calls a function of `fabricast._array`: what NumPy does with an array.
fn as_numpy_does<'py>(
    array: &Bound<'py, Array>,
    function: &Bound<'py, PyString>,
    arguments: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = array.py();
    py.import(intern!(py, "fabricast._array"))?.call_method1(function, arguments)
}

#[pymethods]
impl Array {
    /// Extents of the dimensions.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.layout.shape())
    }

    /// Type of the elements: that of NumPy, or of `ml_dtypes` for bfloat16 and narrower numbers; the
    /// name, such as `"bfloat16"`, if that package is not installed.
    #[getter]
    fn dtype<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "dtype_of"), (slf.get().data_type.to_string(),))
    }

    /// Distance between neighbours in each dimension, in bytes.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let size = self.data_type.item_size().unwrap_or(1) as i64;
        let strides = self.layout.strides().iter().map(|stride| stride * size);
        PyTuple::new(py, strides.collect::<Vec<_>>())
    }

    /// Number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.layout.shape().len()
    }

    /// Number of elements.
    #[getter]
    fn size(&self) -> u64 {
        self.layout.elements()
    }

    /// Length in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.length()
    }

    /// Where the memory is: `"host"`, or a device such as `"cuda:0"`.
    #[getter]
    fn device(&self) -> String {
        self.device.map_or_else(|| "host".to_owned(), |device| device.to_string())
    }

    /// True if the array may not be written.
    #[getter]
    fn readonly(&self) -> bool {
        self.is_read_only
    }

    /// Copies the elements to a new object of the host, in C order.
    fn tobytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        wait_for_writers(py, READ, self.cuda_device())?;
        PyBytes::new_with(py, self.length(), |bytes| Ok(py.detach(|| self.read(bytes))?))
    }

    fn __len__(&self) -> PyResult<usize> {
        match self.layout.shape() {
            [] => Err(pyo3::exceptions::PyTypeError::new_err("len() of a 0-dimensional array")),
            [first, ..] => Ok(*first as usize),
        }
    }

    fn __repr__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let array = slf.get();
        let access = if array.is_read_only { ", read-only" } else { "" };
        let kind = array.layout.type_name(array.data_type);
        let short = format!("<fabricast.Array {kind} on {}{access}>", array.device());
        as_numpy_does(slf, intern!(slf.py(), "represent"), (slf, short))
    }

    /// The array of NumPy in the same memory. Types of less than a byte are copied, since NumPy has
    /// an element in each byte: such a copy is read-only.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "as_numpy"), (slf, dtype, copy))
    }

    /// A one-dimensional array of Arrow in the same memory.
    #[pyo3(signature = (r#type=None))]
    fn __arrow_array__<'py>(
        slf: &Bound<'py, Self>,
        r#type: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "as_arrow"), (slf, r#type))
    }

    fn __getitem__<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "item"), (slf, key))
    }

    fn __setitem__<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
        value: &Bound<'py, PyAny>,
    ) -> PyResult<()> {
        as_numpy_does(slf, intern!(slf.py(), "set_item"), (slf, key, value)).map(drop)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyIterator>> {
        as_numpy_does(slf, intern!(slf.py(), "view"), (slf,))?.try_iter()
    }

    fn __contains__<'py>(slf: &Bound<'py, Self>, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        as_numpy_does(slf, intern!(slf.py(), "view"), (slf,))?.contains(value)
    }

    /// Compares the elements, as NumPy does.
    fn __richcmp__<'py>(
        slf: &Bound<'py, Self>,
        other: &Bound<'py, PyAny>,
        operation: CompareOp,
    ) -> PyResult<Bound<'py, PyAny>> {
        let view = intern!(slf.py(), "view");
        let own = as_numpy_does(slf, view, (slf,))?;
        match other.cast::<Self>() {
            Ok(other) => own.rich_compare(as_numpy_does(other, view, (other,))?, operation),
            Err(_) => own.rich_compare(other, operation),
        }
    }

    fn __bool__(slf: &Bound<'_, Self>) -> PyResult<bool> {
        as_numpy_does(slf, intern!(slf.py(), "view"), (slf,))?.is_truthy()
    }

    fn __float__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "number"), (slf, "float"))
    }

    fn __int__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "number"), (slf, "int"))
    }

    /// A copy in memory of the host.
    fn __copy__(&self, py: Python<'_>) -> Result<Self> {
        if self.cuda_device().is_some() {
            let cause = format!("the memory is on {}: copy it with the framework", self.device());
            return Err(Failure::invalid("copy array", cause));
        }
        self.copy(py)
    }

    fn __deepcopy__(&self, py: Python<'_>, _memo: &Bound<'_, PyAny>) -> Result<Self> {
        self.__copy__(py)
    }

    /// The array for one other process of this machine, which then has the same memory; a copy of a
    /// message of the host.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        as_numpy_does(slf, intern!(slf.py(), "reduce"), (slf,))
    }

    /// Address of the first element.
    #[getter]
    fn _address(&self) -> u64 {
        self.address
    }

    /// Name of the type of the elements, and the bits of one if that is no record.
    #[getter]
    fn _type(&self) -> (String, Option<u8>) {
        (self.data_type.to_string(), self.data_type.element_bits())
    }

    /// The array interface with a type of NumPy whose elements have the same bytes; for elements of
    /// less than a byte that of all bytes.
    fn _raw_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.data_type.raw_interface() {
            Some(type_name) => self.interface(py, &type_name),
            None => {
                let interface = self.interface(py, "|u1")?;
                interface.set_item("shape", (self.length(),))?;
                Ok(interface)
            }
        }
    }

    /// A part of the memory from this byte on, as an array of another type.
    fn _part(
        &self,
        offset: u64,
        dtype: &str,
        shape: Vec<u64>,
        strides: Option<Vec<i64>>,
    ) -> Result<Self> {
        const OPERATION: &str = "access part of array";
        let outside = || {
            let cause = format!("{dtype} {shape:?} at byte {offset} of {} bytes", self.length());
            Failure::new("Malformed", OPERATION, cause)
        };
        let data_type = DataType::parse(dtype).ok_or_else(outside)?;
        let layout = match strides {
            Some(strides) => Layout::strided(shape.clone(), strides),
            None => Layout::contiguous(shape.clone()),
        };
        let layout = layout.filter(|_| self.layout.is_contiguous()).ok_or_else(outside)?;
        let (first, length) = layout.extent(data_type).ok_or_else(outside)?;
        let start = offset.checked_add_signed(first).ok_or_else(outside)?;
        if start.checked_add(length).is_none_or(|end| end > self.length() as u64) {
            return Err(outside());
        }
        Ok(Self {
            address: self.address + offset,
            data_type,
            layout,
            device: self.device,
            is_read_only: self.is_read_only,
            owner: Arc::clone(&self.owner),
        })
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.cuda_device().is_some() {
            let cause = format!("the memory is on {}, see __cuda_array_interface__", self.device());
            return Err(PyAttributeError::new_err(cause));
        }
        self.interface(py, self.interface_type("__array_interface__")?)
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        if self.cuda_device().is_none() {
            let cause = format!("the memory is on {}, see __array_interface__", self.device());
            return Err(PyAttributeError::new_err(cause));
        }
        let interface = self.interface(py, self.interface_type("__cuda_array_interface__")?)?;
        // It is complete: no stream has to be waited for.
        interface.set_item("stream", py.None())?;
        self.owner.used_by(0);
        Ok(interface)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::device(self.cuda_device())
    }

    /// The array as a capsule of DLPack.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let to_host = dl_device == Some(dlpack::device(None)) && self.cuda_device().is_some();
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) && !to_host {
            let cause = format!("an array on {} is not copied to another device", self.device());
            return Err(PyBufferError::new_err(cause));
        }
        if to_host && copy == Some(false) {
            let cause = format!("the memory is on {}: the host needs a copy", self.device());
            return Err(PyBufferError::new_err(cause));
        }
        if copy == Some(true) && self.cuda_device().is_some() && !to_host {
            let cause =
                format!("copy=True of an array on {}: copy it with the framework", self.device());
            return Err(PyBufferError::new_err(cause));
        }
        if to_host || copy == Some(true) {
            let copied = self.copy(py)?;
            return dlpack::export(py, &copied, true, max_version);
        }
        if self.cuda_device().is_some() {
            let handle = match stream {
                None | Some(-1..=1) => 0,
                Some(2) => {
                    let cause =
                        "the per-thread default stream is not supported: pass another stream";
                    return Err(PyBufferError::new_err(cause));
                }
                Some(handle) => handle as u64,
            };
            self.owner.used_by(handle);
        }
        dlpack::export(py, self, false, max_version)
    }

    /// # Safety
    /// As Python calls it.
    #[allow(unsafe_code)]
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut pyo3::ffi::Py_buffer,
        flags: std::ffi::c_int,
    ) -> PyResult<()> {
        let array = slf.get();
        if array.cuda_device().is_some() {
            let cause = format!("the memory is on {}: use DLPack", array.device());
            return Err(PyBufferError::new_err(cause));
        }
        // SAFETY: the caller's view; the object keeps the memory.
        unsafe { buffer::fill(view, slf.clone(), flags) }
    }

    /// # Safety
    /// As Python calls it.
    #[allow(unsafe_code)]
    unsafe fn __releasebuffer__(&self, view: *mut pyo3::ffi::Py_buffer) {
        // SAFETY: filled by `fill`.
        unsafe { buffer::release(view) }
    }
}
