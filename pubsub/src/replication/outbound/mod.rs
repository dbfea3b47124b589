//! A topic at the node that has its messages: writes each message once, in order, into the ring of
//! every destination.
//!
//! Every destination has a cursor of its own. A message is released when the last destination has
//! acknowledged it: the credit of its ring has passed the message's end, and the local provider has
//! completed the write, whatever the credit says. Nothing here knows endpoints, threads or clocks:
//! all effects go through an [`OutboundTransport`].

mod retention;
mod staging;
mod write;

use std::collections::VecDeque;
use std::ops::Range;

use fabric::ring::{Message, Pushed};

use self::staging::StagingArea;
use super::message_header::{MessageHeader, RingMessageKind};
use super::probe::RingProbe;
use super::{ClockReading, NodeId, OutboundOptions, Progress, RingProgress, Source, TurnFailure};
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a batch buffer, which collects small messages.
pub(crate) const BATCH_BUFFER_LENGTH: usize = 16 << 10;
/// The longest payload that is copied into a batch buffer: a longer one justifies a write of its
/// own.
const MAX_BATCHED_PAYLOAD: u64 = 4096;
/// Messages read from the source ahead of the fastest destination.
const READ_AHEAD: u64 = 64;
/// Chunks posted to one destination in one turn.
const CHUNKS_PER_TURN: usize = 32;
/// Copies begun before the completion of earlier ones is polled: beginning one takes some
/// microseconds, and earlier ones may be sent meanwhile.
const COPIES_PER_TURN: usize = 8;

/// Where a message's next bytes are written from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a, P> {
    /// The start of a batch buffer.
    BatchBuffer { batch_buffer: u32, length: usize },
    /// The whole payload, where it lies.
    Direct(&'a P),
    /// A slot, from its start on.
    Slot { slot: u32, length: usize },
    /// A part of the bytes that a probe of the ring is written from.
    Probe { offset: u64, length: u64 },
    /// An empty payload.
    Nothing,
}

/// Where the memory of a ring lies.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RingForm {
    /// In host memory.
    Host,
    /// In device memory: payloads are written to it from where they lie, after the probe.
    Device { probe: Option<RingProbe> },
}

pub(crate) trait OutboundTransport {
    type Ring: Copy + PartialEq + std::fmt::Debug;
    type PayloadLocation;
    type CopyHandle;

    /// Returns true if such a payload has to be copied to a slot first.
    fn is_staged(&self, payload: &Self::PayloadLocation) -> bool;
    fn begin(&self, ring: Self::Ring, form: RingMessageKind, length: u64) -> Result<Message>;
    /// Writes a message's next chunk, from a part that lies in it from byte `at` on, with bytes
    /// beside its header.
    fn push(
        &mut self,
        ring: Self::Ring,
        message: &mut Message,
        part: (Part<'_, Self::PayloadLocation>, u64),
        inline: &[u8],
    ) -> Result<Pushed>;
    /// Returns true if the bytes are there that a probe of the ring is written from.
    fn is_probe_ready(&mut self, ring: Self::Ring) -> Result<bool>;
    /// Releases them: no write from them is in flight.
    fn end_probe(&mut self, ring: Self::Ring);
    fn ring_progress(&self, ring: Self::Ring) -> Result<RingProgress>;
    /// Returns true if no write into a ring that is not written any more is in flight, whatever its
    /// result.
    fn is_quiescent(&mut self, ring: Self::Ring) -> bool;
    fn close(&mut self, ring: Self::Ring);
    /// The longest payload of a chunk that is never split.
    fn max_single_chunk(&self, ring: Self::Ring) -> Result<usize>;

    /// A batch buffer, if one is free, or if it is the caller's first.
    fn take_batch_buffer(&mut self, is_first: bool) -> Option<u32>;
    /// Returns a batch buffer. Quarantined: writes from it may continue though nothing waits for
    /// them.
    fn release_batch_buffer(&mut self, batch_buffer: u32, is_quarantined: bool);
    fn write_batch_buffer(&mut self, batch_buffer: u32, at: usize, bytes: &[u8]) -> Result<()>;
    /// Copies a payload into a batch buffer.
    fn gather(
        &mut self,
        batch_buffer: u32,
        at: usize,
        from: &Self::PayloadLocation,
        length: usize,
    ) -> Result<()>;

    /// A slot for pieces of such a payload, under the same conditions.
    fn take_slot(&mut self, like: &Self::PayloadLocation, is_first: bool) -> Result<Option<u32>>;
    fn release_slot(&mut self, slot: u32, is_quarantined: bool);
    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()>;
    /// Begins to copy a piece of a payload to the start of a slot. Copies of a topic complete in
    /// the order in which they begin.
    fn copy_out(
        &mut self,
        slot: u32,
        from: &Self::PayloadLocation,
        offset: u64,
        length: u64,
    ) -> Result<Self::CopyHandle>;
    fn is_copied(&mut self, copy_handle: &Self::CopyHandle) -> Result<bool>;
}

/// Counters of a destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DestinationCounters {
    /// Messages that it has acknowledged.
    pub delivered: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Ring messages that held several messages.
    pub batches: u64,
    /// How often credit was exhausted.
    pub blocked: u64,
    /// Time without credit, in nanoseconds.
    pub blocked_for: u64,
    /// Lanes for large messages; 0 while it is not connected.
    pub lanes: u64,
    /// True if the destination's ring, or the last one, lies in device memory.
    pub is_direct: bool,
    /// Messages that it missed because it lagged too far.
    pub missed: u64,
}

