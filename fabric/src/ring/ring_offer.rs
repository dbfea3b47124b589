//! What the two sides of a ring tell each other before the first byte.
//!
//! All of it comes from outside and goes through checks when it is used: a shape that
//! there is none of, or memory that is too small, is refused.

use serde::{Deserialize, Serialize};

use super::geometry::{ChunkLayout, RingGeometry};
use super::notify::NotifyMode;
use crate::{Error, ErrorKind, RemoteRegion, Result};

/// More messages than any ring has had.
const MAX_MESSAGES: u64 = 1 << 62;

/// A ring that a reader made, for its writer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingOffer {
    /// The reader's number for the ring.
    pub ring: u16,
    /// Counts the connections.
    pub epoch: u32,
    /// Bytes of the ring.
    pub capacity: u64,
    /// How the reader learns of what was written.
    pub notify: NotifyMode,
    /// Do messages to the reader have a tag?
    pub tagged: bool,
    /// How chunks lie in the ring.
    pub layout: ChunkLayout,
    /// Chunks that may be in the ring at the same time, since each has a notice in the reader's
    /// queue.
    pub max_chunks: u64,
    /// Messages that came completed_messages, over all epochs: the next one is this one.
    pub completed_messages: u64,
    /// The ring's memory, as it is reached through each of the reader's endpoints.
    pub lanes: Vec<LaneOffer>,
}

/// A ring's memory, as it is reached through one endpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaneOffer {
    /// The ring.
    pub ring: RemoteRegion,
    /// The headers, if they lie apart.
    pub headers: Option<RemoteRegion>,
    /// Where notices without a chunk are written: its bytes mean nothing.
    pub credit_memory: RemoteRegion,
}

/// What a writer answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RingAnswer {
    /// The writer's number for the ring.
    pub sender_index: u16,
    /// The epoch that was offered.
    pub epoch: u32,
    /// Chunks that there will be in the ring at the same time, at most: each may have a credit in
    /// the writer's queue.
    pub max_chunks: u64,
    /// Do messages to the writer have a tag?
    pub tagged: bool,
    /// Where notices to the writer are written, and credit to the place of its sender_index there.
    pub credit_memory: RemoteRegion,
}

impl RingOffer {
    /// The ring's shape.
    ///
    /// # Errors
    /// `MalformedDescriptor` if there is no such ring.
    pub fn geometry(&self) -> Result<RingGeometry> {
        match RingGeometry::new(self.capacity, self.ring) {
            // Messages are counted on from what is said to be read.
            Some(geometry)
                if !self.lanes.is_empty()
                    && self.completed_messages < MAX_MESSAGES
                    && self.max_chunks > 0 =>
            {
                Ok(geometry.with_layout(self.layout))
            }
            _ => {
                let detail = format!(
                    "a ring of {} bytes with number {}, {} lanes, {} messages and {} chunks",
                    self.capacity,
                    self.ring,
                    self.lanes.len(),
                    self.completed_messages,
                    self.max_chunks
                );
                Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail))
            }
        }
    }
}
