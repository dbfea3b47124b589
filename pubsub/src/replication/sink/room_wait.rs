//! Whether what comes from another node waits for room.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const NO: u64 = 0;
const WAITS: u64 = u64::MAX;

/// As a sink says it, and the service sees it.
#[derive(Debug)]
pub(in crate::replication) struct RoomWait {
    began: Instant,
    /// Else when a message was refused that does not wait, in nanoseconds, from 1 on.
    state: AtomicU64,
}

impl RoomWait {
    pub(in crate::replication) fn new() -> Self {
        Self { began: Instant::now(), state: AtomicU64::new(NO) }
    }

    /// A message waits for room until there is some, or it is given up.
    pub(in crate::replication) fn set_waiting(&self) {
        self.state.store(WAITS, Ordering::Release);
    }

    /// There is room, or nothing wants it any more.
    pub(in crate::replication) fn clear(&self) {
        self.state.store(NO, Ordering::Release);
    }

    /// A message found none, and is dropped. It may have been the last one.
    pub(in crate::replication) fn record_refusal(&self) {
        let passed = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(WAITS);
        self.state.store(passed.clamp(NO + 1, WAITS - 1), Ordering::Release);
    }

    /// Is it waited for? What was refused counts for so long.
    pub(in crate::replication) fn is_waiting(&self, holds: Duration) -> bool {
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
    fn a_message_that_was_refused_counts_for_a_while_and_one_that_waits_until_there_is_room() {
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
