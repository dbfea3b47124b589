//! The TCP store of torchrun.

use std::time::Duration;

use super::error::{Error, ErrorKind, Result};
use super::exchange::{Exchange, LocalRank};

/// The rank of this process, as torchrun's environment describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) local: Option<LocalRank>,
    /// Identifies the job, and each restart of it.
    pub(super) job: String,
}

/// A job whose processes share a TCP store.
#[derive(Debug)]
pub(super) struct TcpStore {
    place: Place,
}

impl TcpStore {
    /// Connects to the store at `host:port`.
    pub(super) fn connect(_address: &str, _place: Place, _timeout: Duration) -> Result<Self> {
        Err(Error::new("connect to launcher", ErrorKind::Unavailable, "not implemented"))
    }
}

impl Exchange for TcpStore {
    fn name(&self) -> &str {
        "torchrun"
    }

    fn job(&self) -> &str {
        &self.place.job
    }

    fn rank(&self) -> u32 {
        self.place.rank
    }

    fn size(&self) -> u32 {
        self.place.size
    }

    fn local(&self) -> Option<LocalRank> {
        self.place.local
    }

    fn all_gather(&mut self, _own: &[u8], _timeout: Duration) -> Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }
}
