//! Card files beside the sockets of agents, for processes that see the directory; and removal of
//! the files of killed agents.
//!
//! A card file is locked as long as its agent exists, by a lock that ends with the process.
//! Creating card files and sockets, and removing those of dead agents, requires the lock of the
//! directory. So no process sees an unlocked card file or a socket without a listener.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipc::{DirectoryLock, ForkGeneration, LimitReached, NotInherited};
use nix::fcntl::{Flock, FlockArg};

use super::START;
use super::agent_files::{
    CARD_EXTENSION, Condition, PART_EXTENSION, is_at, names_in, remove_if_dead,
};
use crate::error::Error;

/// The card file of an agent, removed with it.
#[derive(Debug)]
pub(super) struct CardFile {
    path: PathBuf,
    /// A forked child does not keep the lock.
    not_inherited: Option<NotInherited>,
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
        let alone = DirectoryLock::take(directory)
            .map_err(|error| Error::of_listening_at(START, directory, error))?;
        remove_dead_agents(directory);
        let written = write(&part, card, mode).and_then(|file| {
            fs::rename(&part, &path)?;
            Ok(file)
        });
        drop(alone);
        match written {
            Ok(file) => {
                let not_inherited = Some(NotInherited::new(&*file));
                let fork_generation = ForkGeneration::current();
                Ok(Self { path, not_inherited, file: Some(file), fork_generation })
            }
            Err(cause) => {
                let _ = fs::remove_file(&part);
                let cause = LimitReached::explain(cause);
                Err(Error::of_file(START, "writing the card file", &cause).at(&path))
            }
        }
    }
}

impl Drop for CardFile {
    fn drop(&mut self) {
        self.not_inherited = None;
        let Some(file) = self.file.take() else { return };
        if !self.fork_generation.is_current() {
            // Card and lock are the parent's.
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

/// Removes the files of dead agents of this user. The caller has the lock of the directory.
fn remove_dead_agents(directory: &Path) {
    // An unreadable directory is left alone.
    for name in names_in(directory).unwrap_or_default() {
        let condition = remove_if_dead(&directory.join(&name), false);
        if matches!(condition, Condition::Dead(files) if !files.is_empty()) {
            tracing::debug!(directory = %directory.display(), name, "removed a dead agent's files");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::agent_files::{examine, is_orphaned, share, socket_of};
    use super::*;

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
