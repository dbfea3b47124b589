//! Elementwise reductions of memory that several processes share: types, operations, and the loops of
//! processors. Kernels of devices give the same results, except for the bits of a NaN.
//!
//! Modules, each importing only those before it: `data_type`, `reduce`.

mod data_type;
mod reduce;

pub use data_type::{DataType, ReduceOp};
pub use reduce::{reduce, reduce_streaming};
