//! Arrays as capsules of DLPack, of version 1 and of the version before.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Array, Owner};

const CPU: i32 = 1;
const CUDA: i32 = 2;
const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
/// The newest version whose fields are known here.
const VERSION: [u32; 2] = [1, 1];

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
struct RawTensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Versioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: RawTensor,
}

/// `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Unversioned {
    tensor: RawTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// What a capsule has.
trait Content {
    /// Names of its capsules, before and after they were consumed.
    const NAMES: [&CStr; 2];
}

impl Content for Versioned {
    const NAMES: [&CStr; 2] = [c"dltensor_versioned", c"used_dltensor_versioned"];
}

impl Content for Unversioned {
    const NAMES: [&CStr; 2] = [c"dltensor", c"used_dltensor"];
}

/// A managed tensor: its first field is what consumers know.
#[repr(C)]
struct Managed<T> {
    raw: T,
    _shape: Box<[i64]>,
    _strides: Box<[i64]>,
    _owner: Arc<dyn Owner>,
}

/// What consumers delete, in any thread and without the interpreter.
unsafe extern "C" fn delete<T>(raw: *mut T) {
    // SAFETY: made by `manage`; a consumer deletes it once.
    drop(unsafe { Box::from_raw(raw.cast::<Managed<T>>()) });
}

fn manage<T>(array: &Array, make: impl FnOnce(RawTensor) -> T) -> *mut T {
    let shape = array.layout.shape().iter().map(|extent| *extent as i64);
    let mut shape: Box<[i64]> = shape.collect();
    let mut strides: Box<[i64]> = array.layout.strides().into();
    let (code, bits, lanes) = array.data_type.codes();
    let raw = make(RawTensor {
        data: ptr::with_exposed_provenance_mut(array.address as usize),
        device: device(array.cuda_device()).into(),
        dimensions: shape.len() as i32,
        code,
        bits,
        lanes,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    });
    let owner = Arc::clone(&array.owner);
    Box::into_raw(Box::new(Managed { raw, _shape: shape, _strides: strides, _owner: owner })).cast()
}

/// Type and number of a device.
pub(super) fn device(cuda_device: Option<u32>) -> (i32, i32) {
    cuda_device.map_or((CPU, 0), |number| (CUDA, number as i32))
}

/// The number of a CUDA device; None for the host; an error for other devices.
pub(super) fn cuda_device([kind, number]: [i32; 2]) -> Result<Option<u32>, String> {
    /// Host memory that CUDA has pinned.
    const CUDA_HOST: i32 = 3;
    /// Memory that CUDA moves between host and devices.
    const CUDA_MANAGED: i32 = 13;
    match (kind, u32::try_from(number)) {
        (CPU | CUDA_HOST, _) => Ok(None),
        (CUDA | CUDA_MANAGED, Ok(number)) => Ok(Some(number)),
        _ => Err(format!("device ({kind}, {number}) is neither the host nor a CUDA device")),
    }
}

/// A tensor of another library, taken from its capsule. It is deleted by the thread that drops it,
/// which holds the lock of the interpreter.
pub(super) enum Taken {
    Versioned(*mut Versioned),
    Unversioned(*mut Unversioned),
}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: it was taken once, and is deleted once.
        unsafe {
            match *self {
                Self::Versioned(raw) => {
                    if let Some(delete) = (*raw).deleter {
                        delete(raw);
                    }
                }
                Self::Unversioned(raw) => {
                    if let Some(delete) = (*raw).deleter {
                        delete(raw);
                    }
                }
            }
        }
    }
}

