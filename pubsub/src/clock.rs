//! The time that messages carry.

use std::time::SystemTime;

/// Nanoseconds since 1970: the one clock that all processes of a machine have in common, and
/// machines roughly. Nothing depends on its running evenly.
#[inline]
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
