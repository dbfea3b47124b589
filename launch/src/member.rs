//! What each rank tells the others when the group starts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use control::launcher::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use transfer::AgentCard;

/// Exchanged once through the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Announcement {
    /// Device and inode of the directory of its agent.
    directory: [u64; 2],
    /// Inode of its network namespace.
    network: u64,
    /// The card of its agent.
    card: Vec<u8>,
}

/// A rank, as another one sees it.
#[derive(Debug, Clone)]
pub(crate) struct Member {
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
    pub(crate) fn read(rank: u32, bytes: &[u8]) -> Result<Self> {
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

    pub(crate) fn card(&self) -> &[u8] {
        &self.card
    }

    pub(crate) fn identity(&self) -> [u8; 16] {
        self.identity
    }

    /// The member's machine, and its directory there: containers of one machine may share it.
    pub(crate) fn site(&self) -> ([u8; 16], [u64; 2]) {
        (self.machine, self.directory)
    }

    /// Do both have the same loopback interface?
    pub(crate) fn shares_loopback_with(&self, other: &Self) -> bool {
        self.network != 0 && (self.machine, self.network) == (other.machine, other.network)
    }
}
