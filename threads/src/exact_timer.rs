//! Sleeps that end on time.
#![allow(unsafe_code)]

use std::marker::PhantomData;

/// While it exists, sleeps of the calling thread with a timeout end some microseconds after it. The
/// system otherwise may delay them by the thread's timer slack, usually 50 µs, to wake several
/// threads at once.
///
/// ```
/// use std::time::Duration;
/// let timer = threads::ExactTimer::set();
/// std::thread::sleep(Duration::from_micros(100));
/// drop(timer);
/// ```
#[derive(Debug)]
pub struct ExactTimer {
    /// The slack before, in nanoseconds; not positive if it was not changed.
    before: libc::c_int,
    /// The slack belongs to the thread.
    not_send: PhantomData<*const ()>,
}

impl ExactTimer {
    /// From now on.
    #[must_use]
    pub fn set() -> Self {
        // SAFETY: reads and writes a number of the calling thread.
        let before = unsafe {
            let before = libc::prctl(libc::PR_GET_TIMERSLACK);
            // What cannot be restored is not changed; 0 stands for the thread's default.
            if before > 0 {
                libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong);
            }
            before
        };
        Self { before, not_send: PhantomData }
    }
}

impl Drop for ExactTimer {
    fn drop(&mut self) {
        if let Ok(before @ 1..) = libc::c_ulong::try_from(self.before) {
            // SAFETY: writes a number of the calling thread.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, before) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slack() -> libc::c_int {
        // SAFETY: reads a number of the calling thread.
        unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) }
    }

    #[test]
    fn slack_is_as_before_afterwards() {
        let before = slack();
        let (outer, inner) = (ExactTimer::set(), ExactTimer::set());
        assert_eq!(slack(), 1);
        drop(inner);
        assert_eq!(slack(), 1);
        drop(outer);
        assert_eq!(slack(), before);
    }
}
