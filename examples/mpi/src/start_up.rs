//! What it costs to start as a rank.

use std::fs;
use std::time::Duration;

/// Times and memory of the start of this rank.
#[derive(Debug, Clone, Copy, Default)]
pub struct StartUp {
    /// Time of `MPI_Init`; zero without MPI.
    pub mpi: Duration,
    /// Time to start the group.
    pub group: Duration,
    /// Resident memory before the group, in bytes.
    pub memory_before: u64,
}

/// Resident memory of this process, in bytes; 0 if it cannot be read.
#[must_use]
pub fn resident_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes =
        line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kibibytes.unwrap_or(0) << 10
}
