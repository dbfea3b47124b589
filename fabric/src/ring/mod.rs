//! A ring in the reader's memory, written by one peer: its protocol, without a wire.
//!
//! Nothing here knows of endpoints, threads or time. A [`WriterState`] says where the next
//! chunk of a message goes and what notice to give, or that there is no room; a
//! [`ReaderState`] takes notices in whatever order they come, says which chunk is next, and
//! when to give credit back. Whoever drives them moves the bytes.
//!
//! Positions are counted from the beginning of an epoch and never wrap; where a position
//! lies in the ring is a matter of arithmetic. With that the three invariants are
//! comparisons: the tail never passes the credit by more than the capacity, the head
//! never passes the tail, the credit never leads the head.

mod chunk_poster;
mod connection;
mod credit;
mod credit_memory;
mod geometry;
mod header;
mod immediate;
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

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod unordered_tests;

pub use connection::{RingListener, RingReader, RingSetup, RingWriter, connect, listen};
pub use geometry::ChunkLayout;
pub use header::{ChunkHeader, HEADER_LEN};
pub use lanes::{LaneSet, default_lane_count};
pub use memory::ChunkView;
pub use notify::NotifyMode;
pub use port::{Port, PortEvent, ReceiverId, RingEvent, SenderId};
pub use queue_budget::queue_entries;
pub use reader_state::ProtocolError;
pub use receiver::{ReceiverStatistics, RingOptions, RingReceiver};
pub use ring_offer::{LaneOffer, RingAnswer, RingOffer};
pub use sender::{Pushed, RingSender, SenderStatistics};
pub use writer_state::{Blocked, Message};

// The protocol itself, for simulations and fuzzing: what a port does with it is the interface.
#[doc(hidden)]
pub use credit::Credit;
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
