//! Common parts of programs that `mpirun`, `srun` or `torchrun` starts.
//!
//! Modules, each importing only those before it: `watchdog`, `communicator`, `options`, `job`,
//! `memory`, `pattern`, `samples`, `arrivals`, `numbers`, `heat`, `fft`.

pub mod arrivals;
#[cfg(feature = "mpi")]
pub mod communicator;
pub mod fft;
pub mod heat;
pub mod job;
pub mod memory;
pub mod numbers;
pub mod options;
pub mod pattern;
pub mod samples;
mod watchdog;

pub use job::{Job, conclude};
pub use options::CommonOptions;

/// Result of the programs: each error ends the program with its text.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
