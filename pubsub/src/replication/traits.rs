//! What the transport of messages knows of a topic: a source and a sink of messages.

use gpu::Slice;

use super::message_header::MessageHeader;
use crate::error::Result;
use crate::ids::NodeId;

/// Location of a payload.
#[derive(Debug, Clone)]
pub enum PayloadLocation {
    /// In memory that the CPU reads and writes: sent from it, and copied into it by the CPU.
    Host(Slice),
    /// In device memory: copied through pinned host memory.
    Device(Slice),
}

impl PayloadLocation {
    /// The memory range.
    pub fn slice(&self) -> &Slice {
        match self {
            Self::Host(slice) | Self::Device(slice) => slice,
        }
    }
}

/// A message to be sent.
#[derive(Debug, Clone)]
pub struct OutgoingMessage<P = PayloadLocation> {
    /// All but the payload. `posted` is filled in when the message is posted.
    pub header: MessageHeader,
    /// The payload, as long as `header.length`.
    pub place: P,
}

/// The source of a topic's messages.
pub trait Source<P = PayloadLocation>: Send {
    /// The next message, if any. Positions grow. A message stays unchanged until it is
    /// [released](Self::release).
    fn next(&mut self) -> Result<Option<OutgoingMessage<P>>>;

    /// Returns true if the next message is taken and still being written, or was so at the last
    /// call of [`next`](Self::next) and has been written since (reported once). The end of the
    /// write sends no notification: poll soon.
    fn is_write_pending(&mut self) -> bool {
        false
    }

    /// The node has all messages before this position. Called occasionally where all messages are
    /// retained, and before these messages are [released](Self::release).
    fn note_delivered(&mut self, node: NodeId, before: u64) {
        let _ = (node, before);
    }

    /// All messages up to this position are delivered to every destination, or never will be.
    fn release(&mut self, through: u64);

    /// This message will not be read again, though earlier ones may be: where not all are retained
    /// for lagging destinations.
    fn release_one(&mut self, position: u64);
}

/// Result of publishing a complete message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishOutcome {
    /// The message is published: its writer may be told that it is delivered.
    Published,
    /// The queue is full: call again.
    Retry,
}

/// Time that a message spent in each stage, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageDurations {
    /// Out of the device, at the writer: from the start of the first copy to the end of the last.
    pub copy_out: u64,
    /// Into the sink's memory, from the start of the first copy to the end of the last.
    pub copy_in: u64,
    /// From the end of copying until this call of the sink.
    pub after_copy: u64,
    /// From the arrival of the last chunk until this call of the sink.
    pub after_arrival: u64,
    /// True if the message came by a ring in device memory.
    pub is_direct: bool,
}

/// The destination of one node's messages of a topic.
pub trait Sink<P = PayloadLocation>: Send {
    /// Allocates memory for the payload of a message. Messages are finished in the order in which
    /// they began. None if there is no memory: called again, less often the longer this lasts.
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<P>>;

    /// Publishes the first of the messages that began; its payload is complete.
    fn finish(&mut self, header: &MessageHeader, stages: &StageDurations) -> Result<FinishOutcome>;

    /// Drops all messages that began and were not published, since their writer is gone. The next
    /// writer sends them again.
    fn abandon(&mut self);
}
