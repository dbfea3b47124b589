//! Timestamps of messages.

use std::time::SystemTime;

/// Nanoseconds since 1970. All processes of a machine share this clock; machines share it roughly.
/// No protocol depends on its monotony.
#[inline]
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}
