//! Arrays of other libraries, by DLPack, the buffer protocol or the array interfaces.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::ptr;
use std::time::Duration;

use collective::{Blocks, CollectiveCall, CommDomain, DeviceDomain, Operation, ReduceOp};
use gpu::{DeviceName, Stream};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList, PyTuple, PyType};

use super::{Array, dlpack};
use crate::arguments::data_type_of;
use crate::data_type::DataType;
use crate::devices::open_device;
use crate::failure::{Failure, Result};
use crate::layout::Layout;

/// What keeps the memory of a source.
enum Keeper {
    Buffer(Box<ffi::Py_buffer>),
    Tensor { _tensor: dlpack::Taken },
    Object { _object: Py<PyAny> },
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Self::Buffer(view) = self {
            // SAFETY: it was filled once; the lock of the interpreter is held.
            unsafe { ffi::PyBuffer_Release(&raw mut **view) };
        }
    }
}

/// An array of another library, as long as this exists.
pub(crate) struct Source {
    address: u64,
    data_type: DataType,
    layout: Layout,
    cuda_device: Option<u32>,
    is_read_only: bool,
    _keeper: Keeper,
}

/// Reads host memory, from the first element on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostBytes {
    address: u64,
}

// SAFETY: only an address; `copy` demands that the source exists.
unsafe impl Send for HostBytes {}

impl Source {
    /// Of an object that speaks one of the protocols.
    ///
    /// # Errors
    /// `TypeError` for another object; `InvalidArgument` for elements or strides that messages
    /// cannot have; exceptions of the object.
    pub(crate) fn of(operation: &'static str, object: &Bound<'_, PyAny>) -> Result<Self> {
        Self::ordered(operation, object, true)
    }

    /// Source of an object, as [`of`](Self::of). Unless it is ordered, the default stream of a device does not wait for the
    /// stream that writes the array: the caller orders its work itself.
    pub(crate) fn ordered(
        operation: &'static str,
        object: &Bound<'_, PyAny>,
        is_ordered: bool,
    ) -> Result<Self> {
        if let Ok(array) = object.cast::<Array>() {
            return Ok(Self::of_own(array));
        }
        // SAFETY: an object of Python, with its lock held.
        if unsafe { ffi::PyObject_CheckBuffer(object.as_ptr()) } == 1 {
            refuse_lossy_buffer(operation, object)?;
            match Self::of_buffer(operation, object) {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {
                    return Self::of_interface(
                        operation,
                        object,
                        "__array_interface__",
                        false,
                        is_ordered,
                    );
                }
                // Of JAX: memory of a device has no buffer.
                Err(Failure::Python(_)) if object.hasattr("__dlpack__")? => {}
                Err(failure) => return Err(failure),
            }
        }
        if object.hasattr("__dlpack__")? {
            return Self::of_dlpack(operation, object, is_ordered);
        }
        for (name, is_cuda) in [("__cuda_array_interface__", true), ("__array_interface__", false)]
        {
            if object.hasattr(name)? {
                return Self::of_interface(operation, object, name, is_cuda, is_ordered);
            }
        }
        // Of pandas, xarray, …: NumPy reads it, in place if it can.
        if object.hasattr("__array__")? {
            let read = object.py().import("numpy")?.call_method1("asarray", (object,))?;
            if !read.is(object) {
                return Self::ordered(operation, &read, is_ordered);
            }
        }
        let is_list = object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>();
        let remedy = if is_list { ". numpy.asarray(list, dtype) makes one" } else { "" };
        let cause = format!(
            "{operation} failed: {} is no array: it has neither a buffer nor __dlpack__, \
             __array_interface__ or __cuda_array_interface__{remedy}",
            object.get_type().name()?
        );
        Err(PyTypeError::new_err(cause).into())
    }

