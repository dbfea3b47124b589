//! Common parts of programs that `mpirun`, `srun` or `torchrun` starts.
//!
//! Modules, each importing only those before it: `watchdog`, `messages`, `communicator`, `options`,
//! `start_up`, `job`, `memory`, `pattern`, `samples`, `channel`, `benchmark`, `stream`, `arrivals`, `numbers`,
//! `heat`, `fft`.

pub mod arrivals;
pub mod benchmark;
pub mod channel;
#[cfg(feature = "mpi")]
pub mod communicator;
pub mod fft;
pub mod heat;
pub mod job;
pub mod memory;
#[cfg(feature = "mpi")]
pub mod messages;
pub mod numbers;
pub mod options;
pub mod pattern;
pub mod samples;
pub mod start_up;
pub mod stream;
mod watchdog;

pub use job::{Job, conclude};
pub use options::CommonOptions;

/// Result of the programs: each error ends the program with its text.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
