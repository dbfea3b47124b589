//! Detects handles that a forked child inherited.
//!
//! A driver's context does not survive a fork: calls in the child fail with misleading errors,
//! and closing objects there that the parent uses is worse. Handles record the process that
//! made them. In a child they refuse all calls, and close nothing.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, ErrorKind, Result};

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

    #[inline]
    pub(crate) fn is_current(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn check(self, operation: &'static str) -> Result<()> {
        if self.is_current() {
            return Ok(());
        }
        let detail = "the handle belongs to the parent process; a driver does not survive a fork. \
                      Use devices in a process that was started with exec";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }
}
