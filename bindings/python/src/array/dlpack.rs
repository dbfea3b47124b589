//! Arrays as capsules of DLPack, of version 1 and of the version before.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::{Owner, Tensor};

const CPU: i32 = 1;
const CUDA: i32 = 2;
pub(super) const READ_ONLY: u64 = 1;
const IS_COPIED: u64 = 2;
/// The newest version whose fields are known here.
const VERSION: [u32; 2] = [1, 1];

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct RawTensor {
    pub(super) data: *mut c_void,
    pub(super) device: [i32; 2],
    pub(super) dimensions: i32,
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Versioned {
    pub(super) version: [u32; 2],
    context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Self)>,
    pub(super) flags: u64,
    pub(super) tensor: RawTensor,
}

/// `DLManagedTensor`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Unversioned {
    pub(super) tensor: RawTensor,
    context: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// Names of the capsules, before and after they were consumed.
pub(super) const VERSIONED: [&CStr; 2] = [c"dltensor_versioned", c"used_dltensor_versioned"];
pub(super) const UNVERSIONED: [&CStr; 2] = [c"dltensor", c"used_dltensor"];

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

fn manage<T>(tensor: &Tensor<'_>, make: impl FnOnce(RawTensor) -> T) -> *mut T {
    let shape = tensor.layout.shape().iter().map(|extent| *extent as i64);
    let mut shape: Box<[i64]> = shape.collect();
    let mut strides: Box<[i64]> = tensor.layout.strides().into();
    let raw = make(RawTensor {
        data: ptr::with_exposed_provenance_mut(tensor.address as usize),
        device: device(tensor.cuda_device).into(),
        dimensions: shape.len() as i32,
        code: tensor.data_type.code,
        bits: tensor.data_type.bits,
        lanes: tensor.data_type.lanes,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    });
    let owner = Arc::clone(&tensor.owner);
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

/// Deletes a tensor that no consumer took.
unsafe extern "C" fn destroy_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule; it has this name until it is consumed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, VERSIONED[0].as_ptr()) == 1 {
            let raw = ffi::PyCapsule_GetPointer(capsule, VERSIONED[0].as_ptr());
            delete::<Versioned>(raw.cast());
        }
    }
}

/// Deletes a tensor that no consumer took.
unsafe extern "C" fn destroy_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls it with the capsule; it has this name until it is consumed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED[0].as_ptr()) == 1 {
            let raw = ffi::PyCapsule_GetPointer(capsule, UNVERSIONED[0].as_ptr());
            delete::<Unversioned>(raw.cast());
        }
    }
}

/// Makes a capsule, of version 1 if the consumer knows that.
pub(super) fn export<'py>(
    py: Python<'py>,
    tensor: &Tensor<'_>,
    max_version: Option<(u32, u32)>,
) -> PyResult<Bound<'py, PyAny>> {
    if max_version.is_some_and(|(major, _)| major >= 1) {
        let read_only = if tensor.is_read_only { READ_ONLY } else { 0 };
        let copied = if tensor.is_copied { IS_COPIED } else { 0 };
        let raw = manage(tensor, |raw| Versioned {
            version: VERSION,
            context: ptr::null_mut(),
            deleter: Some(delete::<Versioned>),
            flags: read_only | copied,
            tensor: raw,
        });
        // SAFETY: a new tensor; the destructor deletes it, unless it is consumed.
        return unsafe {
            let made =
                ffi::PyCapsule_New(raw.cast(), VERSIONED[0].as_ptr(), Some(destroy_versioned));
            Bound::from_owned_ptr_or_err(py, made).inspect_err(|_| delete(raw))
        };
    }
    if tensor.is_read_only {
        let cause = "the array is read-only, which this consumer's version of DLPack cannot express. \
                     Use copy=True, a newer version of the library, or numpy.asarray";
        return Err(PyBufferError::new_err(cause));
    }
    let raw = manage(tensor, |raw| Unversioned {
        tensor: raw,
        context: ptr::null_mut(),
        deleter: Some(delete::<Unversioned>),
    });
    // SAFETY: a new tensor; the destructor deletes it, unless it is consumed.
    unsafe {
        let made =
            ffi::PyCapsule_New(raw.cast(), UNVERSIONED[0].as_ptr(), Some(destroy_unversioned));
        Bound::from_owned_ptr_or_err(py, made).inspect_err(|_| delete(raw))
    }
}
