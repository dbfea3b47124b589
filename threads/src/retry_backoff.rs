//! Pauses between attempts: the more attempts, the longer.

use std::time::Duration;

/// Pauses between retries, or between polls of state that rings no doorbell. Each is twice as long
/// as the previous one, up to a limit. Knows no clock: callers sleep, or compute the next time.
///
/// ```
/// use std::time::Duration;
/// let [one, three] = [1, 3].map(Duration::from_secs);
/// let mut backoff = threads::RetryBackoff::new(one, three);
/// assert_eq!([backoff.next_pause(), backoff.next_pause()], [one, 2 * one]);
/// assert_eq!([backoff.next_pause(), backoff.next_pause()], [three, three]);
/// backoff.reset();
/// assert_eq!(backoff.next_pause(), one);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryBackoff {
    first: Duration,
    longest: Duration,
    /// Zero before the first.
    last: Duration,
}

impl RetryBackoff {
    /// The first pause, and the longest, which is not shorter.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, last: Duration::ZERO }
    }

    /// The first pause.
    #[must_use]
    pub const fn first(&self) -> Duration {
        self.first
    }

    /// The longest pause.
    #[must_use]
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    /// The pause that [`next_pause`](Self::next_pause) returned last; zero before the first.
    #[must_use]
    pub const fn last_pause(&self) -> Duration {
        self.last
    }

    /// The next pause.
    pub fn next_pause(&mut self) -> Duration {
        self.last = (2 * self.last).clamp(self.first, self.longest);
        self.last
    }

    /// Begins again with the first pause.
    pub fn reset(&mut self) {
        self.last = Duration::ZERO;
    }
}