struct Entry<P> {
    header: MessageHeader,
    payload: P,
    /// Index of the first of its pieces.
    piece_index: u64,
    /// Number of pieces: 0 if it is not staged.
    pieces: u64,
    copy_begun: Option<u64>,
    /// Released early: destinations that have not begun with it miss it.
    is_dropped: bool,
}

impl<P> Entry<P> {
    fn is_small(&self, limit: usize) -> bool {
        self.pieces == 0
            && self.header.length <= MAX_BATCHED_PAYLOAD
            && self.header.batch_length() <= limit
    }
}

/// What a write reads from.
#[derive(Debug, Clone, Copy)]
enum WriteSource {
    BatchBuffer(u32),
    Piece(u64),
}

impl WriteSource {
    /// A write has ended, as far as is known; `may_go_on` if it may still continue.
    fn finish<W: OutboundTransport>(
        self,
        staging: &mut StagingArea<W::CopyHandle>,
        wire: &mut W,
        may_go_on: bool,
    ) {
        match self {
            Self::BatchBuffer(batch_buffer) => wire.release_batch_buffer(batch_buffer, may_go_on),
            Self::Piece(piece_index) => staging.write_finished(piece_index, may_go_on),
        }
    }
}

#[derive(Debug)]
struct MessageInProgress {
    message: Message,
    start: MessageStart,
    /// Number of messages of a batch; None for a single message.
    batched: Option<u64>,
}

/// What a ring message begins with.
#[derive(Debug)]
enum MessageStart {
    /// So many bytes of a batch buffer: a whole batch, or header and metadata of a long message.
    BatchBuffer(u32, usize),
    /// The payload; header and metadata are beside the header of the chunk.
    Inline(Box<[u8]>),
}

impl MessageInProgress {
    /// Bytes of the ring message before the payload.
    fn prefix(&self) -> u64 {
        match self.start {
            MessageStart::BatchBuffer(_, length) => length as u64,
            MessageStart::Inline(_) => 0,
        }
    }
}

#[derive(Debug)]
struct OutboundProbe {
    probe: RingProbe,
    message: Option<Message>,
    /// Since when its bytes are waited for.
    since: Option<u64>,
    /// The end of its last message in the ring, once that is written.
    end: Option<u64>,
}

/// A slot with a piece in it.
#[derive(Debug)]
struct StagedPiece<T> {
    piece_index: u64,
    /// The number of its message's entry.
    entry: u64,
    slot: u32,
    /// Order of its copy among the topic's copies; set by `put`.
    order: u64,
    state: CopyState<T>,
    /// Writes from it that the provider has not completed.
    pending_writes: u32,
    /// Writes from it were abandoned, but may continue: the slot must not be reused.
    is_quarantined: bool,
}

#[derive(Debug)]
enum CopyState<T> {
    /// Being copied since this time.
    Copying(T, u64),
    Ready,
}

impl<T> StagedPiece<T> {
    fn is_copying(&self) -> bool {
        matches!(self.state, CopyState::Copying(..))
    }
}

/// The pieces that a destination will need: from this one on.
#[derive(Debug, Clone, Copy)]
struct PieceDemand {
    from: u64,
    /// The destination has no credit now.
    is_blocked: bool,
}

/// What a ring message acknowledges.
#[derive(Debug, Clone, Copy)]
struct UnacknowledgedMessage {
    /// Entries before this one are delivered with it.
    entry: u64,
    messages: u64,
    /// The message is written from copies.
    is_copied: bool,
}