    fn of_own(array: &Bound<'_, Array>) -> Self {
        let object = array.as_any().clone().unbind();
        let array = array.get();
        Self {
            address: array.address,
            data_type: array.data_type,
            layout: array.layout.clone(),
            cuda_device: array.cuda_device(),
            is_read_only: array.is_read_only,
            _keeper: Keeper::Object { _object: object },
        }
    }

    /// None if its elements are none of a buffer, or of those that arrays have here, but the object
    /// has an array interface, which tells more.
    fn of_buffer(operation: &'static str, object: &Bound<'_, PyAny>) -> Result<Option<Self>> {
        let mut view = Box::new(ffi::Py_buffer::new());
        let flags = ffi::PyBUF_FULL_RO;
        // SAFETY: the view is released with the keeper, which exists only after a success.
        let code = unsafe { ffi::PyObject_GetBuffer(object.as_ptr(), &raw mut *view, flags) };
        if code != 0 {
            let error = PyErr::fetch(object.py());
            let is_known = object.hasattr("__array_interface__").unwrap_or(false);
            return if is_known { Ok(None) } else { Err(error.into()) };
        }
        let keeper = Keeper::Buffer(view);
        let Keeper::Buffer(view) = &keeper else { unreachable!("made above") };
        let format = match view.format.is_null() {
            true => c"B",
            // SAFETY: a text that lives as long as the view.
            false => unsafe { CStr::from_ptr(view.format) },
        };
        let format = format.to_string_lossy();
        let data_type = match DataType::from_buffer(&format, view.itemsize as usize) {
            Some(data_type) => data_type,
            None if object.hasattr("__array_interface__")? => return Ok(None),
            None => {
                let cause = format!(
                    "its elements have the format \"{format}\", which no array of the library has: \
                     convert them"
                );
                return Err(Failure::invalid(operation, cause));
            }
        };
        let dimensions = usize::try_from(view.ndim).unwrap_or(0);
        let sizes = |start: *mut isize| match start.is_null() {
            true => None,
            // SAFETY: that many numbers, which live as long as the view.
            false => Some(unsafe { std::slice::from_raw_parts(start, dimensions) }),
        };
        let shape = match sizes(view.shape) {
            Some(shape) => shape.iter().map(|extent| *extent as u64).collect(),
            None if dimensions == 0 => Vec::new(),
            None => vec![(view.len / view.itemsize.max(1)) as u64],
        };
        if !view.suboffsets.is_null()
            && sizes(view.suboffsets).is_some_and(|all| all.iter().any(|it| *it >= 0))
        {
            return Err(Failure::invalid(
                operation,
                "its rows are scattered (suboffsets): copy it",
            ));
        }
        let strides = match sizes(view.strides) {
            Some(strides) => Some(in_elements(operation, strides, view.itemsize)?),
            None => None,
        };
        Ok(Some(Self {
            address: view.buf.expose_provenance() as u64,
            data_type,
            layout: layout_of(operation, data_type, shape, strides)?,
            cuda_device: None,
            is_read_only: view.readonly != 0,
            _keeper: keeper,
        }))
    }

