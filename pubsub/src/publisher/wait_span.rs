//! Since when a publisher has found no room, over successive attempts.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::clock;

/// Successive attempts within this time are one wait: a caller waits in slices.
const PAUSE: Duration = Duration::from_secs(1);

/// In nanoseconds since 1970.
#[derive(Debug, Default)]
pub(super) struct WaitSpan {
    /// When the first of these attempts began to wait; 0 once room was found.
    first: AtomicU64,
    /// When the last of them ended.
    last: AtomicU64,
}

impl WaitSpan {
    /// An attempt begins to wait. Returns since when this publisher waits.
    pub(super) fn begin(&self) -> u64 {
        let (now, first) = (clock::now(), self.first.load(Relaxed));
        let paused = Duration::from_nanos(now.saturating_sub(self.last.load(Relaxed)));
        if first != 0 && paused < PAUSE {
            return first;
        }
        self.first.store(now, Relaxed);
        self.last.store(now, Relaxed);
        now
    }

    pub(super) fn end(&self, has_found: bool) {
        match has_found {
            true => self.relieved(),
            false => self.last.store(clock::now(), Relaxed),
        }
    }

    #[inline]
    pub(super) fn relieved(&self) {
        if self.first.load(Relaxed) != 0 {
            self.first.store(0, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn successive_attempts_are_one_wait() {
        let span = WaitSpan::default();
        let first = span.begin();
        span.end(false);
        assert_eq!(span.begin(), first);
        span.end(true);
        std::thread::sleep(Duration::from_millis(2));
        let second = span.begin();
        assert!(second > first);
        span.end(false);
        // The caller did other work in the meantime.
        let long_ago = span.last.load(Relaxed) - PAUSE.as_nanos() as u64;
        span.last.store(long_ago, Relaxed);
        assert!(span.begin() > second);
    }
}
