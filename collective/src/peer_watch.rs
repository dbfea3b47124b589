//! A thread that waits for the end of the processes of other ranks, while devices wait for each other.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use ipc::Channel;

use crate::error::{Error, ErrorKind, Result};
use crate::members::Members;

/// The thread, which ends with this.
#[derive(Debug)]
pub(crate) struct PeerWatch {
    /// The other end is that of the thread.
    end: Channel,
    thread: Option<JoinHandle<()>>,
}

impl PeerWatch {
    /// Calls `lost` once with the first rank that has ended.
    pub(crate) fn start(
        members: Arc<Members>,
        lost: impl FnOnce(u32) + Send + 'static,
    ) -> Result<Self> {
        let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
            Error::caused_by("watch ranks", ErrorKind::Failed, cause)
        };
        let (end, other) = Channel::pair().map_err(|error| failed(error.into()))?;
        let run = move || {
            if let Some(rank) = first_lost(&members, &other) {
                lost(rank);
            }
        };
        let thread =
            threads::spawn("collective-watch", run).map_err(|error| failed(error.into()))?;
        Ok(Self { end, thread: Some(thread) })
    }
}

impl Drop for PeerWatch {
    fn drop(&mut self) {
        self.end.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until a rank has ended; None if the other end of the channel was shut down.
fn first_lost(members: &Members, end: &Channel) -> Option<u32> {
    let entry = |fd: i32| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ranks = members.pidfds().iter().map(|pidfd| entry(pidfd.as_fd().as_raw_fd()));
    let mut entries: Vec<_> =
        std::iter::once(entry(end.as_fd().as_raw_fd())).chain(ranks).collect();
    // Its own end is of no interest.
    entries[members.rank() as usize + 1].fd = -1;
    loop {
        // SAFETY: so many valid entries.
        let found = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, -1) };
        if found < 0 {
            // Interrupted by a signal.
            continue;
        }
        if entries[0].revents != 0 {
            return None;
        }
        let lost = entries[1..].iter().position(|entry| entry.revents != 0);
        if let Some(rank) = lost {
            return u32::try_from(rank).ok();
        }
    }
}
