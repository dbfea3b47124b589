//! What the transport of messages knows of a topic: where its messages come from, and where they
//! go to.

use gpu::Slice;

use super::message_header::MessageHeader;
use crate::error::Result;
use crate::peers::NodeId;

/// Where a payload lies.
#[derive(Debug, Clone)]
pub enum PayloadLocation {
    /// In memory that the processor reads and writes: pushed from there, and copied to there by
    /// the processor.
    Host(Slice),
    /// In memory of a device, which copies by way of pinned memory.
    Device(Slice),
}

impl PayloadLocation {
    /// The range.
    pub fn slice(&self) -> &Slice {
        match self {
            Self::Host(slice) | Self::Device(slice) => slice,
        }
    }
}

/// A message that is to leave.
#[derive(Debug, Clone)]
pub struct OutgoingMessage<P = PayloadLocation> {
    /// All but the payload. When it is given to the wire is filled in later.
    pub header: MessageHeader,
    /// The payload, as long as the header says.
    pub place: P,
}

/// Where the messages of a topic come from.
pub trait Source<P = PayloadLocation>: Send {
    /// The next message, if there is one. Their positions grow. Each stays as it is until it is
    /// [released](Self::release).
    fn next(&mut self) -> Result<Option<OutgoingMessage<P>>>;

    /// Is the next message taken, and still being written; or was it when it was [asked](Self::next)
    /// for, and is written since, which is told once? Nobody announces when it is done: it is asked for
    /// soon.
    fn is_write_pending(&mut self) -> bool {
        false
    }

    /// This node has all messages before this position; told where all are kept, now and then, and
    /// before what it has is [released](Self::release).
    fn note_delivered(&mut self, node: NodeId, before: u64) {
        let _ = (node, before);
    }

    /// All messages up to this position are delivered by everybody who wants them, or will never
    /// be.
    fn release(&mut self, through: u64);

    /// This message will not be asked for any more, though earlier ones may be: where not all
    /// are kept for those that lag behind.
    fn release_one(&mut self, position: u64);
}

/// What became of a message that is all there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishOutcome {
    /// It is published: its writer may be told that it is delivered.
    Published,
    /// There is no room in the queue; it is asked again, as for room.
    Retry,
}

/// How long a message spent in each stage of its way, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StageDurations {
    /// Out of the device, at the writer: from the first copy's beginning to the last one's end.
    pub copy_out: u64,
    /// Into its place, from the first copy's beginning to the last one's end.
    pub copy_in: u64,
    /// From then on until the sink was asked to publish it, this time.
    pub after_copy: u64,
    /// From the arrival of its last chunk until the sink was asked to publish it, this time.
    pub after_arrival: u64,
}

/// Where the messages of one node's topic go.
pub trait Sink<P = PayloadLocation>: Send {
    /// Gives room for a message, as long as the payload. It is finished later, in the order in which
    /// they began. None yet: it is asked again, the less often the longer it had none.
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<P>>;

    /// The first of those that began is all there: publishes it.
    fn finish(&mut self, header: &MessageHeader, stages: &StageDurations) -> Result<FinishOutcome>;

    /// All that began and was not published will not be: its writer is gone. Whoever comes after
    /// brings it again.
    fn abandon(&mut self);
}

/// The time, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Now {
    /// Of a clock that only goes forward.
    pub(crate) monotonic: u64,
    /// Of the clock on the wall.
    pub(crate) realtime: u64,
}

/// What came of giving a topic its turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Something happened: there may be more.
    pub(crate) has_moved: bool,
    /// A device copies: nobody tells when it is done.
    pub(crate) is_copying: bool,
    /// Something is to be tried again, though nobody says when: room at the sink or in the
    /// provider's queue.
    pub(crate) is_waiting: bool,
}
