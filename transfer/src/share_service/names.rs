//! Names under which other processes find shared memory: files with tokens in the directory.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ipc::{ChannelListener, Credentials, DirectoryLock, ForkGeneration};

use super::token::{self, digits};
use crate::error::{Error, ErrorKind, Result, failed};
use crate::share::random;

const SHARE: &str = "share memory under name";
const FIND: &str = "find shared memory by name";
/// Prefix of the file of a name.
const PREFIX: &str = "shared-";
/// Maximum length of a name in bytes.
pub const MAX_SHARED_NAME_LENGTH: usize = 128;
/// A file is never longer.
const MAX_TOKEN_LENGTH: u64 = 4096;

/// A name of shared memory, until this is dropped.
#[derive(Debug)]
pub struct SharedName {
    path: PathBuf,
    token: Vec<u8>,
    fork_generation: ForkGeneration,
}

fn path_of(operation: &'static str, directory: &Path, name: &str) -> Result<PathBuf> {
    let is_valid = (1..=MAX_SHARED_NAME_LENGTH).contains(&name.len())
        && !name.chars().any(|it| it == '/' || it.is_control());
    if !is_valid {
        let detail = format!(
            "the name {name:?} has not 1 to {MAX_SHARED_NAME_LENGTH} bytes, or has slashes or control characters"
        );
        return Err(Error::new(operation, ErrorKind::Malformed, detail));
    }
    Ok(directory.join(format!("{PREFIX}{name}")))
}

/// The token in a file; None without a file.
fn read(path: &Path) -> std::io::Result<Option<Vec<u8>>> {
    // Not through a link, and not from a pipe, which would block.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => {
            let mut token = Vec::new();
            file.take(MAX_TOKEN_LENGTH).read_to_end(&mut token)?;
            Ok(Some(token))
        }
        Err(error) if error.kind() == IoErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn unreadable(operation: &'static str, path: &Path, error: std::io::Error) -> Error {
    if error.kind() != IoErrorKind::PermissionDenied {
        return failed(operation)(error).at(path);
    }
    let detail = "this user may not read it. Its owner names this user when it shares the memory, in a \
                  directory that this user can enter";
    Error::new(operation, ErrorKind::Denied, detail).at(path)
}

/// Does a process serve the memory of this token?
fn is_served(token: &[u8], directory: &Path) -> bool {
    token::read(token, directory)
        .is_ok_and(|(_, socket)| socket.exists() && !ChannelListener::is_stale(&socket))
}

/// Files of names whose processes have ended. The caller has the lock of the directory.
fn stale_in(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = directory.read_dir().into_iter().flatten().flatten();
    let names = entries.filter(|it| {
        let name = it.file_name();
        let name = name.as_bytes();
        // A process was killed while it wrote a file that begins with a dot.
        name.strip_prefix(b".").unwrap_or(name).starts_with(PREFIX.as_bytes())
    });
    let own = Credentials::of_this_process().user;
    names.map(|it| it.path()).filter(move |path| {
        let is_own = path.symlink_metadata().is_ok_and(|it| it.is_file() && it.uid() == own);
        let is_stale = |token: Vec<u8>| !is_served(&token, directory);
        is_own && read(path).ok().flatten().is_some_and(is_stale)
    })
}

/// Removes names whose processes have ended. The caller has the lock of the directory.
pub(super) fn remove_stale(directory: &Path) {
    for path in stale_in(directory) {
        let _ = fs::remove_file(path);
    }
}

/// Removes the files of names whose processes have ended, and returns them; in a dry run only returns
/// them. Starting to share memory in the directory does it, too.
///
/// # Errors
/// [`Failed`](ErrorKind::Failed) if the directory cannot be locked.
pub fn clean_names(directory: &Path, dry_run: bool) -> Result<Vec<PathBuf>> {
    const OPERATION: &str = "clean up names of shared memory";
    let locked = DirectoryLock::take(directory);
    let _alone = locked.map_err(|error| failed(OPERATION)(error).at(directory))?;
    let found: Vec<_> = stale_in(directory).collect();
    Ok(found.into_iter().filter(|path| dry_run || fs::remove_file(path).is_ok()).collect())
}

impl SharedName {
    /// Writes the token into the file of the name. Only a token for the own user is a secret.
    pub(super) fn publish(
        directory: &Path,
        name: &str,
        token: &[u8],
        is_secret: bool,
    ) -> Result<Self> {
        let path = path_of(SHARE, directory, name)?;
        let system = |error: std::io::Error| failed(SHARE)(error).at(&path);
        let _alone = DirectoryLock::take(directory).map_err(failed(SHARE))?;
        remove_stale(directory);
        // A stale one of this user was removed.
        if let Some(other) = read(&path).map_err(|error| unreadable(SHARE, &path, error))? {
            let detail = match is_served(&other, directory) {
                true => format!(
                    "a process shares memory under the name {name:?} already. Use another name, or end it first"
                ),
                false => format!(
                    "an ended process of another user left the name {name:?}. Use another name, or let \
                     that user remove it: fabricast clean"
                ),
            };
            return Err(Error::new(SHARE, ErrorKind::TooMany, detail).at(&path));
        }
        let part = directory.join(format!(".{PREFIX}{}", digits(random(SHARE)?)));
        let mode = if is_secret { 0o600 } else { 0o644 };
        let written = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&part)
            .and_then(|mut file| file.write_all(token))
            .and_then(|()| fs::rename(&part, &path));
        written.map_err(|error| {
            let _ = fs::remove_file(&part);
            system(error)
        })?;
        let fork_generation = ForkGeneration::current();
        Ok(Self { path, token: token.to_owned(), fork_generation })
    }
}

impl Drop for SharedName {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            return;
        }
        let Some(directory) = self.path.parent() else { return };
        let Ok(_alone) = DirectoryLock::take(directory) else { return };
        // Another process may have the name by now, if this one was taken for dead.
        if read(&self.path).is_ok_and(|token| token.as_ref() == Some(&self.token)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The token of the memory that a process shares under this name in the directory; None if there is
/// none, or its process has ended.
///
/// # Errors
/// [`Malformed`](ErrorKind::Malformed) for a name that no memory has; [`Denied`](ErrorKind::Denied) if
/// this user may not read the file of the name; [`Failed`](ErrorKind::Failed).
pub fn shared_under_name(directory: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = path_of(FIND, directory, name)?;
    let found = read(&path).map_err(|error| unreadable(FIND, &path, error))?;
    Ok(found.filter(|token| is_served(token, directory)))
}
