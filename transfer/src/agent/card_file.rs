//! What hangs beside an agent's socket: its card, for those who see the directory. And what
//! agents left there that were killed.
//!
//! A card is locked for as long as its agent lives, by a lock that ends with the process,
//! whatever ends it. Cards are hung up, and the dead are cleaned up after, by who has the lock
//! of the directory, so nobody finds a card that is not locked yet. Sockets are made under
//! the same lock, and so nobody finds one that does not listen yet.

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

/// What a socket is called: this, and the agent's identity in 32 digits.
const SOCKET_PREFIX: &str = "agent-";
const DIGITS: usize = 32;
/// As the socket is called, with this behind it.
const CARD_EXTENSION: &str = "card";
/// A card that is being written.
const PART_EXTENSION: &str = "part";

/// Where an agent's socket is, in a directory.
pub(super) fn socket_of(directory: &Path, identity: [u8; 16]) -> PathBuf {
    let digits: String = identity.iter().map(|byte| format!("{byte:02x}")).collect();
    directory.join(format!("{SOCKET_PREFIX}{digits}"))
}

/// An agent's card, in a file that goes with it.
#[derive(Debug)]
pub(super) struct CardFile {
    path: PathBuf,
    /// Locked as long as the agent lives.
    file: Option<Flock<File>>,
    fork_generation: ForkGeneration,
}

impl CardFile {
    /// Hangs a card up beside where a socket is to be: whole, or not at all. It can be read by
    /// those who may connect there. What agents left in the directory that are dead is removed.
    pub(super) fn create(socket: &Path, card: &[u8], mode: u32) -> Result<Self, Error> {
        let (path, part) =
            (socket.with_extension(CARD_EXTENSION), socket.with_extension(PART_EXTENSION));
        let above = socket.parent().filter(|above| !above.as_os_str().is_empty());
        let directory = above.unwrap_or(Path::new("."));
        let alone = DirectoryLock::take(directory).map_err(|error| match error {
            ChannelError::System { call, cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
                let detail = format!("{call}: {cause}: create the directory first");
                Error::new(START, ErrorKind::Failed, detail).with(directory.display())
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
                let detail = format!("writing its card: {cause}");
                Err(Error::new(START, ErrorKind::Failed, detail).with(path.display()))
            }
        }
    }
}

impl Drop for CardFile {
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        if !self.fork_generation.is_current() {
            // In a forked child: file and lock are the parent's, who shares them.
            std::mem::forget(file);
            return;
        }
        if file.metadata().is_ok_and(|ours| is_at(&self.path, &ours)) {
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

/// Locked against its owner alone, who would have to be dead.
fn share(file: File) -> io::Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockSharedNonblock).map_err(|(_, error)| error.into())
}

/// Is it this file that lies there, and not another?
fn is_at(path: &Path, file: &Metadata) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|found| (found.dev(), found.ino()) == (file.dev(), file.ino()))
}

/// Removes what agents of this user left in a directory that are dead. To be called by who
/// has the lock of the directory.
fn remove_dead_agents(directory: &Path) {
    // Where nothing is seen nothing is removed.
    for name in names_in(directory).unwrap_or_default() {
        let left = leftovers::remove_if_dead(&directory.join(&name), false);
        if matches!(left, Condition::Dead(files) if !files.is_empty()) {
            tracing::debug!(directory = %directory.display(), name, "cleaned up after a dead agent");
        }
    }
}

/// The agents of whom anything lies in a directory, by the names of their sockets.
pub(super) fn names_in(directory: &Path) -> io::Result<BTreeSet<String>> {
    let names = fs::read_dir(directory)?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str().and_then(agent_of).map(str::to_owned)
    });
    Ok(names.collect())
}

/// The name of the socket to which a file belongs, if it is an agent's.
fn agent_of(name: &str) -> Option<&str> {
    let (socket, end) = name.split_at_checked(SOCKET_PREFIX.len() + DIGITS)?;
    let digits = socket.strip_prefix(SOCKET_PREFIX)?;
    let is_ours = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        && ["", ".card", ".part"].contains(&end);
    is_ours.then_some(socket)
}

