//! What the two sides of a ring exchange before the first byte.
//!
//! Everything here comes from a peer and is checked where it is used: an impossible geometry or
//! memory that is too small is refused.

use serde::{Deserialize, Serialize};

use super::geometry::{ChunkLayout, RingGeometry};
use super::notify::NotifyMode;
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
        match RingGeometry::new(self.capacity, self.ring) {
            // Bounded, since the reader counts messages on from this number.
            Some(geometry)
                if !self.lanes.is_empty()
                    && self.completed_messages < MAX_MESSAGES
                    && self.max_chunks > 0 =>
            {
                Ok(geometry.with_layout(self.layout))
            }
            _ => {
                let detail = format!(
                    "a ring of {} bytes with index {}, {} lanes, {} completed messages and {} chunks is impossible",
                    self.capacity,
                    self.ring,
                    self.lanes.len(),
                    self.completed_messages,
                    self.max_chunks
                );
                Err(Error::new(ErrorKind::MalformedDescriptor, "open ring", detail))
            }
        }
    }
}
