//! Starting a group.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use control::launcher::{
    self, Contribution, Environment, Error, ErrorKind, Exchange, LocalRank, Result,
};
use fabric::{EndpointKind, Locality, Query, Requirements};
use transfer::Agent;

use super::Group;
use crate::address;
use crate::member::{Member, announce};
use crate::messenger::Messenger;
use crate::options::GroupOptions;
use crate::ranks::Ranks;

const START: &str = "start group";

impl Group {
    /// Starts a group of the ranks that a launcher started, with the options
    /// [of the environment](GroupOptions::from_environment). All ranks call it. Without a launcher,
    /// it has one rank.
    ///
    /// # Errors
    /// As [`start_with`](Self::start_with).
    pub fn start() -> Result<Self> {
        Self::start_with(GroupOptions::from_environment()?)
    }

    /// Starts a group of the ranks that a launcher started.
    ///
    /// # Errors
    /// [`InvalidEnvironment`](ErrorKind::InvalidEnvironment) if the environment describes half of a
    /// job or several; [`Unavailable`](ErrorKind::Unavailable) without the launcher's library;
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) with the ranks that did not come;
    /// [`RankFailed`](ErrorKind::RankFailed) with the ranks that could not start, on all ranks;
    /// [`VersionMismatch`](ErrorKind::VersionMismatch).
    pub fn start_with(options: GroupOptions) -> Result<Self> {
        let deadline = ipc::deadline(options.start_timeout());
        let exchange = launcher::start(&Environment::of_this_process(), options.start_timeout())?;
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        Self::start_within(exchange, options, left)
    }

    /// Starts a group by an exchange that the program has already, such as an MPI communicator.
    ///
    /// ```
    /// use launch::{Group, GroupOptions, Single};
    /// let group = Group::start_over(Single::new(), GroupOptions::new())?;
    /// assert_eq!((group.rank(), group.size()), (0, 1));
    /// # Ok::<(), launch::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`start_with`](Self::start_with), and errors of the exchange.
    pub fn start_over(exchange: impl Exchange + 'static, options: GroupOptions) -> Result<Self> {
        let timeout = options.start_timeout();
        Self::start_within(Box::new(exchange), options, timeout)
    }

    fn start_within(
        mut exchange: Box<dyn Exchange>,
        options: GroupOptions,
        timeout: Duration,
    ) -> Result<Self> {
        let (rank, size) = (exchange.rank(), exchange.size());
        let is_one_machine = exchange.local().is_some_and(|local| local.size == size);
        // A rank that cannot start tells the others why: otherwise they would wait for it.
        let prepared = prepare(rank, is_one_machine, &options);
        let failure = prepared.as_ref().err().map(ToString::to_string);
        let own = match (&prepared, &failure) {
            (Ok((_, announcement)), _) => Contribution::Bytes(announcement),
            (_, failure) => Contribution::Failed(failure.as_deref().unwrap_or_default()),
        };
        let gathered = launcher::gather(&mut *exchange, own, timeout);
        let (agent, _) = prepared?;
        let read = |(bytes, rank): (&Vec<u8>, u32)| Member::read(rank, bytes);
        let members = gathered?.iter().zip(0..).map(read).collect::<Result<Vec<_>>>()?;
        let ranks = Ranks::new(rank, members);
        let local = ranks.local();
        let index = local.iter().position(|other| *other == rank).unwrap_or(0);
        let local = LocalRank { rank: index as u32, size: local.len() as u32 };
        tracing::debug!(launcher = exchange.name(), rank, size, ?local, "group started");
        let messenger = Messenger::default();
        Ok(Self { ranks, local, agent, messenger, options, node_directory: None, exchange })
    }
}

/// What a rank does before it meets the others.
fn prepare(rank: u32, is_one_machine: bool, options: &GroupOptions) -> Result<(Agent, Vec<u8>)> {
    create(options.directory_path())?;
    let mut agent = options.agent_options(rank);
    if options.uses_fabric(is_one_machine) {
        let failed = |cause| Error::caused_by(START, ErrorKind::Unavailable, cause);
        let mut query = Query::new(EndpointKind::Rdm);
        if let Ok(source) = options.source_address().map_or_else(address::own, Ok) {
            query = query.interface(source);
        }
        let locality = match is_one_machine {
            true => Locality::SameMachine,
            false => Locality::OtherMachines,
        };
        let need = Requirements { immediate_bytes: 0, ..Requirements::ring(locality) };
        let (offer, choice) =
            fabric::choose(&query, &need, options.provider_policy()).map_err(failed)?;
        tracing::debug!(%choice, "provider of the group");
        agent = agent.fabric(&query.with_device_memory(offer));
    }
    let agent =
        Agent::start(agent).map_err(|error| Error::caused_by(START, ErrorKind::Failed, error))?;
    let announcement = announce(&agent.card(), options.directory_path())?;
    Ok((agent, announcement))
}

fn create(directory: &Path) -> Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    created.map_err(|cause| {
        let detail = format!("create directory {}: {cause}", directory.display());
        Error::new(START, ErrorKind::Failed, detail)
    })?;
    pubsub::check_directory(directory)
        .map_err(|error| Error::caused_by(START, ErrorKind::Failed, error))
}
