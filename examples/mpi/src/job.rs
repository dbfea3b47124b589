//! A program as one rank of a job.

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fabricast::ipc::WaitStrategy;
use fabricast::launch::Group;
use fabricast::transfer::{Event, Notice, PeerId};

use crate::start_up::{StartUp, resident_memory};
use crate::{CommonOptions, Result, watchdog};

/// This rank: its group, and MPI with the feature `mpi`.
#[derive(Debug)]
pub struct Job {
    /// The ranks.
    pub group: Group,
    timeout: Duration,
    wait_strategy: WaitStrategy,
    start_up: StartUp,
    #[cfg(feature = "mpi")]
    mpi: Mpi,
}

/// MPI, initialized. It ends after the group.
#[cfg(feature = "mpi")]
struct Mpi(std::mem::ManuallyDrop<mpi::environment::Universe>);

#[cfg(feature = "mpi")]
impl std::fmt::Debug for Mpi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Mpi")
    }
}

#[cfg(feature = "mpi")]
impl Mpi {
    /// `MPI_Finalize`: it waits for all ranks. After an error it is not called: others may wait for
    /// this rank, and the launcher ends them when it exits.
    fn finalize(self) {
        drop(std::mem::ManuallyDrop::into_inner(self.0));
    }
}

/// MPI that the program was not built for starts each rank as a job of one.
#[cfg(feature = "mpi")]
fn check_launcher(universe: &mpi::environment::Universe) -> Result<()> {
    use fabricast::launch::Environment;
    use mpi::topology::Communicator;
    let ranks = universe.world().size();
    let environment = Environment::of_this_process();
    for variable in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        let started: i32 = environment.number(variable)?.unwrap_or(0);
        if ranks == 1 && started > 1 {
            return Err(format!(
                "start ranks failed: MPI has 1 rank, but {variable} is {started}. Start the program with the \
                 mpirun of the MPI that it was built for"
            )
            .into());
        }
    }
    Ok(())
}

/// The rank of this process, for its error.
static RANK: OnceLock<u32> = OnceLock::new();

impl Job {
    /// Starts MPI, if this is built with it, and the group. `label` is the name of the program.
    ///
    /// # Errors
    /// Errors of [`Group::start_with`].
    pub fn start(label: &str, options: &CommonOptions) -> Result<Self> {
        watchdog::start(options.deadline());
        let group_options = options.group()?.label(label);
        let (timeout, wait_strategy) = (options.timeout(), options.wait_strategy());
        let start = Instant::now();
        #[cfg(feature = "mpi")]
        let mpi = {
            // Only the main thread calls MPI; agents have threads.
            let threading = mpi::environment::Threading::Funneled;
            let universe = mpi::environment::initialize_with_threading(threading);
            let universe = universe.ok_or("MPI is already initialized")?.0;
            check_launcher(&universe)?;
            Mpi(std::mem::ManuallyDrop::new(universe))
        };
        let mut start_up = StartUp { mpi: start.elapsed(), ..StartUp::default() };
        start_up.memory_before = resident_memory();
        let start = Instant::now();
        #[cfg(feature = "mpi")]
        let group = {
            let exchange = crate::communicator::WorldExchange::new(timeout)?;
            Group::start_over(exchange, group_options)?
        };
        #[cfg(not(feature = "mpi"))]
        let group = Group::start_with(group_options)?;
        start_up.group = start.elapsed();
        let _ = RANK.set(group.rank());
        Ok(Self {
            group,
            timeout,
            wait_strategy,
            start_up,
            #[cfg(feature = "mpi")]
            mpi,
        })
    }

    /// The next notice of another rank. Other agents, such as that of `fabricast paths --explain`, may
    /// come and go.
    ///
    /// # Errors
    /// If a rank has left, or no notice arrives in time.
    pub fn next_notice(&mut self, timeout: Duration) -> Result<Notice> {
        loop {
            match self.group.agent().next_event(timeout)? {
                Event::Notice { notice, .. } => return Ok(notice),
                Event::Left { from, label, .. } if self.group.rank_of(from).is_some() => {
                    return Err(format!("wait for ranks failed: \"{label}\" has left").into());
                }
                _ => {}
            }
        }
    }

    /// The timeout of each wait.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// What its start cost.
    #[must_use]
    pub fn start_up(&self) -> StartUp {
        self.start_up
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

    /// Connects to a rank, which may be this one.
    ///
    /// # Errors
    /// As [`Group::peer`].
    pub fn peer(&mut self, rank: u32) -> Result<PeerId> {
        if rank != self.group.rank() {
            return Ok(self.group.peer(rank, self.timeout)?);
        }
        let agent = self.group.agent();
        let card = agent.card().encode()?;
        Ok(agent.connect(&card, self.timeout)?)
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
        self.mpi.finalize();
        let of_rank = |bytes: &Vec<u8>| bytes[..].try_into().map_or(1, u64::from_le_bytes);
        let counts: Vec<_> = all.iter().map(of_rank).collect();
        let wrong: Vec<_> = (0..counts.len()).filter(|rank| counts[*rank] > 0).collect();
        if !wrong.is_empty() {
            let sum: u64 = counts.iter().sum();
            return Err(format!("check {what} failed: {sum} mistakes at ranks {wrong:?}").into());
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
            match RANK.get() {
                Some(rank) => eprintln!("rank {rank}: {error}"),
                None => eprintln!("{error}"),
            }
            ExitCode::FAILURE
        }
    }
}
