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

mod board;
mod capacity;
mod connection;
mod credit;
mod credit_memory;
mod header;
mod immediate;
mod memory;
mod notify;
mod outlet;
mod port;
mod reader;
mod receiver;
mod retries;
mod sender;
mod shape;
mod speaker;
mod stripes;
mod terms;
mod writer;

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod unordered_tests;

pub use capacity::queue_entries;
pub use connection::{RingListener, RingReader, RingSetup, RingWriter, connect, listen};
pub use header::{HEADER, Header};
pub use memory::View;
pub use notify::Notify;
pub use port::{News, Port, ReceiverId, SenderId, Turn};
pub use reader::ProtocolError;
pub use receiver::{ReceiverStatistics, RingOptions, RingReceiver};
pub use sender::{Pushed, RingSender, SenderStatistics};
pub use shape::Layout;
pub use stripes::{Stripes, default_stripes};
pub use terms::{LaneOffer, RingAnswer, RingOffer};
pub use writer::{Blocked, Message};

// The protocol itself, for simulations and fuzzing: what a port does with it is the interface.
#[doc(hidden)]
pub use credit::Credit;
#[doc(hidden)]
pub use immediate::{Immediate, Notice};
#[doc(hidden)]
pub use reader::{Arrived, Place, Reader, Span};
#[doc(hidden)]
pub use shape::{GRANULE, LARGEST, MOST_CHUNKS, MOST_CHUNKS_APART, Shape};
#[doc(hidden)]
pub use writer::{Chunk, Refused, Writer};
