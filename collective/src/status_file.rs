//! A file in the directory of a domain with what it uses and has learnt, for operators.
//!
//! The rank that decides on parameters writes it when it joins and when it settles on parameters, and holds a
//! lock on it: a file without a lock is of a process that has ended.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipc::ForkGeneration;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::controller::{Change, Controller};
use crate::operation::OpKey;
use crate::parameters::Parameters;

const SUFFIX: &str = ".domain.json";
/// More than a domain with all keys has.
const MAX_BYTES: u64 = 16 << 20;
/// A file is read again if it is being written.
const READS: u32 = 20;
const READ_PAUSE: Duration = Duration::from_millis(5);

/// A domain of a machine, as the rank that decides on its parameters has described it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainStatus {
    /// The kind of the domain.
    pub kind: DomainKind,
    /// The name of the job.
    pub job: String,
    /// The number of ranks.
    pub ranks: u32,
    /// The processes of the ranks on this machine, as far as they are known.
    pub processes: Vec<u32>,
    /// Set if the parameters were given, so that nothing is learnt.
    pub is_fixed: bool,
    /// What the domain uses for each operation, size class and type that it has learnt.
    pub operations: Vec<OperationStatus>,
}

/// The kind of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum DomainKind {
    /// Operations in host memory, within a machine.
    HostMemory,
    /// Operations in host memory, between machines.
    Machines,
    /// Operations of devices.
    DeviceMemory,
    /// Operations that a [`ChoiceLog`](crate::ChoiceLog) leaves to the faster library.
    LibraryOperations,
    /// Operations of a program, with a [`ShmParamStore`](crate::ShmParamStore).
    ParameterStore,
}

impl fmt::Display for DomainKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::HostMemory => "host memory",
            Self::Machines => "machines",
            Self::DeviceMemory => "device memory",
            Self::LibraryOperations => "library operations",
            Self::ParameterStore => "parameter store",
        })
    }
}

/// The domains of a directory.
#[derive(Debug, Default)]
pub struct FoundDomains {
    /// Those whose processes run.
    pub domains: Vec<DomainStatus>,
    /// Files that cannot be read, and why.
    pub unreadable: Vec<(PathBuf, io::Error)>,
}

/// What a domain uses for operations of a key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationStatus {
    /// The name of the operation.
    pub operation: String,
    /// The name of the type of the elements.
    pub data_type: String,
    /// The largest size of the class in bytes.
    pub largest_bytes: u64,
    /// The parameters of operations to come.
    #[serde(flatten)]
    pub uses: UsedParameters,
    /// Clear while the parameters are being learnt.
    pub is_settled: bool,
    /// Changes of the parameters, the latest first.
    pub history: Vec<ParameterChange>,
}

/// Parameters, by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsedParameters {
    /// The name of the algorithm.
    pub algorithm: String,
    /// The share of the bytes on the fast path, in thousandths.
    pub alpha: u16,
    /// The bytes that are moved at once; 0 for the default.
    pub chunk_bytes: u64,
    /// The number of streams or links; 0 for the default.
    pub stripes: u8,
}

/// Change of parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterChange {
    /// After so many executions.
    pub executions: u64,
    /// The parameters since then.
    #[serde(flatten)]
    pub uses: UsedParameters,
    /// The time of the last execution before, in nanoseconds.
    pub nanoseconds_before: u64,
}

impl UsedParameters {
    fn new(parameters: Parameters) -> Self {
        let Parameters { alpha, chunk_bits, stripes, algorithm } = parameters;
        let chunk_bytes = if chunk_bits == 0 { 0 } else { 1 << chunk_bits };
        Self { algorithm: algorithm.name().to_owned(), alpha, chunk_bytes, stripes }
    }
}

