//! Whether messages of another node wait for capacity.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NO: u64 = 0;
const WAITS: u64 = u64::MAX;

/// Set by a sink, read by the service.
#[derive(Debug)]
pub(crate) struct RoomWait {
    began: Instant,
    /// `NO`, `WAITS`, or the time of the last refused message in nanoseconds from 1.
    state: AtomicU64,
}

impl RoomWait {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), state: AtomicU64::new(NO) }
    }

    /// A message waits for capacity.
    pub(crate) fn set_waiting(&self) {
        self.state.store(WAITS, Ordering::Release);
    }

    /// There is capacity, or no message waits any more.
    pub(crate) fn clear(&self) {
        self.state.store(NO, Ordering::Release);
    }

    /// A message was dropped for lack of capacity. It may have been the last one.
    pub(crate) fn record_refusal(&self) {
        let passed = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(WAITS);
        self.state.store(passed.clamp(NO + 1, WAITS - 1), Ordering::Release);
    }

    /// Whether a message waits; a refused message counts for `holds`.
    pub(crate) fn is_waiting(&self, holds: Duration) -> bool {
        match self.state.load(Ordering::Acquire) {
            NO => false,
            WAITS => true,
            refused => self.began.elapsed() < Duration::from_nanos(refused) + holds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_message_counts_for_a_while_waiting_one_until_cleared() {
        let (room_wait, long) = (RoomWait::new(), Duration::from_secs(3600));
        assert!(!room_wait.is_waiting(long));
        room_wait.set_waiting();
        assert!(room_wait.is_waiting(Duration::ZERO));
        room_wait.record_refusal();
        assert!(room_wait.is_waiting(long) && !room_wait.is_waiting(Duration::ZERO));
        room_wait.clear();
        assert!(!room_wait.is_waiting(long));
    }
}
