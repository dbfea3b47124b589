//! Registrations, and the endpoints that they are bound to.
//!
//! A provider that binds regions to endpoints (`FI_MR_ENDPOINT`) may refuse to close an endpoint
//! that has any (`-FI_EBUSY`). And a region is held by whatever is in flight until its endpoint
//! is closed. So an endpoint closes the registrations that are bound to it before itself; their
//! memory stays with the regions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use libfabric_sys as sys;

use crate::handle::Handle;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A registration, until it is closed: with its region, or before the endpoint it is bound to.
#[derive(Debug)]
pub(super) struct Registration {
    handle: Mutex<Option<Handle<sys::fid_mr>>>,
    /// It could not be closed: the provider may use the memory for good.
    close_failed: AtomicBool,
}

impl Registration {
    pub(super) fn new(handle: Handle<sys::fid_mr>) -> Self {
        Self { handle: Mutex::new(Some(handle)), close_failed: AtomicBool::new(false) }
    }

    /// It is not closed as long as this is held.
    pub(super) fn lock_handle(&self) -> MutexGuard<'_, Option<Handle<sys::fid_mr>>> {
        lock(&self.handle)
    }

    pub(super) fn close_failed(&self) -> bool {
        self.close_failed.load(Ordering::Acquire)
    }

    /// Before the endpoint is.
    fn close(&self) {
        let mut handle = self.lock_handle();
        if let Some(Err(error)) = handle.take().map(Handle::close) {
            self.close_failed.store(true, Ordering::Release);
            tracing::error!(%error, "closing a memory registration failed; its memory is leaked");
        }
    }
}

/// The registrations that are bound to one endpoint.
#[derive(Debug)]
pub(crate) struct BoundRegistrations {
    /// Tells endpoints apart, also those that are closed.
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

    /// One more is bound.
    pub(super) fn add(&self, registration: &Arc<Registration>) {
        let mut registrations = lock(&self.registrations);
        if registrations.len() == registrations.capacity() {
            // Those that are closed, before there is room for as many again.
            registrations.retain(|one| one.strong_count() > 0);
        }
        registrations.push(Arc::downgrade(registration));
    }

    /// Closes all that are not closed yet: the endpoint is about to be.
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
