//! The temporary directory of a measurement, in which its processes share sockets and files.
//!
//! It is removed when the measurement ends, and by a thread that waits for signals when a signal
//! ends the process. A killed process leaves its directory behind; the next measurement removes it.
//! A live process holds a lock on its own.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use ipc::Credentials;
use nix::fcntl::{Flock, FlockArg, OFlag};
use nix::sys::signal::{SigSet, Signal, raise};

use command::exit::Failure;
use command::process::is_ignored;

use crate::process::leave;
use crate::worker::end_children;

/// Locked as long as the process lives that made the directory.
const OWNER: &str = "owner";
const NAME: &str = "fabricast-bench-";
/// Processes of one number in several containers that share a directory, and what is left of
/// those that had the number before.
const ATTEMPTS: u32 = 100;

/// The directory to remove if a signal ends the process.
static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<PathBuf>> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The temporary directory of a measurement. A process has one at a time.
#[derive(Debug)]
pub(crate) struct TempDir {
    directory: PathBuf,
    _lock: Flock<File>,
}

impl TempDir {
    /// Creates it. To be called before other threads are started, since they inherit the signal mask
    /// that leaves signals to the thread that removes the directory.
    pub(crate) fn create() -> Result<Self, Failure> {
        wait_for_signals()?;
        remove_abandoned(&std::env::temp_dir());
        let (directory, lock) = make(&std::env::temp_dir())?;
        *current() = Some(directory.clone());
        Ok(Self { directory, _lock: lock })
    }

    /// Its path.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.directory
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        *current() = None;
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Creates a directory that no other process has.
fn make(above: &Path) -> Result<(PathBuf, Flock<File>), Failure> {
    let mut last = String::new();
    for attempt in 0..ATTEMPTS {
        let more = if attempt == 0 { String::new() } else { format!("-{attempt}") };
        let path = above.join(format!("{NAME}{}{more}", std::process::id()));
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        if let Err(error) = made {
            last = format!("making {}: {error}", path.display());
            continue;
        }
        match take(&path) {
            Some(lock) => return Ok((path, lock)),
            // Another process took it for an abandoned one.
            None => last = format!("locking {}: it is gone", path.display()),
        }
    }
    Err(Failure::failed(last))
}

/// Makes the lock of a directory that was just made.
fn take(path: &Path) -> Option<Flock<File>> {
    let _alone = lock(path)?;
    let mut owner = OpenOptions::new();
    owner.write(true).create_new(true).mode(0o600);
    Flock::lock(owner.open(path.join(OWNER)).ok()?, FlockArg::LockExclusiveNonblock).ok()
}

/// Locks a directory of this user, if nobody has locked it, and it is still there then. Agents
/// lock it, too, for the moment in which they make a socket there; so it says nothing of its
/// owner, who has a lock of its own.
fn lock(path: &Path) -> Option<Flock<File>> {
    let flags = (OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits();
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let locked = Flock::lock(directory, FlockArg::LockExclusiveNonblock).ok()?;
    let (found, there) = (locked.metadata().ok()?, fs::symlink_metadata(path).ok()?);
    let is_it = (found.dev(), found.ino()) == (there.dev(), there.ino());
    (is_it && found.uid() == Credentials::of_this_process().user).then_some(locked)
}

fn is_name(name: &str) -> bool {
    let number = name.strip_prefix(NAME);
    number.is_some_and(|rest| {
        !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
    })
}

/// Is the process that created it alive? False, too, if it was killed before it took the lock.
fn has_owner(owner: &Path) -> bool {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(owner);
    file.is_ok_and(|file| Flock::lock(file, FlockArg::LockSharedNonblock).is_err())
}

fn remove_abandoned(above: &Path) {
    let Ok(entries) = fs::read_dir(above) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_str().is_some_and(is_name) {
            continue;
        }
        // No process is creating it while this is held.
        let Some(_alone) = lock(&entry.path()) else { continue };
        if !has_owner(&entry.path().join(OWNER)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Starts the thread that waits for signals, unless it is there already.
fn wait_for_signals() -> Result<(), Failure> {
    static STARTED: Once = Once::new();
    let mut outcome = Ok(());
    STARTED.call_once(|| outcome = start_thread());
    outcome
}

fn start_thread() -> Result<(), Failure> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // A signal that is ignored, as nohup does, stays ignored.
        if !is_ignored(signal) {
            signals.add(signal);
        }
    }
    let failed = |why: String| Failure::failed(format!("waiting for signals: {why}"));
    signals.thread_block().map_err(|error| failed(error.desc().to_owned()))?;
    let thread = std::thread::Builder::new().name("fabricast-signals".to_owned());
    let started = thread.spawn(move || {
        loop {
            if let Ok(signal) = signals.wait() {
                end(signal, &signals);
            }
        }
    });
    started.map(drop).map_err(|error| failed(error.to_string()))
}

/// Removes the directory, and ends this process as the signal would have.
fn end(signal: Signal, signals: &SigSet) -> ! {
    // Held to the end: no other thread creates or removes the directory from now on.
    let current = current();
    end_children();
    if let Some(directory) = current.as_ref() {
        // What this process was just about to make there would be in the way.
        let _ = (0..3).any(|_| fs::remove_dir_all(directory).is_ok());
    }
    // The handler of a provider, if it has one, removes what it left elsewhere: that of shm, which
    // then ends the process with exit code 1.
    let _ = signals.thread_unblock();
    let _ = raise(signal);
    leave(128 + signal as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_killed_processes_are_removed() {
        let above = std::env::temp_dir().join(format!("temp-dir-test-{}", std::process::id()));
        fs::create_dir_all(&above).unwrap();
        let (path, lock) = make(&above).unwrap();
        // One that has the same number elsewhere.
        let (second, other) = make(&above).unwrap();
        assert_ne!(path, second);
        fs::write(second.join("socket"), "").unwrap();
        let foreign =
            ["fabricast-bench-", "fabricast-bench-1x", "else"].map(|name| above.join(name));
        foreign.iter().for_each(|path| fs::create_dir(path).unwrap());
        std::os::unix::fs::symlink(&foreign[2], above.join("fabricast-bench-7")).unwrap();
        fs::write(above.join("fabricast-bench-8"), "").unwrap();
        remove_abandoned(&above);
        assert!(path.exists() && second.exists(), "they are in use");
        drop(other);
        remove_abandoned(&above);
        assert!(path.exists() && !second.exists());
        drop(lock);
        remove_abandoned(&above);
        assert!(!path.exists() && foreign.iter().all(|path| path.exists()));
        assert!(above.join("fabricast-bench-7").is_symlink());
        assert!(above.join("fabricast-bench-8").exists());
        fs::remove_dir_all(&above).unwrap();
    }
}
