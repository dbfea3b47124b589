//! When patience is over.

use std::time::{Duration, Instant};

/// Beyond this patience has no end: later moments may be none that a clock can tell.
const MAX_TIMEOUT: Duration = Duration::from_secs(1 << 30);

/// When a wait that begins now ends, at the latest; years from now counts as never.
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
