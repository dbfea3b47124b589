//! Options of domains, and how ranks of a machine join by them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Layout, WaitStrategy};

use crate::domain_key::{CommDomainKey, digest, digest_of_bytes};
use crate::error::{Error, ErrorKind, Result};
use crate::members::{MAX_RANKS, Members};
use crate::param_table::LearningOptions;
use crate::parameters::Parameters;
use crate::rendezvous::{Offer, Rendezvous};
use crate::status_file::{DomainKind, DomainStatus, StatusFile};

pub(crate) const JOIN: &str = "join communication domain";
const LAYOUT: Layout = Layout::new("fabricast domain", 2);
const PAGE_WORDS: usize = 4096 / size_of::<u64>();

/// Options of a [`CommDomain`](crate::CommDomain) or a [`ShmParamStore`](crate::ShmParamStore): equal on all ranks, except for the timeout.
#[derive(Debug, Clone)]
pub struct DomainOptions {
    directory: PathBuf,
    job: String,
    timeout: Duration,
    wait_strategy: WaitStrategy,
    learning: LearningOptions,
    fixed: Option<Parameters>,
    reads_peers: bool,
    interruption: Option<fn() -> bool>,
}

impl Default for DomainOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl DomainOptions {
    /// Options with the default directory, and a timeout of 30 seconds.
    #[must_use]
    pub fn new() -> Self {
        Self {
            directory: transfer::default_directory(),
            job: String::new(),
            timeout: Duration::from_secs(30),
            wait_strategy: WaitStrategy::default(),
            learning: LearningOptions::default(),
            fixed: None,
            reads_peers: true,
            interruption: None,
        }
    }

