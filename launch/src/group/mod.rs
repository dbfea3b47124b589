//! The ranks of a job as peers.

mod nodes;
mod rings;
mod start;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Exchange, LocalRank, Result};
use fabric::Offer;
use transfer::{Agent, PeerId};

use crate::collective::{AllGather, Barrier, Broadcast, Collective};
use crate::job_directory::JobDirectory;
use crate::mailbox::MAX_BYTES;
use crate::messenger::{Call, CallDeadline, Messenger, too_long};
use crate::options::GroupOptions;
use crate::ranks::Ranks;

/// The ranks of a launched job, as one of them sees them.
///
/// Each rank has an [agent](Self::agent). Connections to other ranks are made when they are first
/// used. [`barrier`](Self::barrier), [`broadcast`](Self::broadcast) and
/// [`all_gather`](Self::all_gather) are for set-up: they take log2(ranks) steps of small messages.
/// Large data goes by puts, gets, rings and topics.
///
/// All ranks call collectives in the same order. If a rank is missing or has ended, all fail with an
/// error that names it; then the collectives of the group are over, and the rest goes on.
///
/// ```
/// use std::time::Duration;
/// use launch::Group;
/// use transfer::{HostBuffer, Rights};
/// let timeout = Duration::from_secs(10);
/// let mut group = Group::start()?;
/// let inbox = HostBuffer::new(4096)?;
/// let region = group.agent().register(&inbox, Rights::WRITE)?;
/// let descriptors = group.all_gather(&region.descriptor().encode()?, timeout)?;
/// let next = (group.rank() + 1) % group.size();
/// if next != group.rank() {
///     let peer = group.peer(next, timeout)?;
///     let source = group.agent().register_local(HostBuffer::from_vec(vec![7; 4096])?)?;
///     let descriptor = &descriptors[next as usize];
///     let policy = transfer::path::Policy::default();
///     let route = group.agent().join(peer, &source, descriptor, &policy, timeout)?;
///     let put = group.agent().put_all(&route, None)?;
///     group.agent().wait(put, timeout)?;
/// }
/// group.close(timeout)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Group {
    ranks: Ranks,
    local: LocalRank,
    /// None once the group was closed.
    agent: Option<Agent>,
    /// The fabric of the agent.
    offer: Option<Offer>,
    messenger: Messenger,
    options: GroupOptions,
    /// The directory of the job's node, if one was joined.
    node_directory: Option<JobDirectory>,
    /// Last: its connection to the launcher ends after the agent.
    exchange: Box<dyn Exchange>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Group");
        shown.field("launcher", &self.exchange.name()).field("rank", &self.rank());
        shown.field("size", &self.size()).field("local", &self.local);
        shown.field("agent", &self.agent).finish_non_exhaustive()
    }
}

