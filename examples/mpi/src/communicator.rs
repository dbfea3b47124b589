//! An MPI communicator as the exchange by which a group starts.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fabricast::launch::{Error, ErrorKind, Exchange, LocalRank, Result};
use mpi::topology::{Communicator, SimpleCommunicator};

use crate::messages;

/// `MPI_COMM_WORLD`, after `MPI_Init`.
#[derive(Debug)]
pub struct WorldExchange {
    job: String,
    local: LocalRank,
}

fn world() -> SimpleCommunicator {
    SimpleCommunicator::world()
}

impl WorldExchange {
    /// All ranks call it.
    ///
    /// # Errors
    /// If a rank does not come; errors of MPI.
    pub fn new(timeout: Duration) -> Result<Self> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let job = format!("mpi-{}-{}", std::process::id(), since.as_nanos());
        // `MPI_Comm_split_type` would say the same, but polls: see `messages::all_gather`.
        let kernel = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let machine =
            format!("{} {kernel}", mpi::environment::processor_name().unwrap_or_default());
        let (jobs, machines) =
            (all_gather(job.as_bytes(), timeout)?, all_gather(machine.as_bytes(), timeout)?);
        let rank = world().rank() as usize;
        let is_here = |other: &&Vec<u8>| **other == machines[rank];
        let local = LocalRank {
            rank: machines[..rank].iter().filter(is_here).count() as u32,
            size: machines.iter().filter(is_here).count() as u32,
        };
        Ok(Self { job: String::from_utf8_lossy(&jobs[0]).into_owned(), local })
    }
}

fn all_gather(own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
    let failed = |kind, detail: &str| Error::new("exchange among ranks", kind, detail).by("MPI");
    let gathered = messages::all_gather(own, world().size() as usize, timeout);
    let gathered = gathered.map_err(|error| failed(ErrorKind::Failed, &error.to_string()))?;
    gathered.ok_or_else(|| failed(ErrorKind::DeadlineExceeded, "a rank did not come"))
}

impl Exchange for WorldExchange {
    fn name(&self) -> &str {
        "MPI"
    }

    fn job(&self) -> &str {
        &self.job
    }

    fn rank(&self) -> u32 {
        world().rank() as u32
    }

    fn size(&self) -> u32 {
        world().size() as u32
    }

    fn local(&self) -> Option<LocalRank> {
        Some(self.local)
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        all_gather(own, timeout)
    }
}
