//! A descriptor that wakes who sleeps in `poll`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Readable from when it was rung until it is silenced.
#[derive(Debug)]
pub(crate) struct WakeFd(EventFd);

impl WakeFd {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?))
    }

    pub(crate) fn ring(&self) {
        // If the count cannot be any larger, it is not zero.
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
