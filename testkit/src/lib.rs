//! Helpers that the tests and benchmarks of all crates share. It is not part of the product,
//! and depends on none of the product's crates, so each of them can use it.

pub mod addresses;
pub mod allocations;
pub mod bytes;
pub mod cases;
pub mod children;
pub mod measurement_lock;
pub mod processes;
pub mod reference;
pub mod skip;
pub mod temp_dir;