    fn of_dlpack(
        operation: &'static str,
        object: &Bound<'_, PyAny>,
        is_ordered: bool,
    ) -> Result<Self> {
        let py = object.py();
        let options = PyDict::new(py);
        let device: (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
        let device = dlpack::cuda_device(device.into());
        if device.map_err(|cause| Failure::invalid(operation, cause))?.is_some() {
            // Work is begun on the default stream; -1 is for none.
            options.set_item("stream", if is_ordered { 1 } else { -1 })?;
        }
        let old_options = options.copy()?;
        options.set_item("max_version", (1, 1))?;
        let capsule = match object.call_method("__dlpack__", (), Some(&options)) {
            // A library of before version 1.
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                object.call_method("__dlpack__", (), Some(&old_options))
            }
            capsule => capsule,
        }?;
        let Some(tensor) = dlpack::Taken::from_capsule(&capsule) else {
            return Err(Failure::invalid(operation, "__dlpack__ returned no capsule of DLPack"));
        };
        if tensor.version() > 1 {
            let cause =
                format!("its capsule has version {} of DLPack, 1 is known", tensor.version());
            return Err(Failure::invalid(operation, cause));
        }
        let cuda_device = dlpack::cuda_device(tensor.device());
        let cuda_device = cuda_device.map_err(|cause| Failure::invalid(operation, cause))?;
        let (code, bits, lanes) = tensor.codes();
        let data_type = DataType::from_codes(code, bits, lanes).ok_or_else(|| {
            let cause = format!(
                "its elements have code {code}, {bits} bits and {lanes} lanes, which are unknown"
            );
            Failure::invalid(operation, cause)
        })?;
        let (shape, strides) = tensor.sizes();
        Ok(Self {
            address: tensor.address(),
            data_type,
            layout: layout_of(operation, data_type, shape, strides)?,
            cuda_device,
            is_read_only: tensor.is_read_only(),
            _keeper: Keeper::Tensor { _tensor: tensor },
        })
    }

