//! A ring in the reader's memory, written by one peer: its protocol, without a wire.
//!
//! Nothing here knows of endpoints, threads or time. A [`Writer`] says where the next
//! chunk of a message goes and what notice to give, or that there is no room; a
//! [`Reader`] takes notices in whatever order they come, says which chunk is next, and
//! when to give credit back. Whoever drives them moves the bytes.
//!
//! Positions are counted from the beginning of an epoch and never wrap; where a position
//! lies in the ring is a matter of arithmetic. With that the three invariants are
//! comparisons: the tail never passes the credit by more than the capacity, the head
//! never passes the tail, the credit never leads the head.

mod header;
mod immediate;
mod reader;
mod receiver;
mod sender;
mod writer;

#[cfg(test)]
mod model_tests;

pub use header::{HEADER, Header};
pub use immediate::{Immediate, Notice};
pub use reader::{Arrived, ProtocolError, Reader, Span};
pub use receiver::{RingReceiver, View};
pub use sender::{Pushed, RingSender};
pub use writer::{Blocked, Chunk, Message, Writer, exceeds};

/// The smallest granule, in bytes: a cache line.
pub const GRANULE: u64 = 64;
/// Chunks that may be in a ring at the same time: a notice tells the lower 16 bits of
/// their numbers, and those that came already are to be told from those ahead.
pub const MOST_CHUNKS: u64 = 1 << 14;
/// The smallest ring, in bytes.
pub const SMALLEST: u64 = 16 * GRANULE;
/// The largest ring, in bytes.
pub const LARGEST: u64 = 1 << 40;

/// What both sides of a ring agree on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    capacity: u64,
    ring: u16,
}

impl Shape {
    /// A ring of so many bytes, known to both sides by a number below 1024. None if it is
    /// too small, too large, or no even number of [granules](Self::granule).
    #[must_use]
    pub fn new(capacity: u64, ring: u16) -> Option<Self> {
        let shape = Self { capacity, ring };
        let is_good = (SMALLEST..=LARGEST).contains(&capacity)
            && capacity.is_multiple_of(2 * shape.granule())
            && ring < immediate::RINGS;
        is_good.then_some(shape)
    }

    /// Bytes of the ring.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Its number.
    #[must_use]
    pub fn ring(&self) -> u16 {
        self.ring
    }

    /// Where a position lies in the ring.
    #[must_use]
    pub fn offset(&self, position: u64) -> u64 {
        position % self.capacity
    }

    /// Bytes from a position to the end of the ring.
    #[must_use]
    pub fn until_end(&self, position: u64) -> u64 {
        self.capacity - self.offset(position)
    }

    /// The most bytes of a chunk, header and all: an empty ring has always room for it,
    /// wherever its end lies.
    #[must_use]
    pub fn longest_chunk(&self) -> u64 {
        self.capacity / 2
    }

    /// Chunks begin at multiples of so many bytes, and credit is told in these: as fine as
    /// it fits a notice, in which half the numbers stand for the past. So a whole ring is
    /// less than half of them. A large ring has large granules, but no larger than its
    /// share of [`MOST_CHUNKS`].
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.capacity.div_ceil((1 << 15) - 1).next_power_of_two().max(GRANULE)
    }

    /// Bytes that a chunk with so much payload takes.
    #[must_use]
    pub fn taken(&self, payload: u64) -> u64 {
        (HEADER + payload).next_multiple_of(self.granule())
    }
}
