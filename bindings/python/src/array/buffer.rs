//! Arrays as buffers of Python.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ptr;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use super::Array;

/// Fills in a view of the array.
///
/// # Safety
/// `view` is that of a caller of the buffer protocol.
pub(super) unsafe fn fill(
    view: *mut ffi::Py_buffer,
    object: Bound<'_, Array>,
    flags: c_int,
) -> PyResult<()> {
    let array = object.get();
    let refused = |cause: &str| {
        // SAFETY: the caller's view.
        unsafe { (*view).obj = ptr::null_mut() };
        Err(PyBufferError::new_err(cause.to_owned()))
    };
    let wants = |flag: c_int| flags & flag == flag;
    if wants(ffi::PyBUF_WRITABLE) && array.is_read_only {
        return refused("the array is read-only");
    }
    let has_rows = array.layout.shape().iter().filter(|extent| **extent > 1).count() > 1;
    if wants(ffi::PyBUF_F_CONTIGUOUS) && !wants(ffi::PyBUF_ANY_CONTIGUOUS) && has_rows {
        return refused("the array is in C order");
    }
    let wants_order = [ffi::PyBUF_C_CONTIGUOUS, ffi::PyBUF_F_CONTIGUOUS, ffi::PyBUF_ANY_CONTIGUOUS];
    let is_strided = wants(ffi::PyBUF_STRIDES) && !wants_order.into_iter().any(wants);
    if !array.layout.is_contiguous() && !is_strided {
        return refused("the array is strided: copy it, or use a consumer of strided buffers");
    }
    let is_bytes = array.data_type.item_size() == Some(1) && array.layout.shape().len() == 1;
    if !is_bytes && !wants(ffi::PyBUF_ND) && !wants(ffi::PyBUF_FORMAT) {
        return refused(
            "the consumer asks for bytes without type and shape, as torch.asarray does. Use \
             torch.from_dlpack(array) for a tensor, memoryview(array) for the bytes",
        );
    }
    let (Some(item_size), Some(format)) =
        (array.data_type.item_size(), array.data_type.buffer_format())
    else {
        let cause = format!("buffers have no {}: use DLPack", array.data_type);
        return refused(&cause);
    };
    let dimensions = array.layout.shape().len();
    // Extents, and behind them strides in bytes.
    let extents = array.layout.shape().iter().map(|extent| *extent as isize);
    let strides = array.layout.strides().iter().map(|stride| *stride as isize * item_size as isize);
    let sizes: Box<[isize]> = extents.chain(strides).collect();
    let length = array.layout.elements() * item_size;
    let sizes = Box::into_raw(Box::new(sizes));
    // SAFETY: the caller's view; the sizes live until `release`.
    unsafe {
        let shape = (*sizes).as_mut_ptr();
        let has_shape = wants(ffi::PyBUF_ND);
        (*view).buf = ptr::with_exposed_provenance_mut(array.address as usize);
        (*view).len = length as isize;
        (*view).itemsize = item_size as isize;
        (*view).readonly = c_int::from(array.is_read_only);
        (*view).ndim = if has_shape { dimensions as c_int } else { 1 };
        (*view).format =
            if wants(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { ptr::null_mut() };
        (*view).shape = if has_shape { shape } else { ptr::null_mut() };
        (*view).strides =
            if wants(ffi::PyBUF_STRIDES) { shape.add(dimensions) } else { ptr::null_mut() };
        (*view).suboffsets = ptr::null_mut();
        (*view).internal = sizes.cast();
        (*view).obj = object.into_any().into_ptr();
    }
    Ok(())
}

/// Frees what [`fill`] made.
///
/// # Safety
/// `view` was filled by it, and is released once.
pub(super) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: made by `fill`.
    drop(unsafe { Box::from_raw((*view).internal.cast::<Box<[isize]>>()) });
}
