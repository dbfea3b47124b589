//! Temporary directories of this user's processes, in which they share sockets and files.
//!
//! A directory is removed when its process ends. A killed process leaves its directory behind; the
//! next process that creates one removes it. A running process holds a lock on its directory.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::exit::{Failure, Result};

/// Names of the directories of each program, before the process number.
const PREFIXES: [&str; 2] = ["fabricast-bench-", "fabricast-demo-"];
/// Locked while the process that created the directory runs.
const LOCK_FILE: &str = "owner";
const MODE: u32 = 0o700;
/// Enough for processes of one number in several containers that share the parent directory, and
/// for directories of earlier processes of that number.
const ATTEMPTS: u32 = 100;

/// The program that uses the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// `fabricast-bench`.
    Bench,
    /// `fabricast demo`.
    Demo,
}

/// A directory of this process, removed when this is dropped.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    /// None where files cannot be locked: there no abandoned directory is removed.
    _lock: Option<Flock<File>>,
}

impl TempDir {
    /// Creates it in the directory for temporary files, and removes directories that killed
    /// processes of this user left there.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn create(program: Program) -> Result<Self> {
        Self::create_in(&std::env::temp_dir(), program)
    }

    fn create_in(parent: &Path, program: Program) -> Result<Self> {
        remove_abandoned(parent);
        let name = PREFIXES[program as usize];
        let mut last = String::new();
        for attempt in 0..ATTEMPTS {
            let more = if attempt == 0 { String::new() } else { format!("-{attempt}") };
            let path = parent.join(format!("{name}{}{more}", std::process::id()));
            let taken = DirBuilder::new().mode(MODE).create(&path).and_then(|()| take(&path));
            match taken {
                Ok(lock) => return Ok(Self { path, _lock: lock }),
                Err(error) => last = format!("make directory {} failed: {error}", path.display()),
            }
        }
        Err(Failure::failed(last))
    }

    /// The directory's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Locks a new directory. Fails if another process removed it as abandoned.
fn take(path: &Path) -> io::Result<Option<Flock<File>>> {
    let unsupported = |error: &io::Error| {
        matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::EOPNOTSUPP | Errno::ENOSYS))
    };
    let _lock = match lock(path) {
        Err(error) if unsupported(&error) => return Ok(None),
        locked => locked?,
    };
    let owner =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join(LOCK_FILE))?;
    let locked = Flock::lock(owner, FlockArg::LockExclusiveNonblock);
    locked.map(Some).map_err(|(_, error)| error.into())
}

/// Locks a directory of this user, if it is unlocked and still exists. Agents lock it, too, while
/// they create a socket in it; so this lock does not show that the owner runs, which has a lock of
/// its own.
fn lock(path: &Path) -> io::Result<Flock<File>> {
    let flags = (OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits();
    let directory = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let locked = Flock::lock(directory, FlockArg::LockExclusiveNonblock);
    let locked = locked.map_err(|(_, error)| io::Error::from(error))?;
    let (found, there) = (locked.metadata()?, fs::symlink_metadata(path)?);
    let is_it = (found.dev(), found.ino()) == (there.dev(), there.ino());
    let is_own = found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & 0o777 == MODE;
    if is_it && is_own { Ok(locked) } else { Err(Errno::ENOENT.into()) }
}

fn is_name(name: &str) -> bool {
    let number = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    number.is_some_and(|rest| {
        rest.starts_with(|first: char| first.is_ascii_digit())
            && rest.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-')
    })
}

/// Does the process that created the directory run? True also where that is unknown; false if it
/// was killed before it locked the file.
fn is_locked(owner: &Path) -> bool {
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    match OpenOptions::new().read(true).custom_flags(flags).open(owner) {
        Ok(file) => Flock::lock(file, FlockArg::LockSharedNonblock).is_err(),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

fn remove_abandoned(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_str().is_some_and(is_name) {
            continue;
        }
        // No process can create it while this lock is held.
        let Ok(_lock) = lock(&entry.path()) else { continue };
        if !is_locked(&entry.path().join(LOCK_FILE)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn either_program_removes_directories_of_killed_processes() {
        let parent = std::env::temp_dir().join(format!("temp-dir-test-{}", std::process::id()));
        let _ = fs::remove_dir_all(&parent);
        fs::create_dir(&parent).unwrap();
        let make = |name: &str, mode| {
            let path = parent.join(name);
            fs::create_dir_all(path.join("node-1")).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        };
        let living = TempDir::create_in(&parent, Program::Bench).unwrap();
        // Of a process with the same number in another container.
        let mut second = TempDir::create_in(&parent, Program::Bench).unwrap();
        assert_ne!(living.path, second.path);
        fs::write(second.path.join("socket"), "").unwrap();
        let dead = [make("fabricast-demo-1234", MODE), make("fabricast-bench-1234-5", MODE)];
        let mut left = vec![
            make("fabricast-bench-", MODE),
            make("fabricast-bench-1x", MODE),
            make("fabricast-demo-12", 0o755),
            make("else", MODE),
            parent.join("fabricast-bench-7"),
            parent.join("fabricast-demo-8"),
        ];
        symlink(&left[3], &left[4]).unwrap();
        fs::write(&left[5], "").unwrap();
        // Root could remove directories of other users.
        let others = make("fabricast-demo-9", MODE);
        if std::os::unix::fs::chown(&others, Some(1), None).is_ok() {
            left.push(others);
        }
        let demo = TempDir::create_in(&parent, Program::Demo).unwrap();
        assert!(dead.iter().all(|path| !path.exists()));
        for path in left.iter().chain([&living.path, &second.path, &demo.path]) {
            assert!(path.symlink_metadata().is_ok(), "{}", path.display());
        }
        // As if its process were killed.
        drop(second._lock.take());
        remove_abandoned(&parent);
        assert!(!second.path.exists() && living.path.exists());
        let path = living.path.clone();
        drop(living);
        assert!(!path.exists());
        fs::remove_dir_all(&parent).unwrap();
    }
}
