//! Connecting to the launcher that started this process.

use std::time::Duration;

use super::detect::detect;
use super::environment::Environment;
use super::error::Result;
use super::exchange::Exchange;
use super::launchers::Launcher;
use super::pmi::Pmi;
use super::pmix::Pmix;
use super::single::Single;
use super::tcp_store::{Place, TcpStore};

/// Connects to the launcher that started this process. Without one the job has one rank.
///
/// ```
/// use std::time::Duration;
/// use control::launcher::{Contribution, Environment, gather, start};
///
/// let timeout = Duration::from_secs(30);
/// let mut job = start(&Environment::of_this_process(), timeout)?;
/// let own = format!("rank {} of {}", job.rank(), job.size());
/// let cards = gather(&mut *job, Contribution::Bytes(own.as_bytes()), timeout)?;
/// assert_eq!(cards[job.rank() as usize], own.as_bytes());
/// # Ok::<(), control::launcher::Error>(())
/// ```
///
/// # With an MPI library in the same process
///
/// An MPI library may use the same connection to the launcher:
///
/// | started by | order |
/// |---|---|
/// | `mpirun` of MPICH or Intel MPI | this before or after `MPI_Init`, but before `MPI_Finalize` |
/// | the same with `-pmi-port` | all exchanges before `MPI_Init` |
/// | `srun --mpi=pmi2` | not possible: `MPI_Init` fails after this, and this after `MPI_Init` |
///
/// MPI and this must not use it at the same time in two threads. The connection stays open until
/// the process exits, and can be started again after the exchange was dropped. A process that ends
/// by a signal or `_exit` counts as crashed; launchers end the job then.
///
/// # Errors
/// Errors of [`detect`]; [`Unavailable`](super::ErrorKind::Unavailable) after `MPI_Finalize`, or
/// where the launcher serves MPI only; errors of the connection.
pub fn start(environment: &Environment, timeout: Duration) -> Result<Box<dyn Exchange>> {
    Ok(match detect(environment)? {
        Launcher::Single => Box::new(Single::new()),
        Launcher::Pmi { version, server } => {
            Box::new(Pmi::connect(&server, version, environment, timeout)?)
        }
        Launcher::Pmix => Box::new(Pmix::connect(timeout)?),
        Launcher::TorchRun { store, rank, size, local, job } => {
            let place = Place { rank, size, local, job };
            Box::new(TcpStore::connect(&store, place, timeout)?)
        }
    })
}
