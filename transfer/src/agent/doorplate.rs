//! What hangs beside an agent's socket: its card, for those who see the directory.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use ipc::Incarnation;

use super::START;
use crate::error::{Error, ErrorKind, Result};

/// As the socket is called, with this behind it.
const CARD: &str = "card";
/// A card that is being written.
const PART: &str = "part";

/// An agent's card, in a file that goes with it.
#[derive(Debug)]
pub(super) struct Doorplate {
    path: PathBuf,
    /// Device and number of the file: not to remove another's.
    file: (u64, u64),
    born: Incarnation,
}

impl Doorplate {
    /// Hangs a card up beside a socket: whole, or not at all. It can be read by those who may
    /// connect there.
    pub(super) fn hang(socket: &Path, card: &[u8], mode: u32) -> Result<Self> {
        let (path, part) = (socket.with_extension(CARD), socket.with_extension(PART));
        let written = write(&part, card, mode).and_then(|file| {
            fs::rename(&part, &path)?;
            Ok(file)
        });
        match written {
            Ok(file) => Ok(Self { path, file, born: Incarnation::current() }),
            Err(cause) => {
                let _ = fs::remove_file(&part);
                let detail = format!("writing its card: {cause}");
                Err(Error::new(START, ErrorKind::Failed, detail).with(path.display()))
            }
        }
    }
}

impl Drop for Doorplate {
    fn drop(&mut self) {
        let is_ours = fs::symlink_metadata(&self.path).is_ok_and(|found| id(&found) == self.file);
        // In a forked child it is the parent's.
        if is_ours && self.born.is_current() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn id(found: &fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

fn write(path: &Path, card: &[u8], mode: u32) -> io::Result<(u64, u64)> {
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(card)?;
    file.set_permissions(Permissions::from_mode(mode & 0o644))?;
    file.metadata().map(|found| id(&found))
}
