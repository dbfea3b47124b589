//! Leaving alone for a while what does not succeed: the longer, the more often it failed.

use std::time::{Duration, Instant};

/// Without a failure for so long after a rest, the next rest is short again.
const RESET_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub(crate) struct RetryBackoff {
    until: Instant,
    length: Duration,
}

impl RetryBackoff {
    /// One more failure: twice the rest that there was before, unless there was no failure since
    /// then for `RESET_AFTER` and for four times that rest.
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
    fn the_more_often_the_longer() {
        let (mut now, lengths) = (Instant::now(), (Duration::from_secs(1), Duration::from_secs(3)));
        let mut rest = None;
        for seconds in [1, 2, 3, 3] {
            let next = RetryBackoff::after(rest, now, lengths);
            assert!(!next.is_over(now));
            assert_eq!(next.until(), now + Duration::from_secs(seconds));
            now = next.until();
            assert!(next.is_over(now));
            rest = Some(next);
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
        let later = RetryBackoff::after(rest, now + Duration::from_secs(60), lengths);
        assert_eq!(later.until(), now + Duration::from_secs(61));
    }
}
