//! Registrations, and the endpoints that they are bound to.
//!
//! A provider that binds regions to endpoints (`FI_MR_ENDPOINT`) may refuse to close an
//! endpoint with bound regions (`-FI_EBUSY`), and operations in flight hold a region until its
//! endpoint is closed. So an endpoint first closes the registrations bound to it; their memory
//! stays with the regions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use libfabric_sys as sys;
use threads::lock;

use crate::handle::Handle;

/// A registration until it is closed: with its region, or before the endpoint that it is bound
/// to.
#[derive(Debug)]
pub(super) struct Registration {
    handle: Mutex<Option<Handle<sys::fid_mr>>>,
    /// Closing it failed: the provider may use the memory permanently.
    close_failed: AtomicBool,
}

impl Registration {
    pub(super) fn new(handle: Handle<sys::fid_mr>) -> Self {
        Self { handle: Mutex::new(Some(handle)), close_failed: AtomicBool::new(false) }
    }

    /// Prevents closing while the guard is held.
    pub(super) fn lock_handle(&self) -> MutexGuard<'_, Option<Handle<sys::fid_mr>>> {
        lock(&self.handle)
    }

    pub(super) fn close_failed(&self) -> bool {
        self.close_failed.load(Ordering::Acquire)
    }

    /// Closes it before the endpoint is closed.
    fn close(&self) {
        let mut handle = self.lock_handle();
        if let Some(Err(error)) = handle.take().map(Handle::close) {
            self.close_failed.store(true, Ordering::Release);
            tracing::error!(%error, "closing a memory registration failed; its memory is leaked");
        }
    }
}

#[derive(Debug)]
pub(crate) struct BoundRegistrations {
    /// Distinguishes endpoints, including closed ones.
    number: u64,
    registrations: Mutex<Vec<Weak<Registration>>>,
}

impl BoundRegistrations {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { number, registrations: Mutex::new(Vec::new()) }
    }

    /// The endpoint's number, which is never 0.
    #[inline]
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn add(&self, registration: &Arc<Registration>) {
        let mut registrations = lock(&self.registrations);
        if registrations.len() == registrations.capacity() {
            // Removes closed registrations before the list would double.
            registrations.retain(|one| one.strong_count() > 0);
        }
        registrations.push(Arc::downgrade(registration));
    }

    /// Closes all remaining registrations, because the endpoint is about to be closed.
    pub(crate) fn close(&self) {
        let registrations = std::mem::take(&mut *lock(&self.registrations));
        for registration in registrations.iter().filter_map(Weak::upgrade) {
            registration.close();
        }
    }
}

#[cfg(test)]
#[path = "bound_tests.rs"]
mod tests;
