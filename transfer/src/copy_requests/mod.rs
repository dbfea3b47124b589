//! What processes send to the copy service of their machine, and its client.
//!
//! The service sees all devices, and copies between memories that their owners exported. A client
//! opens *pairs* of memory over a Unix socket. Then it posts requests to a ring in shared memory, and
//! the service writes their outcomes there: no system call is needed while both are busy.

mod copy_client;
mod opening;
mod request_ring;

use std::path::{Path, PathBuf};

pub(crate) use copy_client::{
    ClientIdentity, CopyClient, ExportedPiece, PairRemote, ServicePair, StreamDelay, absence,
};
pub(crate) use opening::{OfferedPieces, Opening, RegionName, Remote, Reply, Request};
#[cfg(test)]
pub(crate) use request_ring::ClientRing;
pub(crate) use request_ring::{PostedRequest, ServiceRing, Start};

/// The name of the service's socket in the directory that it shares with its clients.
pub(crate) const SOCKET: &str = "copy-service";

/// The socket of the copy service of a directory.
pub(crate) fn socket_in(directory: &Path) -> PathBuf {
    directory.join(SOCKET)
}
