//! Detects objects that a forked child inherited.
//!
//! A forked child shares its parent's sockets, device queues and names in `/dev/shm`. Closing
//! an object in the child would shut down the parent's connections and remove its names. So an
//! object records the process that opened it, and a child neither closes it nor frees its
//! registered memory.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The fork generation of the process that made an object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkGeneration(u32);

impl ForkGeneration {
    pub(crate) fn now() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler only does an atomic addition.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Was the object made before a fork, by a parent of this process?
    #[inline]
    pub(crate) fn is_inherited(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}
