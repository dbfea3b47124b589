//! Closing registrations where the provider forgets to look out for others.
//!
//! tcp of libfabric before 1.19 (as `net`, before 1.18) takes no lock to close a registration,
//! though other threads may register, or look a key up for a peer, at the same time: that breaks
//! its tree of keys. Any thread may drop a region here. So on such a provider a region is closed when no
//! queue is read and nothing is registered; or else by whoever reads a queue next.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use libfabric_sys as sys;

use super::region::Keepalive;
use crate::choice::closes_regions_unguarded;
use crate::handle::Handle;
use crate::version::Version;

/// A registration whose last user has let go of it.
#[derive(Debug)]
pub(super) struct Late {
    pub(super) handle: Handle<sys::fid_mr>,
    pub(super) memory: Option<Keepalive>,
    pub(super) bytes: usize,
}

/// What keeps those apart that the provider does not.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    /// Held while a queue is read: then the provider looks keys up.
    turn: Mutex<()>,
    /// Held while something is registered or closed.
    late: Mutex<Vec<Late>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Closing {
    /// None where the provider sees to it.
    pub(crate) fn of(provider: &str) -> Option<Box<Self>> {
        closes_regions_unguarded(provider, Version::running()).then(Box::default)
    }

    /// Before a queue is read, and until it was.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        let turn = lock(&self.turn);
        let mut late = lock(&self.late);
        if !late.is_empty() {
            let closed: Vec<_> = late.drain(..).map(Late::close).collect();
            // Memory may have regions of its own, which end with it.
            drop(late);
            drop(closed);
        }
        turn
    }

    /// Before something is registered, and until it was.
    pub(crate) fn registering(&self) -> impl Drop + '_ {
        lock(&self.late)
    }

    /// Closes a registration, now or soon, and then frees its memory.
    pub(super) fn close(&self, region: Late) {
        let turn = match self.turn.try_lock() {
            Err(TryLockError::WouldBlock) => return lock(&self.late).push(region),
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        };
        let nobody_registers = lock(&self.late);
        let memory = region.close();
        drop((nobody_registers, turn));
        drop(memory);
    }
}

impl Late {
    /// What may be freed then.
    pub(super) fn close(self) -> Option<Keepalive> {
        let Self { handle, memory, bytes } = self;
        let Err(error) = handle.close() else { return memory };
        // The provider may still write into the memory: freeing it would be
        // worse than losing it.
        std::mem::forget(memory);
        tracing::error!(%error, bytes, "a registration could not be closed; its memory is leaked");
        None
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        // Before the domain: nobody uses it any more.
        drop(self.turn());
    }
}
