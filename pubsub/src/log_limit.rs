//! Limits log lines that other nodes, or any connection, can cause.

use std::time::Duration;

/// Lines allowed at once.
const BURST: u32 = 100;
/// Lines allowed at once where all have much the same cause.
const SHORT_BURST: u32 = 10;
/// Time per further line.
const PAUSE: Duration = Duration::from_secs(1);
const SHORT_PAUSE: Duration = Duration::from_secs(10);

/// A common limit of some log lines. Times are durations since any fixed moment.
#[derive(Debug)]
pub(crate) struct LogLimit {
    burst: u32,
    pause: Duration,
    left: u32,
    /// Up to when further lines were added to `left`.
    counted: Duration,
    suppressed: u64,
    #[cfg(test)]
    all_suppressed: u64,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        Self::of(BURST, PAUSE)
    }

    /// A limit for lines that have much the same cause.
    pub(crate) fn short() -> Self {
        Self::of(SHORT_BURST, SHORT_PAUSE)
    }

    fn of(burst: u32, pause: Duration) -> Self {
        Self {
            burst,
            pause,
            left: burst,
            counted: Duration::ZERO,
            suppressed: 0,
            #[cfg(test)]
            all_suppressed: 0,
        }
    }

    /// Returns true if one more line is allowed. Logs the number of suppressed lines first.
    pub(crate) fn allows(&mut self, now: Duration) -> bool {
        let Some(suppressed) = self.next(now) else { return false };
        if suppressed > 0 {
            tracing::warn!(suppressed, "log lines were suppressed: rate limit");
        }
        true
    }

    /// Total of suppressed lines.
    #[cfg(test)]
    pub(crate) fn all_suppressed(&self) -> u64 {
        self.all_suppressed
    }

    /// Lines suppressed since the last allowed one; None if this one is suppressed, too.
    fn next(&mut self, now: Duration) -> Option<u64> {
        let passed = now.saturating_sub(self.counted).as_secs() / self.pause.as_secs();
        self.counted += self.pause * u32::try_from(passed).unwrap_or(u32::MAX);
        self.left =
            self.burst.min(self.left.saturating_add(u32::try_from(passed).unwrap_or(u32::MAX)));
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed += 1;
                #[cfg(test)]
                {
                    self.all_suppressed += 1;
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_of_log_lines_is_limited_and_suppressed_ones_counted() {
        let mut limit = LogLimit::new();
        let mut logged = Vec::new();
        // 700 lines a second for 20 seconds.
        for line in 0..14_000 {
            let now = Duration::from_secs(5) + Duration::from_micros(line * 20_000_000 / 14_000);
            logged.extend(limit.next(now));
        }
        assert!((100..=121).contains(&logged.len()), "{}", logged.len());
        assert_eq!(logged[..100], [0; 100]);
        assert!(logged[101..].iter().all(|suppressed| (600..800).contains(suppressed)));
        // Afterwards lines are logged again.
        let later = Duration::from_secs(3600);
        assert!(limit.next(later).is_some_and(|suppressed| suppressed > 0));
        assert!((0..99).all(|_| limit.next(later) == Some(0)));
        assert_eq!(limit.next(later), None);
    }
}
