//! Requests for more memory.

use serde::{Deserialize, Serialize};

use super::{Pool, PoolId};

/// A block of this many bytes did not fit into a pool that had this many pieces.
///
/// A piece may be admitted between the attempt and the arrival of the request at the service: the
/// requester then tries again, and the request must not add one more piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GrowthRequest {
    pool: PoolId,
    admitted: u32,
    bytes: u64,
}

impl GrowthRequest {
    pub(crate) fn new(pool: PoolId, admitted: u32, bytes: u64) -> Self {
        Self { pool, admitted, bytes }
    }

    pub(crate) fn pool(&self) -> PoolId {
        self.pool
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if the pool has grown since the attempt.
    pub(crate) fn is_outdated(&self, pool: &Pool) -> bool {
        pool.admitted() > self.admitted as usize
    }
}
