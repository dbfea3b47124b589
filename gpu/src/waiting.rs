//! Waiting for devices, always with a deadline.
//!
//! The driver's own waits have no deadline: a wait for a copy that waits for a dead peer would
//! never end. So this module looks for the end, as [`look_schedule`](crate::look_schedule) says.

use std::time::{Duration, Instant};

use threads::ExactTimer;

use crate::error::{Error, ErrorKind, Result, proves_idle};
use crate::look_schedule::Pause;

/// Looks until the result is true, or the time is over.
pub(crate) fn wait_until(
    operation: &'static str,
    timeout: Duration,
    is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    wait_for_end(operation, timeout, None, is_done).map(drop)
}

/// Looks until the result is true, which is estimated to be at this time. Returns when it was last
/// false; None if it was true at first.
pub(crate) fn wait_for_end(
    operation: &'static str,
    timeout: Duration,
    estimate: Option<Instant>,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<Option<Instant>> {
    let start = Instant::now();
    let (mut in_progress, mut asked) = (None, start);
    loop {
        if is_done()? {
            return Ok(in_progress);
        }
        // Before the answer: afterwards the thread may have been delayed.
        in_progress = Some(asked);
        let now = Instant::now();
        asked = now;
        let waited = now - start;
        if waited >= timeout {
            let detail = format!("no completion within {waited:?}");
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail));
        }
        match Pause::for_end(now, start, estimate) {
            Pause::Spin => std::hint::spin_loop(),
            Pause::Until(until) => {
                let _exact = ExactTimer::set();
                std::thread::sleep((until - now).min(timeout - waited));
                asked = Instant::now();
            }
        }
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
