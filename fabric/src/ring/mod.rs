//! A ring in the reader's memory, written by one peer: the protocol without I/O.
//!
//! The protocol has no endpoints, threads or clock. A [`WriterState`] plans where the next chunk of
//! a message is written and which notice follows, or reports that there is no room. A
//! [`ReaderState`] takes notices in any order, finds the next chunk, and decides when to return
//! credit. The caller moves the bytes.
//!
//! Positions count bytes from the beginning of an epoch and never wrap; the offset in the ring is
//! computed from them. So the three invariants are comparisons: the tail never passes the credit by
//! more than the capacity, the head never passes the tail, the credit never passes the head.

mod chunk_poster;
mod connection;
mod credit_format;
mod credit_memory;
mod geometry;
mod header;
mod immediate;
mod inline_data;
mod lanes;
mod memory;
mod notice_sender;
mod notify;
mod port;
mod posted_receives;
mod queue_budget;
mod reader_state;
mod receiver;
mod retries;
mod ring_offer;
mod sender;
mod writer_state;

use crate::{CompletionQueue, Endpoint};

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod unordered_tests;

pub use connection::{RingListener, RingReader, RingSetup, RingWriter, connect, listen};
pub use geometry::{ChunkLayout, MAX_INLINE_DATA};
pub use header::{ChunkHeader, HEADER_LEN};
pub use lanes::{LaneSet, default_lane_count};
pub use memory::ChunkView;
pub use notify::NotifyMode;
pub use port::{Port, PortEvent, RingEvent};
pub use queue_budget::queue_entries;
pub use reader_state::ProtocolError;
pub use receiver::{ReceiverStatistics, RingOptions, RingReceiver};
pub use ring_offer::{LaneOffer, RingAnswer, RingOffer};
pub use sender::{Pushed, RingSender, SenderStatistics};
pub use writer_state::{Blocked, Message};

// The protocol itself, public for simulations and fuzzing; applications use `Port`.
#[doc(hidden)]
pub use credit_format::Credit;
#[doc(hidden)]
pub use geometry::{
    MAX_CAPACITY, MAX_CHUNKS, MAX_CHUNKS_SEPARATE_HEADER, MIN_GRANULE, RingGeometry,
};
#[doc(hidden)]
pub use immediate::{Immediate, RingNotice};
#[doc(hidden)]
pub use reader_state::{ArrivedChunk, HeaderLocation, ReaderState, ReleaseToken};
#[doc(hidden)]
pub use writer_state::{Chunk, Refused, WriterState};

/// The endpoint of a port or a lane, and the queue that it reports to.
#[derive(Debug)]
struct EndpointIo {
    endpoint: Endpoint,
    queue: CompletionQueue,
}

/// Distinguishes the writes of one sender from those of others, also of earlier ones with the same
/// index, whose completions may be late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct SenderInstance(u32);

impl SenderInstance {
    /// From the index of the sender on its port, and the number of senders opened before, truncated.
    fn new(sender_index: u16, generation: u16) -> Self {
        Self(u32::from(generation) << 16 | u32::from(sender_index))
    }

    #[inline]
    fn sender_index(self) -> u16 {
        self.0 as u16
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ReceivedNotice {
    bits: u32,
    /// Bytes of the write that carried it; 0 where the provider does not report them.
    length: u64,
    /// The credit in a message, behind the notice.
    credit: Option<[u8; credit_format::LENGTH]>,
}

/// A ring that a port writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SenderId(u16);

/// A ring that a port reads. An id is never reused, though its ring index may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiverId {
    ring: u16,
    /// The epoch in which it was created, unique on the port.
    creation_epoch: u32,
}
