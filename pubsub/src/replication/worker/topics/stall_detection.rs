//! Connections that are up, but stalled.
//!
//! A provider may not report a lost connection: a link was down, or another process took over the
//! connection of the peer. Then the writer waits for credit and the reader for messages, without an
//! error. One side alone cannot distinguish that from a slow reader. So a stalled writer sends its
//! number of written chunks and the last acknowledged position. The reader compares them with its
//! own counts. If they keep differing, the connections of that node have a
//! [fault](crate::replication::worker::endpoint). The writer may have made the counts up.

use std::time::Duration;

use crate::replication::worker::nanoseconds;

/// A writer sends a stall check after this time without progress, and again after as long.
const SENDER_STALL_AFTER: Duration = Duration::from_millis(600);
/// A difference that lasts this long is no delay. The time doubles after each restart without
/// effect, up to 16 s: the network may be slow.
const RECEIVER_STALL_AFTER: Duration = Duration::from_millis(1000);
pub(super) const MAX_DOUBLINGS: u32 = 4;
/// Time that data has to arrive after the writer's last check.
const IN_FLIGHT_ALLOWANCE: Duration = Duration::from_millis(200);

/// Counts of a connection at the writer, and since when they have not changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SendProgress {
    /// Chunks written, and the position acknowledged by the reader.
    known: (u64, u64),
    since: u64,
    reported: u64,
}

impl SendProgress {
    /// Returns true if a stall check is due. `waits`: data waits to be acknowledged or written.
    pub(super) fn poll(&mut self, now: u64, known: (u64, u64), waits: bool) -> bool {
        if known != self.known || !waits {
            *self = Self { known, since: now, reported: 0 };
            return false;
        }
        let last = self.since.max(self.reported);
        let is_due = now.saturating_sub(last) >= nanoseconds(SENDER_STALL_AFTER);
        if is_due {
            self.reported = now;
        }
        is_due
    }
}

/// A difference found by a reader, until it is resolved.
#[derive(Debug, Clone, Copy)]
pub(super) struct StallSuspicion {
    /// Chunks expected, and received at that time.
    chunks: u64,
    received: u64,
    /// Credit that was sent, and the position that the writer has received of it.
    credited: u64,
    read: u64,
    /// Since when, and time of the last check.
    since: u64,
    last_check: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StallVerdict {
    /// No difference, or progress.
    Resolved,
    Pending,
    Stalled,
}

impl StallSuspicion {
    /// Handles a stall check: (`received`, `credited`) are the counts of this side.
    pub(super) fn update(
        before: Option<Self>,
        now: u64,
        (chunks, read): (u64, u64),
        (received, credited): (u64, u64),
    ) -> Self {
        match before {
            Some(before) => Self { read, last_check: now, ..before },
            None => Self { chunks, received, credited, read, since: now, last_check: now },
        }
    }

    pub(super) fn poll(&self, now: u64, received: u64, doublings: u32) -> StallVerdict {
        let has_all = received >= self.chunks || received > self.received;
        let has_credit = self.read >= self.credited;
        if has_all && has_credit {
            return StallVerdict::Resolved;
        }
        let timeout = nanoseconds(RECEIVER_STALL_AFTER) << doublings;
        // The writer is running, and repeats the same counts.
        let is_confirmed = self.last_check >= self.since + nanoseconds(SENDER_STALL_AFTER) / 2;
        let is_late = now.saturating_sub(self.since) >= timeout
            && now.saturating_sub(self.last_check) >= nanoseconds(IN_FLIGHT_ALLOWANCE);
        if is_late && is_confirmed { StallVerdict::Stalled } else { StallVerdict::Pending }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn stall_check_is_sent_only_without_progress_of_waiting_data() {
        let mut send_progress = SendProgress::default();
        let mut reported = Vec::new();
        for tenth in 0..50 {
            let now = tenth * SECOND / 10;
            // It makes progress until then.
            let known = (tenth.min(10), 0);
            if send_progress.poll(now, known, true) {
                reported.push(tenth);
            }
        }
        assert_eq!(reported, [16, 22, 28, 34, 40, 46]);
        assert!(!send_progress.poll(60 * SECOND, (10, 0), false));
        assert!(!send_progress.poll(60 * SECOND, (10, 0), true));
        assert!(send_progress.poll(61 * SECOND, (10, 0), true));
    }

    /// When a reader decides that a connection is stalled; the writer repeats these counts every
    /// 600 ms.
    fn stalled_at(
        reported: (u64, u64),
        received_counts: impl Fn(u64) -> (u64, u64),
    ) -> Option<u64> {
        let mut suspicion = None;
        for tick in 0..100 {
            let now = tick * SECOND / 10;
            if tick % 6 == 0 {
                suspicion =
                    Some(StallSuspicion::update(suspicion, now, reported, received_counts(tick)));
            }
            match suspicion.map(|it| it.poll(now, received_counts(tick).0, 0)) {
                Some(StallVerdict::Stalled) => return Some(tick),
                Some(StallVerdict::Resolved) => suspicion = None,
                Some(StallVerdict::Pending) | None => {}
            }
        }
        None
    }

    #[test]
    fn slow_reader_is_not_a_stalled_connection() {
        // All chunks arrived, and none was released.
        assert_eq!(stalled_at((7, 0), |_| (7, 0)), None);
        // Chunks arrive slowly.
        assert_eq!(stalled_at((7, 0), |tick| (tick / 9, 0)), None);
        // The writer has received all credit.
        assert_eq!(stalled_at((7, 512), |_| (7, 512)), None);
    }

    #[test]
    fn lost_chunks_and_credit_are_detected_within_two_seconds() {
        let chunks = stalled_at((7, 0), |_| (3, 0)).unwrap();
        let credit = stalled_at((7, 0), |_| (7, 512)).unwrap();
        // The writer's first check comes after 600 ms.
        assert!(chunks <= 14 && credit <= 14, "{chunks} {credit}");
    }

    #[test]
    fn stall_is_not_reported_before_data_in_flight_can_arrive() {
        // A process that was stopped receives check and data at the same time.
        let first = StallSuspicion::update(None, 0, (7, 0), (3, 0));
        let late = StallSuspicion::update(Some(first), 20 * SECOND, (7, 0), (3, 0));
        assert_eq!(late.poll(20 * SECOND, 3, 0), StallVerdict::Pending);
        assert_eq!(late.poll(20 * SECOND + SECOND / 10, 7, 0), StallVerdict::Resolved);
        assert_eq!(late.poll(20 * SECOND + SECOND / 2, 3, 0), StallVerdict::Stalled);
    }

    #[test]
    fn stall_timeout_doubles_after_ineffective_restarts() {
        let first = StallSuspicion::update(None, 0, (7, 0), (3, 0));
        let again = StallSuspicion::update(Some(first), SECOND / 2, (7, 0), (3, 0));
        for doublings in 0..=MAX_DOUBLINGS {
            let timeout = SECOND << doublings;
            assert_eq!(again.poll(timeout - 1, 3, doublings), StallVerdict::Pending);
            assert_eq!(again.poll(timeout, 3, doublings), StallVerdict::Stalled);
            // Its writer may not be running any more.
            assert_eq!(first.poll(timeout, 3, doublings), StallVerdict::Pending);
        }
    }
}