struct Destination<R> {
    node: NodeId,
    ring: Option<R>,
    /// The first position that it lacks.
    from: u64,
    /// The number of the entry to be written next.
    next: u64,
    /// Entries before this one are delivered.
    delivered: u64,
    /// The last value of `delivered` reported to the source.
    reported: Option<u64>,
    in_progress: Option<MessageInProgress>,
    probe: Option<OutboundProbe>,
    /// Sources of posted writes, with their ends in the ring.
    in_flight_writes: VecDeque<(u64, WriteSource)>,
    /// Ends of messages in the ring, and what is delivered then.
    unacknowledged: VecDeque<(u64, UnacknowledgedMessage)>,
    /// Credit and completed position at the last poll.
    credit: u64,
    left: u64,
    blocked_since: Option<u64>,
    /// The provider's queue was full at its last turn.
    is_busy: bool,
    counters: DestinationCounters,
}

impl<R> Destination<R> {
    fn end_blocked(&mut self, now: ClockReading) {
        if let Some(since) = self.blocked_since.take() {
            self.counters.blocked_for += now.monotonic - since;
        }
    }
}

/// Pops the first item that ends at or before a position.
fn pop_through<T>(items: &mut VecDeque<(u64, T)>, position: u64) -> Option<(u64, T)> {
    match items.front() {
        Some((end, _)) if *end <= position => items.pop_front(),
        _ => None,
    }
}

/// A ring that is not written any more, though writes into it may be in flight. Their sources stay
/// unchanged until they complete. Otherwise a reader that does not know yet would find other bytes
/// in a message.
struct RetiringRing<R> {
    ring: R,
    /// Time of the first poll.
    since: Option<u64>,
    /// The entries whose writes may be in flight.
    entries: Range<u64>,
}

pub(crate) struct Outbound<W: OutboundTransport> {
    options: OutboundOptions,
    entries: VecDeque<Entry<W::PayloadLocation>>,
    /// The number of the first entry.
    first: u64,
    /// The position after the last message that was read; 0 before the first.
    taken_to: u64,
    /// Number of dropped entries.
    dropped: usize,
    /// Since when no entry can be added though a destination wants one.
    full_since: Option<u64>,
    /// Number of pieces of all entries so far.
    next_piece: u64,
    staging: StagingArea<W::CopyHandle>,
    destinations: Vec<Destination<W::Ring>>,
    retiring: Vec<RetiringRing<W::Ring>>,
    /// Index of the destination whose turn is first.
    turn: usize,
    lost: Vec<(NodeId, Error)>,
    demands: Vec<PieceDemand>,
}

impl<W: OutboundTransport> Outbound<W> {
    pub(crate) fn new(options: OutboundOptions) -> Self {
        Self {
            options,
            entries: VecDeque::new(),
            first: 0,
            taken_to: 0,
            dropped: 0,
            full_since: None,
            next_piece: 0,
            staging: StagingArea::new(options.slots),
            destinations: Vec::new(),
            retiring: Vec::new(),
            turn: 0,
            lost: Vec::new(),
            demands: Vec::new(),
        }
    }

    /// Adds a node that wants the messages, from the first retained one. No message is released
    /// before the node has acknowledged it, or is removed.
    pub(crate) fn add(&mut self, node: NodeId) {
        if self.destination_index(node).is_none() {
            self.destinations.push(Destination {
                node,
                ring: None,
                from: 0,
                next: self.first,
                delivered: self.first,
                reported: None,
                in_progress: None,
                probe: None,
                in_flight_writes: VecDeque::new(),
                unacknowledged: VecDeque::new(),
                credit: 0,
                left: 0,
                blocked_since: None,
                is_busy: false,
                counters: DestinationCounters::default(),
            });
        }
    }

    /// Connects a node to this empty ring, from a position on.
    pub(crate) fn connect(
        &mut self,
        node: NodeId,
        (ring, form): (W::Ring, RingForm),
        from: u64,
        wire: &mut W,
    ) {
        self.add(node);
        self.disconnect(node, wire);
        let Some(index) = self.destination_index(node) else { return };
        let destination = &mut self.destinations[index];
        destination.ring = Some(ring);
        (destination.from, destination.reported) = (from, None);
        destination.counters.is_direct = matches!(form, RingForm::Device { .. });
        destination.probe = match form {
            RingForm::Device { probe: Some(probe) } => {
                Some(OutboundProbe { probe, message: None, since: None, end: None })
            }
            _ => None,
        };
        // Earlier messages are delivered; all others are written again.
        let is_delivered = |entry: &&Entry<_>| entry.header.position < from;
        let has = self.entries.iter().take_while(is_delivered).count() as u64;
        destination.next = destination.delivered.max(self.first + has);
        destination.delivered = destination.next;
    }

