//! The files of agents in a directory: their names, the condition of the agent that they belong to,
//! and their removal.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ipc::{ChannelListener, Credentials};
use nix::fcntl::{Flock, FlockArg, OFlag};

use crate::copy_requests;

/// Prefix of a socket's name; the agent's identity follows in 32 digits.
const SOCKET_PREFIX: &str = "agent-";
/// Prefix of the socket of a process that shares memory, which has no card file.
const SHARE_PREFIX: &str = "share-";
const DIGITS: usize = 32;
/// The card file has the name of the socket and this extension.
pub(super) const CARD_EXTENSION: &str = "card";
/// Extension of a card file that is being written.
pub(super) const PART_EXTENSION: &str = "part";

/// Condition of an agent, according to its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Condition {
    /// The agent is dead, and these files were removed; or would be removed, in a dry run.
    Dead(Vec<PathBuf>),
    /// The agent is dead, but some of its files could not be removed.
    PartlyRemoved {
        /// Removed files.
        removed: Vec<PathBuf>,
        /// Files that still exist.
        kept: Vec<PathBuf>,
        /// Why the first of them could not be removed.
        why: String,
    },
    /// The agent is alive, for this reason. Nothing was changed.
    Alive(String),
    /// Unknown, for this reason. Nothing was changed.
    Unknown(String),
}

pub(super) fn socket_of(directory: &Path, identity: [u8; 16]) -> PathBuf {
    let digits: String = identity.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(format!("{SOCKET_PREFIX}{digits}"))
}

/// The names of the sockets of all agents with files in a directory, and of its copy service.
pub(super) fn names_in(directory: &Path) -> io::Result<BTreeSet<String>> {
    let names = fs::read_dir(directory)?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str().and_then(agent_of).map(str::to_owned)
    });
    Ok(names.collect())
}

/// The name of the socket to which a file belongs: of an agent, of memory that is shared, or of the
/// copy service.
fn agent_of(name: &str) -> Option<&str> {
    if name == copy_requests::SOCKET {
        return Some(name);
    }
    let (socket, end) = name.split_at_checked(SOCKET_PREFIX.len() + DIGITS)?;
    let digits = [SOCKET_PREFIX, SHARE_PREFIX].iter().find_map(|it| socket.strip_prefix(it))?;
    let is_identity = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        && ["", ".card", ".part"].contains(&end);
    is_identity.then_some(socket)
}

/// The files of a dead agent, and locks that keep its name unused; or why the agent is alive or
/// unknown. The caller has the lock of the directory.
pub(super) fn examine(socket: &Path) -> Result<(Vec<PathBuf>, Vec<Flock<File>>), Condition> {
    let unknown_cause = |cause: &str| Err(Condition::Unknown(cause.to_owned()));
    let alive = |cause: &str| Err(Condition::Alive(cause.to_owned()));
    let unknown = |error: io::Error| Condition::Unknown(error.to_string());
    let own = Credentials::of_this_process().user;
    let mut found = Vec::new();
    // Held until all files are removed.
    let mut locks = Vec::new();
    for end in [CARD_EXTENSION, PART_EXTENSION] {
        let path = socket.with_extension(end);
        let Some(status) = status(&path).map_err(unknown)? else { continue };
        if !(status.is_file() && status.uid() == own) {
            return unknown_cause("its card file does not belong to this user");
        }
        // Fails if the agent is alive, on another machine of a shared file system too, where its
        // socket refuses all connections. Only the agent has an exclusive lock: processes that
        // check hold shared locks. No agent can start meanwhile, which would need the lock of the
        // directory.
        let file =
            match share(OpenOptions::new().read(true).write(true).open(&path).map_err(unknown)?) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return alive("a running process has its card file locked");
                }
                file => file.map_err(unknown)?,
            };
        if !is_at(&path, &file.metadata().map_err(unknown)?) {
            return unknown_cause("its card file was replaced just now");
        }
        locks.push(file);
        found.push(path);
    }
    // Last, because connecting wakes a running agent.
    if let Some(status) = status(socket).map_err(unknown)? {
        if !(status.file_type().is_socket() && status.uid() == own) {
            return unknown_cause("its socket does not belong to this user");
        }
        if !ChannelListener::is_stale(socket) {
            return alive("a process listens on its socket");
        }
        found.push(socket.to_owned());
    }
    Ok((found, locks))
}

