//! What the threads of the service share.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use ipc::{Doorbell, DoorbellWatcher, LocalWords, WaitStrategy};

use super::clients::Clients;
use super::owners::Owners;
use crate::admission::Admission;
use crate::error::Result;

/// Clients, owners, and the signal to the thread that copies.
pub(super) struct Shared {
    clients: Clients,
    owners: Owners,
    signal: Doorbell<LocalWords>,
    watcher: DoorbellWatcher,
    is_over: AtomicBool,
    copied_bytes: AtomicU64,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("clients", &self.clients.count()).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(directory: &Path, admission: Admission) -> Result<Self> {
        Ok(Self {
            clients: Clients::default(),
            owners: Owners::new(directory.to_owned(), admission)?,
            signal: Doorbell::in_this_process(),
            watcher: DoorbellWatcher::new(),
            is_over: AtomicBool::new(false),
            copied_bytes: AtomicU64::new(0),
        })
    }

    pub(super) fn clients(&self) -> &Clients {
        &self.clients
    }

    pub(super) fn owners(&self) -> &Owners {
        &self.owners
    }

    /// The thread that listens to the doorbells of all clients.
    pub(super) fn watcher(&self) -> &DoorbellWatcher {
        &self.watcher
    }

    /// Wakes the thread that copies.
    pub(super) fn wake(&self) {
        self.signal.ring();
    }

    /// Sleeps until `has_work`, or a wake-up after which it has, or a time.
    pub(super) fn sleep(&self, until: Instant, mut has_work: impl FnMut() -> bool) {
        let look = || has_work().then_some(());
        self.signal.wait(&mut WaitStrategy::Block, until, look);
    }

    /// The service is to end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    pub(super) fn count(&self, bytes: u64) {
        self.copied_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied_bytes.load(Ordering::Relaxed)
    }
}
