//! Whether this is still the process that an object was opened in.
//!
//! A forked child shares its parent's sockets, queues of devices and names in `/dev/shm`.
//! To close an object there would shut the parent's connections down and remove its names.
//! So an object remembers the process that it was opened in, and a child leaves it, with the
//! memory that is registered, as it is.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that something was made in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkGeneration(u32);

impl ForkGeneration {
    pub(crate) fn now() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler does nothing but an atomic addition.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Was it made before a fork, by a parent of this process?
    #[inline]
    pub(crate) fn is_inherited(self) -> bool {
        self.0 != FORKS.load(Ordering::Relaxed)
    }
}
