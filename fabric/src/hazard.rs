//! Hazard pointers: the peer that each endpoint is posting to, published for
//! threads that remove peers.
//!
//! A post publishes the peer's index, then looks the peer up. A removal takes the
//! peer out of the table, then looks who has published it. Between the two steps each
//! side needs a full barrier, or both could miss what the other did. Posts are the hot
//! path and removals are rare, so the removal makes the barrier for both sides
//! (`membarrier`), and a post pays two plain stores to a cache line of its own.
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// The peer that one endpoint is posting to.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(crate) struct HazardPointer(AtomicU64);

impl HazardPointer {
    /// To be called before the peer is looked up.
    #[inline]
    pub(crate) fn publish(&self, index: u32) {
        self.0.store(u64::from(index) + 1, Ordering::Relaxed);
        // The processor's half of this barrier is made by `barrier_on_all_threads`.
        compiler_fence(Ordering::SeqCst);
    }

    /// To be called when the provider's call has returned.
    #[inline]
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// Is it this peer?
    pub(crate) fn is(&self, index: u32) -> bool {
        self.0.load(Ordering::Acquire) == u64::from(index) + 1
    }
}

const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;

/// A full memory barrier on every thread of the process; false where the kernel has
/// none to offer (before 4.14, or behind a filter of system calls).
pub(crate) fn barrier_on_all_threads() -> bool {
    static IS_REGISTERED: OnceLock<bool> = OnceLock::new();
    let membarrier = |command: libc::c_int| {
        // SAFETY: the call takes two numbers and touches no memory of ours.
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
    fn a_hazard_names_what_was_published_until_it_is_cleared() {
        let hazard = HazardPointer::default();
        assert!(!hazard.is(0));
        hazard.publish(0);
        assert!(hazard.is(0) && !hazard.is(1));
        hazard.clear();
        assert!(!hazard.is(0));
    }

    #[test]
    fn barriers_can_be_made_again_and_again() {
        assert_eq!(barrier_on_all_threads(), barrier_on_all_threads());
    }
}
