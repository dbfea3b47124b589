//! The ranks of a group: what each announces when the group starts, and the connections of this one.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use control::launcher::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use transfer::{Agent, AgentCard, PeerId};

const CONNECT: &str = "connect to rank";

/// Exchanged once through the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Announcement {
    /// Device and inode of the directory of its agent.
    directory: [u64; 2],
    /// Inode of its network namespace.
    network: u64,
    card: Vec<u8>,
}

/// A rank, as another one sees it.
#[derive(Debug, Clone)]
struct Member {
    directory: [u64; 2],
    network: u64,
    machine: [u8; 16],
    identity: [u8; 16],
    card: Vec<u8>,
}

/// The bytes that announce this rank, whose agent has this directory.
pub(crate) fn announce(card: &AgentCard, directory: &Path) -> Result<Vec<u8>> {
    let failed = |cause: String| Error::new("announce rank", ErrorKind::Failed, cause);
    let card = card.encode().map_err(|error| failed(error.to_string()))?;
    let found = fs::metadata(directory)
        .map_err(|error| failed(format!("{}: {error}", directory.display())))?;
    // Without /proc, each rank counts as one of another network: its address is used.
    let network = fs::metadata("/proc/self/ns/net").map_or(0, |found| found.ino());
    let announcement = Announcement { directory: [found.dev(), found.ino()], network, card };
    postcard::to_allocvec(&announcement).map_err(|error| failed(error.to_string()))
}

impl Member {
    /// A rank that announced itself by these bytes.
    fn read(rank: u32, bytes: &[u8]) -> Result<Self> {
        let malformed = |cause: String| {
            let detail = format!("rank {rank} sent no valid card: {cause}");
            Error::new("read cards of ranks", ErrorKind::Malformed, detail).of_ranks([rank])
        };
        let Announcement { directory, network, card } =
            postcard::from_bytes(bytes).map_err(|error| malformed(error.to_string()))?;
        let decoded = AgentCard::decode(&card).map_err(|error| malformed(error.to_string()))?;
        let (machine, identity) = (decoded.machine, decoded.identity);
        Ok(Self { directory, network, machine, identity, card })
    }

    /// The member's machine, and its directory there: containers of one machine may share it.
    fn site(&self) -> ([u8; 16], [u64; 2]) {
        (self.machine, self.directory)
    }
}

#[derive(Debug)]
pub(crate) struct Ranks {
    own: u32,
    members: Vec<Member>,
    peers: Vec<Option<PeerId>>,
    by_identity: HashMap<[u8; 16], u32>,
}

impl Ranks {
    /// The ranks that announced themselves by these bytes, in their order.
    pub(crate) fn read(own: u32, announced: &[Vec<u8>]) -> Result<Self> {
        let members = announced.iter().zip(0..).map(|(bytes, rank)| Member::read(rank, bytes));
        let members = members.collect::<Result<Vec<_>>>()?;
        let ranks = members.iter().zip(0..).map(|(member, rank)| (member.identity, rank));
        let by_identity = ranks.collect();
        Ok(Self { own, peers: vec![None; members.len()], members, by_identity })
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

    /// The ranks of each machine, ascending; machines in the order of their first ranks.
    pub(crate) fn by_machine(&self) -> Vec<Vec<u32>> {
        let mut machines: Vec<(_, Vec<u32>)> = Vec::new();
        for (member, rank) in self.members.iter().zip(0..) {
            match machines.iter_mut().find(|(site, _)| *site == member.site()) {
                Some((_, ranks)) => ranks.push(rank),
                None => machines.push((member.site(), vec![rank])),
            }
        }
        machines.into_iter().map(|(_, ranks)| ranks).collect()
    }

    pub(crate) fn is_first_of_machine(&self, rank: u32) -> bool {
        let site = self.members[rank as usize].site();
        !self.members[..rank as usize].iter().any(|member| member.site() == site)
    }

    pub(crate) fn shares_loopback_with(&self, rank: u32) -> bool {
        let [one, other] = [rank, self.own].map(|rank| &self.members[rank as usize]);
        one.network != 0 && (one.machine, one.network) == (other.machine, other.network)
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

    /// The ranks that this one has connected to.
    pub(crate) fn connected(&self) -> impl Iterator<Item = (u32, PeerId)> {
        self.peers.iter().zip(0..).filter_map(|(peer, rank)| Some((rank, (*peer)?)))
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
        let connected = agent.connect(&self.members[rank as usize].card, timeout);
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
