//! Ranks of a launched job: which rank this process is, and one exchange of bytes among all ranks.
//!
//! A launcher (`mpirun`, `mpiexec`, `srun`, `torchrun`) describes the job to its processes by
//! environment variables, and offers an exchange of bytes: PMI-1 and PMI-2 over a socket, PMIx by a
//! library that is loaded at run time, or the TCP store of torchrun. [`start`] finds out which, and
//! connects to it; no MPI library is linked. A program that has an MPI communicator implements
//! [`Exchange`] by it instead.

mod bounded_call;
mod detect;
mod envelope;
mod environment;
mod error;
mod exchange;
mod launchers;
mod pmi;
mod pmix;
mod presence;
mod single;
mod start;
mod tcp_store;
mod text;

pub use detect::detect;
pub use envelope::{Contribution, gather};
pub use environment::Environment;
pub use error::{Error, ErrorKind, Result};
pub use exchange::{Exchange, LocalRank};
pub use launchers::Launcher;
pub use pmi::{PmiServer, PmiVersion};
pub use single::Single;
pub use start::start;

/// Connects by PMIx, for tests: [`start`] does it where the environment says so.
#[doc(hidden)]
pub fn connect_by_pmix(timeout: std::time::Duration) -> Result<Box<dyn Exchange>> {
    Ok(Box::new(pmix::Pmix::connect(timeout)?))
}
