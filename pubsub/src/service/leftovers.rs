//! Removes on request the files that a killed service left in the directory of its node. The next
//! service does the same, but there may be none.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ipc::{ChannelListener, Credentials, DirectoryLock};

use super::election::{self, LeaderLock, MemberLock, lock_path, socket_path};
use crate::error::{Error, ErrorKind, Result};

/// State of a node, as its directory shows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// There is nothing to remove.
    Clean,
    /// The node is dead, and these files were removed; or would have been, in a dry run.
    Dead(Vec<PathBuf>),
    /// The node is alive, and this file was left; with the reason.
    Alive(PathBuf, String),
    /// The state is unknown, and this file was left; with the reason.
    Unknown(PathBuf, String),
}

/// Rejects a directory that no node may use, as [joining](crate::Node::join) would: one that
/// belongs to another user, or that others may write to. A missing directory is accepted.
///
/// # Errors
/// [`Denied`](ErrorKind::Denied); [`Failed`](ErrorKind::Failed) if it cannot be read.
pub fn check_directory(directory: &Path) -> Result<()> {
    election::check("read directory of node", directory)
}

/// Removes files that processes left in the directory of a dead node; a dry run only lists them. No
/// file of a living process is removed.
///
/// The three lock files stay: a joining process may be about to lock them at any time.
///
/// ```
/// use pubsub::{Condition, Node, NodeOptions};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-clean-{}", std::process::id()));
/// # let options = NodeOptions { directory: directory.clone(), ..NodeOptions::default() };
/// let node = Node::join(options)?;
/// assert!(matches!(pubsub::clean(&directory, false)?, Condition::Alive(..)));
/// drop(node);
/// assert_eq!(pubsub::clean(&directory, false)?, Condition::Clean);
/// # std::fs::remove_dir_all(directory).unwrap();
/// # Ok::<(), pubsub::Error>(())
/// ```
///
/// # Errors
/// [`Failed`](ErrorKind::Failed) if the directory cannot be read; [`Denied`](ErrorKind::Denied) if
/// others may write to it.
pub fn clean(directory: &Path, dry_run: bool) -> Result<Condition> {
    const OPERATION: &str = "clean up after node";
    let failed = |error: std::io::Error| Error::of(OPERATION, error).at(directory.display());
    let socket = socket_path(directory);
    let found = match fs::symlink_metadata(&socket) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Condition::Clean),
        Err(error) => return Err(failed(error)),
    };
    let unknown = |reason: String| Ok(Condition::Unknown(socket.clone(), reason));
    let alive = |reason: &str| Ok(Condition::Alive(socket.clone(), reason.to_owned()));
    if found.uid() != Credentials::of_this_process().user {
        return unknown("it belongs to another user".to_owned());
    }
    // Where others may write, any user may have created it.
    election::check(OPERATION, directory)?;
    if fs::symlink_metadata(lock_path(directory)).is_err() {
        return unknown("there is no lock file of a node beside it".to_owned());
    }
    // While this holds the leader lock, no service starts.
    let Some(_leader_lock) = LeaderLock::take(OPERATION, directory)? else {
        return alive("a process serves the node");
    };
    if MemberLock::is_held(OPERATION, directory)? {
        return alive("members of the node are about to serve it");
    }
    let _alone = DirectoryLock::take(directory).map_err(|error| {
        Error::because(OPERATION, ErrorKind::Failed, error).at(directory.display())
    })?;
    if !ChannelListener::is_stale(&socket) {
        return unknown(match ChannelListener::non_socket_kind(&socket) {
            Some(found) => format!("it is {found}, not a socket"),
            None => "a process that is not a member of the node listens on it".to_owned(),
        });
    }
    if !dry_run {
        fs::remove_file(&socket).map_err(failed)?;
    }
    Ok(Condition::Dead(vec![socket]))
}

/// Removes the directory of a node that no process uses, or will use: all its files, and then the
/// directory if nothing else is in it. False if a process uses the node, or something is left.
///
/// For directories that a program made for one run, such as a job's. A process that joins meanwhile
/// may fail.
///
/// ```
/// use pubsub::{Node, NodeOptions};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-remove-{}", std::process::id()));
/// # let options = NodeOptions { directory: directory.clone(), ..NodeOptions::default() };
/// let node = Node::join(options)?;
/// assert!(!pubsub::remove_directory(&directory)?);
/// drop(node);
/// assert!(pubsub::remove_directory(&directory)?);
/// assert!(!directory.exists());
/// # Ok::<(), pubsub::Error>(())
/// ```
///
/// # Errors
/// As [`clean`].
pub fn remove_directory(directory: &Path) -> Result<bool> {
    const OPERATION: &str = "remove directory of node";
    if !directory.exists() {
        return Ok(true);
    }
    if let Condition::Alive(..) | Condition::Unknown(..) = clean(directory, false)? {
        return Ok(false);
    }
    election::check(OPERATION, directory)?;
    let Some(_leader_lock) = LeaderLock::take(OPERATION, directory)? else { return Ok(false) };
    if MemberLock::is_held(OPERATION, directory)? {
        return Ok(false);
    }
    for file in election::FILES {
        match fs::remove_file(directory.join(file)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::of(OPERATION, error).at(directory.display()));
            }
            _ => {}
        }
    }
    Ok(fs::remove_dir(directory).is_ok())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::service::election::prepare;

    #[test]
    fn only_files_of_dead_processes_are_removed() {
        let name = format!("fabricast-leftovers-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        prepare("test", &directory).unwrap();
        let socket = socket_path(&directory);
        assert_eq!(clean(&directory, false).unwrap(), Condition::Clean);
        // As a killed service leaves it: the standard library does not remove it.
        drop(UnixListener::bind(&socket).unwrap());
        let is_unknown = |found| matches!(found, Condition::Unknown(..));
        assert!(is_unknown(clean(&directory, false).unwrap()), "there was never a node");
        let leader_lock = LeaderLock::take("test", &directory).unwrap().unwrap();
        assert!(matches!(clean(&directory, false).unwrap(), Condition::Alive(..)));
        drop(leader_lock);
        let member = MemberLock::hold("test", &directory).unwrap();
        assert!(matches!(clean(&directory, false).unwrap(), Condition::Alive(..)));
        drop(member);
        assert!(socket.exists());
        let dead = Condition::Dead(vec![socket.clone()]);
        assert_eq!(clean(&directory, true).unwrap(), dead);
        assert!(socket.exists(), "a dry run removes nothing");
        assert_eq!(clean(&directory, false).unwrap(), dead);
        assert!(!socket.exists());
        // A socket of another program.
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(is_unknown(clean(&directory, false).unwrap()));
        drop(listener);
        fs::remove_file(&socket).unwrap();
        fs::write(&socket, "a file").unwrap();
        let Condition::Unknown(_, reason) = clean(&directory, false).unwrap() else { panic!() };
        assert_eq!(reason, "it is a regular file, not a socket");
        fs::remove_dir_all(directory).unwrap();
    }
}