impl OperationStatus {
    fn new(controller: &Controller, key: OpKey) -> Self {
        let change = |change: &Change| ParameterChange {
            executions: change.update,
            uses: UsedParameters::new(change.parameters),
            nanoseconds_before: u64::try_from(change.time_before.as_nanos()).unwrap_or(u64::MAX),
        };
        Self {
            operation: key.operation.name().to_owned(),
            data_type: key.data_type.name().to_owned(),
            largest_bytes: key.size_class.largest(),
            uses: UsedParameters::new(controller.parameters(key)),
            is_settled: controller.is_settled(key),
            history: controller.history(key).map(change).collect(),
        }
    }
}

impl DomainStatus {
    /// The domains of a directory whose processes run.
    ///
    /// ```
    /// use collective::{CommDomain, CommDomainKey, DomainKind, DomainOptions, DomainStatus};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-status-{}", std::process::id()));
    /// let options = DomainOptions::new().job("example");
    /// # let options = options.directory(&directory);
    /// let domain = CommDomain::join(&CommDomainKey::of_first_ranks(1), 0, &options)?;
    /// let found = &DomainStatus::of_directory(&directory)?.domains[0];
    /// assert_eq!((found.kind, found.job.as_str()), (DomainKind::HostMemory, "example"));
    /// drop(domain);
    /// assert!(DomainStatus::of_directory(&directory)?.domains.is_empty());
    /// # std::fs::remove_dir(&directory).unwrap();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn of_directory(directory: &Path) -> io::Result<FoundDomains> {
        let mut found = FoundDomains::default();
        for path in files(directory)? {
            match read(&path) {
                Ok(status) => found.domains.extend(status),
                Err(error) => found.unreadable.push((path, error)),
            }
        }
        Ok(found)
    }

    /// Removes files of this user whose processes have ended. With `dry_run` nothing is removed.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn clean(directory: &Path, dry_run: bool) -> io::Result<CleanedDomains> {
        let mut done = CleanedDomains::default();
        for path in files(directory)? {
            match remove_stale(&path, dry_run) {
                Ok(true) => done.removed.push(path),
                Ok(false) => {}
                Err(error) => done.kept.push((path, error)),
            }
        }
        Ok(done)
    }
}

/// The files of domains that were removed, or not.
#[derive(Debug, Default)]
pub struct CleanedDomains {
    /// Those that were, or would be, removed.
    pub removed: Vec<PathBuf>,
    /// Those that cannot be removed, and why.
    pub kept: Vec<(PathBuf, io::Error)>,
}

/// Removes a file, unless its process runs. Returns whether it was stale.
fn remove_stale(path: &Path, dry_run: bool) -> io::Result<bool> {
    let file = match open(path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    let (user, inode) = file.metadata().map(|found| (found.uid(), found.ino()))?;
    if user != nix::unistd::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a file of another user"));
    }
    let Ok(_locked) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else { return Ok(false) };
    // A new domain may have replaced it.
    if !std::fs::symlink_metadata(path).is_ok_and(|named| named.ino() == inode) {
        return Ok(false);
    }
    if !dry_run {
        std::fs::remove_file(path)?;
    }
    Ok(true)
}

/// The files of domains in a directory, in the order of their names.
fn files(directory: &Path) -> io::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for entry in directory.read_dir()? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(SUFFIX)) {
            found.insert(path);
        }
    }
    Ok(found)
}

/// Does not follow a link, or wait for the writer of a pipe.
fn open(path: &Path, create: bool) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(create).create(create).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a file"));
    }
    Ok(file)
}

/// The domain of a file; None if its process has ended.
fn read(path: &Path) -> io::Result<Option<DomainStatus>> {
    let mut file = match open(path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    file = match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => return Ok(None),
        Err((file, Errno::EWOULDBLOCK)) => file,
        Err((_, error)) => return Err(error.into()),
    };
    let mut reads = 0;
    loop {
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        (&file).take(MAX_BYTES).read_to_end(&mut text)?;
        reads += 1;
        match serde_json::from_slice(&text) {
            Err(_) if reads < READS => std::thread::sleep(READ_PAUSE),
            status => return Ok(Some(status?)),
        }
    }
}

