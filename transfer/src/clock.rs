//! When patience is over.

use std::time::{Duration, Instant};

/// When the patience is over; years from now counts as never.
pub(crate) fn deadline(patience: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(1 << 30);
    Instant::now() + patience.min(LONGEST)
}
