//! Card files beside the sockets of agents, for processes that see the directory; and removal of
//! the files of killed agents.
//!
//! A card file is locked as long as its agent exists, by a lock that ends with the process.
//! Creating card files and sockets, and removing those of dead agents, requires the lock of the
//! directory. So no process sees an unlocked card file or a socket without a listener.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipc::{ChannelError, ChannelListener, Credentials, DirectoryLock, ForkGeneration};
use nix::fcntl::{Flock, FlockArg, OFlag};

use super::START;
use super::leftovers::{self, Condition};
use crate::error::{Error, ErrorKind};

/// Prefix of a socket's name; the agent's identity follows in 32 digits.
const SOCKET_PREFIX: &str = "agent-";
/// Prefix of the socket of a process that shares memory, which has no card file.
const SHARE_PREFIX: &str = "share-";
const DIGITS: usize = 32;
/// The card file has the name of the socket and this extension.
const CARD_EXTENSION: &str = "card";
/// Extension of a card file that is being written.
const PART_EXTENSION: &str = "part";

/// The path of an agent's socket in a directory.
pub(super) fn socket_of(directory: &Path, identity: [u8; 16]) -> PathBuf {
    let digits: String = identity.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(format!("{SOCKET_PREFIX}{digits}"))
}

/// The card file of an agent, removed with it.
#[derive(Debug)]
pub(super) struct CardFile {
    path: PathBuf,
    /// Locked as long as the agent exists.
    file: Option<Flock<File>>,
    fork_generation: ForkGeneration,
}

impl CardFile {
    /// Creates a card file atomically beside the future socket. Users that may connect can read
    /// it. Files of dead agents in the directory are removed.
    pub(super) fn create(socket: &Path, card: &[u8], mode: u32) -> Result<Self, Error> {
        let (path, part) =
            (socket.with_extension(CARD_EXTENSION), socket.with_extension(PART_EXTENSION));
        let parent = socket.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new("."));
        let alone = DirectoryLock::take(directory).map_err(|error| match error {
            ChannelError::System { call, cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
                let detail = format!("{call}: {cause}. Create the directory first");
                Error::new(START, ErrorKind::Failed, detail).at(directory)
            }
            other => Error::of_channel_at(START, directory, other),
        })?;
        remove_dead_agents(directory);
        let written = write(&part, card, mode).and_then(|file| {
            fs::rename(&part, &path)?;
            Ok(file)
        });
        drop(alone);
        match written {
            Ok(file) => {
                Ok(Self { path, file: Some(file), fork_generation: ForkGeneration::current() })
            }
            Err(cause) => {
                let _ = fs::remove_file(&part);
                let detail = format!("writing the card file: {cause}");
                Err(Error::new(START, ErrorKind::Failed, detail).at(&path))
            }
        }
    }
}

impl Drop for CardFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        if !self.fork_generation.is_current() {
            // A forked child shares file and lock with the parent, which owns them.
            std::mem::forget(file);
            return;
        }
        if file.metadata().is_ok_and(|locked| is_at(&self.path, &locked)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn write(path: &Path, card: &[u8], mode: u32) -> io::Result<Flock<File>> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let mut file = lock(file)?;
    file.write_all(card)?;
    file.set_permissions(Permissions::from_mode(mode & 0o644))?;
    Ok(file)
}

fn lock(file: File) -> io::Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, error)| error.into())
}

/// Fails only if the owner has its exclusive lock.
fn share(file: File) -> io::Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|(_, error)| error.into())
}

/// Is this file still at the path?
fn is_at(path: &Path, file: &Metadata) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (file.dev(), file.ino()))
}

/// Removes the files of dead agents of this user. The caller has the lock of the directory.
fn remove_dead_agents(directory: &Path) {
    // An unreadable directory is left alone.
    for name in names_in(directory).unwrap_or_default() {
        let condition = leftovers::remove_if_dead(&directory.join(&name), false);
        if matches!(condition, Condition::Dead(files) if !files.is_empty()) {
            tracing::debug!(directory = %directory.display(), name, "removed a dead agent's files");
        }
    }
}

/// The names of the sockets of all agents with files in a directory.
pub(super) fn names_in(directory: &Path) -> io::Result<BTreeSet<String>> {
    let names = fs::read_dir(directory)?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str().and_then(agent_of).map(str::to_owned)
    });
    Ok(names.collect())
}

/// The name of the socket to which an agent's file belongs.
fn agent_of(name: &str) -> Option<&str> {
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
        let long = format!("{socket}0");
        let dotted = format!("{socket}.card.part");
        let upper = socket.to_uppercase();
        let short = &socket[..socket.len() - 1];
        for name in [&long, &dotted, &upper, short, "agent-", "card", "", "agent-é"] {
            assert_eq!(agent_of(name), None, "{name}");
        }
    }
    #[test]
    fn shared_lock_of_a_check_does_not_make_an_agent_alive() {
        let directory = std::env::temp_dir().join(format!("card-file-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let socket = socket_of(&directory, [0x5a; 16]);
        let card = socket.with_extension(CARD_EXTENSION);
        let is_dead = || examine(&socket).is_ok();
        fs::write(&card, b"a card").unwrap();
        let checking = share(File::open(&card).unwrap()).unwrap();
        assert!(is_dead(), "a check has the card file locked");
        assert!(is_orphaned(&socket));
        drop(checking);
        let owner = lock(OpenOptions::new().write(true).open(&card).unwrap()).unwrap();
        assert!(!is_dead() && !is_orphaned(&socket), "the owner has it locked");
        drop(owner);
        assert!(is_dead());
        fs::remove_dir_all(&directory).unwrap();
    }
}