/// The file of a domain, which only the rank that decides on parameters has.
#[derive(Debug)]
pub(crate) struct StatusFile {
    /// Forgotten in a forked child: the lock is that of its parent, too.
    file: Option<Flock<File>>,
    path: PathBuf,
    status: DomainStatus,
    /// The number of stage changes of the controller when it was written.
    stage_changes: u64,
    fork_generation: ForkGeneration,
}

impl StatusFile {
    /// Writes the file of this name. None if that is not possible: operations do not depend on it.
    pub(crate) fn new(directory: &Path, name: &str, status: DomainStatus) -> Option<Self> {
        // Those that killed processes left behind.
        let _ = DomainStatus::clean(directory, false);
        let path = directory.join(format!("{name}{SUFFIX}"));
        match Self::lock(&path) {
            Ok(file) => {
                let fork_generation = ForkGeneration::current();
                let file = Some(file);
                let mut file = Self { file, path, status, stage_changes: 0, fork_generation };
                file.write();
                Some(file)
            }
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "domain without a file for its status");
                None
            }
        }
    }

    fn lock(path: &Path) -> io::Result<Flock<File>> {
        let mut attempts = 0;
        loop {
            let file = open(path, true)?;
            let file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                // A reader has it for a moment.
                Err((_, Errno::EWOULDBLOCK)) if attempts < READS => {
                    attempts += 1;
                    std::thread::sleep(READ_PAUSE);
                    continue;
                }
                file => file.map_err(|(_, error)| io::Error::from(error))?,
            };
            // A domain that has just ended may have removed it.
            match std::fs::symlink_metadata(path) {
                Ok(named) if named.ino() == file.metadata()?.ino() => return Ok(file),
                _ => {}
            }
        }
    }

    /// Writes what was learnt, if a key was settled or begins to be learnt again.
    pub(crate) fn update(&mut self, controller: &Controller) {
        if self.stage_changes == controller.stage_changes() || !self.fork_generation.is_current() {
            return;
        }
        self.stage_changes = controller.stage_changes();
        self.status.operations =
            controller.keys().map(|key| OperationStatus::new(controller, key)).collect();
        self.write();
    }

    fn write(&mut self) {
        let Some(file) = &mut self.file else { return };
        let written = serde_json::to_vec(&self.status).map_err(io::Error::from);
        let written = written.and_then(|text| {
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&text)
        });
        if let Err(error) = written {
            tracing::debug!(path = %self.path.display(), %error, "status of a domain is not written");
        }
    }
}

