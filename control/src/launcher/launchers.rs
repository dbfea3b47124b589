//! The launchers of jobs.

use std::fmt;

use super::exchange::LocalRank;
use super::pmi::{PmiServer, PmiVersion};

/// A launcher that started this process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// None: a job of one rank.
    Single,
    /// PMI-1 or PMI-2: `mpirun` of MPICH and Intel MPI, `srun --mpi=pmi2`.
    Pmi {
        /// The version to begin with; the launcher may answer with the other one.
        version: PmiVersion,
        /// Where it listens.
        server: PmiServer,
    },
    /// PMIx: `mpirun` of Open MPI, `srun --mpi=pmix`.
    Pmix,
    /// torchrun, whose agent hosts a TCP store.
    TorchRun {
        /// `host:port` of the store.
        store: String,
        /// This process' rank.
        rank: u32,
        /// The number of ranks.
        size: u32,
        /// The process's rank on its machine.
        local: Option<LocalRank>,
        /// Identifies the job, and each restart of it.
        job: String,
    },
}

impl fmt::Display for Launcher {
    /// Writes the name, like [`Exchange::name`](super::Exchange::name).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single => f.write_str("no launcher"),
            Self::Pmi { version, .. } => version.fmt(f),
            Self::Pmix => f.write_str("PMIx"),
            Self::TorchRun { .. } => f.write_str("torchrun"),
        }
    }
}