impl Taken {
    /// The tensor of a capsule of either version; None for another object, or after it was taken.
    pub(super) fn from_capsule(capsule: &Bound<'_, PyAny>) -> Option<Self> {
        let take = |[name, used]: [&'static CStr; 2]| {
            // SAFETY: it is checked whether it is a capsule of this name, which then has a tensor.
            unsafe {
                if ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) != 1 {
                    return None;
                }
                let raw = ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr());
                ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr());
                Some(raw)
            }
        };
        let versioned = take(Versioned::NAMES).map(|raw| Self::Versioned(raw.cast()));
        versioned.or_else(|| take(Unversioned::NAMES).map(|raw| Self::Unversioned(raw.cast())))
    }

    /// The major version; 0 before there were versions. Nothing else may be asked of one above 1.
    pub(super) fn version(&self) -> u32 {
        match self {
            // SAFETY: the version is the first field in all versions.
            Self::Versioned(raw) => unsafe { (**raw).version[0] },
            Self::Unversioned(_) => 0,
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        match self {
            // SAFETY: it has this version.
            Self::Versioned(raw) => unsafe { (**raw).flags & READ_ONLY != 0 },
            Self::Unversioned(_) => false,
        }
    }

    fn tensor(&self) -> &RawTensor {
        // SAFETY: it lives as long as this, and nothing changes it.
        unsafe {
            match self {
                Self::Versioned(raw) => &(**raw).tensor,
                Self::Unversioned(raw) => &(**raw).tensor,
            }
        }
    }

    /// Address of the first element.
    pub(super) fn address(&self) -> u64 {
        let tensor = self.tensor();
        (tensor.data.expose_provenance() as u64).wrapping_add(tensor.byte_offset)
    }

    /// Type and number of the device.
    pub(super) fn device(&self) -> [i32; 2] {
        self.tensor().device
    }

    /// Code, bits and lanes of the elements.
    pub(super) fn codes(&self) -> (u8, u8, u16) {
        let tensor = self.tensor();
        (tensor.code, tensor.bits, tensor.lanes)
    }

    /// Extents; and strides in elements, if it is not contiguous.
    pub(super) fn sizes(&self) -> (Vec<u64>, Option<Vec<i64>>) {
        let tensor = self.tensor();
        let dimensions = usize::try_from(tensor.dimensions).unwrap_or(0);
        let sizes = |start: *mut i64| match start.is_null() || dimensions == 0 {
            true => None,
            // SAFETY: that many numbers, which live as long as the tensor.
            false => Some(unsafe { std::slice::from_raw_parts(start, dimensions) }),
        };
        let shape = sizes(tensor.shape).unwrap_or_default();
        let shape = shape.iter().map(|extent| (*extent).max(0) as u64).collect();
        (shape, sizes(tensor.strides).map(<[i64]>::to_vec))
    }
}

/// Deletes a tensor that no consumer took.
unsafe extern "C" fn destroy<T: Content>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule; it has this name until it is consumed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, T::NAMES[0].as_ptr()) == 1 {
            delete::<T>(ffi::PyCapsule_GetPointer(capsule, T::NAMES[0].as_ptr()).cast());
        }
    }
}

/// Makes a capsule of an array.
fn capsule<'py, T: Content>(
    py: Python<'py>,
    array: &Array,
    make: impl FnOnce(RawTensor) -> T,
) -> PyResult<Bound<'py, PyAny>> {
    let raw = manage(array, make);
    // SAFETY: a new tensor; the destructor deletes it, unless it is consumed.
    unsafe {
        let made = ffi::PyCapsule_New(raw.cast(), T::NAMES[0].as_ptr(), Some(destroy::<T>));
        Bound::from_owned_ptr_or_err(py, made).inspect_err(|_| delete(raw))
    }
}

/// Makes a capsule, of version 1 if the consumer knows that.
pub(super) fn export<'py>(
    py: Python<'py>,
    array: &Array,
    is_copied: bool,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyAny>> {
    if array.data_type.structured().is_some() {
        return Err(PyBufferError::new_err("DLPack has no records. Use numpy.asarray(array)"));
    }
    if max_version.is_some_and(|(major, _)| major >= 1) {
        let read_only = if array.is_read_only { READ_ONLY } else { 0 };
        let copied = if is_copied { IS_COPIED } else { 0 };
        return capsule(py, array, |raw| Versioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete::<Versioned>),
            flags: read_only | copied,
            tensor: raw,
        });
    }
    if array.is_read_only {
        let cause = "the array is read-only, which this consumer's version of DLPack cannot express. \
                     Use torch.from_numpy(numpy.asarray(array)), jax.numpy.asarray(array), a version \
                     that knows DLPack 1, or a copy";
        return Err(PyBufferError::new_err(cause));
    }
    capsule(py, array, |raw| Unversioned {
        tensor: raw,
        context: ptr::null_mut(),
        deleter: Some(delete::<Unversioned>),
    })
}
