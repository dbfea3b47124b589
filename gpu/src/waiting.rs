//! Waiting for devices, always with a deadline.
//!
//! The driver's own waits have none: a wait for a copy that waits for a peer that died
//! would never end. So we ask, first often, then with growing rests.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};

/// How long to ask without a rest: a copy of some kilobytes takes less.
const ASKING: Duration = Duration::from_micros(30);
const FIRST_REST: Duration = Duration::from_micros(10);
const LONGEST_REST: Duration = Duration::from_micros(500);

/// Asks until the answer is yes, or the time is over.
pub(crate) fn until(
    operation: &'static str,
    longest: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    let mut rest = FIRST_REST;
    loop {
        if is_done()? {
            return Ok(());
        }
        let waited = start.elapsed();
        if waited >= longest {
            let detail = format!("the device was not done after {waited:?}");
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail));
        }
        if waited < ASKING {
            std::hint::spin_loop();
            continue;
        }
        std::thread::sleep(rest.min(longest - waited));
        rest = (rest * 2).min(LONGEST_REST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_kept_and_a_failure_ends_it() {
        let start = Instant::now();
        let longest = Duration::from_millis(20);
        let error = until("test", longest, || Ok(false)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(start.elapsed() >= longest);
        let mut asked = 0;
        until("test", longest, || {
            asked += 1;
            Ok(asked == 3)
        })
        .unwrap();
        assert_eq!(asked, 3);
        let broken = || Err(Error::new("test", ErrorKind::DeviceFailed, ""));
        assert_eq!(until("test", longest, broken).unwrap_err().kind(), ErrorKind::DeviceFailed);
    }
}
