//! Waiting for devices, always with a deadline.
//!
//! The driver's own waits have no deadline: a wait for a copy that waits for a dead peer would
//! never end. So this module polls, first often, then with growing pauses.

use std::time::{Duration, Instant};

use threads::RetryBackoff;

use crate::error::{Error, ErrorKind, Result, proves_idle};

/// How long to poll without a pause: a copy of some kilobytes takes less.
const SPIN_TIME: Duration = Duration::from_micros(30);
const POLL_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_micros(10), Duration::from_micros(500));

/// Polls until the result is true, or the time is over.
pub(crate) fn wait_until(
    operation: &'static str,
    timeout: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    let mut backoff = POLL_BACKOFF;
    loop {
        if is_done()? {
            return Ok(());
        }
        let waited = start.elapsed();
        if waited >= timeout {
            let detail = format!("no completion within {waited:?}");
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail));
        }
        if waited < SPIN_TIME {
            std::hint::spin_loop();
            continue;
        }
        std::thread::sleep(backoff.next_pause().min(timeout - waited));
    }
}

/// The result of a query. An error that does not prove the end of the operation counts as
/// unknown, and the query is repeated.
pub(crate) fn retry_unless_over(answer: Result<bool>) -> Result<bool> {
    match answer {
        Err(error) if !proves_idle(&error) => Ok(false),
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_ends_at_its_deadline_or_a_failure() {
        let start = Instant::now();
        let timeout = Duration::from_millis(20);
        let error = wait_until("test", timeout, || Ok(false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(start.elapsed() >= timeout);
        let mut asked = 0;
        wait_until("test", timeout, || {
            asked += 1;
            Ok(asked == 3)
        })
        .unwrap();
        assert_eq!(asked, 3);
        let broken = || Err(Error::new("test", ErrorKind::DeviceFailed, ""));
        assert_eq!(
            wait_until("test", timeout, broken).unwrap_err().kind(),
            ErrorKind::DeviceFailed
        );
    }
}
