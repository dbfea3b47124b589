//! What both sides of a ring agree on: capacity, index, and the layout of chunks.

use serde::{Deserialize, Serialize};

use super::header::HEADER_LEN;
use super::immediate;
use super::inline_data;

/// The smallest granule, in bytes: a cache line.
pub const MIN_GRANULE: u64 = 64;
/// Chunks that may be in a ring at the same time. A notice has the lower 16 bits of a chunk's
/// number, and duplicates must be distinguishable from chunks ahead.
pub const MAX_CHUNKS: u64 = 1 << 14;
/// Chunks of a ring with [separate headers](ChunkLayout::SeparateHeader), each of which needs its
/// own memory.
pub const MAX_CHUNKS_SEPARATE_HEADER: u64 = 1 << 10;
pub(super) const MIN_CAPACITY: u64 = 16 * MIN_GRANULE;
/// The largest ring, in bytes.
pub const MAX_CAPACITY: u64 = 1 << 40;
/// The most bytes of the application in a separate header.
pub const MAX_INLINE_DATA: u16 = 1024;

/// Where a chunk's header lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkLayout {
    /// Before the payload: one write has both.
    InlineHeader,
    /// In a slot of host memory: for rings in device memory, which the reader's processor cannot
    /// read.
    SeparateHeader,
}

/// What both sides of a ring agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingGeometry {
    capacity: u64,
    ring: u16,
    layout: ChunkLayout,
    /// Mask of offsets if the capacity is a power of two, else 0: a division by a run-time number
    /// takes as long as the rest of a chunk's arithmetic.
    mask: u64,
    /// Binary logarithm of the granule.
    granule_bits: u32,
    /// Bytes of the application that a separate header has room for.
    inline_data: u16,
}

impl RingGeometry {
    /// A ring of `capacity` bytes with an index below 1024 and [inline
    /// headers](ChunkLayout::InlineHeader). None if it is too small, too large, or not an even
    /// number of [granules](Self::granule).
    #[inline]
    pub fn new(capacity: u64, ring: u16) -> Option<Self> {
        let most = 2 * MAX_CHUNKS - 1;
        let granule = capacity.div_ceil(most).checked_next_power_of_two()?.max(MIN_GRANULE);
        let geometry = Self {
            capacity,
            ring,
            layout: ChunkLayout::InlineHeader,
            mask: if capacity.is_power_of_two() { capacity - 1 } else { 0 },
            granule_bits: granule.trailing_zeros(),
            inline_data: 0,
        };
        let is_good = (MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity)
            && capacity.is_multiple_of(2 * geometry.granule())
            && ring < immediate::MAX_RINGS;
        is_good.then_some(geometry)
    }

    /// Replaces the layout of chunks.
    #[inline]
    pub fn with_layout(self, layout: ChunkLayout) -> Self {
        Self { layout, ..self }
    }

    /// Adds room for bytes of the application in each separate header. None if there are too many,
    /// or no separate headers.
    pub fn with_inline_data(self, inline_data: u16) -> Option<Self> {
        let is_possible = inline_data == 0
            || self.layout == ChunkLayout::SeparateHeader && inline_data <= MAX_INLINE_DATA;
        is_possible.then_some(Self { inline_data, ..self })
    }

    /// Bytes of the application that a separate header has room for.
    #[inline]
    pub fn inline_data(&self) -> u16 {
        self.inline_data
    }

    /// Bytes from one separate header to the next.
    #[inline]
    pub fn header_stride(&self) -> u64 {
        match self.inline_data {
            0 => HEADER_LEN,
            room => (HEADER_LEN + inline_data::length_of(room.into()) as u64).next_multiple_of(64),
        }
    }

    /// Bytes of the ring.
    #[inline]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Index of the ring at its reader.
    #[inline]
    pub fn ring(&self) -> u16 {
        self.ring
    }

    /// The layout of chunks.
    #[inline]
    pub fn layout(&self) -> ChunkLayout {
        self.layout
    }

    /// Chunks that may be in the ring at the same time.
    #[inline]
    pub fn max_chunks(&self) -> u64 {
        let is_separate = self.layout == ChunkLayout::SeparateHeader;
        if is_separate { MAX_CHUNKS_SEPARATE_HEADER } else { MAX_CHUNKS }
    }

    /// Offset of a position in the ring.
    #[inline]
    pub fn offset(&self, position: u64) -> u64 {
        if self.mask != 0 { position & self.mask } else { position % self.capacity }
    }

    /// Bytes from a position to the end of the ring.
    #[inline]
    pub fn bytes_to_end(&self, position: u64) -> u64 {
        self.capacity - self.offset(position)
    }

    /// The most bytes of a chunk with its header: an empty ring always has room for it, wherever
    /// its end lies.
    #[inline]
    pub fn max_chunk_len(&self) -> u64 {
        self.capacity / 2
    }

    /// Chunks begin at multiples of this many bytes. A large ring has large granules: at least
    /// [`MAX_CHUNKS`] of them and fewer than twice as many, since smaller ones would not admit more
    /// chunks.
    #[inline]
    pub fn granule(&self) -> u64 {
        1 << self.granule_bits
    }

    /// Bytes from the start of a chunk to its payload.
    #[inline]
    pub fn payload_offset(&self) -> u64 {
        if self.layout == ChunkLayout::SeparateHeader { 0 } else { HEADER_LEN }
    }

    /// Bytes that a chunk with this payload occupies. An empty chunk occupies a granule, so that it
    /// can be released.
    #[inline]
    pub fn taken(&self, payload: u64) -> u64 {
        let bytes = match self.layout {
            ChunkLayout::InlineHeader => HEADER_LEN + payload,
            ChunkLayout::SeparateHeader => payload.max(1),
        };
        let rest = self.granule() - 1;
        (bytes + rest) & !rest
    }

    /// The largest payload of a chunk that occupies at most `room` bytes, a multiple of the
    /// granule.
    #[inline]
    pub fn max_payload_in(&self, room: u64) -> u64 {
        match self.layout {
            ChunkLayout::InlineHeader => room.saturating_sub(HEADER_LEN),
            ChunkLayout::SeparateHeader => room,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn max_payload_is_the_largest_that_fits(granules in 16_u64..200, room in 1_u64..100, is_separate: bool) {
            let layout = if is_separate { ChunkLayout::SeparateHeader } else { ChunkLayout::InlineHeader };
            let geometry = RingGeometry::new(granules * 128, 1).unwrap().with_layout(layout);
            let room = room * geometry.granule();
            let most = geometry.max_payload_in(room);
            prop_assert!(most == 0 || geometry.taken(most) <= room);
            prop_assert!(geometry.taken(most + 1) > room || most + 1 > room);
            prop_assert!(geometry.taken(0) > 0);
        }
    }
}
