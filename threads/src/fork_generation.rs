//! Detects objects that a forked child inherited.
//!
//! A forked child has none of its parent's threads, and shares its sockets, device queues, shared
//! memory and names in `/dev/shm`. Closing an object there would shut down the parent's connections
//! and remove its names; its lock may be held by a thread that does not exist.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// Identifies this process, in a way that a fork changes.
///
/// An object that was made before a fork belongs to the parent. It stores this value, and a child
/// neither uses nor closes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ForkGeneration(u32);

static GENERATION: AtomicU32 = AtomicU32::new(0);

extern "C" fn after_fork_in_child() {
    GENERATION.fetch_add(1, Relaxed);
}

impl ForkGeneration {
    /// The generation of this process.
    #[inline]
    #[must_use]
    pub fn current() -> Self {
        static WATCH: Once = Once::new();
        WATCH.call_once(|| {
            // SAFETY: the handler only does an atomic addition.
            unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        });
        Self(GENERATION.load(Relaxed))
    }

    /// Is this still the same process?
    #[inline]
    #[must_use]
    pub fn is_current(self) -> bool {
        self.0 == GENERATION.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fork_is_detected() {
        let before = ForkGeneration::current();
        assert!(before.is_current());
        // SAFETY: the child only compares and exits.
        let number = unsafe { libc::fork() };
        if number == 0 {
            let code = i32::from(before.is_current());
            // SAFETY: ends the child at once, without running any code of the parent.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: a child of this process.
        unsafe { libc::waitpid(number, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 0, "the child did not detect the fork");
        assert!(before.is_current());
    }
}
