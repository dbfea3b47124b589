//! Where the processes of the demonstration meet: a directory that goes with it, or, if it is
//! killed, with the next one. Whoever lives has its own locked.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;

use crate::cli::exit::Failure;

const NAME: &str = "fabricast-demo-";
const MODE: u32 = 0o700;
/// Others may come upon one before it is locked.
const ATTEMPTS: usize = 8;

/// The directory. It goes when this is dropped.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    /// None where there are no locks: there nobody takes it for one of the killed either.
    _lock: Option<Flock<File>>,
}

impl Directory {
    pub(super) fn make() -> Result<Self, Failure> {
        Self::make_in(&std::env::temp_dir())
    }

    fn make_in(above: &Path) -> Result<Self, Failure> {
        remove_dead(above);
        for _ in 0..ATTEMPTS {
            let drawn = getrandom::u32()
                .map_err(|error| Failure::failed(format!("naming a directory: {error}")))?;
            let path = above.join(format!("{NAME}{drawn:08x}"));
            let made = DirBuilder::new().mode(MODE).create(&path);
            made.map_err(|error| failed(&path, &error))?;
            match lock(&path) {
                Ok(lock) => return Ok(Self { path, _lock: Some(lock) }),
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(Self { path, _lock: None }),
                // Another one takes it for one of the killed.
                Err(Errno::EWOULDBLOCK | Errno::ENOENT) => drop(std::fs::remove_dir(&path)),
                Err(error) => {
                    let _ = std::fs::remove_dir(&path);
                    return Err(failed(&path, &error.into()));
                }
            }
        }
        let why = "each directory that is made there is removed at once";
        Err(failed(above, &io::Error::other(why)))
    }

    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::failed(format!("making {}: {error}", path.display()))
}

/// Locks a directory that is there, unless somebody else has it locked.
fn lock(path: &Path) -> Result<Flock<File>, Errno> {
    let errno = |error: io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO));
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW);
    let locked = Flock::lock(options.open(path).map_err(errno)?, FlockArg::LockExclusiveNonblock);
    let locked = locked.map_err(|(_, error)| error)?;
    // Whoever had it locked before may have removed it.
    let found = locked.metadata().map_err(errno)?;
    let there = path.symlink_metadata().map_err(errno)?;
    let is_it = (found.dev(), found.ino()) == (there.dev(), there.ino());
    if is_it { Ok(locked) } else { Err(Errno::ENOENT) }
}

fn is_name(name: &str) -> bool {
    let is_drawn = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix(NAME).is_some_and(|drawn| drawn.len() == 8 && drawn.bytes().all(is_drawn))
}

/// Removes what demonstrations of this user left that were killed. What cannot be told, or
/// removed, stays.
fn remove_dead(above: &Path) {
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(is_name) {
            continue;
        }
        let Ok(lock) = lock(&entry.path()) else { continue };
        let is_own = lock.metadata().is_ok_and(|found| {
            found.uid() == nix::unistd::geteuid().as_raw() && found.mode() & 0o777 == MODE
        });
        if is_own {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_what_killed_demonstrations_left_is_removed() {
        let above = std::env::temp_dir().join(format!("demo-directory-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&above);
        std::fs::create_dir(&above).unwrap();
        let living = Directory::make_in(&above).unwrap();
        let make = |name: &str, mode| {
            let path = above.join(name);
            std::fs::create_dir_all(path.join("node-1")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        };
        let dead = make("fabricast-demo-0123abcd", MODE);
        let mut left = vec![
            make("fabricast-demo-0123abcg", MODE),
            make("fabricast-demo-0123abc", MODE),
            make("fabricast-demo-0123abce", 0o755),
            above.join("fabricast-demo-0123abcf"),
        ];
        symlink(&left[0], &left[3]).unwrap();
        // Who may do everything could remove those of others.
        let others = make("fabricast-demo-01234567", MODE);
        if std::os::unix::fs::chown(&others, Some(1), None).is_ok() {
            left.push(others);
        }
        let next = Directory::make_in(&above).unwrap();
        assert!(!dead.exists());
        for path in left.iter().chain([&living.path, &next.path]) {
            assert!(path.symlink_metadata().is_ok(), "{}", path.display());
        }
        let path = living.path.clone();
        drop((living, next));
        assert!(!path.exists());
        std::fs::remove_dir_all(above).unwrap();
    }
}