impl Group {
    /// This process' rank, from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.ranks.own()
    }

    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.ranks.size()
    }

    /// This rank among those of its machine that share its directory.
    #[must_use]
    pub fn local(&self) -> LocalRank {
        self.local
    }

    /// The ranks of this machine that share its directory, ascending, with this one.
    #[must_use]
    pub fn local_ranks(&self) -> Vec<u32> {
        self.ranks.local()
    }

    /// The number of machines with ranks of the group: ranks that share a directory count as one
    /// machine.
    #[must_use]
    pub fn machines(&self) -> u32 {
        self.ranks.machines()
    }

    /// The ranks of each machine, ascending; machines in the order of their first ranks. With
    /// [`force_remote`](GroupOptions::force_remote) each rank has a machine of its own.
    #[must_use]
    pub fn ranks_by_machine(&self) -> Vec<Vec<u32>> {
        match self.options.forces_remote() {
            true => (0..self.size()).map(|rank| vec![rank]).collect(),
            false => self.ranks.by_machine(),
        }
    }

    /// The launcher or its protocol: `PMI-1`, `PMIx`.
    #[must_use]
    pub fn launcher(&self) -> &str {
        self.exchange.name()
    }

    /// The name of the job: equal on all ranks, and different for each start of a job.
    #[must_use]
    pub fn job(&self) -> &str {
        self.exchange.job()
    }

    /// The directory in which this rank finds the others of its machine.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.options.directory_path()
    }

    /// This rank's agent. It never returns notices of the group, whose tags have their upper 16 bits
    /// set.
    pub fn agent(&mut self) -> &mut Agent {
        present(&mut self.agent)
    }

    /// The fabric by which this rank reaches ranks of other machines: for a component with an endpoint
    /// of its own. None if the group uses none.
    #[must_use]
    pub fn fabric_offer(&self) -> Option<&Offer> {
        self.offer.as_ref()
    }

    /// Connects this rank's agent to that of another rank, once, by the best path that both have.
    /// The connection belongs to the group: it must not be disconnected.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for this rank itself, or a rank that does not
    /// exist; [`RankFailed`](ErrorKind::RankFailed) if its process has ended; errors of
    /// [`Agent::connect`].
    pub fn peer(&mut self, rank: u32, timeout: Duration) -> Result<PeerId> {
        self.ranks.connect(present(&mut self.agent), rank, timeout)
    }

    /// The rank of an agent, as events name it; None if it is of no rank.
    #[must_use]
    pub fn rank_of(&self, identity: [u8; 16]) -> Option<u32> {
        self.ranks.find(identity)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) or
    /// [`RankFailed`](ErrorKind::RankFailed), with the rank that is missing or has ended.
    pub fn barrier(&mut self, timeout: Duration) -> Result<()> {
        let mut barrier = Barrier::new(self.rank(), self.size());
        self.run(&mut barrier, CallDeadline::new("barrier of ranks", timeout))
    }

    /// The bytes of the rank `root` for all ranks. Bytes of other ranks are ignored.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no
    /// such rank, or for more than 16 MiB: then the other ranks fail too, and name this one.
    pub fn broadcast(&mut self, root: u32, bytes: &[u8], timeout: Duration) -> Result<Vec<u8>> {
        let operation = "broadcast to ranks";
        if root >= self.size() {
            let detail = format!("rank {root} does not exist: the group has {} ranks", self.size());
            return Err(Error::new(operation, ErrorKind::InvalidArgument, detail));
        }
        let own = (root == self.rank()).then(|| bytes.to_vec());
        let mut broadcast = Broadcast::new(self.rank(), self.size(), root, own);
        self.run(&mut broadcast, CallDeadline::new(operation, timeout))?;
        Ok(broadcast.into_bytes())
    }

    /// The bytes of all ranks for all, in the order of the ranks.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`InvalidArgument`](ErrorKind::InvalidArgument) if the bytes of
    /// a rank, or of all together, exceed 16 MiB: then the other ranks fail too.
    pub fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let operation = "all-gather of ranks";
        let mut gather = AllGather::new(self.rank(), self.size(), own.to_vec());
        self.run(&mut gather, CallDeadline::new(operation, timeout))?;
        match gather.total() {
            total if total > MAX_BYTES => Err(too_long(operation, total)),
            _ => Ok(gather.into_bytes()),
        }
    }

    fn run(&mut self, collective: &mut impl Collective, deadline: CallDeadline) -> Result<()> {
        let mut call = Call::new(present(&mut self.agent), &mut self.ranks, deadline);
        self.messenger.run(&mut call, collective)
    }

    /// The address at which ranks of other machines reach this one: that of the
    /// [options](GroupOptions::source), or of the first interface beyond loopback.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) without such an interface.
    pub fn address(&self) -> Result<IpAddr> {
        self.own_address("find address of rank")
    }

    /// The address of this machine for rings and topics.
    fn own_address(&self, operation: &'static str) -> Result<IpAddr> {
        if let Some(address) = self.options.source_address() {
            return Ok(address);
        }
        let addresses = fabric::local_addresses()
            .map_err(|error| Error::caused_by(operation, ErrorKind::Failed, error))?;
        addresses.first().copied().ok_or_else(|| {
            let detail = "the machine has no address beyond loopback. Set GroupOptions::source";
            Error::new(operation, ErrorKind::Unavailable, detail)
        })
    }

    /// Ends the group after all ranks have called it: completes the operations of its agent, and
    /// leaves nothing behind. Dropping a group ends it without waiting for other ranks; it tells them
    /// which rank had ended before, if one had, so that their errors name that one.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier) and [`Agent::close`]; the group has ended nevertheless.
    pub fn close(mut self, timeout: Duration) -> Result<()> {
        let deadline = CallDeadline::new("close group", timeout);
        let mut barrier = Barrier::new(self.rank(), self.size());
        let all_came = self.run(&mut barrier, deadline);
        let closed = self.agent.take().map_or(Ok(()), |agent| agent.close(deadline.left()));
        all_came?;
        closed.map_err(|error| Error::caused_by("close group", ErrorKind::Failed, error))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(agent) = &mut self.agent {
            let deadline = CallDeadline::new("leave group", Duration::ZERO);
            self.messenger.leave(Call::new(agent, &mut self.ranks, deadline));
        }
    }
}

/// The agent of a group that was not closed.
fn present(agent: &mut Option<Agent>) -> &mut Agent {
    agent.as_mut().expect("only close, which consumes the group, takes the agent")
}
