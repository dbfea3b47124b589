//! Which ranks of this machine have started: to name the missing ones.
//!
//! Each rank binds a datagram socket in the abstract namespace, which ends with its process. The
//! launchers' own barriers only say that *some* rank is missing. Ranks in other network namespaces
//! are not seen.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The mark of this process.
#[derive(Debug)]
pub(super) struct Presence {
    job: String,
    /// None if the name is taken: then this rank counts as present all the same.
    _socket: Option<UnixDatagram>,
}

fn address(job: &str, rank: u32) -> io::Result<SocketAddr> {
    let mut hasher = DefaultHasher::new();
    (job, nix::unistd::getuid().as_raw()).hash(&mut hasher);
    SocketAddr::from_abstract_name(format!("fabricast-rank-{:016x}-{rank}", hasher.finish()))
}

impl Presence {
    /// Marks this rank as started, until the process ends or the mark is dropped.
    pub(super) fn mark(job: &str, rank: u32) -> Self {
        let bind = || UnixDatagram::bind_addr(&address(job, rank)?);
        Self { job: job.to_owned(), _socket: bind().ok() }
    }

    /// The ranks among these that have not started on this machine.
    pub(super) fn absent(&self, ranks: impl IntoIterator<Item = u32>) -> Vec<u32> {
        ranks.into_iter().filter(|rank| !self.has_started(*rank)).collect()
    }

    fn has_started(&self, rank: u32) -> bool {
        let connect = || UnixDatagram::unbound()?.connect_addr(&address(&self.job, rank)?);
        connect().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_present_until_they_end() {
        let job = format!("presence-{}", std::process::id());
        let first = Presence::mark(&job, 0);
        let second = Presence::mark(&job, 2);
        assert_eq!(first.absent(0..4), [1, 3]);
        drop(second);
        assert_eq!(first.absent(0..4), [1, 2, 3]);
        assert_eq!(Presence::mark("another job", 9).absent([0]), [0]);
    }
}
