//! Which process serves a node: the one that holds a lock in the node's directory.
//!
//! It is a record lock, which belongs to the process and to nobody else: the kernel takes it
//! from the dead, and a forked child does not have it. Within one process, which could take
//! such a lock twice, a set of directories keeps order.
//!
//! Every member of a node holds another lock, together with the others. While anybody holds
//! it there is a hall, and a new service waits for somebody to bring it.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ipc::{Credentials, Incarnation};
use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::libc;

use crate::error::{Error, ErrorKind, Result};

const SERVICE: &str = "node.lock";
const MEMBERS: &str = "node.members";
const SOCKET: &str = "node.sock";

/// Where processes join.
pub(crate) fn socket_in(directory: &Path) -> PathBuf {
    directory.join(SOCKET)
}

/// The lock of who serves.
pub(crate) fn lock_in(directory: &Path) -> PathBuf {
    directory.join(SERVICE)
}

/// Makes the directory of a node, or refuses one that others could tamper with.
pub(crate) fn prepare(operation: &'static str, directory: &Path) -> Result<()> {
    let failed = |error: io::Error| Error::of(operation, error).on(directory.display());
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
    let found = fs::symlink_metadata(directory).map_err(failed)?;
    let own = Credentials::of_this_process().user;
    if !found.is_dir() || found.uid() != own || found.mode() & 0o022 != 0 {
        let detail = "it is not a directory of this user in which nobody else may write";
        return Err(Error::new(operation, ErrorKind::Denied, detail).on(directory.display()));
    }
    Ok(())
}

/// The locks that this process holds, by device and number of the file.
static HELD: Mutex<BTreeSet<(u64, u64)>> = Mutex::new(BTreeSet::new());

fn held() -> MutexGuard<'static, BTreeSet<(u64, u64)>> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to serve a node.
#[derive(Debug)]
pub(crate) struct Office {
    file: File,
    key: (u64, u64),
    born: Incarnation,
}

fn open(directory: &Path, name: &str) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(directory.join(name))
}

impl Office {
    /// Takes it, if nobody has it.
    pub(crate) fn take(operation: &'static str, directory: &Path) -> Result<Option<Self>> {
        let failed = |error: io::Error| Error::of(operation, error).on(directory.display());
        // Kept until it is known whose the lock is. Closing any descriptor of the file would
        // take the lock from this process, so it is not even opened if this process has it.
        let mut held = held();
        if let Ok(found) = fs::metadata(directory.join(SERVICE))
            && held.contains(&(found.dev(), found.ino()))
        {
            return Ok(None);
        }
        let file = open(directory, SERVICE).map_err(failed)?;
        let found = file.metadata().map_err(failed)?;
        let key = (found.dev(), found.ino());
        match fcntl(&file, FcntlArg::F_SETLK(&whole(libc::F_WRLCK))) {
            Ok(_) => {
                held.insert(key);
                Ok(Some(Self { file, key, born: Incarnation::current() }))
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }
}

/// A lock of a whole file.
fn whole(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

impl Drop for Office {
    fn drop(&mut self) {
        if self.born.is_current() {
            let mut held = held();
            let _ = fcntl(&self.file, FcntlArg::F_SETLK(&whole(libc::F_UNLCK)));
            held.remove(&self.key);
        }
    }
}

/// Held by every member of a node.
#[derive(Debug)]
pub(crate) struct Membership(Option<Flock<File>>, Incarnation);

impl Membership {
    /// Nobody holds it alone for longer than it takes to see that this can be.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// Holds it, together with others.
    pub(crate) fn hold(operation: &'static str, directory: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::of(operation, error).on(directory.display());
        let mut file = open(directory, MEMBERS).map_err(failed)?;
        let end = Instant::now() + Self::PATIENCE;
        loop {
            match Flock::lock(file, FlockArg::LockSharedNonblock) {
                Ok(lock) => return Ok(Self(Some(lock), Incarnation::current())),
                // A service looks whether anybody is there.
                Err((back, nix::errno::Errno::EAGAIN)) if Instant::now() < end => file = back,
                Err((_, error)) => return Err(failed(error.into())),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Does anybody hold it? To be asked by who holds the [office](Office).
    pub(crate) fn is_held(operation: &'static str, directory: &Path) -> Result<bool> {
        let failed = |error: io::Error| Error::of(operation, error).on(directory.display());
        let file = open(directory, MEMBERS).map_err(failed)?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(_) => Ok(false),
            Err((_, nix::errno::Errno::EAGAIN)) => Ok(true),
            Err((_, error)) => Err(failed(error.into())),
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.1.is_current() {
            // The lock is the parent's, who shares the file with its child.
            std::mem::forget(self.0.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("fabricast-{name}-{}", std::process::id()));
        prepare("test", &path).unwrap();
        path
    }

    #[test]
    fn one_serves_at_a_time_also_within_a_process() {
        let directory = directory("election");
        let office = Office::take("test", &directory).unwrap().unwrap();
        assert!(Office::take("test", &directory).unwrap().is_none());
        drop(office);
        assert!(Office::take("test", &directory).unwrap().is_some());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn members_are_seen_while_they_are_there() {
        let directory = directory("members");
        assert!(!Membership::is_held("test", &directory).unwrap());
        let one = Membership::hold("test", &directory).unwrap();
        let other = Membership::hold("test", &directory).unwrap();
        drop(one);
        assert!(Membership::is_held("test", &directory).unwrap());
        drop(other);
        assert!(!Membership::is_held("test", &directory).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_directory_of_others_is_refused() {
        let directory = directory("open");
        fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        assert_eq!(prepare("test", &directory).unwrap_err().kind(), ErrorKind::Denied);
        fs::remove_dir_all(&directory).unwrap();
    }
}
