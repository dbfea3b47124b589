//! Tokens by which processes open shared memory.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::wire::{DescriptorFormat, put_length_prefixed};

/// A token: identity of the socket (16), name (16), and the directory of the socket; empty for that
/// of the receiver.
const FORMAT: DescriptorFormat =
    DescriptorFormat { magic: *b"FcTK", version: 1, operation: "open shared memory" };
/// Length of a [short token](super::Share::short_token).
pub const SHORT_TOKEN_LENGTH: usize = 46;
/// Prefix of the name of a socket; its identity follows, in hexadecimal digits.
pub(super) const SOCKET_PREFIX: &str = "share-";
const MAX_PATH_LENGTH: usize = 108;

pub(super) fn digits(bytes: [u8; 16]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn socket_in(directory: &Path, socket: [u8; 16]) -> PathBuf {
    directory.join(format!("{SOCKET_PREFIX}{}", digits(socket)))
}

pub(super) fn token_of(socket: [u8; 16], name: [u8; 16], directory: &[u8]) -> Option<Vec<u8>> {
    let mut token = FORMAT.begin();
    token.extend(socket);
    token.extend(name);
    put_length_prefixed(&mut token, directory);
    FORMAT.seal(token)
}

/// Are these the bytes of a token?
#[must_use]
pub fn is_token(bytes: &[u8]) -> bool {
    FORMAT.open(bytes).is_ok()
}

/// Name and socket of a token.
pub(super) fn read(token: &[u8], directory: &Path) -> Result<(String, PathBuf)> {
    let mut reader = FORMAT.open(token)?;
    let (socket, name) = (reader.take()?, digits(reader.take()?));
    let of_owner = Path::new(OsStr::from_bytes(reader.length_prefixed(MAX_PATH_LENGTH)?));
    let path = socket_in(of_owner, socket);
    reader.finish()?;
    let here = socket_in(directory, socket);
    let is_here = of_owner.as_os_str().is_empty() || (!path.exists() && here.exists());
    Ok((name, if is_here { here } else { path }))
}
