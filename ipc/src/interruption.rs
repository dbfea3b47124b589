//! Sleeps that a signal handler ended.

use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::futex;

/// Tells whether a signal handler has ended a sleep of the calling thread since the
/// [start](Self::watch).
///
/// A sleep in this crate ends when a handler has run in the sleeping thread, even with
/// `SA_RESTART`; the wait checks its condition and sleeps again. A wait that should end then
/// queries this type in its check. A handler that runs while the thread does not sleep is not
/// detected.
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
    /// The count belongs to the thread.
    not_send: PhantomData<*const ()>,
}

impl Interruption {
    /// Starts now.
    #[must_use]
    pub fn watch() -> Self {
        Self { before: futex::interrupted_sleeps(), not_send: PhantomData }
    }

    /// Has a handler ended a sleep since the start?
    #[must_use]
    pub fn occurred(&self) -> bool {
        futex::interrupted_sleeps() != self.before
    }
}

/// Sleeps for this long, or until a signal handler has run in the calling thread.
pub fn sleep_interruptible(timeout: Duration) {
    futex::sleep(&AtomicU64::new(0), 0, timeout);
}