    fn of_interface(
        operation: &'static str,
        object: &Bound<'_, PyAny>,
        name: &str,
        is_cuda: bool,
        is_ordered: bool,
    ) -> Result<Self> {
        let interface = object.getattr(name)?;
        let interface = interface.cast::<PyDict>().map_err(PyErr::from)?;
        let field = |field: &str| {
            let missing = || Failure::invalid(operation, format!("its {name} has no \"{field}\""));
            interface.get_item(field)?.ok_or_else(missing)
        };
        let type_name: String = field("typestr")?.extract()?;
        let data_type = match (DataType::parse(&type_name), object.getattr_opt("dtype")?) {
            (Some(data_type), _) => data_type,
            // Of records, of `ml_dtypes`, or of none of the library's types.
            (None, Some(dtype)) => data_type_of(operation, &dtype)?,
            (None, None) => {
                let cause = format!(
                    "its elements have the type \"{type_name}\", which no array of the library has: \
                     convert them"
                );
                return Err(Failure::invalid(operation, cause));
            }
        };
        if data_type.item_size().is_none() {
            let cause = format!(
                "NumPy has an element of {data_type} in each byte, a message several. Write them to a \
                 loan, which packs them: loan.array[...] = array"
            );
            return Err(Failure::invalid(operation, cause));
        }
        let shape: Vec<u64> = field("shape")?.extract()?;
        let data = field("data")?;
        let Ok((address, is_read_only)) = data.extract::<(u64, bool)>() else {
            let cause = format!("its {name} has no address in \"data\"");
            return Err(Failure::invalid(operation, cause));
        };
        let strides = match interface.get_item("strides")?.filter(|strides| !strides.is_none()) {
            Some(strides) => {
                let strides = strides.cast::<PyTuple>().map_err(PyErr::from)?;
                let strides: Vec<isize> = strides.extract()?;
                let item_size = data_type.item_size().unwrap_or(1) as isize;
                Some(in_elements(operation, &strides, item_size)?)
            }
            None => None,
        };
        let cuda_device = match is_cuda {
            // The driver knows the device of an address.
            true => match gpu::PointerAttributes::of(address).and_then(|found| found.device) {
                Some(device) => Some(device.number),
                None => {
                    let cause = format!("{address:#x} is no address of a CUDA device");
                    return Err(Failure::invalid(operation, cause));
                }
            },
            false => None,
        };
        if let (Some(number), Some(stream)) = (cuda_device, interface.get_item("stream")?)
            && !stream.is_none()
            && is_ordered
        {
            wait_for_producer(operation, number, stream.extract()?)?;
        }
        Ok(Self {
            address,
            data_type,
            layout: layout_of(operation, data_type, shape, strides)?,
            cuda_device,
            is_read_only,
            _keeper: Keeper::Object { _object: object.clone().unbind() },
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn data_type(&self) -> DataType {
        self.data_type
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Number of the CUDA device; None for memory that the host accesses.
    pub(crate) fn cuda_device(&self) -> Option<u32> {
        self.cuda_device
    }

    pub(crate) fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Length in bytes, without gaps.
    pub(crate) fn length(&self) -> u64 {
        // Checked when it was made.
        self.data_type.bytes(self.layout.elements()).unwrap_or(0)
    }

    /// The bytes that it reaches, from the first element on: offset and length.
    pub(crate) fn extent(&self, operation: &'static str) -> Result<(i64, u64)> {
        self.layout.extent(self.data_type).ok_or_else(|| {
            let cause =
                format!("elements of {} share bytes, and these have gaps: copy it", self.data_type);
            Failure::invalid(operation, cause)
        })
    }

    /// The elements without gaps; None for memory of a device.
    pub(crate) fn host_elements(&self) -> Option<Vec<u8>> {
        if self.cuda_device.is_some() {
            return None;
        }
        let mut elements = vec![0; self.length() as usize];
        // SAFETY: this source has the type and the layout, in memory of the host; the vector has
        // its length.
        unsafe { self.host_bytes().copy(self.data_type, &self.layout, elements.as_mut_ptr()) };
        Some(elements)
    }

    /// The array's first element; for memory of the host.
    pub(crate) fn host_bytes(&self) -> HostBytes {
        HostBytes { address: self.address }
    }
}

impl HostBytes {
    /// Copies an array of this layout that begins here, without gaps.
    ///
    /// # Safety
    /// A source with this type and layout exists, in memory of the host; `into` has its length.
    pub(crate) unsafe fn copy(self, data_type: DataType, layout: &Layout, into: *mut u8) {
        let (row, offsets) = layout.rows();
        // Elements of less than a byte are in contiguous arrays only.
        let row_bytes = data_type.bytes(row).unwrap_or(0) as usize;
        let item_size = data_type.item_size().unwrap_or(1) as i64;
        let start: *const u8 = ptr::with_exposed_provenance(self.address as usize);
        for (number, offset) in offsets.enumerate() {
            let from = start.wrapping_offset((offset * item_size) as isize);
            // SAFETY: the layout was checked: its rows are in the source, and fill the target.
            unsafe { ptr::copy_nonoverlapping(from, into.add(number * row_bytes), row_bytes) };
        }
    }
}

/// Refuses an object of NumPy whose buffer has less than the object: the bytes of a date, and the
/// elements of a masked array.
fn refuse_lossy_buffer(operation: &'static str, object: &Bound<'_, PyAny>) -> Result<()> {
    static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let (py, kind) = (object.py(), object.get_type());
    if object.is_exact_instance_of::<PyBytes>() || object.is_exact_instance_of::<PyByteArray>() {
        return Ok(());
    }
    // Without NumPy there is no such object.
    if NDARRAY.get(py).is_none() && !py.import("sys")?.getattr("modules")?.contains("numpy")? {
        return Ok(());
    }
    let array_type = NDARRAY.import(py, "numpy", "ndarray")?;
    if kind.is(array_type) {
        return Ok(());
    }
    if object.is_instance(array_type)? && object.hasattr("_mask")? {
        let cause = "a masked array would lose its mask: use array.filled(value), and publish or \
                     share array.mask, too";
        return Err(Failure::invalid(operation, cause));
    }
    // Of an element by itself.
    if let Some(dtype) = object.getattr_opt("dtype")? {
        data_type_of(operation, &dtype)?;
    }
    Ok(())
}

/// An array in a collective operation: contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand<'a> {
    address: u64,
    length: u64,
    is_read_only: bool,
    cuda_device: Option<u32>,
    blocks: Blocks<'a>,
}

impl<'a> Operand<'a> {
    /// Of an array that has these blocks, in elements of the operation.
    pub(crate) fn new(
        operation: &'static str,
        source: &'a Source,
        blocks: Blocks<'a>,
    ) -> Result<Self> {
        if !source.layout.is_contiguous() {
            let cause = "the array is not contiguous: pass a contiguous copy";
            return Err(Failure::invalid(operation, cause));
        }
        let (address, length) = (source.address, source.length());
        let Source { is_read_only, cuda_device, .. } = *source;
        Ok(Self { address, length, is_read_only, cuda_device, blocks })
    }

    /// Fails if the array is shorter than its blocks.
    fn check(&self, operation: &'static str, ranks: u32, item_size: usize) -> Result<()> {
        let end = match self.blocks {
            Blocks::One(count) => Some(count),
            Blocks::Each(count) => count.checked_mul(ranks as usize),
            Blocks::Unequal { counts, offsets } => {
                let mut blocks = counts.iter().zip(offsets);
                blocks.try_fold(0, |end: usize, (count, offset)| {
                    Some(end.max(count.checked_add(*offset)?))
                })
            }
        };
        match end.and_then(|end| end.checked_mul(item_size)) {
            Some(bytes) if bytes as u64 <= self.length => Ok(()),
            _ => {
                let cause = format!(
                    "the array has {} bytes, fewer than its blocks for {ranks} ranks",
                    self.length
                );
                Err(Failure::invalid(operation, cause))
            }
        }
    }
}

/// A collective operation between arrays, whose blocks were checked. A side that this rank does not use has no
/// array.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArrayCall<'a> {
    operation: Operation,
    data_type: collective::DataType,
    reduce_op: ReduceOp,
    root: u32,
    from: Option<Operand<'a>>,
    to: Option<Operand<'a>>,
}

impl<'a> ArrayCall<'a> {
    /// Call of a rank, with the number of ranks. `call` says what is done, without addresses and blocks.
    ///
    /// # Errors
    /// `InvalidArgument` if an array is too short, read-only, or not where the other one is.
    pub(crate) fn new(
        call: &CollectiveCall<'_>,
        from: Option<Operand<'a>>,
        to: Option<Operand<'a>>,
        [rank, ranks]: [u32; 2],
    ) -> Result<Self> {
        use Operation::{Broadcast, Gather, Reduce};
        let CollectiveCall { operation, data_type, reduce_op, root, .. } = *call;
        let name = operation.name();
        for operand in from.iter().chain(&to) {
            operand.check(name, ranks, data_type.size())?;
        }
        let is_written = match operation {
            Broadcast => rank != root,
            Gather | Reduce => rank == root,
            _ => true,
        };
        if is_written && to.is_some_and(|operand| operand.is_read_only) {
            return Err(Failure::invalid(name, "the array for the result is read-only"));
        }
        if let (Some(from), Some(to)) = (&from, &to)
            && from.cuda_device != to.cuda_device
        {
            let place = |operand: &Operand<'_>| match operand.cuda_device {
                Some(number) => format!("on cuda:{number}"),
                None => "in memory of the host".to_owned(),
            };
            let cause = format!("the array is {}, that for the result {}", place(from), place(to));
            return Err(Failure::invalid(name, cause));
        }
        Ok(Self { operation, data_type, reduce_op, root, from, to })
    }

    /// The operation's name.
    pub(crate) fn name(&self) -> &'static str {
        self.operation.name()
    }