impl Drop for StatusFile {
    fn drop(&mut self) {
        match self.fork_generation.is_current() {
            true => drop(std::fs::remove_file(&self.path)),
            false => std::mem::forget(self.file.take()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::Choices;
    use crate::operation::{Operation, SizeClass};
    use crate::statistics::ExecStat;
    use crate::{CommDomain, CommDomainKey, DomainOptions};
    use reduction::DataType;
    use testkit::children::ForkedChild;
    use testkit::temp_dir::TempDir;

    fn status() -> DomainStatus {
        DomainStatus {
            kind: DomainKind::DeviceMemory,
            job: String::new(),
            ranks: 2,
            processes: vec![1, 2],
            is_fixed: false,
            operations: Vec::new(),
        }
    }

    fn domains(directory: &Path) -> Vec<DomainStatus> {
        let found = DomainStatus::of_directory(directory).unwrap();
        assert!(found.unreadable.is_empty(), "{:?}", found.unreadable);
        found.domains
    }

    #[test]
    fn settled_parameters_are_written_with_their_history() {
        let directory = TempDir::new("status-learnt");
        let mut file = StatusFile::new(&directory, "a", status()).unwrap();
        let candidates = vec![Parameters::default()];
        let choices = move |_| Choices { candidates: candidates.clone(), first_alpha: Some(900) };
        let mut controller = Controller::new(choices);
        let size_class = SizeClass::of(1 << 28);
        let key = OpKey { operation: Operation::AllGather, size_class, data_type: DataType::U8 };
        for _ in 0..30 {
            let used = controller.parameters(key);
            let fast_bytes = used.fast_bytes(1 << 28, 4096);
            let second_bytes = (1 << 28) - fast_bytes;
            let fast_time = Duration::from_nanos(fast_bytes / 380);
            let second_time = Duration::from_nanos(second_bytes / 36);
            let stat = ExecStat { fast_time, second_time, fast_bytes, second_bytes, success: true };
            controller.update(key, used, &stat);
            file.update(&controller);
        }
        assert!(controller.is_settled(key));
        let found = domains(&directory);
        let [operation] = &found[0].operations[..] else { panic!("{found:?}") };
        assert_eq!(*operation, OperationStatus::new(&controller, key));
        assert_eq!(operation.uses, operation.history[0].uses);
        assert!(operation.is_settled && operation.history.len() > 1);
        drop(file);
        assert!(directory.read_dir().unwrap().next().is_none());
    }

    #[test]
    fn file_of_a_killed_process_is_not_listed_and_is_removed() {
        let directory = TempDir::new("status-killed");
        let options = DomainOptions::new().directory(&directory);
        let key = CommDomainKey::of_first_ranks(1);
        let rank = ForkedChild::new(|| {
            let _domain = CommDomain::join(&key, 0, &options).unwrap();
            std::thread::sleep(Duration::from_secs(60));
        });
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while domains(&directory).is_empty() {
            assert!(std::time::Instant::now() < end);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(DomainStatus::clean(&directory, false).unwrap().removed.is_empty());
        rank.kill();
        while !domains(&directory).is_empty() {
            assert!(std::time::Instant::now() < end);
            std::thread::sleep(Duration::from_millis(5));
        }
        let stale = DomainStatus::clean(&directory, true).unwrap().removed;
        assert_eq!(stale.len(), 1);
        // The next domain with this name takes the file over.
        let domain = CommDomain::join(&key, 0, &options).unwrap();
        assert_eq!(domains(&directory).len(), 1);
        assert!(DomainStatus::clean(&directory, false).unwrap().removed.is_empty());
        drop(domain);
        std::fs::write(&stale[0], "left behind").unwrap();
        assert_eq!(DomainStatus::clean(&directory, false).unwrap().removed, stale);
        assert!(!stale[0].exists());
    }

    #[test]
    fn forked_child_leaves_the_file_to_its_parent() {
        let directory = TempDir::new("status-forked");
        let file = StatusFile::new(&directory, "a", status()).unwrap();
        let mut file = Some(file);
        let child = ForkedChild::new(|| drop(file.take()));
        assert!(child.wait().success());
        assert_eq!(domains(&directory), [status()]);
    }

    #[test]
    fn files_that_are_no_status_are_named() {
        let directory = TempDir::new("status-foreign");
        let path = directory.join("a.domain.json");
        std::fs::write(&path, "{\"kind\": 3}").unwrap();
        // A lock as that of a running process.
        let file = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusive).unwrap();
        std::os::unix::fs::symlink(&path, directory.join("b.domain.json")).unwrap();
        std::fs::create_dir(directory.join("c.domain.json")).unwrap();
        let found = DomainStatus::of_directory(&directory).unwrap();
        let names = found.unreadable.iter().map(|(path, _)| path.file_name().unwrap());
        let expected = ["a.domain.json", "b.domain.json", "c.domain.json"];
        assert_eq!(names.collect::<Vec<_>>(), expected);
        assert!(found.domains.is_empty());
        let cleaned = DomainStatus::clean(&directory, false).unwrap();
        assert!(cleaned.removed.is_empty() && cleaned.kept.len() == 2, "{cleaned:?}");
        drop(file);
    }
}
