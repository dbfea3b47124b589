//! Timeouts of calls.

use std::time::{Duration, Instant};

use transfer::ErrorKind;

use crate::failure::Failure;
use crate::status::Status;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timeout {
    /// Does not wait.
    Now,
    For(Duration),
    Forever,
}

/// The longest wait. Later times overflow on some systems.
const FOREVER_DURATION: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// Interval at which a wait checks for a closed handle. A signal handler that runs during such a
/// check is not noticed.
pub(crate) const CLOSE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Timeout {
    /// Below 0 means forever.
    pub(crate) fn of_nanoseconds(nanoseconds: i64) -> Self {
        match u64::try_from(nanoseconds) {
            Err(_) => Self::Forever,
            Ok(0) => Self::Now,
            Ok(nanoseconds) => Self::For(Duration::from_nanos(nanoseconds)),
        }
    }

    /// Below 0 means forever.
    pub(crate) fn of_milliseconds(milliseconds: i32) -> Self {
        Self::of_nanoseconds(i64::from(milliseconds) * 1_000_000)
    }

    /// The deadline.
    pub(crate) fn end(self) -> Instant {
        Instant::now() + self.as_duration()
    }

    /// The rest of the timeout of a call that ends then.
    pub(crate) fn remaining(self, end: Instant) -> Self {
        match self {
            Self::For(_) => Self::For(end.saturating_duration_since(Instant::now())),
            other => other,
        }
    }

    /// Converts to a duration; forever is 100 years.
    pub(crate) fn as_duration(self) -> Duration {
        match self {
            Self::Now => Duration::ZERO,
            Self::For(time) => time.min(FOREVER_DURATION),
            Self::Forever => FOREVER_DURATION,
        }
    }
}

impl Failure {
    /// The failure of a call with this timeout: of the whole wait, not of its last `slice`.
    pub(crate) fn of_wait(
        timeout: Timeout,
        slice: Option<Duration>,
        error: transfer::Error,
    ) -> Self {
        if error.kind() != ErrorKind::DeadlineExceeded {
            return error.into();
        }
        let mut text = error.to_string();
        let mut status = Status::DeadlineExceeded;
        if timeout == Timeout::Now {
            status = Status::WouldBlock;
            text = text.replacen("deadline exceeded", "would block", 1);
        } else if let Some(slice) = slice {
            let whole = timeout.as_duration();
            text = text.replacen(&format!("after {slice:?}"), &format!("after {whole:?}"), 1);
        }
        Self::from_text(status, error.operation(), text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_is_now_finite_or_forever() {
        assert_eq!(Timeout::of_nanoseconds(0), Timeout::Now);
        assert_eq!(Timeout::of_nanoseconds(5), Timeout::For(Duration::from_nanos(5)));
        assert_eq!(Timeout::of_nanoseconds(-1), Timeout::Forever);
        assert_eq!(Timeout::of_nanoseconds(i64::MIN), Timeout::Forever);
        assert!(Timeout::of_nanoseconds(i64::MAX).end() <= Timeout::Forever.end());
        assert_eq!(Timeout::Now.as_duration(), Duration::ZERO);
    }
}
