//! Waiting for several descriptors at a time.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Which of the descriptors can be read, or are at their end? None if that cannot be told.
pub(crate) fn ready<'a>(
    descriptors: impl Iterator<Item = BorrowedFd<'a>>,
    longest: Duration,
) -> Option<Vec<bool>> {
    let mut entries: Vec<_> =
        descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)).collect();
    let timeout = PollTimeout::try_from(longest).unwrap_or(PollTimeout::ZERO);
    match poll(&mut entries, timeout) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => {}
        Err(_) => return None,
    }
    Some(entries.iter().map(|entry| entry.any().unwrap_or(true)).collect())
}
