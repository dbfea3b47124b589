//! An MPI communicator as the exchange by which a group starts.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fabricast::launch::{Error, ErrorKind, Exchange, LocalRank, Result};
use mpi::datatype::PartitionMut;
use mpi::topology::{Communicator, SimpleCommunicator};
use mpi::traits::{CommunicatorCollectives, Root};

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
    #[must_use]
    pub fn new() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut job = [u64::from(std::process::id()), since.as_nanos() as u64];
        world().process_at_rank(0).broadcast_into(&mut job);
        let node = world().split_shared(world().rank());
        let local = LocalRank { rank: node.rank() as u32, size: node.size() as u32 };
        Self { job: format!("mpi-{}-{}", job[0], job[1]), local }
    }
}

impl Default for WorldExchange {
    fn default() -> Self {
        Self::new()
    }
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
        let world = world();
        // After the barrier all ranks are here: the rest does not wait for late ones.
        let end = Instant::now() + timeout;
        let mut barrier = world.immediate_barrier();
        while let Err(pending) = barrier.test() {
            barrier = pending;
            if Instant::now() > end {
                std::mem::forget(barrier);
                let detail = "a rank did not come";
                let error = Error::new("exchange among ranks", ErrorKind::DeadlineExceeded, detail);
                return Err(error.by("MPI"));
            }
            std::thread::yield_now();
        }
        let length = i32::try_from(own.len()).map_err(|error| {
            Error::caused_by("exchange among ranks", ErrorKind::InvalidArgument, error)
        })?;
        let mut lengths = vec![0; world.size() as usize];
        world.all_gather_into(&length, &mut lengths);
        let starts: Vec<i32> = lengths
            .iter()
            .scan(0, |next, length| Some(std::mem::replace(next, *next + length)))
            .collect();
        let mut bytes = vec![0_u8; lengths.iter().sum::<i32>() as usize];
        let mut parts = PartitionMut::new(&mut bytes, &*lengths, &*starts);
        world.all_gather_varcount_into(own, &mut parts);
        let part = |(start, length): (&i32, &i32)| {
            bytes[*start as usize..(*start + *length) as usize].to_vec()
        };
        Ok(starts.iter().zip(&lengths).map(part).collect())
    }
}
