//! PMIx, by a library that is loaded at run time: Open MPI's `mpirun`, `srun --mpi=pmix`.
//!
//! An exchange and MPI share the connection of the process. While `MPI_Init` or `MPI_Finalize` run
//! on one thread, no exchange may run on another one: both use fences among all ranks, which the
//! launcher matches by their order. The process must end by `exit`, as after `MPI_Init`; a process
//! that ends by `_exit` counts as failed at the launcher.
//!
//! What is put stays in the launcher's memory, and is sent again with each further exchange.

mod abi;
mod fence_exchange;
mod library;
mod process;
mod survey;

use std::sync::{Arc, TryLockError};
use std::time::Duration;

use self::library::MAX_LENGTH;
use self::process::Job;
use super::error::{Error, ErrorKind, GATHER, Result};
use super::exchange::{Exchange, LocalRank};

const NAME: &str = "PMIx";

/// A job whose launcher is reached through PMIx.
#[derive(Debug)]
pub(super) struct Pmix {
    job: Arc<Job>,
}

impl Pmix {
    /// Loads the library and connects to the launcher. The connection lasts until the process
    /// exits.
    pub(super) fn connect(timeout: Duration) -> Result<Self> {
        let job = process::job(timeout).map_err(|error| error.by(NAME))?;
        Ok(Self { job })
    }

    fn gather(&self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        process::check_fork(GATHER)?;
        if own.len() > MAX_LENGTH {
            let detail = format!("{} bytes, {MAX_LENGTH} are the limit", own.len());
            return Err(Error::new(GATHER, ErrorKind::InvalidArgument, detail));
        }
        let mut turn = match self.job.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let detail = "another thread of this process exchanges bytes";
                return Err(Error::new(GATHER, ErrorKind::Failed, detail));
            }
        };
        if let Some(error) = &turn.failure {
            return Err(error.clone());
        }
        if self.job.size == 1 {
            return Ok(vec![own.to_vec()]);
        }
        let number = turn.number;
        turn.number += 1;
        let gathered = fence_exchange::gather(&self.job, number, own, timeout);
        turn.failure = gathered.as_ref().err().cloned();
        gathered
    }
}

impl Exchange for Pmix {
    fn name(&self) -> &str {
        NAME
    }

    fn job(&self) -> &str {
        &self.job.name
    }

    fn rank(&self) -> u32 {
        self.job.own.rank
    }

    fn size(&self) -> u32 {
        self.job.size
    }

    fn local(&self) -> Option<LocalRank> {
        self.job.local
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.gather(own, timeout).map_err(|error| error.by(NAME))
    }
}
