//! What it costs to start as a rank.

use std::fs;
use std::time::Duration;

use crate::{Job, Result};

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

/// Prints the largest values of all ranks. `node` is the time to join the node of the job. All ranks
/// call it.
///
/// # Errors
/// Errors of the exchange.
pub fn report(job: &mut Job, node: Duration) -> Result<()> {
    let StartUp { mpi, group, memory_before } = job.start_up();
    let more = resident_memory().saturating_sub(memory_before);
    let [mpi, group, node] = [mpi, group, node].map(|time| time.as_micros() as u64);
    let own = [mpi, group, node, memory_before, more].map(u64::to_le_bytes).concat();
    let timeout = job.timeout();
    let mut most = [0; 5];
    for bytes in job.group.all_gather(&own, timeout)? {
        for (most, word) in most.iter_mut().zip(bytes.as_chunks().0) {
            *most = u64::from_le_bytes(*word).max(*most);
        }
    }
    if job.is_root() {
        let [mpi, group, node, before, more] = most.map(|value| value as f64);
        let (ranks, mebibyte) = (job.group.size(), f64::from(1 << 20));
        println!(
            "start-up of {ranks} ranks, the largest values: MPI_Init {:.0} ms, group {:.0} ms, node {:.0} ms; \
             resident {:.1} MiB before the group, {:.1} MiB more now",
            mpi / 1e3,
            group / 1e3,
            node / 1e3,
            before / mebibyte,
            more / mebibyte
        );
    }
    Ok(())
}
