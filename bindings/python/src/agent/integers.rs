//! Lists of integers: indices and offsets of blocks.

use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange, PyTuple};

use crate::array::Source;
use crate::failure::{Failure, Result};

/// Integers of a list or range, or of an array, which is read as a whole.
pub(super) struct Integers {
    values: Vec<i64>,
    shape: Vec<u64>,
}

/// Is it a sequence of Python, and not an array?
pub(super) fn is_sequence(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>()
        || object.is_instance_of::<PyTuple>()
        || object.is_instance_of::<PyRange>()
}

impl Integers {
    /// Of a sequence, or of an array in memory of the host, whatever library it is from.
    pub(super) fn of(operation: &'static str, object: &Bound<'_, PyAny>) -> Result<Self> {
        if is_sequence(object) {
            let values: Vec<i64> = object.extract()?;
            let shape = vec![values.len() as u64];
            return Ok(Self { values, shape });
        }
        let source = Source::of(operation, object)?;
        let Some(bytes) = source.host_elements() else {
            let cause = "the integers are in memory of a device: copy them to the host";
            return Err(Failure::invalid(operation, cause));
        };
        let words = |bytes: &[u8]| bytes.as_chunks::<4>().0.to_vec();
        let doubles = |bytes: &[u8]| bytes.as_chunks::<8>().0.to_vec();
        let values = match source.data_type().codes() {
            (0, 32, 1) => {
                words(&bytes).into_iter().map(|it| i32::from_ne_bytes(it).into()).collect()
            }
            (1, 32, 1) => {
                words(&bytes).into_iter().map(|it| u32::from_ne_bytes(it).into()).collect()
            }
            (0, 64, 1) => doubles(&bytes).into_iter().map(i64::from_ne_bytes).collect(),
            (1, 64, 1) => {
                let values = doubles(&bytes).into_iter().map(u64::from_ne_bytes).map(i64::try_from);
                let values: std::result::Result<_, _> = values.collect();
                values.map_err(|_| {
                    Failure::invalid(operation, "an integer of 2^63 or more is no index or offset")
                })?
            }
            _ => {
                let cause = format!(
                    "elements of the type {}: int32, uint32, int64 or uint64 are possible",
                    source.data_type()
                );
                return Err(Failure::invalid(operation, cause));
            }
        };
        Ok(Self { values, shape: source.layout().shape().to_vec() })
    }

    /// Indices of so many blocks.
    pub(super) fn to_indices(&self, operation: &'static str, blocks: usize) -> Result<Vec<u32>> {
        if self.shape.len() != 1 {
            let cause = format!("indices have one dimension, not {}", self.shape.len());
            return Err(Failure::invalid(operation, cause));
        }
        let index = |value: &i64| {
            u32::try_from(*value).map_err(|_| {
                Failure::new("OutOfBounds", operation, format!("index {value} of {blocks} blocks"))
            })
        };
        self.values.iter().map(index).collect()
    }

    /// Rows of three numbers.
    pub(super) fn to_triples(&self, operation: &'static str) -> Result<Vec<[u64; 3]>> {
        if !matches!(*self.shape, [_, 3]) {
            let cause = format!("blocks have the shape (n, 3), not {:?}", self.shape);
            return Err(Failure::invalid(operation, cause));
        }
        let number = |value: &i64| {
            let negative = |_| Failure::invalid(operation, format!("a block has {value}"));
            u64::try_from(*value).map_err(negative)
        };
        let rows = self.values.as_chunks::<3>().0.iter();
        rows.map(|[to, from, length]| Ok([number(to)?, number(from)?, number(length)?])).collect()
    }
}
