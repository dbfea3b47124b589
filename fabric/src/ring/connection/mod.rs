//! A ring between two programs, established over a TCP connection: the reader listens at an
//! address, the writer connects to it.
//!
//! The TCP connection carries the handshake: providers, addresses, ring offer and answer.
//! Afterwards it carries nothing, and its end tells each side that the other has exited. Messages
//! go over the fabric.

mod connector;
mod frame;
mod listener;
mod progress_thread;
mod provider_choice;
mod reader;
mod setup;
mod writer;

#[cfg(test)]
mod tests;

pub use listener::RingListener;
pub use reader::RingReader;
pub use setup::{connect, listen};
pub use writer::RingWriter;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use crate::Policy;

const OPERATION: &str = "connect ring";

/// Options of a ring between two programs.
///
/// ```
/// use fabric::ring::RingSetup;
/// let setup = RingSetup::new().policy("^sockets".parse()?).capacity(64 << 20).largest(1 << 20);
/// let listener = setup.listen("127.0.0.1:0")?;
/// assert_ne!(listener.address().port(), 0);
/// // Addresses that other machines reach need consent.
/// assert!(RingSetup::new().listen("0.0.0.0:0").is_err());
/// assert!(RingSetup::new().insecure().listen("0.0.0.0:0").is_ok());
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RingSetup {
    policy: Policy,
    capacity: u64,
    largest: u64,
    insecure: bool,
    key: Option<RingKey>,
}

/// Writers without this key are refused.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RingKey([u8; 16]);

/// Without the key.
impl std::fmt::Debug for RingKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RingKey")
    }
}

/// What both sides of a ring must have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ProviderProtocol {
    /// The provider; or its fabric, if that provider does not interoperate with other providers'
    /// peers.
    name: String,
    protocol: u32,
    address_format: u32,
}

/// Sleeps until one of these descriptors is readable, or this time has passed.
fn wait_readable<'a>(
    descriptors: impl IntoIterator<Item = BorrowedFd<'a>>,
    longest: Duration,
) -> std::io::Result<()> {
    let readable = |descriptor| PollFd::new(descriptor, PollFlags::POLLIN);
    let mut entries: Vec<_> = descriptors.into_iter().map(readable).collect();
    let milliseconds = longest.as_millis().saturating_add(1);
    let timeout = PollTimeout::try_from(milliseconds).unwrap_or(PollTimeout::MAX);
    match poll(&mut entries, timeout) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
