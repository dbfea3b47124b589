//! PMI-1 and PMI-2: the launcher's socket, inherited or at an address.
//!
//! Each rank stores its bytes in the launcher's key-value store, waits for all others in its
//! barrier, and gets their bytes.
//!
//! An MPI library may use the same socket. `hydra`, the launcher of MPICH and Intel MPI, answers
//! both. Slurm answers the first only, and a launcher at an address answers the last connection
//! only; connecting beside MPI is refused there.

mod client;
mod descriptor;
mod failure;
mod launcher_connection;
mod mapping;
mod message;
mod mpi;
mod open_sessions;
mod pieces;
mod session;
mod version;
mod wire1;
mod wire2;

#[cfg(test)]
mod test_server;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use self::client::{Client, Reported};
use self::failure::Failure;
use self::launcher_connection::Connection;
use self::mpi::MpiState;
use self::open_sessions::Key;
use self::session::Session;
use super::bounded_call::deadline;
use super::environment::Environment;
use super::error::{CONNECT, Error, ErrorKind, GATHER, Result};
use super::exchange::{Exchange, LocalRank};

pub use version::PmiVersion;

/// Most ranks of a job.
const MAX_SIZE: u32 = 1 << 24;

/// Where the launcher listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PmiServer {
    /// An inherited descriptor: `PMI_FD`.
    Descriptor(i32),
    /// An address, `host:port`, and the number of this process there: `PMI_PORT`, `PMI_ID`.
    Address(String, u32),
}

/// A job whose launcher speaks PMI.
#[derive(Debug)]
pub(super) struct Pmi {
    key: Key,
    /// None if it has been put back.
    session: Option<Session>,
    failed: Option<Error>,
    /// The process that connected.
    process: u32,
    version: PmiVersion,
    job: String,
    place: (u32, u32),
}

impl Pmi {
    pub(in crate::launcher) fn connect(
        server: &PmiServer,
        version: PmiVersion,
        environment: &Environment,
        timeout: Duration,
    ) -> Result<Self> {
        let name = version.name();
        let deadline = deadline(timeout);
        check_beside_mpi(server, environment).map_err(|error| error.by(name))?;
        let (key, connection) = match server {
            PmiServer::Descriptor(number) => {
                let connection = Connection::inherited(*number)
                    .map_err(|failure| failure.error(CONNECT, name, timeout))?;
                (Key::Inherited(connection.descriptor()), Some(connection))
            }
            PmiServer::Address(address, id) => (Key::Address(address.clone(), *id), None),
        };
        let session = match open_sessions::take(&key).map_err(|error| error.by(name))? {
            Some(session) => session,
            None => match open(connection, server, version, environment, deadline) {
                Ok(session) => {
                    open_sessions::opened(&key, &session);
                    session
                }
                Err(failure) => {
                    let error = failure.error(CONNECT, name, timeout);
                    open_sessions::not_opened(&key, &error);
                    return Err(error);
                }
            },
        };
        let client = session.client();
        let (version, place) = (client.version(), client.place());
        let (job, process) = (client.job().to_owned(), std::process::id());
        Ok(Self { key, session: Some(session), failed: None, process, version, job, place })
    }

    /// The session, if it can be used now.
    fn usable(&mut self) -> Result<&mut Session> {
        let unusable = |kind, detail: &str| Err(Error::new(GATHER, kind, detail));
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if self.process != std::process::id() {
            return Err(open_sessions::of_fork(GATHER));
        }
        let is_own = matches!(self.key, Key::Address(..));
        if is_own && mpi::state() == MpiState::Initialized {
            return unusable(ErrorKind::Unavailable, BESIDE_MPI_AT_ADDRESS);
        }
        match &mut self.session {
            Some(session) if session.client().descriptor().is_same() => Ok(session),
            _ => unusable(ErrorKind::Closed, AFTER_MPI),
        }
    }
}

fn open(
    connection: Option<Connection>,
    server: &PmiServer,
    version: PmiVersion,
    environment: &Environment,
    deadline: Instant,
) -> std::result::Result<Session, Failure> {
    let number = |name| {
        environment.number::<u32>(name).map_err(|error| Failure::Environment(error.to_string()))
    };
    let place = number("PMI_RANK")?.zip(number("PMI_SIZE")?);
    let mut reported = Reported { id: None, place, job: environment.text("PMI_JOBID") };
    let connection = match (connection, server) {
        (Some(connection), _) => connection,
        (None, PmiServer::Descriptor(number)) => Connection::inherited(*number)?,
        (None, PmiServer::Address(address, id)) => {
            reported.id = Some(*id);
            Connection::to_address(address, deadline)?
        }
    };
    let client = Client::open(connection, version, reported, deadline)?;
    match client.place() {
        (rank, size) if rank < size && size <= MAX_SIZE => {
            Session::of_client(client, environment, deadline)
        }
        (rank, size) => Err(Failure::Environment(format!("rank {rank} of {size} ranks"))),
    }
}

const AFTER_MPI: &str = "the connection to the launcher has been closed in this process, as \
                         MPI_Finalize does. Start the group before MPI_Finalize";
const BESIDE_MPI_AT_ADDRESS: &str = "the launcher at PMI_PORT answers one connection of each \
    process, and MPI uses it. Start the group before MPI_Init, or start the job without -pmi-port";
const BESIDE_MPI_IN_SLURM: &str = "Slurm answers one user of PMI in each process, and MPI uses \
    it. Start the job by srun --mpi=pmix, or pass an exchange by MPI";

/// Refuses to connect where that would break MPI's connection.
fn check_beside_mpi(server: &PmiServer, environment: &Environment) -> Result<()> {
    let detail = match (mpi::state(), server) {
        (MpiState::NotInitialized, _) => return Ok(()),
        (MpiState::Finalized, _) => AFTER_MPI,
        (MpiState::Initialized, PmiServer::Address(..)) => BESIDE_MPI_AT_ADDRESS,
        (MpiState::Initialized, _) if environment.is_started_by_slurm() => BESIDE_MPI_IN_SLURM,
        (MpiState::Initialized, _) => return Ok(()),
    };
    Err(Error::new(CONNECT, ErrorKind::Unavailable, detail))
}

impl Exchange for Pmi {
    fn name(&self) -> &str {
        self.version.name()
    }

    fn job(&self) -> &str {
        &self.job
    }

    fn rank(&self) -> u32 {
        self.place.0
    }

    fn size(&self) -> u32 {
        self.place.1
    }

    fn local(&self) -> Option<LocalRank> {
        self.session.as_ref()?.local()
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = deadline(timeout);
        let name = self.version.name();
        let gathered = self.usable().map_err(|error| error.by(name)).and_then(|session| {
            if own.len() > pieces::MAX_BYTES {
                let limit = pieces::MAX_BYTES;
                let detail = format!("{} bytes of a rank, at most {limit} are allowed", own.len());
                return Err(Error::new(GATHER, ErrorKind::InvalidArgument, detail).by(name));
            }
            session.all_gather(own, timeout, deadline)
        });
        self.failed = gathered.as_ref().err().cloned();
        gathered
    }
}

impl Drop for Pmi {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            open_sessions::put_back(&self.key, session, self.failed.take());
        }
    }
}