    /// The CUDA device that the arrays are on; None for arrays of the host, and without arrays.
    pub(crate) fn cuda_device(&self) -> Option<u32> {
        self.from.or(self.to).and_then(|operand| operand.cuda_device)
    }

    fn with_addresses(&self) -> CollectiveCall<'a> {
        let Self { operation, data_type, reduce_op, root, from, to } = *self;
        let address = |operand: Option<Operand<'_>>| operand.map_or(0, |operand| operand.address);
        CollectiveCall {
            operation,
            data_type,
            reduce_op,
            root,
            input: ptr::with_exposed_provenance(address(from) as usize),
            send: from.map_or(Blocks::One(0), |operand| operand.blocks),
            output: ptr::with_exposed_provenance_mut(address(to) as usize),
            receive: to.map_or(Blocks::One(0), |operand| operand.blocks),
        }
    }

    /// Carries it out in memory of the host.
    pub(crate) fn run(&self, domain: &mut CommDomain, timeout: Duration) -> Result<()> {
        // SAFETY: the sources exist until the return, and have all blocks: checked by `new`. The program
        // does not use the arrays meanwhile, as NumPy demands of threads that share one.
        Ok(unsafe { domain.run(&self.with_addresses(), timeout) }?)
    }

    /// Starts it on a stream of the device.
    pub(crate) fn start(
        &self,
        domain: &mut DeviceDomain,
        stream: &Stream,
        timeout: Duration,
    ) -> Result<()> {
        // SAFETY: as for `run`. A caller that does not wait keeps the arrays until the stream has done it, as
        // libraries with streams demand.
        Ok(unsafe { domain.start(&self.with_addresses(), stream, timeout) }?)
    }
}

