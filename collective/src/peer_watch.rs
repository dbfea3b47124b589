//! A thread that watches other ranks while devices wait for each other: whether their processes end, and whether
//! the domain has failed.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use ipc::{Channel, ForkGeneration};

use crate::error::{Error, ErrorKind, Result};
use crate::members::{CHECK_INTERVAL, Failure, Members};

/// The thread, which ends with this.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    /// The other end is that of the thread.
    end: Channel,
    /// Forgotten in a forked child, as the other end: both are of its parent.
    thread: Option<JoinHandle<()>>,
    fork_generation: ForkGeneration,
}

impl PeerWatch {
    /// Calls `give_up` once: if a rank has ended that had not left, or if `look` finds a failure.
    pub(crate) fn start(
        members: Arc<Members>,
        look: impl Fn() -> Option<Failure> + Send + 'static,
        give_up: impl FnOnce(Failure) + Send + 'static,
    ) -> Result<Self> {
        let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::caused_by("watch ranks", ErrorKind::Failed, cause)
        };
        let (end, other) = Channel::pair().map_err(|error| failed(error.into()))?;
        let run = move || {
            if let Some(failure) = first_failure(&members, &other, look) {
                give_up(failure);
            }
        };
        let thread =
            threads::spawn("collective-watch", run).map_err(|error| failed(error.into()))?;
        let fork_generation = ForkGeneration::current();
        Ok(Self { end, thread: Some(thread), fork_generation })
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        if !self.fork_generation.is_current() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.end.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits for a failure; None if the other end of the channel was shut down.
fn first_failure(
    members: &Members,
    end: &Channel,
    look: impl Fn() -> Option<Failure>,
) -> Option<Failure> {
    let entry = |fd: i32| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ranks = members.pidfds().iter().map(|pidfd| entry(pidfd.as_fd().as_raw_fd()));
    let mut entries: Vec<_> =
        std::iter::once(entry(end.as_fd().as_raw_fd())).chain(ranks).collect();
    // Its own end is of no interest.
    entries[members.rank() as usize + 1].fd = -1;
    loop {
        // SAFETY: so many valid entries.
        let found = unsafe {
            let interval = CHECK_INTERVAL.as_millis() as libc::c_int;
            libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, interval)
        };
        if found < 0 {
            // Interrupted by a signal.
            continue;
        }
        if entries[0].revents != 0 {
            return None;
        }
        let lost = entries[1..].iter().position(|entry| entry.revents != 0);
        match lost.map(|rank| rank as u32) {
            // A rank leaves after its part of all operations; otherwise `look` finds that.
            Some(rank) if members.has_left(rank) => entries[rank as usize + 1].fd = -1,
            Some(rank) => return Some(Failure::Ended { rank }),
            None => {}
        }
        if let Some(failure) = look() {
            return Some(failure);
        }
    }
}
