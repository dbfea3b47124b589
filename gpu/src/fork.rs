//! Whether this is still the process that a handle was made in.
//!
//! A driver's context does not survive a fork: calls in the child fail in ways that do
//! not say so, and closing there what the parent uses is worse. Handles remember which
//! process made them, refuse in a child, and leave alone what they would close.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

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

    #[inline]
    pub(crate) fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check(self, operation: &'static str) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        let detail = "it belongs to the parent process, and a driver does not survive a fork: \
                      use devices in a process that was started anew";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }
}
