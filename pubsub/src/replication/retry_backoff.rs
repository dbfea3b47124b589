//! Backoff after failures: the more failures, the longer.

use std::time::{Duration, Instant};

/// Without a failure for this long after a backoff, the next one is short again.
const RESET_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryBackoff {
    until: Instant,
    length: Duration,
}

impl RetryBackoff {
    /// The backoff after one more failure: twice the previous one, unless there was no failure for
    /// `RESET_AFTER` and for four times its length.
    pub(crate) fn after(
        before: Option<Self>,
        now: Instant,
        (shortest, longest): (Duration, Duration),
    ) -> Self {
        let length = match before {
            Some(Self { until, length }) if now < until + RESET_AFTER.max(4 * length) => {
                (2 * length).min(longest)
            }
            _ => shortest,
        };
        Self { until: now + length, length }
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
    fn repeated_failures_double_the_backoff() {
        let (mut now, lengths) = (Instant::now(), (Duration::from_secs(1), Duration::from_secs(3)));
        let mut backoff = None;
        for seconds in [1, 2, 3, 3] {
            let next = RetryBackoff::after(backoff, now, lengths);
            assert!(!next.is_over(now));
            assert_eq!(next.until(), now + Duration::from_secs(seconds));
            now = next.until();
            assert!(next.is_over(now));
            backoff = Some(next);
        }
        let first = RetryBackoff::after(None, now, lengths);
        let soon = first.until() + RESET_AFTER - Duration::from_millis(1);
        assert_eq!(
            RetryBackoff::after(Some(first), soon, lengths).until(),
            soon + Duration::from_secs(2)
        );
        let late = first.until() + RESET_AFTER;
        assert_eq!(
            RetryBackoff::after(Some(first), late, lengths).until(),
            late + Duration::from_secs(1)
        );
        let later = RetryBackoff::after(backoff, now + Duration::from_secs(60), lengths);
        assert_eq!(later.until(), now + Duration::from_secs(61));
    }
}