/// Lets the default stream of a device wait for the stream that writes an array.
fn wait_for_producer(operation: &'static str, number: u32, handle: u64) -> Result<()> {
    let handle = match handle {
        // The default stream by itself.
        0 | 1 => return Ok(()),
        2 => {
            let cause =
                "its \"stream\" is the per-thread default stream, which differs in each thread";
            return Err(Failure::invalid(operation, cause));
        }
        handle => handle,
    };
    let device = open_device(DeviceName::cuda(number))?;
    // SAFETY: the producer says that it is a stream of the device, which it has.
    let producer = unsafe { device.adopt_stream(handle) }?;
    if !producer.is_done()? {
        // SAFETY: the default stream always exists.
        unsafe { device.delay_stream(0, &producer.point()?) }?;
    }
    Ok(())
}

/// Copies the elements of an array, without gaps, out of the bytes of its
/// [extent](Layout::extent).
pub(crate) fn gather(data_type: DataType, layout: &Layout, bytes: &[u8], into: &mut [u8]) {
    let (first, extent) = layout.extent(data_type).unwrap_or_default();
    assert!(bytes.len() as u64 >= extent, "fewer bytes than the extent");
    assert!(data_type.bytes(layout.elements()) == Some(into.len() as u64), "another length");
    let start = bytes.as_ptr().expose_provenance() as u64;
    let start = HostBytes { address: start.wrapping_add_signed(-first) };
    // SAFETY: the elements are in the bytes, and fill the target: checked above.
    unsafe { start.copy(data_type, layout, into.as_mut_ptr()) };
}

fn in_elements(operation: &'static str, strides: &[isize], item_size: isize) -> Result<Vec<i64>> {
    let in_elements = strides.iter().map(|stride| {
        (item_size > 0 && stride % item_size == 0).then(|| (stride / item_size) as i64)
    });
    in_elements.collect::<Option<_>>().ok_or_else(|| {
        let cause = format!(
            "strides of {strides:?} bytes are no multiples of {item_size}, the size of an element"
        );
        Failure::invalid(operation, cause)
    })
}

fn layout_of(
    operation: &'static str,
    data_type: DataType,
    shape: Vec<u64>,
    strides: Option<Vec<i64>>,
) -> Result<Layout> {
    let described = format!("shape {shape:?} with strides {strides:?}");
    let layout = match strides {
        Some(strides) => Layout::strided(shape, strides),
        None => Layout::contiguous(shape),
    };
    let has_length = |layout: &Layout| data_type.bytes(layout.elements()).is_some();
    layout.filter(has_length).ok_or_else(|| {
        let cause = format!("{described}: at most 16 dimensions, and less than 2^63 bytes");
        Failure::invalid(operation, cause)
    })
}
