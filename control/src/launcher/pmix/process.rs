//! The connection of this process: there is one, shared by all exchanges.
//!
//! The library counts connections of a process, but a second connection after the last one was
//! closed fails with some versions. So a process connects once, and closes at its exit.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use threads::lock;

use super::abi;
use super::abi::Proc;
use super::library::{Failure, Library, Value};
use crate::launcher::bounded_call;
use crate::launcher::error::{CONNECT, Error, ErrorKind, Result};
use crate::launcher::exchange::LocalRank;
use crate::launcher::presence::Presence;

/// A job of more ranks is a corrupt number.
const MAX_RANKS: u32 = 1 << 24;

/// The job, as the launcher's server describes it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) library: Library,
    pub(super) own: Proc,
    pub(super) name: String,
    pub(super) size: u32,
    pub(super) local: Option<LocalRank>,
    /// The ranks on this machine, with this one; empty if they are not known.
    pub(super) local_ranks: Vec<u32>,
    /// Shows the other ranks of this machine that this one has started.
    pub(super) presence: Presence,
    pub(super) turn: Mutex<Turn>,
}

/// Which exchange is next.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// Equal on all ranks, since all ranks exchange equally often.
    pub(super) number: u64,
    /// The error of the last one: it is the result of all further ones.
    pub(super) failure: Option<Error>,
}

/// The process that connected, 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);
static JOB: Mutex<Option<Result<Arc<Job>>>> = Mutex::new(None);

/// Refuses a fork of the process that connected: it has none of the library's threads.
pub(super) fn check_fork(operation: &'static str) -> Result<()> {
    match OWNER.load(Ordering::Relaxed) {
        0 => Ok(()),
        owner if owner == std::process::id() => Ok(()),
        owner => {
            let detail = format!(
                "process {owner} is connected, and this process is its fork. Start processes that \
                 take part by the launcher"
            );
            Err(Error::new(operation, ErrorKind::Failed, detail))
        }
    }
}

/// The job of this process. Connects at the first call.
pub(super) fn job(timeout: Duration) -> Result<Arc<Job>> {
    check_fork(CONNECT)?;
    let mut job = lock(&JOB);
    if let Some(known) = &*job {
        return known.clone();
    }
    OWNER.store(std::process::id(), Ordering::Relaxed);
    let deadline = bounded_call::deadline(timeout);
    let connected = match bounded_call::run("fabricast-pmix", deadline, open) {
        Ok(Some(Ok(job))) => Ok(Arc::new(job)),
        // Nothing was started, so it may be tried again.
        Ok(Some(Err(Failed::BeforeStart(error)))) => {
            OWNER.store(0, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Some(Err(Failed::Started(error)))) => Err(error),
        Ok(None) => {
            let detail = format!(
                "its server did not answer within {timeout:?}. Check that mpirun or srun is not \
                 stopped"
            );
            Err(Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail))
        }
        Err(error) => Err(Error::caused_by(CONNECT, ErrorKind::Failed, error)),
    };
    job.insert(connected).clone()
}

/// An error, and whether the library has begun to connect: it does so once only.
enum Failed {
    BeforeStart(Error),
    Started(Error),
}

fn open() -> std::result::Result<Job, Failed> {
    let library = Library::load().map_err(Failed::BeforeStart)?;
    let own = library.initialize().map_err(|status| {
        let detail = format!(
            "PMIx_Init: {}. Start the program by mpirun or srun --mpi=pmix",
            library.describe(status)
        );
        Failed::Started(Error::new(CONNECT, ErrorKind::Unavailable, detail))
    })?;
    describe(library, own).map_err(Failed::Started)
}

/// What the server knows about the job.
fn describe(library: Library, own: Proc) -> Result<Job> {
    let malformed = |detail: String| Error::new(CONNECT, ErrorKind::Malformed, detail);
    let name = own.job().ok_or_else(|| malformed("the job's name is no text".to_owned()))?;
    let all = own.with_rank(abi::ALL_RANKS);
    let size = match library.get(&all, abi::JOB_SIZE) {
        Ok(Value::Number(size)) => u32::try_from(size)
            .ok()
            .filter(|size| own.rank < *size && *size <= MAX_RANKS)
            .ok_or_else(|| malformed(format!("rank {} of {size}", own.rank)))?,
        Ok(_) => return Err(malformed("the number of ranks is no number".to_owned())),
        Err(Failure::Status(status)) => {
            let detail = format!("the number of ranks: {}", library.describe(status));
            return Err(Error::new(CONNECT, ErrorKind::Failed, detail));
        }
        Err(Failure::Malformed(detail)) => return Err(malformed(detail)),
    };
    // The server need not know these.
    let number = |of: &Proc, key| match library.get(of, key) {
        Ok(Value::Number(number)) => u32::try_from(number).ok(),
        _ => None,
    };
    let local = number(&own, abi::LOCAL_RANK).zip(number(&all, abi::LOCAL_SIZE));
    let local = local.filter(|(rank, local_size)| rank < local_size && *local_size <= size);
    let local_ranks = match library.get(&all, abi::LOCAL_PEERS) {
        Ok(Value::Text(text)) => ranks_of(&text, size),
        _ => Vec::new(),
    };
    let local = local.map(|(rank, size)| LocalRank { rank, size });
    let presence = Presence::mark(&name, own.rank);
    let turn = Mutex::default();
    Ok(Job { library, own, name, size, local, local_ranks, presence, turn })
}

/// The ranks in a list; none if it is no list of ranks of the job.
fn ranks_of(text: &str, size: u32) -> Vec<u32> {
    let ranks = text.split(',').map(|rank| rank.trim().parse().ok().filter(|rank| *rank < size));
    let mut ranks: Vec<u32> = ranks.collect::<Option<_>>().unwrap_or_default();
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_ranks_are_sorted_or_refused_as_a_whole() {
        assert_eq!(ranks_of("2,0,1,2", 3), [0, 1, 2]);
        assert_eq!(ranks_of("0", 1), [0]);
        for text in ["", "0,,1", "0,3", "0,-1", "0-2"] {
            assert_eq!(ranks_of(text, 3), [], "{text}");
        }
    }
}
