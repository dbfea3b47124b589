//! Arguments that NumPy accepts in several forms: shapes and types of elements.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::data_type::DataType;
use crate::failure::{Failure, Result};
use crate::layout::Layout;

/// The extents that a caller names: a number, or a sequence of numbers.
pub(crate) fn shape_of(operation: &'static str, shape: &Bound<'_, PyAny>) -> Result<Vec<u64>> {
    let refused = |cause: &str| {
        let shape = shape.repr().map_or_else(|_| "…".to_owned(), |text| text.to_string());
        Failure::invalid(operation, format!("shape={shape}: {cause}"))
    };
    let unknown = || refused("a number or a sequence of numbers, such as (480, 640)");
    let extent = |extent: &Bound<'_, PyAny>| match extent.extract::<i128>() {
        Ok(extent) => u64::try_from(extent).map_err(|_| refused("an extent is 0 to 2^63")),
        Err(_) => Err(unknown()),
    };
    if shape.is_instance_of::<PyString>() || shape.is_instance_of::<PyBytes>() {
        return Err(unknown());
    }
    match shape.try_iter() {
        // A number of NumPy has an iterator, but no elements.
        Ok(extents) => extents.map(|found| extent(&found.map_err(|_| unknown())?)).collect(),
        Err(_) => Ok(vec![extent(shape)?]),
    }
}

/// The type of elements that a caller names: by text, or by the type object of a library.
pub(crate) fn data_type_of(operation: &'static str, name: &Bound<'_, PyAny>) -> Result<DataType> {
    let py = name.py();
    let text = match name.cast::<PyString>() {
        Ok(text) => text.to_string(),
        // The scalar types of ml_dtypes are classes; types of PyTorch have a name as text.
        Err(_) => match name.getattr(intern!(py, "__name__")) {
            Ok(text) => text.to_string(),
            Err(_) => name.str()?.to_string(),
        },
    };
    if let Some(found) = DataType::parse(&text) {
        return Ok(found);
    }
    let described = py
        .import(intern!(py, "fabricast._array"))?
        .call_method1(intern!(py, "type_name"), (name,))
        .map_err(|error| match () {
            () if error.is_instance_of::<PyTypeError>(py)
                || error.is_instance_of::<PyValueError>(py) =>
            {
                Failure::invalid(operation, error.value(py))
            }
            () => error.into(),
        })?;
    let described: String = described.extract()?;
    DataType::parse(&described).ok_or_else(|| {
        let cause = match described.starts_with('{') {
            true => "a record has at most 64 fields, and a process at most 4096 types of records",
            false => "arrays of the library have no such elements: convert them with astype",
        };
        let cause = format!("dtype={described}: {cause}");
        Failure::invalid(operation, cause)
    })
}

/// Type and layout of a contiguous array, and its length in bytes.
pub(crate) fn contiguous(
    operation: &'static str,
    data_type: DataType,
    shape: Vec<u64>,
) -> Result<(Layout, u64)> {
    let described = format!("shape={shape:?} of {data_type}");
    let layout = Layout::contiguous(shape);
    let length = layout.as_ref().and_then(|layout| data_type.bytes(layout.elements()));
    match (layout, length) {
        (Some(layout), Some(length)) => Ok((layout, length)),
        _ => {
            let cause = format!("{described}: at most 16 dimensions, and less than 2^63 bytes");
            Err(Failure::invalid(operation, cause))
        }
    }
}