    /// Closes the ring to a node: unacknowledged messages will be written again.
    pub(crate) fn disconnect(&mut self, node: NodeId, wire: &mut W) {
        let Some(index) = self.destination_index(node) else { return };
        let destination = &mut self.destinations[index];
        if let Some(ring) = destination.ring.take() {
            match wire.is_quiescent(ring) {
                true => wire.close(ring),
                false => {
                    let entries = destination.in_flight_entries();
                    self.retiring.push(RetiringRing { ring, since: None, entries });
                }
            }
        }
        // Messages released before they were acknowledged are not written again.
        destination.counters.missed += self.first.saturating_sub(destination.delivered);
        destination.delivered = destination.delivered.max(self.first);
        destination.next = destination.delivered;
        destination.unacknowledged.clear();
        (destination.credit, destination.left, destination.blocked_since) = (0, 0, None);
        (destination.is_busy, destination.probe) = (false, None);
        if let Some(MessageInProgress { message, start, .. }) = destination.in_progress.take()
            && let MessageStart::BatchBuffer(batch_buffer, _) = start
            && message.written() == 0
        {
            // Nothing of this batch buffer was written.
            wire.release_batch_buffer(batch_buffer, false);
        }
        for (_, source) in destination.in_flight_writes.drain(..) {
            source.finish(&mut self.staging, wire, true);
        }
    }

    /// Removes a node that does not want the messages any more.
    pub(crate) fn remove(&mut self, node: NodeId, wire: &mut W) {
        self.disconnect(node, wire);
        self.destinations.retain(|destination| destination.node != node);
    }

    /// Polls rings that are not written any more. True if one was closed.
    fn retire(&mut self, now: ClockReading, wire: &mut W) -> bool {
        let before = self.retiring.len();
        self.retiring.retain_mut(|retiring| {
            retiring.since.get_or_insert(now.monotonic);
            let stays = !wire.is_quiescent(retiring.ring);
            if !stays {
                wire.close(retiring.ring);
            }
            stays
        });
        self.retiring.len() < before
    }

    /// Returns true if no write is in flight.
    pub(crate) fn is_quiescent(&mut self, now: ClockReading, wire: &mut W) -> bool {
        self.retire(now, wire);
        self.retiring.is_empty()
    }

    /// Returns true if the completion of a write is overdue. Then only closing the endpoint
    /// guarantees that the provider reads no memory any more.
    pub(crate) fn is_overdue(&self, now: ClockReading) -> bool {
        let timeout = self.options.timeout;
        let is_late = |since: u64| now.monotonic.saturating_sub(since) > timeout;
        self.retiring.iter().any(|retiring| retiring.since.is_some_and(is_late))
    }

    /// Forgets retiring rings after the endpoint was closed; none is connected, and no write is in
    /// flight.
    pub(crate) fn forget_rings(&mut self) {
        debug_assert!(self.destinations.iter().all(|destination| destination.ring.is_none()));
        self.retiring.clear();
    }

    pub(crate) fn close(&mut self, wire: &mut W) {
        while let Some(destination) = self.destinations.first() {
            self.remove(destination.node, wire);
        }
        for item in self.staging.items() {
            wire.release_slot(item.slot, true);
        }
    }

    /// A connection that failed, with the cause.
    pub(crate) fn next_disconnected(&mut self) -> Option<(NodeId, Error)> {
        self.lost.pop()
    }

    /// Destinations that block the others: they lack the oldest message. If none was read, the
    /// unconnected ones.
    pub(crate) fn lagging(&self) -> Vec<NodeId> {
        let is_behind = |destination: &&Destination<_>| match self.entries.is_empty() {
            true => destination.ring.is_none(),
            false => destination.delivered == self.first,
        };
        self.destinations.iter().filter(is_behind).map(|destination| destination.node).collect()
    }

    pub(crate) fn counters(&self) -> Vec<(NodeId, DestinationCounters)> {
        self.destinations.iter().map(|it| (it.node, it.counters)).collect()
    }

    pub(crate) fn ring_of(&self, node: NodeId) -> Option<W::Ring> {
        self.destinations[self.destination_index(node)?].ring
    }

    /// Returns true if the provider's queue is full for a node's next write.
    pub(crate) fn is_busy(&self, node: NodeId) -> bool {
        self.destination_index(node).is_some_and(|index| self.destinations[index].is_busy)
    }

    fn destination_index(&self, node: NodeId) -> Option<usize> {
        self.destinations.iter().position(|destination| destination.node == node)
    }

    fn end(&self) -> u64 {
        self.first + self.entries.len() as u64
    }