/// Is there a card file beside this socket? It is created before the socket.
pub(super) fn exists(socket: &Path) -> bool {
    status(&socket.with_extension(CARD_EXTENSION)).is_ok_and(|found| found.is_some())
}

/// Was the agent of this socket killed, so that its card file is left? Takes the lock briefly and
/// does not wake the agent. False if unknown.
pub(super) fn is_orphaned(socket: &Path) -> bool {
    let path = socket.with_extension(CARD_EXTENSION);
    if !status(&path).is_ok_and(|found| found.is_some_and(|found| found.is_file())) {
        return false;
    }
    // The path may have been replaced, for example by a FIFO, on which `open` would block.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(&path) else {
        return false;
    };
    share(file).is_ok_and(|file| {
        file.metadata().is_ok_and(|locked| locked.is_file() && is_at(&path, &locked))
    })
}

/// Was a socket removed from its directory? False where the directory is not visible: it may be
/// another container's.
pub(super) fn is_socket_gone(socket: &Path) -> bool {
    let is_directory = socket.parent().is_some_and(Path::is_dir);
    is_directory && status(socket).is_ok_and(|found| found.is_none())
}

fn status(path: &Path) -> io::Result<Option<Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Fails only if the owner has its exclusive lock.
pub(super) fn share(file: File) -> io::Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|(_, error)| error.into())
}

pub(super) fn is_at(path: &Path, file: &Metadata) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (file.dev(), file.ino()))
}

/// Removes the files of an agent if it is dead; in a dry run only reports. The caller has the lock
/// of the directory.
pub(super) fn remove_if_dead(socket: &Path, dry_run: bool) -> Condition {
    match examine(socket) {
        Ok((files, _locks)) if dry_run => Condition::Dead(files),
        Ok((files, _locks)) => remove(files),
        Err(condition) => condition,
    }
}

/// Continues after files that cannot be removed.
fn remove(files: Vec<PathBuf>) -> Condition {
    let mut first_error = None;
    let (removed, kept) = files.into_iter().partition(|file| match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            first_error.get_or_insert(error);
            false
        }
        _ => true,
    });
    match first_error {
        Some(error) => Condition::PartlyRemoved { removed, kept, why: error.to_string() },
        None => Condition::Dead(removed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_agent_files_are_recognised() {
        let socket = socket_of(Path::new(""), [0xa5; 16]).display().to_string();
        for end in ["", ".card", ".part"] {
            assert_eq!(agent_of(&format!("{socket}{end}")), Some(socket.as_str()));
        }
        let share = socket.replace("agent-", "share-");
        assert_eq!(agent_of(&share), Some(share.as_str()));
        assert_eq!(agent_of("copy-service"), Some("copy-service"));
        let long = format!("{socket}0");
        let dotted = format!("{socket}.card.part");
        let upper = socket.to_uppercase();
        let short = &socket[..socket.len() - 1];
        for name in [&long, &dotted, &upper, short, "agent-", "card", "", "agent-é"] {
            assert_eq!(agent_of(name), None, "{name}");
        }
    }

    #[test]
    fn removed_files_are_reported_if_others_remain() {
        let directory =
            std::env::temp_dir().join(format!("fabricast-stuck-{}", std::process::id()));
        // A directory in place of a file cannot be removed.
        let paths = ["first", "second", "third", "gone"].map(|name| directory.join(name));
        let [first, second, third, gone] = &paths;
        fs::create_dir_all(second).unwrap();
        for file in [first, third] {
            fs::write(file, "").unwrap();
        }
        let Condition::PartlyRemoved { removed, kept, why } = remove(paths.to_vec()) else {
            panic!()
        };
        assert_eq!(removed, [first.clone(), third.clone(), gone.clone()]);
        assert_eq!(kept, std::slice::from_ref(second));
        assert!(!why.is_empty() && !first.exists() && second.exists() && !third.exists());
        fs::remove_dir_all(directory).unwrap();
    }
}
