//! Size of the next piece of a pool.

use crate::pool::Pool;

/// Range of the size of a new piece, which doubles its pool; a message may need a larger one.
const MIN_PIECE: u64 = 4 << 20;
const MAX_PIECE: u64 = 1 << 30;

/// The size of the next piece of a pool that needs so many bytes: it doubles the pool, so that many
/// loans need few pieces, unless the pool would exceed its limit.
pub(super) fn of_next(pool: &Pool, bytes: u64) -> u64 {
    let generous = pool.length().clamp(MIN_PIECE, MAX_PIECE).max(bytes);
    if pool.may_grow(generous) { generous } else { bytes }
}