    /// Directory in which the ranks find each other. It is created with its parents.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.directory = directory.to_owned();
        self
    }

    /// A name of the job: domains of different jobs do not mix, although their keys are equal.
    #[must_use]
    pub fn job(mut self, job: &str) -> Self {
        self.job = job.to_owned();
        self
    }

    /// How long a rank waits for the others when it joins.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How ranks wait for each other.
    #[must_use]
    pub fn wait_strategy(mut self, strategy: WaitStrategy) -> Self {
        self.wait_strategy = strategy;
        self
    }

    /// How parameters are learnt and agreed on.
    #[must_use]
    pub fn learning(mut self, learning: LearningOptions) -> Self {
        self.learning = learning;
        self
    }

    /// Uses these parameters in all operations, instead of learning which are best.
    #[must_use]
    pub fn fixed_parameters(mut self, parameters: Parameters) -> Self {
        self.fixed = Some(parameters);
        self
    }

    /// Allows ranks to read the memory of each other by the kernel (the default), where that is possible.
    #[must_use]
    pub fn reads_peers(mut self, reads_peers: bool) -> Self {
        self.reads_peers = reads_peers;
        self
    }

    /// A function that is asked every 50 milliseconds while a rank waits for others in an operation of a
    /// domain. When it returns true, the rank gives up, as if it had left: the domain is over.
    #[must_use]
    pub fn interruption(mut self, is_interrupted: fn() -> bool) -> Self {
        self.interruption = Some(is_interrupted);
        self
    }

    pub(crate) fn join_timeout(&self) -> Duration {
        self.timeout
    }

    pub(crate) fn strategy(&self) -> WaitStrategy {
        self.wait_strategy
    }

    pub(crate) fn learning_options(&self) -> LearningOptions {
        self.learning
    }

    pub(crate) fn fixed(&self) -> Option<Parameters> {
        self.fixed
    }

    pub(crate) fn wants_to_read_peers(&self) -> bool {
        self.reads_peers
    }

    /// Joins the ranks of the machine. `names` are their ranks in the domain, if that has further ones;
    /// `words` are those that so
    /// many ranks need beside the table.
    pub(crate) fn join(
        &self,
        kind: Kind,
        key: &CommDomainKey,
        rank: u32,
        names: Option<&[u32]>,
        words: impl Fn(u32) -> usize,
        offer: Offer,
    ) -> Result<MachineRanks> {
        let invalid = |detail: String| Error::new(JOIN, ErrorKind::InvalidArgument, detail);
        let ranks = u32::try_from(key.ranks.len()).unwrap_or(u32::MAX);
        if ranks == 0 || ranks > MAX_RANKS {
            return Err(invalid(format!("a domain has 1 to {MAX_RANKS} ranks, not {ranks}")));
        }
        if rank >= ranks {
            return Err(invalid(format!(
                "rank {rank} does not exist: the domain has {ranks} ranks"
            )));
        }
        let Some(table) = self.learning.table_setup(ranks).required_words() else {
            let most = ipc::AgreedTableSetup::MAX.window;
            return Err(invalid(format!(
                "the window is 1 to {most}, not {}",
                self.learning.window
            )));
        };
        let first_table = Members::required_words(ranks);
        let first_extra = (first_table + table).next_multiple_of(PAGE_WORDS);
        let socket = self.directory.join(format!("{}.sock", self.file_name(kind, key)));
        let setup = self.setup(key, kind.build);
        let length = (first_extra + words(ranks)) * size_of::<u64>();
        let rendezvous = Rendezvous::new(socket, [rank, ranks], setup, LAYOUT, length, offer);
        let deadline = ipc::deadline(self.timeout);
        let joined = rendezvous.join(self.timeout)?;
        let names = names.map_or_else(|| (0..ranks).collect(), <[u32]>::to_vec);
        let (members, offers) = Members::new(joined, rank, names, key.digest(), self.interruption)?;
        let members = Arc::new(members);
        let status = self.status_file(kind, key, &members);
        Ok(MachineRanks { members, first_table, first_extra, deadline, offers, status })
    }

    /// The file by which operators see a domain; only the first rank of a machine has it.
    pub(crate) fn status_file(
        &self,
        kind: Kind,
        key: &CommDomainKey,
        members: &Members,
    ) -> Option<StatusFile> {
        if members.rank() != 0 {
            return None;
        }
        let processes = (0..members.count()).map(|rank| members.process_id(rank));
        let status = DomainStatus {
            kind: kind.kind,
            job: self.job.clone(),
            ranks: key.ranks.len() as u32,
            processes: processes.filter(|process| *process != 0).collect(),
            is_fixed: self.fixed.is_some(),
            operations: Vec::new(),
        };
        StatusFile::new(&self.directory, &self.file_name(kind, key), status)
    }

    /// The name of files of a domain, without the suffix.
    fn file_name(&self, kind: Kind, key: &CommDomainKey) -> String {
        let name = digest([key.digest(), digest_of_bytes(self.job.bytes())]);
        format!("{}-{name:016x}", kind.name)
    }

    /// A text of all that must be equal on all ranks.
    pub(crate) fn setup(&self, key: &CommDomainKey, build: u64) -> String {
        format!(
            "version {} (build {build:016x}) with {:?}, {}, reading of peers {}, key {:016x}",
            env!("CARGO_PKG_VERSION"),
            self.learning,
            self.fixed.map_or("learnt parameters".to_owned(), |fixed| format!("{fixed:?}")),
            self.reads_peers,
            key.digest()
        )
    }
}

/// What ranks join for: those of different kinds do not find each other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    name: &'static str,
    kind: DomainKind,
    /// A digest of what is built in.
    build: u64,
}

impl Kind {
    pub(crate) fn new(name: &'static str, kind: DomainKind, build: u64) -> Self {
        Self { name, kind, build }
    }
}

/// The ranks of a machine that have joined, and the parts of their segment.
#[derive(Debug)]
pub(crate) struct MachineRanks {
    members: Arc<Members>,
    /// The word at which the parameter table begins.
    first_table: usize,
    /// The word at which the rest begins.
    first_extra: usize,
    deadline: Instant,
    /// What each rank gives.
    offers: Vec<Offer>,
    status: Option<StatusFile>,
}

impl MachineRanks {
    pub(crate) fn first_table(&self) -> usize {
        self.first_table
    }

    pub(crate) fn first_extra(&self) -> usize {
        self.first_extra
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The file by which operators see the domain, if this rank has it.
    pub(crate) fn take_status(&mut self) -> Option<StatusFile> {
        self.status.take()
    }

    /// The ranks, and what each gives.
    pub(crate) fn into_members(self) -> (Arc<Members>, Vec<Offer>) {
        (self.members, self.offers)
    }
}

pub(crate) fn segment_too_small() -> Error {
    Error::new(JOIN, ErrorKind::Malformed, "the segment is too small")
}
