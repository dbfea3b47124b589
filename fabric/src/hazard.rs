//! Hazard pointers: the peer that each endpoint is posting to, published for threads that
//! remove peers.
//!
//! A post publishes the peer's index, then looks the peer up. A removal takes the peer out of
//! the table, then reads the published indices. Between the two steps each side needs a full
//! barrier, or both could miss the other's change. Posts are the hot path and removals are
//! rare. So the removal issues the barrier for both sides (`membarrier`), and a post pays two
//! plain stores to its own cache line.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// The hazard pointer of one endpoint: the peer that it is posting to.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct HazardPointer(AtomicU64);

impl HazardPointer {
    /// Must be called before the peer is looked up.
    #[inline]
    pub(crate) fn publish(&self, index: u32) {
        self.0.store(u64::from(index) + 1, Ordering::Relaxed);
        // `barrier_on_all_threads` provides the processor's half of this barrier.
        compiler_fence(Ordering::SeqCst);
    }

    /// Must be called after the provider's call has returned.
    #[inline]
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Does it protect this peer?
    pub(crate) fn is(&self, index: u32) -> bool {
        self.0.load(Ordering::Acquire) == u64::from(index) + 1
    }
}

const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;

/// A full memory barrier on every thread of the process; false where the kernel has none
/// (before 4.14, or with a seccomp filter).
pub(crate) fn barrier_on_all_threads() -> bool {
    static IS_REGISTERED: OnceLock<bool> = OnceLock::new();
    let membarrier = |command: libc::c_int| {
        // SAFETY: the call takes two numbers and touches no memory of this process.
        unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
    };
    // A forked child inherits the registration with the address space.
    *IS_REGISTERED.get_or_init(|| membarrier(REGISTER_PRIVATE_EXPEDITED))
        && membarrier(PRIVATE_EXPEDITED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hazard_pointer_protects_until_cleared() {
        let hazard = HazardPointer::default();
        assert!(!hazard.is(0));
        hazard.publish(0);
        assert!(hazard.is(0) && !hazard.is(1));
        hazard.clear();
        assert!(!hazard.is(0));
    }

    #[test]
    fn barriers_can_be_repeated() {
        assert_eq!(barrier_on_all_threads(), barrier_on_all_threads());
    }
}
