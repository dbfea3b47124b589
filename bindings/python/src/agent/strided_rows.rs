//! Strided rows of transfers.

use pyo3::prelude::*;
use transfer::{Strided, Subarray};

use crate::failure::Result;

/// Rows of the same length at regular strides, as planes and halos of arrays have them.
#[pyclass(frozen, name = "Strided", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyStrided {
    rows: Strided,
}

impl PyStrided {
    pub(super) fn rows_of_transfer(&self) -> Strided {
        self.rows
    }
}

#[pymethods]
impl PyStrided {
    /// Rows of `length` bytes, at these distances in bytes.
    #[staticmethod]
    fn rows(count: u64, length: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Ok(Self { rows: Strided::rows(count, length, from_stride, to_stride)? })
    }

    /// A part of an array of elements of `item_size` bytes, which lies in arrays of both sides.
    #[staticmethod]
    fn tile(
        item_size: u64,
        tile: Vec<u64>,
        from_extents: Vec<u64>,
        from_origin: Vec<u64>,
        to_extents: Vec<u64>,
        to_origin: Vec<u64>,
    ) -> Result<Self> {
        let from = Subarray { extents: &from_extents, origin: &from_origin };
        let to = Subarray { extents: &to_extents, origin: &to_origin };
        Ok(Self { rows: Strided::tile(item_size, &tile, from, to)? })
    }

    /// Repeats the rows, at these distances in bytes.
    fn repeat(&self, count: u64, from_stride: u64, to_stride: u64) -> Result<Self> {
        Ok(Self { rows: self.rows.repeat(count, from_stride, to_stride)? })
    }

    /// Moves the rows to offsets larger by this many bytes.
    #[pyo3(signature = (*, source=0, target=0))]
    fn shifted(&self, source: u64, target: u64) -> Result<Self> {
        Ok(Self { rows: self.rows.shifted(source, target)? })
    }

    /// Number of bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.rows.bytes()
    }
}
