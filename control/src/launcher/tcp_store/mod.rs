//! The TCP store of torchrun: its agent hosts a PyTorch `TCPStore`, at `MASTER_ADDR` and
//! `MASTER_PORT`, which its processes use without PyTorch.
//!
//! Works with the stores of PyTorch 2.0 and newer, of both implementations. The queries used are
//! those that all of them have; their numbers differ in 2.0 and 2.1 (see `wire`).
//!
//! Keys begin with `fabricast/` and the job. Those of PyTorch are `init/`, and begin with `/`:
//!
//! | key behind `fabricast/JOB/` | value |
//! |---|---|
//! | `starts/SIZE.RANK` | how often this rank has connected, among so many ranks; kept |
//! | `SIZE.START.SEQUENCE/RANK` | head of the rank's contribution |
//! | `SIZE.START.SEQUENCE/RANK.PIECE` | a piece of it |
//! | `SIZE.START.SEQUENCE/read` | number of ranks that have read all contributions |
//!
//! The last reader of an exchange removes its keys, so the agent's memory does not grow. Up to
//! PyTorch 2.1 it removes only the values: about 200 bytes remain for each rank and exchange. After
//! an error all keys of the exchange remain until the agent ends.
//!
//! The store outlives restarts of the ranks. Each restart has keys of its own: the text of the job
//! differs, or START does. A rank that has connected less often than the others, with the same text
//! of the job, does not find them, and misses the deadline.

mod contribution;
mod gather;
mod store_connection;
mod wire;

#[cfg(test)]
mod fake_store;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use self::gather::Gather;
use self::store_connection::{Connection, Fault};
use super::bounded_call::deadline;
use super::error::{CONNECT, Error, ErrorKind, GATHER, Result, list};
use super::exchange::{Exchange, LocalRank};

const NAME: &str = "torchrun";
/// Longest job text: keys have some more bytes.
const MAX_JOB: usize = 1024;
const _: () = assert!(MAX_JOB + 128 <= wire::MAX_KEY);
/// How long to find out which ranks are missing, after the deadline.
const DIAGNOSIS: Duration = Duration::from_secs(2);

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
    address: String,
    /// Distinguishes this connection from others of the same process and job. All ranks connect
    /// equally often.
    start: i64,
    /// The number of the next exchange.
    sequence: u64,
    /// None after a failure.
    connection: Option<Connection>,
}

impl TcpStore {
    /// Connects to the store at `host:port`.
    pub(super) fn connect(address: &str, place: Place, timeout: Duration) -> Result<Self> {
        let invalid = |text: String| Error::new(CONNECT, ErrorKind::InvalidArgument, text).by(NAME);
        if place.rank >= place.size {
            let text = format!("rank {} of {} ranks does not exist", place.rank, place.size);
            return Err(invalid(text));
        }
        if place.job.len() > MAX_JOB {
            let length = place.job.len();
            return Err(invalid(format!("the job's name has {length} bytes, at most {MAX_JOB}")));
        }
        let start = || {
            let mut connection = Connection::open(address, deadline(timeout))?;
            let Place { rank, size, ref job, .. } = place;
            let key = format!("fabricast/{job}/starts/{size}.{rank}");
            connection.send(|queries| queries.add(&key, 1))?;
            Ok((connection.number()?, connection))
        };
        let (start, connection) = start().map_err(|fault| match fault {
            Fault::Late(what) => {
                let text = format!(
                    "{what} within {timeout:?}. Check MASTER_ADDR, MASTER_PORT, and the network \
                     between the machines"
                );
                Error::new(CONNECT, ErrorKind::DeadlineExceeded, text).by(NAME)
            }
            other => failed(CONNECT, address, other),
        })?;
        tracing::debug!(address, dialect = ?connection.dialect(), start, "connected to TCP store");
        let (address, connection) = (address.to_owned(), Some(connection));
        Ok(Self { place, address, start, sequence: 0, connection })
    }

    fn next_gather(&mut self) -> Gather {
        let Place { rank, size, ref job, .. } = self.place;
        let prefix = format!("fabricast/{job}/{size}.{}.{}", self.start, self.sequence);
        self.sequence += 1;
        Gather { prefix, rank, size }
    }

    fn run(&mut self, gather: &Gather, own: &[u8], deadline: Instant) -> Outcome {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => Connection::open(&self.address, deadline)?,
        };
        connection.set_deadline(deadline);
        let gathered = gather.run(&mut connection, own)?;
        // All ranks have the result, so this rank does not report a failure from here on: it
        // connects again if there is a next exchange.
        match gather.finish(&mut connection, &gathered) {
            Ok(()) => self.connection = Some(connection),
            Err(fault) => tracing::debug!(?fault, "removing keys from the TCP store failed"),
        }
        Ok(gathered)
    }

    /// The error of a missed deadline. Asks by a new connection, because the store may still hold
    /// back answers on the other one.
    fn late(&self, gather: &Gather, timeout: Duration) -> Error {
        let new = |text| Error::new(GATHER, ErrorKind::DeadlineExceeded, text).by(NAME);
        let absent = || {
            let mut connection = Connection::open(&self.address, deadline(DIAGNOSIS))?;
            gather.absent(&mut connection)
        };
        match absent() {
            Ok(ranks) if ranks.is_empty() => new(format!(
                "all ranks came, but the store at {} did not send all contributions within \
                 {timeout:?}",
                self.address
            )),
            Ok(ranks) => {
                let missing = list(&ranks);
                new(format!(
                    "{missing} did not come within {timeout:?}. Check that all ranks call it"
                ))
                .of_ranks(ranks)
            }
            Err(fault) => {
                tracing::debug!(?fault, "finding the missing ranks failed");
                new(format!(
                    "the store at {} did not answer within {timeout:?}. Check that torchrun runs \
                     there and is not stopped",
                    self.address
                ))
            }
        }
    }
}

type Outcome = std::result::Result<Vec<Vec<u8>>, Fault>;

fn failed(operation: &'static str, address: &str, fault: Fault) -> Error {
    let new = |kind, text: String| Error::new(operation, kind, text).by(NAME);
    match fault {
        Fault::Late(text) => new(ErrorKind::DeadlineExceeded, text),
        Fault::Closed(text) => {
            new(ErrorKind::Closed, format!("{text}. Check that torchrun runs there"))
        }
        Fault::Malformed(text) => {
            let hint = "It is no TCP store of PyTorch: check MASTER_ADDR and MASTER_PORT";
            new(ErrorKind::Malformed, format!("{address} sent {text}. {hint}"))
        }
        Fault::OfRank(rank, text) => {
            new(ErrorKind::Malformed, format!("rank {rank} sent {text}")).of_ranks([rank])
        }
        Fault::InvalidAddress(text) => new(ErrorKind::InvalidArgument, text),
        Fault::Failed(text) => new(ErrorKind::Failed, text),
    }
}

impl Exchange for TcpStore {
    fn name(&self) -> &str {
        NAME
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

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        if own.len() > contribution::MAX {
            let text = format!("{} bytes, at most {} a rank", own.len(), contribution::MAX);
            return Err(Error::new(GATHER, ErrorKind::InvalidArgument, text).by(NAME));
        }
        let gather = self.next_gather();
        if gather.size == 1 {
            return Ok(vec![own.to_vec()]);
        }
        self.run(&gather, own, deadline(timeout)).map_err(|fault| match fault {
            Fault::Late(_) => self.late(&gather, timeout),
            other => failed(GATHER, &self.address, other),
        })
    }
}
