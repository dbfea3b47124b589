//! What both sides of a ring agree on: its length, its number, and how chunks lie in it.

use serde::{Deserialize, Serialize};

use super::header::HEADER_LEN;
use super::immediate;

/// The smallest granule, in bytes: a cache line.
pub const MIN_GRANULE: u64 = 64;
/// Chunks that may be in a ring at the same time: a notice tells the lower 16 bits of
/// their numbers, and those that came already are to be told from those ahead.
pub const MAX_CHUNKS: u64 = 1 << 14;
/// The same for a ring whose headers lie [separate_header](Layout::Apart), since each of them has a
/// place there.
pub const MAX_CHUNKS_SEPARATE_HEADER: u64 = 1 << 10;
/// The smallest ring, in bytes.
pub(super) const MIN_CAPACITY: u64 = 16 * MIN_GRANULE;
/// The largest ring, in bytes.
pub const MAX_CAPACITY: u64 = 1 << 40;
/// Bytes of the flag behind a [trailing_flag](Layout::Flagged) chunk.
pub(super) const FLAG_LEN: u64 = 8;

/// Where a chunk's header lies, and what else is written with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkLayout {
    /// Before the payload: one write has both.
    InlineHeader,
    /// In a place of its own in host memory, for a ring that the reader's processor does not
    /// look into: device memory.
    SeparateHeader,
    /// Before the payload, and behind it a flag that is written last: for a reader that is
    /// not told, but looks.
    TrailingFlag,
}

/// What both sides of a ring agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingGeometry {
    capacity: u64,
    ring: u16,
    layout: ChunkLayout,
    /// Of offsets, if the capacity is a power of two, else 0: a division by a number that the
    /// compiler does not know takes as long as all the rest of a chunk's arithmetic.
    mask: u64,
    /// The granule is 2 to this.
    granule_bits: u32,
}

impl RingGeometry {
    /// A ring of so many bytes, known to its writer by a number below 1024, with headers
    /// and payload [inline_header](Layout::Together). None if it is too small, too large, or no
    /// even number of [granules](Self::granule).
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
        };
        let is_good = (MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity)
            && capacity.is_multiple_of(2 * geometry.granule())
            && ring < immediate::MAX_RINGS;
        is_good.then_some(geometry)
    }

    /// The same with chunks laid out in another way.
    #[inline]
    pub fn with_layout(self, layout: ChunkLayout) -> Self {
        Self { layout, ..self }
    }

    /// Bytes of the ring.
    #[inline]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Its number.
    #[inline]
    pub fn ring(&self) -> u16 {
        self.ring
    }

    /// How chunks lie in it.
    #[inline]
    pub fn layout(&self) -> ChunkLayout {
        self.layout
    }

    /// Chunks that may be in it at the same time.
    #[inline]
    pub fn max_chunks(&self) -> u64 {
        match self.layout {
            ChunkLayout::SeparateHeader => MAX_CHUNKS_SEPARATE_HEADER,
            ChunkLayout::InlineHeader | ChunkLayout::TrailingFlag => MAX_CHUNKS,
        }
    }

    /// Where a position lies in the ring.
    #[inline]
    pub fn offset(&self, position: u64) -> u64 {
        if self.mask != 0 { position & self.mask } else { position % self.capacity }
    }

    /// Bytes from a position to the end of the ring.
    #[inline]
    pub fn bytes_to_end(&self, position: u64) -> u64 {
        self.capacity - self.offset(position)
    }

    /// The most bytes that a chunk takes, header and all: an empty ring has always room for
    /// it, wherever its end lies.
    #[inline]
    pub fn max_chunk_len(&self) -> u64 {
        self.capacity / 2
    }

    /// Chunks begin at multiples of so many bytes. A large ring has large granules: at least
    /// [`MAX_CHUNKS`] of them and less than twice as many, since finer ones would not let
    /// more chunks in.
    #[inline]
    pub fn granule(&self) -> u64 {
        1 << self.granule_bits
    }

    /// Bytes from where a chunk begins to its payload.
    #[inline]
    pub fn payload_offset(&self) -> u64 {
        match self.layout {
            ChunkLayout::SeparateHeader => 0,
            ChunkLayout::InlineHeader | ChunkLayout::TrailingFlag => HEADER_LEN,
        }
    }

    /// Bytes that a chunk with so much payload takes. Also one with nothing takes a granule:
    /// by that its place can be given back.
    #[inline]
    pub fn taken(&self, payload: u64) -> u64 {
        let bytes = match self.layout {
            ChunkLayout::InlineHeader => HEADER_LEN + payload,
            ChunkLayout::SeparateHeader => payload.max(1),
            ChunkLayout::TrailingFlag => self.flag(payload) + FLAG_LEN,
        };
        let rest = self.granule() - 1;
        (bytes + rest) & !rest
    }

    /// Bytes from where a chunk begins to its flag.
    #[inline]
    pub(super) fn flag(&self, payload: u64) -> u64 {
        HEADER_LEN + payload.next_multiple_of(FLAG_LEN)
    }

    /// The most payload of a chunk that takes no more than so many bytes, which are whole
    /// granules.
    #[inline]
    pub fn max_payload_in(&self, room: u64) -> u64 {
        match self.layout {
            ChunkLayout::InlineHeader => room.saturating_sub(HEADER_LEN),
            ChunkLayout::SeparateHeader => room,
            ChunkLayout::TrailingFlag => room.saturating_sub(HEADER_LEN + FLAG_LEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_fits_is_what_takes_no_more(granules in 16_u64..200, room in 1_u64..100, layout in 0_usize..3) {
            let layout = [ChunkLayout::InlineHeader, ChunkLayout::SeparateHeader, ChunkLayout::TrailingFlag][layout];
            let geometry = RingGeometry::new(granules * 128, 1).unwrap().with_layout(layout);
            let room = room * geometry.granule();
            let most = geometry.max_payload_in(room);
            prop_assert!(most == 0 || geometry.taken(most) <= room);
            prop_assert!(geometry.taken(most + 1) > room || most + 1 > room);
            prop_assert!(geometry.taken(0) > 0);
        }
    }
}