    fn entry(&self, number: u64) -> Option<&Entry<W::PayloadLocation>> {
        self.entries.get(number.checked_sub(self.first)? as usize)
    }

    /// Runs one turn, with a bounded amount of work.
    pub(crate) fn advance(
        &mut self,
        now: ClockReading,
        source: &mut dyn Source<W::PayloadLocation>,
        wire: &mut W,
    ) -> Result<Progress> {
        let mut progress = Progress::default();
        progress.has_moved |= self.poll_copies(now, wire)?;
        progress.has_moved |= self.retire(now, wire);
        for index in 0..self.destinations.len() {
            match self.poll_ring(index, now, wire) {
                Ok(has_moved) => progress.has_moved |= has_moved,
                Err(error) => self.disconnect_failed(index, error, wire),
            }
        }
        self.report_delivered(source);
        progress.has_moved |= self.release(source, wire);
        progress.has_moved |= self.read_source(now, source, wire)?;
        let count = self.destinations.len();
        self.turn = if count == 0 { 0 } else { (self.turn + 1) % count };
        let turn = self.turn;
        for index in (0..count).map(|offset| (offset + turn) % count) {
            match self.write(index, now, wire, &mut progress) {
                Ok(()) => {}
                Err(TurnFailure::Connection(error)) => self.disconnect_failed(index, error, wire),
                Err(TurnFailure::Topic(error)) => return Err(error),
                // Only readers judge probes.
                Err(TurnFailure::Probe(_)) => {}
            }
        }
        if self.next_piece > 0 {
            progress.has_moved |= self.stage_more(now, wire, &mut progress)?;
        }
        progress.is_waiting |= !self.retiring.is_empty();
        progress.is_copying = self.staging.items().iter().any(StagedPiece::is_copying);
        progress.is_copying |= source.is_write_pending();
        Ok(progress)
    }

    fn disconnect_failed(&mut self, index: usize, error: Error, wire: &mut W) {
        let node = self.destinations[index].node;
        self.disconnect(node, wire);
        self.lost.push((node, error));
    }

    fn poll_copies(&mut self, now: ClockReading, wire: &mut W) -> Result<bool> {
        let mut has_moved = false;
        // Copies complete in order, and polling a device costs as much as beginning a copy: poll
        // only the oldest.
        while let Some(item) = self.staging.oldest_copy() {
            let CopyState::Copying(copy_handle, since) = &item.state else { break };
            if !wire.is_copied(copy_handle)? {
                if now.monotonic - since > self.options.timeout {
                    let detail = "the device did not copy a message out within the timeout";
                    let kind = ErrorKind::DeadlineExceeded;
                    return Err(Error::new("copy message out", kind, detail));
                }
                break;
            }
            item.state = CopyState::Ready;
            has_moved = true;
            let index = item.entry.checked_sub(self.first).map(|index| index as usize);
            let Some(entry) = index.and_then(|index| self.entries.get(index)) else { continue };
            if item.piece_index + 1 == entry.piece_index + entry.pieces {
                let took = now.monotonic - entry.copy_begun.unwrap_or(now.monotonic);
                let at = entry.header.length - (entry.pieces - 1) * self.options.piece;
                wire.write_slot(item.slot, at as usize, &took.to_le_bytes())?;
            }
        }
        Ok(has_moved)
    }

    /// Polls completed writes and acknowledged messages of one destination.
    fn poll_ring(&mut self, index: usize, now: ClockReading, wire: &mut W) -> Result<bool> {
        let destination = &mut self.destinations[index];
        let Some(ring) = destination.ring else { return Ok(false) };
        let ring_progress = wire.ring_progress(ring)?;
        let mut has_moved = false;
        while let Some((_, source)) =
            pop_through(&mut destination.in_flight_writes, ring_progress.left)
        {
            has_moved = true;
            source.finish(&mut self.staging, wire, false);
        }
        destination.left = ring_progress.left;
        let probe_end = destination.probe.as_ref().and_then(|probe| probe.end);
        if probe_end.is_some_and(|end| end <= ring_progress.left) {
            destination.probe = None;
            wire.end_probe(ring);
        }
        // A reader may claim to have read more than was completed. The claim is wrong, and the
        // provider still reads the rest.
        let read = ring_progress.read.min(ring_progress.left);
        while let Some((_, unacknowledged)) = pop_through(&mut destination.unacknowledged, read) {
            has_moved = true;
            destination.counters.delivered += unacknowledged.messages;
            destination.delivered = unacknowledged.entry;
        }
        if ring_progress.read != destination.credit {
            destination.credit = ring_progress.read;
            destination.end_blocked(now);
        }
        Ok(has_moved)
    }
}
