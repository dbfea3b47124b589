//! Memory that can only be freed while no stream waits.
//!
//! A driver frees device memory, and unregisters host memory, only after all earlier operations
//! are done. A stream that waits for a word of another process can block that without a bound;
//! if the process waits for this one, for ever. The thread that frees would hang in a call
//! without a deadline.
//!
//! So memory that is released while a stream may wait is deferred. The next allocation of the
//! same length reuses it. The rest is freed once no stream waits, by the next thread that
//! allocates, frees, records a point of a stream or synchronizes one.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use threads::lock;

use crate::device_name::Implementation;
use crate::stream_waits::{FreeGuard, any_stream_waits};

/// Memory without users that is to be freed.
#[derive(Debug)]
pub(crate) enum DeferredFree {
    /// Memory of `cuMemAlloc`, and whether no other process can have opened it.
    Plain { address: u64, length: u64, is_private: bool },
    /// Registered host memory, and the owner that keeps it mapped.
    Host { address: u64, length: u64, _mapping: Box<dyn fmt::Debug + Send + Sync> },
    /// Another process's memory, opened by this handle. It may have users again.
    Legacy { bytes: [u8; 64] },
}

/// Memory that was returned to a device, and is not freed yet.
#[derive(Debug, Default)]
pub(crate) struct DeferredFrees {
    all: Mutex<Vec<DeferredFree>>,
    /// The number of entries, including those being freed, readable without the lock.
    count: AtomicUsize,
}

impl DeferredFrees {
    pub(crate) fn push(&self, deferred_free: DeferredFree) {
        self.count.fetch_add(1, Ordering::AcqRel);
        lock(&self.all).push(deferred_free);
    }

    /// Frees all memory by this function, if the guard is available and no stream waits. Then
    /// nothing is left of what any thread returned before.
    pub(crate) fn free_all(
        &self,
        guard: impl FnOnce() -> Option<FreeGuard>,
        implementation: Implementation,
        free: impl Fn(&DeferredFree),
    ) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let Some(_guard) = guard() else { return };
        if any_stream_waits(implementation) {
            return;
        }
        loop {
            let freed = std::mem::take(&mut *lock(&self.all));
            if freed.is_empty() {
                return;
            }
            freed.iter().for_each(&free);
            // Host owners are dropped while the guard is held, and counted until then: another
            // thread that passed the gate relies on its mappings being gone. Objects that their
            // owners release are freed in the next round.
            let count = freed.len();
            drop(freed);
            self.count.fetch_sub(count, Ordering::AcqRel);
        }
    }

    /// Deferred memory of this length, for reuse.
    pub(crate) fn take_plain(&self, wanted: u64) -> Option<u64> {
        let taken = self.take(|deferred_free| match deferred_free {
            DeferredFree::Plain { length, is_private, .. } => *is_private && *length == wanted,
            _ => false,
        });
        match taken? {
            DeferredFree::Plain { address, .. } => Some(address),
            _ => None,
        }
    }

    /// Takes the registration of exactly this host range, if it is still deferred. Returns its
    /// previous owner, which may be dropped when the range has a new one.
    pub(crate) fn take_host(&self, range: (u64, u64)) -> Option<DeferredFree> {
        self.take(|deferred_free| match deferred_free {
            DeferredFree::Host { address, length, .. } => (*address, *length) == range,
            _ => false,
        })
    }

    fn take(&self, is_wanted: impl Fn(&DeferredFree) -> bool) -> Option<DeferredFree> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = lock(&self.all);
        let at = all.iter().position(is_wanted)?;
        let deferred_free = all.swap_remove(at);
        self.count.fetch_sub(1, Ordering::AcqRel);
        Some(deferred_free)
    }
}
