//! Deadlines from timeouts.

use std::time::{Duration, Instant};

/// A longer timeout has no end: the clock may not be able to represent it.
const MAX_TIMEOUT: Duration = Duration::from_secs(1 << 30);

/// The deadline of a wait that begins now; a timeout of years means none.
///
/// ```
/// use std::time::{Duration, Instant};
/// let deadline = ipc::deadline(Duration::from_secs(1));
/// assert!(deadline > Instant::now());
/// assert!(ipc::deadline(Duration::MAX) > deadline);
/// ```
#[must_use]
pub fn deadline(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(MAX_TIMEOUT)
}
