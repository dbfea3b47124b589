//! Sleeps that a signal ended.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::futex;

thread_local! {
    static ENDED: Cell<u64> = const { Cell::new(0) };
}

/// A sleep of the calling thread ended since a handler of a signal had run.
pub(crate) fn note_interrupted_sleep() {
    ENDED.set(ENDED.get().wrapping_add(1));
}

/// Tells whether a handler of a signal has ended a sleep of the calling thread, since a moment.
///
/// Sleeps in this crate end when a handler has run in the sleeping thread, whatever `SA_RESTART` says
/// of it, and the wait looks for what it waits for and sleeps again. A wait that is to end then asks
/// here when it looks. A handler that runs while a thread does not sleep is not noticed.
///
/// ```
/// use std::time::Duration;
/// let interruption = ipc::Interruption::watch();
/// ipc::sleep_interruptible(Duration::from_millis(1));
/// assert!(!interruption.occurred());
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Interruption {
    before: u64,
    /// The count is the thread's.
    stays: PhantomData<*const ()>,
}

impl Interruption {
    /// From now on.
    #[must_use]
    pub fn watch() -> Self {
        Self { before: ENDED.get(), stays: PhantomData }
    }

    /// Has a handler ended a sleep since then?
    #[must_use]
    pub fn occurred(&self) -> bool {
        ENDED.get() != self.before
    }
}

/// Sleeps for so long, or until a handler of a signal has run in the calling thread.
pub fn sleep_interruptible(timeout: Duration) {
    futex::sleep(&AtomicU64::new(0), 0, timeout);
}
