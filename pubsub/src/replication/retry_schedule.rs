//! When to retry after failures: the more failures, the later.

use std::time::{Duration, Instant};

use threads::RetryBackoff;

/// Without a failure for this long after a pause, the next one is short again.
const RESET_AFTER: Duration = Duration::from_secs(10);

/// The pause after the last failure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RetrySchedule {
    until: Instant,
    backoff: RetryBackoff,
}

impl RetrySchedule {
    /// The pause after one more failure: longer than the previous one, unless there was no failure
    /// for `RESET_AFTER` and for four times its length. `first` is the backoff of the first failure.
    pub(crate) fn after(before: Option<Self>, now: Instant, first: RetryBackoff) -> Self {
        let is_recent = |it: &Self| now < it.until + RESET_AFTER.max(4 * it.backoff.last_pause());
        let mut backoff = before.filter(is_recent).map_or(first, |it| it.backoff);
        Self { until: now + backoff.next_pause(), backoff }
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now >= self.until
    }

    pub(crate) fn until(&self) -> Instant {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_double_the_pause() {
        let lengths = RetryBackoff::new(Duration::from_secs(1), Duration::from_secs(3));
        let mut now = Instant::now();
        let mut schedule = None;
        for seconds in [1, 2, 3, 3] {
            let next = RetrySchedule::after(schedule, now, lengths);
            assert!(!next.is_over(now));
            assert_eq!(next.until(), now + Duration::from_secs(seconds));
            now = next.until();
            assert!(next.is_over(now));
            schedule = Some(next);
        }
        let first = RetrySchedule::after(None, now, lengths);
        let soon = first.until() + RESET_AFTER - Duration::from_millis(1);
        assert_eq!(
            RetrySchedule::after(Some(first), soon, lengths).until(),
            soon + Duration::from_secs(2)
        );
        let late = first.until() + RESET_AFTER;
        assert_eq!(
            RetrySchedule::after(Some(first), late, lengths).until(),
            late + Duration::from_secs(1)
        );
        let later = RetrySchedule::after(schedule, now + Duration::from_secs(60), lengths);
        assert_eq!(later.until(), now + Duration::from_secs(61));
    }
}
