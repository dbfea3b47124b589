//! Starting a group.

use std::fs::DirBuilder;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

use control::launcher::{
    self, Contribution, Environment, Error, ErrorKind, Exchange, LocalRank, Result,
};
use fabric::{EndpointKind, Locality, Offer, Query, Requirements};
use transfer::Agent;

use super::Group;
use crate::messenger::Messenger;
use crate::options::GroupOptions;
use crate::ranks::{Ranks, announce};

const START: &str = "start group";
/// Interfaces whose providers are compared: each query takes time.
const MAX_INTERFACES: usize = 8;

impl Group {
    /// Starts a group of the ranks that a launcher started, with the options
    /// [of the environment](GroupOptions::from_environment). All ranks call it. Without a launcher,
    /// it has one rank.
    ///
    /// # Errors
    /// As [`start_with`](Self::start_with).
    pub fn start() -> Result<Self> {
        Self::start_by_launcher(GroupOptions::from_environment())
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
        Self::start_by_launcher(Ok(options))
    }

    /// Options that cannot be used are reported to the other ranks, too.
    fn start_by_launcher(options: Result<GroupOptions>) -> Result<Self> {
        let timeout =
            options.as_ref().map_or(GroupOptions::DEFAULT_TIMEOUT, GroupOptions::start_timeout);
        let start = Instant::now();
        let exchange = launcher::start(&Environment::of_this_process(), timeout)?;
        // In tenths of a second, since errors name it.
        let tenths = timeout.saturating_sub(start.elapsed()).as_millis().div_ceil(100);
        let left = u64::try_from(tenths.saturating_mul(100)).unwrap_or(u64::MAX);
        Self::start_within(exchange, options, Duration::from_millis(left))
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
        Self::start_within(Box::new(exchange), Ok(options), timeout)
    }

    fn start_within(
        mut exchange: Box<dyn Exchange>,
        options: Result<GroupOptions>,
        timeout: Duration,
    ) -> Result<Self> {
        let (rank, size) = (exchange.rank(), exchange.size());
        let is_one_machine = exchange.local().is_some_and(|local| local.size == size);
        // A rank that cannot start tells the others why: otherwise they would wait for it.
        let prepared = options.and_then(|options| prepare(rank, is_one_machine, options));
        let failure = prepared.as_ref().err().map(ToString::to_string);
        let own = match (&prepared, &failure) {
            (Ok((.., announcement)), _) => Contribution::Bytes(announcement),
            (_, failure) => Contribution::Failed(failure.as_deref().unwrap_or_default()),
        };
        let gathered = launcher::gather(&mut *exchange, own, timeout);
        let (options, offer, agent, _) = prepared.map_err(|error| error.of_ranks([rank]))?;
        let ranks = Ranks::read(rank, &gathered?)?;
        let local = ranks.local();
        let index = local.iter().position(|other| *other == rank).unwrap_or(0);
        let local = LocalRank { rank: index as u32, size: local.len() as u32 };
        tracing::debug!(launcher = exchange.name(), rank, size, ?local, "group started");
        let messenger = Messenger::default();
        Ok(Self {
            ranks,
            local,
            agent: Some(agent),
            offer,
            messenger,
            options,
            node_directory: None,
            exchange,
        })
    }
}

/// What a rank does before it meets the others. The options get the address that it chose.
fn prepare(
    rank: u32,
    is_one_machine: bool,
    mut options: GroupOptions,
) -> Result<(GroupOptions, Option<Offer>, Agent, Vec<u8>)> {
    create(options.directory_path())?;
    let mut agent = options.agent_options(rank);
    let mut chosen = None;
    if options.uses_fabric(is_one_machine) {
        let (offer, address) = choose(is_one_machine, &options)
            .map_err(|cause| Error::caused_by(START, ErrorKind::Unavailable, cause))?;
        agent = agent.fabric(&offer);
        chosen = Some(offer);
        if let Some(address) = address {
            options = options.source(address);
        }
    }
    let agent =
        Agent::start(agent).map_err(|error| Error::caused_by(START, ErrorKind::Failed, error))?;
    let announcement = announce(&agent.card(), options.directory_path())?;
    Ok((options, chosen, agent, announcement))
}

/// The best offer of all interfaces, or of the one that the options name; and the address of its
/// interface.
fn choose(is_one_machine: bool, options: &GroupOptions) -> fabric::Result<(Offer, Option<IpAddr>)> {
    let locality = match is_one_machine {
        true => Locality::SameMachine,
        false => Locality::OtherMachines,
    };
    let need = Requirements { immediate_bytes: 0, ..Requirements::ring(locality) };
    let choose_at = |address: Option<IpAddr>| {
        let query = Query::new(EndpointKind::Rdm);
        let query = address.map_or(query.clone(), |address| query.interface(address));
        let (offer, choice) = fabric::choose(&query, &need, options.provider_policy())?;
        tracing::debug!(?address, %choice, "providers of an interface");
        let score = choice.taken().map_or(0, |taken| taken.score);
        Ok((score, query.with_device_memory(offer), address))
    };
    let addresses = match options.source_address() {
        Some(address) => vec![address],
        None => fabric::local_addresses()?,
    };
    let mut addresses = addresses.into_iter().take(MAX_INTERFACES);
    let mut best: fabric::Result<_> = choose_at(addresses.next());
    for address in addresses {
        let other = choose_at(Some(address));
        // The first interface among equal ones.
        if let Ok((score, ..)) = &other
            && best.as_ref().map_or(true, |(best, ..)| score > best)
        {
            best = other;
        }
    }
    best.map(|(_, offer, address)| (offer, address))
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
