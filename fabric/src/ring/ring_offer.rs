//! What the two sides of a ring exchange before the first byte.
//!
//! Everything here comes from a peer and is checked where it is used: an impossible geometry or
//! memory that is too small is refused.

use serde::{Deserialize, Serialize};

use super::{ChunkLayout, NotifyMode, RingGeometry};
use crate::{Error, ErrorKind, RemoteRegion, Result};

/// More messages than any ring can have carried.
const MAX_MESSAGES: u64 = 1 << 62;

/// A ring that a reader offers to its writer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingOffer {
    /// The reader's index of the ring.
    pub ring: u16,
    /// Number of the connection.
    pub epoch: u32,
    /// Bytes of the ring.
    pub capacity: u64,
    /// How the reader is notified of chunks.
    pub notify: NotifyMode,
    /// Are messages to the reader tagged?
    pub tagged: bool,
    /// The layout of chunks in the ring.
    pub layout: ChunkLayout,
    /// Bytes of the writer that accompany each separate header, at most.
    pub inline_data: u16,
    /// Chunks that may be in the ring at the same time: each has a notice in the reader's queue.
    pub max_chunks: u64,
    /// Messages completed over all epochs: the number of the next one.
    pub completed_messages: u64,
    /// The ring's memory, as each of the reader's endpoints reaches it.
    pub lanes: Vec<LaneOffer>,
}

/// A ring's memory, as one endpoint reaches it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaneOffer {
    /// The memory of the ring.
    pub ring: RemoteRegion,
    /// The separate headers, if the layout has them.
    pub headers: Option<RemoteRegion>,
    /// Target of notices without a chunk: its contents are ignored.
    pub credit_memory: RemoteRegion,
}

/// The writer's answer to an offer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingAnswer {
    /// The writer's index of the ring.
    pub sender_index: u16,
    /// The epoch of the offer.
    pub epoch: u32,
    /// Chunks in the ring at the same time, at most: each may have a credit notice in the writer's
    /// queue.
    pub max_chunks: u64,
    /// Are messages to the writer tagged?
    pub tagged: bool,
    /// Target of notices to the writer, with a credit slot for each sender index.
    pub credit_memory: RemoteRegion,
}

impl RingOffer {
    /// The ring's geometry.
    ///
    /// # Errors
    /// `MalformedDescriptor` if the offer describes no possible ring.
    pub fn geometry(&self) -> Result<RingGeometry> {
        let Self { ring, capacity, completed_messages, max_chunks, .. } = *self;
        let lanes = self.lanes.len();
        // Bounded, since the reader counts messages on from this number.
        let is_possible = lanes > 0 && completed_messages < MAX_MESSAGES && max_chunks > 0;
        let geometry = RingGeometry::new(capacity, ring).filter(|_| is_possible);
        let geometry =
            geometry.and_then(|it| it.with_layout(self.layout).with_inline_data(self.inline_data));
        geometry.ok_or_else(|| {
            let (layout, inline_data) = (self.layout, self.inline_data);
            let detail = format!(
                "a ring of {capacity} bytes with index {ring}, layout {layout:?}, {inline_data} bytes beside headers, {lanes} lanes, {completed_messages} completed messages and {max_chunks} chunks is impossible"
            );
            Error::new(ErrorKind::MalformedDescriptor, "open ring", detail)
        })
    }
}
