//! A descriptor that wakes a thread in `poll`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Readable after `ring`, until `silence`.
#[derive(Debug)]
pub(crate) struct WakeFd(EventFd);

impl WakeFd {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    pub(crate) fn ring(&self) {
        // A failure means that the counter is at its maximum, and so not zero.
        let _ = self.0.write(1);
    }

    pub(crate) fn silence(&self) {
        let _ = self.0.read();
    }
}

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
