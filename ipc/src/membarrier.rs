//! Fences of two sides, of which one runs often and the other rarely: the rare side lets the kernel
//! run a memory barrier on all processors that run a process that is prepared for it.
//!
//! If each side stores a word, passes its fence, and loads the word of the other, then at least one
//! sees the store of the other.
//!
//! ```
//! use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
//! use ipc::membarrier;
//!
//! membarrier::prepare();
//! let (is_busy, is_closed) = (AtomicBool::new(false), AtomicBool::new(false));
//! std::thread::scope(|scope| {
//!     let worker = scope.spawn(|| {
//!         is_busy.store(true, Relaxed);
//!         membarrier::light();
//!         is_closed.load(Relaxed)
//!     });
//!     is_closed.store(true, Relaxed);
//!     membarrier::heavy();
//!     let saw_work = is_busy.load(Relaxed);
//!     assert!(worker.join().unwrap() || saw_work);
//! });
//! ```
#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence, fence};
use std::time::Duration;

const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
const REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;
/// Longer than any processor keeps a store for itself.
const WITHOUT_MEMBARRIER: Duration = Duration::from_millis(1);

/// The kernel runs barriers on the processors of this process.
static IS_REGISTERED: AtomicBool = AtomicBool::new(false);

fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes three numbers and touches no memory of this process.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Registers this process; a forked child is registered, too.
pub fn prepare() {
    static ATTEMPT: OnceLock<()> = OnceLock::new();
    ATTEMPT.get_or_init(|| {
        IS_REGISTERED.store(membarrier(REGISTER_GLOBAL_EXPEDITED), Ordering::Release)
    });
}

/// The side that runs often. Without the kernel's help it is a full fence.
#[inline]
pub fn light() {
    if IS_REGISTERED.load(Ordering::Relaxed) {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The side that runs rarely: it takes microseconds.
pub fn heavy() {
    fence(Ordering::SeqCst);
    // A seccomp filter may forbid it here, and not to the other side.
    if !membarrier(GLOBAL_EXPEDITED) {
        std::thread::sleep(WITHOUT_MEMBARRIER);
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Each side stores a word, and then loads that of the other: at least one sees the other's.
    #[test]
    fn one_side_at_least_sees_the_store_of_the_other() {
        prepare();
        let words = [const { AtomicU64::new(0) }; 2];
        let [often, rarely] = &words;
        let rounds = 300;
        let start = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut seen = Vec::new();
                for round in 1..=rounds {
                    start.wait();
                    often.store(round, Ordering::Relaxed);
                    light();
                    seen.push(rarely.load(Ordering::Relaxed) == round);
                }
                seen
            });
            let mut seen = Vec::new();
            for round in 1..=rounds {
                start.wait();
                rarely.store(round, Ordering::Relaxed);
                heavy();
                seen.push(often.load(Ordering::Relaxed) == round);
            }
            let other = other.join().unwrap();
            assert!(seen.iter().zip(other).all(|(one, other)| *one || other));
        });
    }
}
