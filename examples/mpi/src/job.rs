//! A program as one rank of a job.

use std::process::ExitCode;
use std::time::Duration;

use fabricast::ipc::WaitStrategy;
use fabricast::launch::Group;

use crate::{CommonOptions, Result, watchdog};

/// This rank: its group, and MPI with the feature `mpi`.
#[derive(Debug)]
pub struct Job {
    /// The ranks.
    pub group: Group,
    timeout: Duration,
    wait_strategy: WaitStrategy,
    #[cfg(feature = "mpi")]
    mpi: Mpi,
}

/// MPI, initialized. It ends after the group.
#[cfg(feature = "mpi")]
struct Mpi {
    /// Dropping it finalizes MPI.
    _universe: Option<mpi::environment::Universe>,
    is_finished: bool,
}

#[cfg(feature = "mpi")]
impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mpi")
    }
}

#[cfg(feature = "mpi")]
impl Drop for Mpi {
    fn drop(&mut self) {
        use mpi::topology::{Communicator, SimpleCommunicator};
        if !self.is_finished {
            // Finalizing would wait for ranks that wait for this one.
            SimpleCommunicator::world().abort(1);
        }
    }
}

impl Job {
    /// Starts MPI, if this is built with it, and the group. `label` is the name of the program.
    ///
    /// # Errors
    /// Errors of [`Group::start_with`].
    pub fn start(label: &str, options: &CommonOptions) -> Result<Self> {
        watchdog::start(options.deadline());
        let group_options = options.group()?.label(label);
        let (timeout, wait_strategy) = (options.timeout(), options.wait_strategy());
        #[cfg(feature = "mpi")]
        {
            // Only the main thread calls MPI; agents have threads.
            let threading = mpi::environment::Threading::Funneled;
            let (universe, _) = mpi::environment::initialize_with_threading(threading)
                .ok_or("MPI is already initialized")?;
            let mut mpi = Mpi { _universe: Some(universe), is_finished: false };
            let exchange = crate::communicator::WorldExchange::new();
            match Group::start_over(exchange, group_options) {
                Ok(group) => Ok(Self { group, timeout, wait_strategy, mpi }),
                Err(error) => {
                    // All ranks fail alike.
                    mpi.is_finished = true;
                    Err(error.into())
                }
            }
        }
        #[cfg(not(feature = "mpi"))]
        Ok(Self { group: Group::start_with(group_options)?, timeout, wait_strategy })
    }

    /// The timeout of each wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How this rank waits.
    #[must_use]
    pub fn wait_strategy(&self) -> WaitStrategy {
        self.wait_strategy
    }

    /// Is this rank 0, which prints?
    #[must_use]
    pub fn is_root(&self) -> bool {
        self.group.rank() == 0
    }

    /// All ranks, as an MPI communicator.
    #[cfg(feature = "mpi")]
    #[must_use]
    pub fn world(&self) -> mpi::topology::SimpleCommunicator {
        mpi::topology::SimpleCommunicator::world()
    }

    /// Do all ranks say yes? All ranks call it.
    ///
    /// # Errors
    /// Errors of the all-gather.
    pub fn all(&mut self, own: bool) -> Result<bool> {
        let all = self.group.all_gather(&[u8::from(own)], self.timeout)?;
        Ok(all.iter().all(|rank| rank[..] == [1]))
    }

    /// Ends the program after all ranks have called it. Rank 0 prints `what: ok` if no rank found a
    /// mistake.
    ///
    /// # Errors
    /// With the ranks that found mistakes; errors of the exchange.
    pub fn finish(mut self, what: &str, mistakes: u64) -> Result<()> {
        let all = self.group.all_gather(&mistakes.to_le_bytes(), self.timeout)?;
        let is_root = self.is_root();
        self.group.close(self.timeout)?;
        #[cfg(feature = "mpi")]
        {
            self.mpi.is_finished = true;
        }
        let counts = all.iter().map(|count| count.iter().any(|byte| *byte != 0));
        let wrong: Vec<_> = counts.zip(0..).filter(|(is_wrong, _)| *is_wrong).collect();
        if !wrong.is_empty() {
            let ranks: Vec<_> =
                wrong.iter().map(|(_, rank): &(bool, u32)| rank.to_string()).collect();
            let text =
                format!("{what} failed: ranks {} found {mistakes} mistakes", ranks.join(", "));
            return Err(text.into());
        }
        if is_root {
            println!("{what}: ok");
        }
        Ok(())
    }
}

/// Runs the program, and prints its error.
pub fn conclude(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
