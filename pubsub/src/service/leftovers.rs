//! What a killed service left in the directory of its node, removed on request: the next one
//! does it, too, but there may be none.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ipc::{ChannelListener, Credentials, DirectoryLock};

use super::election::{self, LeaderLock, MemberLock, lock_path, socket_path};
use crate::error::{Error, ErrorKind, Result};

/// How a node is, as far as its directory tells.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// Nothing is there that would have to be removed.
    Clean,
    /// Nobody is there any more, and these files were removed; or would have been, if only that
    /// was asked.
    Dead(Vec<PathBuf>),
    /// Somebody is there, and this file was not touched. With who.
    Alive(PathBuf, String),
    /// Nobody can say, and this file was not touched. With what is in the way.
    Unknown(PathBuf, String),
}

/// Refuses what no node's directory can be, as [joining](crate::Node::join) there would: one that is
/// another user's, or in which others may write. One that is not there may yet be made.
///
/// # Errors
/// [`Denied`](ErrorKind::Denied); [`Failed`](ErrorKind::Failed) if it cannot be looked at.
pub fn check_directory(directory: &Path) -> Result<()> {
    election::check("read the directory of a node", directory)
}

/// Removes what processes left in the directory of a node that nobody is at any more; or only
/// says what it would remove. Nothing is removed that anybody could be alive for.
///
/// The three lock files stay: by them those that come find out who else is there, so nobody can
/// ever be sure that a new one is not just about to lock them.
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
/// [`Failed`](ErrorKind::Failed) if the directory cannot be looked into;
/// [`Denied`](ErrorKind::Denied) if others may write in it.
pub fn clean(directory: &Path, dry_run: bool) -> Result<Condition> {
    const OPERATION: &str = "clean up after a node";
    let failed = |error: std::io::Error| Error::of(OPERATION, error).on(directory.display());
    let socket = socket_path(directory);
    let found = match fs::symlink_metadata(&socket) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Condition::Clean),
        Err(error) => return Err(failed(error)),
    };
    if found.uid() != Credentials::of_this_process().user {
        let reason = "it is another user's";
        return Ok(Condition::Unknown(socket, reason.to_owned()));
    }
    // Where others may write anybody can have put it there.
    election::check(OPERATION, directory)?;
    if fs::symlink_metadata(lock_path(directory)).is_err() {
        let reason = "no lock file of a node beside it";
        return Ok(Condition::Unknown(socket, reason.to_owned()));
    }
    // As long as this has the office, nobody begins to serve.
    let Some(_leader_lock) = LeaderLock::take(OPERATION, directory)? else {
        return Ok(Condition::Alive(socket, "a process serves the node".to_owned()));
    };
    if MemberLock::is_held(OPERATION, directory)? {
        let reason = "members of the node are about to serve it";
        return Ok(Condition::Alive(socket, reason.to_owned()));
    }
    let _alone = DirectoryLock::take(directory).map_err(|error| {
        Error::because(OPERATION, ErrorKind::Failed, error).on(directory.display())
    })?;
    if !ChannelListener::is_stale(&socket) {
        let reason = match ChannelListener::non_socket_kind(&socket) {
            Some(found) => format!("it is {found}, not a socket"),
            None => "a process that is no member of the node listens at it".to_owned(),
        };
        return Ok(Condition::Unknown(socket, reason));
    }
    if !dry_run {
        fs::remove_file(&socket).map_err(failed)?;
    }
    Ok(Condition::Dead(vec![socket]))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::service::election::prepare;

    #[test]
    fn only_what_nobody_is_alive_for_is_removed() {
        let name = format!("fabricast-leftovers-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        prepare("test", &directory).unwrap();
        let socket = socket_path(&directory);
        assert_eq!(clean(&directory, false).unwrap(), Condition::Clean);
        // As a killed one leaves it: the standard library does not remove it.
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
        assert!(socket.exists(), "a rehearsal removes nothing");
        assert_eq!(clean(&directory, false).unwrap(), dead);
        assert!(!socket.exists());
        // Somebody else's game.
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