/// The files of an agent that nothing speaks for being alive, and the locks that keep it so; or else
/// what does, or what is in the way. To be called by who has the lock of the directory.
pub(super) fn examine(socket: &Path) -> Result<(Vec<PathBuf>, Vec<Flock<File>>), Condition> {
    let strange = |why: &str| Err(Condition::Unknown(why.to_owned()));
    let alive = |why: &str| Err(Condition::Alive(why.to_owned()));
    let unknown = |error: io::Error| Condition::Unknown(error.to_string());
    let own = Credentials::of_this_process().user;
    let mut found = Vec::new();
    // Kept until all is removed.
    let mut locks = Vec::new();
    for end in [CARD_EXTENSION, PART_EXTENSION] {
        let path = socket.with_extension(end);
        let Some(status) = status(&path).map_err(unknown)? else { continue };
        if !(status.is_file() && status.uid() == own) {
            return strange("its card is not a file of this user");
        }
        // Fails if the agent lives, on another machine of a shared file system too, where its
        // socket refuses everybody. It alone has a lock that others cannot share: whoever looks
        // whether it lives shares theirs, and does not pass for it. None can come to life meanwhile,
        // which would need the lock of the directory.
        let file =
            match share(OpenOptions::new().read(true).write(true).open(&path).map_err(unknown)?) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return alive("its card is locked, by a process that lives");
                }
                file => file.map_err(unknown)?,
            };
        if !is_at(&path, &file.metadata().map_err(unknown)?) {
            return strange("its card was replaced just now");
        }
        locks.push(file);
        found.push(path);
    }
    // Last, since it wakes those that live.
    if let Some(status) = status(socket).map_err(unknown)? {
        if !(status.file_type().is_socket() && status.uid() == own) {
            return strange("its socket is not one of this user");
        }
        if !ChannelListener::is_stale(socket) {
            return alive("a process listens at its socket");
        }
        found.push(socket.to_owned());
    }
    Ok((found, locks))
}

/// Is there a card beside this socket? It hangs there before the socket is made.
pub(super) fn exists(socket: &Path) -> bool {
    status(&socket.with_extension(CARD_EXTENSION)).is_ok_and(|found| found.is_some())
}

/// Did the agent of this socket leave its card behind, as those do that are killed? Its lock is
/// asked for, and let go of at once; nobody is woken. False if nothing is known.
pub(super) fn is_orphaned(socket: &Path) -> bool {
    let path = socket.with_extension(CARD_EXTENSION);
    if !status(&path).is_ok_and(|found| found.is_some_and(|found| found.is_file())) {
        return false;
    }
    // What lies there now may be something else, and would be waited for.
    let flags = (OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits();
    let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(&path) else {
        return false;
    };
    share(file).is_ok_and(|file| {
        file.metadata().is_ok_and(|locked| locked.is_file() && is_at(&path, &locked))
    })
}

/// Is a socket gone from its directory? Not known, and false, where the directory is not seen: it
/// may be another container's.
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
    fn only_names_that_agents_give_are_theirs() {
        let socket = socket_of(Path::new(""), [0xa5; 16]).display().to_string();
        for end in ["", ".card", ".part"] {
            assert_eq!(agent_of(&format!("{socket}{end}")), Some(socket.as_str()));
        }
        let long = format!("{socket}0");
        let dotted = format!("{socket}.card.part");
        let upper = socket.to_uppercase();
        let short = &socket[..socket.len() - 1];
        for name in [&long, &dotted, &upper, short, "agent-", "card", "", "agent-é"] {
            assert_eq!(agent_of(name), None, "{name}");
        }
    }
    #[test]
    fn who_only_looks_is_not_taken_for_the_agent() {
        let directory = std::env::temp_dir().join(format!("doorplate-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let socket = socket_of(&directory, [0x5a; 16]);
        let card = socket.with_extension(CARD_EXTENSION);
        let is_dead = || examine(&socket).is_ok();
        fs::write(&card, b"a card").unwrap();
        let looking = share(File::open(&card).unwrap()).unwrap();
        assert!(is_dead(), "somebody looks, and the agent is dead all the same");
        assert!(is_orphaned(&socket));
        drop(looking);
        let owner = lock(OpenOptions::new().write(true).open(&card).unwrap()).unwrap();
        assert!(!is_dead() && !is_orphaned(&socket), "it lives");
        drop(owner);
        assert!(is_dead());
        fs::remove_dir_all(&directory).unwrap();
    }
}
