//! The ranks of a group, and this rank's connections to them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Result};
use transfer::{Agent, PeerId};

use crate::member::Member;

const CONNECT: &str = "connect to rank";

/// All ranks, and this one's connections.
#[derive(Debug)]
pub(crate) struct Ranks {
    own: u32,
    members: Vec<Member>,
    peers: Vec<Option<PeerId>>,
    by_identity: HashMap<[u8; 16], u32>,
}

impl Ranks {
    pub(crate) fn new(own: u32, members: Vec<Member>) -> Self {
        let ranks = members.iter().zip(0..).map(|(member, rank)| (member.identity(), rank));
        let by_identity = ranks.collect();
        Self { own, peers: vec![None; members.len()], members, by_identity }
    }

    pub(crate) fn own(&self) -> u32 {
        self.own
    }

    pub(crate) fn size(&self) -> u32 {
        self.members.len() as u32
    }

    /// The rank of an agent.
    pub(crate) fn find(&self, identity: [u8; 16]) -> Option<u32> {
        self.by_identity.get(&identity).copied()
    }

    /// The ranks of this machine that share its directory, ascending.
    pub(crate) fn local(&self) -> Vec<u32> {
        let site = self.members[self.own as usize].site();
        let ranks = self.members.iter().zip(0..);
        ranks.filter(|(member, _)| member.site() == site).map(|(_, rank)| rank).collect()
    }

    /// Machines, counted as directories that ranks share.
    pub(crate) fn machines(&self) -> u32 {
        self.members.iter().map(Member::site).collect::<HashSet<_>>().len() as u32
    }

    /// Is a rank the first one of its machine?
    pub(crate) fn is_first_of_machine(&self, rank: u32) -> bool {
        let site = self.members[rank as usize].site();
        !self.members[..rank as usize].iter().any(|member| member.site() == site)
    }

    /// Do this rank and another one have the same loopback interface?
    pub(crate) fn shares_loopback_with(&self, rank: u32) -> bool {
        self.members[rank as usize].shares_loopback_with(&self.members[self.own as usize])
    }

    /// Checks that a rank exists and is not this one.
    pub(crate) fn check(&self, operation: &'static str, rank: u32) -> Result<()> {
        let detail = if rank >= self.size() {
            format!("rank {rank} does not exist: the group has {} ranks", self.size())
        } else if rank == self.own {
            format!("rank {rank} is this rank itself")
        } else {
            return Ok(());
        };
        Err(Error::new(operation, ErrorKind::InvalidArgument, detail).of_ranks([rank]))
    }

    pub(crate) fn is_connected(&self, rank: u32) -> bool {
        self.peers[rank as usize].is_some()
    }

    /// Connects to a rank, once.
    pub(crate) fn connect(
        &mut self,
        agent: &mut Agent,
        rank: u32,
        timeout: Duration,
    ) -> Result<PeerId> {
        self.check(CONNECT, rank)?;
        if let Some(peer) = self.peers[rank as usize] {
            return Ok(peer);
        }
        let connected = agent.connect(self.members[rank as usize].card(), timeout);
        let peer = connected.map_err(|error| of_agent(CONNECT, rank, error))?;
        self.peers[rank as usize] = Some(peer);
        Ok(peer)
    }
}

/// An error of an agent in an operation with a rank.
pub(crate) fn of_agent(operation: &'static str, rank: u32, error: transfer::Error) -> Error {
    let kind = match error.kind() {
        transfer::ErrorKind::DeadlineExceeded => ErrorKind::DeadlineExceeded,
        transfer::ErrorKind::Closed | transfer::ErrorKind::Stale => ErrorKind::RankFailed,
        _ => ErrorKind::Failed,
    };
    Error::caused_by(operation, kind, error).of_ranks([rank])
}
