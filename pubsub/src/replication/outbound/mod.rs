//! A topic at the node that has its messages: writes each once into the ring of every node that
//! wants it, in order.
//!
//! Every destination has a cursor of its own; a message is released when the last has delivered
//! it, that is, when the credit of its ring has passed the message's end, and our own provider is
//! done with it, whatever credit says. Nothing here knows of endpoints, threads or clocks: what is
//! done goes through a [`OutboundTransport`].

pub(in crate::replication) mod staging;

mod retention;
mod write;

use std::collections::VecDeque;
use std::ops::Range;

use fabric::ring::{Message, Pushed};

use super::{NodeId, Now, Progress, Source};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::message_header::{MessageHeader, RingMessageKind};
use crate::replication::outbound::staging::{CopyState, PieceDemand, StagingArea};

/// Bytes of a batch buffer, on which small messages are put together.
pub(crate) const BATCH_BUFFER_LENGTH: usize = 16 << 10;
/// The longest payload that is copied to a batch buffer: what is longer is worth a write of its own.
const MAX_BATCHED_PAYLOAD: u64 = 4096;
/// Messages that are taken from the source before somebody is ready to write them.
const READ_AHEAD: u64 = 64;
/// Chunks that are given to one destination before others have their turn.
const CHUNKS_PER_TURN: usize = 32;
/// Copies that are begun before it is seen which are done: to begin one takes some microseconds, and
/// those before it may be on the wire meanwhile.
const COPIES_PER_TURN: usize = 8;

/// How far a ring is: positions of its epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RingProgress {
    /// What was written.
    pub(crate) tail: u64,
    /// Up to here the provider is done with what was written from.
    pub(crate) left: u64,
    /// Up to here the reader is known to be done.
    pub(crate) read: u64,
}

/// What a message's next bytes are written from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a, P> {
    /// The start of a batch buffer.
    BatchBuffer { batch_buffer: u32, length: usize },
    /// The whole payload, where it lies.
    Direct(&'a P),
    /// A slot, from its start on.
    Slot { slot: u32, length: usize },
}

/// What an outbound topic does things with.
pub(crate) trait OutboundTransport {
    type Ring: Copy + PartialEq + std::fmt::Debug;
    type PayloadLocation;
    type CopyHandle;

    /// Has such a payload to be copied to a slot first?
    fn is_staged(&self, place: &Self::PayloadLocation) -> bool;
    /// Begins a message of a ring.
    fn begin(&self, ring: Self::Ring, form: RingMessageKind, length: u64) -> Result<Message>;
    /// Writes a message's next chunk, from a part that lies in it from byte `at` on.
    fn push(
        &mut self,
        ring: Self::Ring,
        message: &mut Message,
        part: Part<'_, Self::PayloadLocation>,
        at: u64,
    ) -> Result<Pushed>;
    fn ring_progress(&self, ring: Self::Ring) -> Result<RingProgress>;
    /// Is nothing on its way any more into a ring that is not written any more, whatever became of
    /// it?
    fn is_quiescent(&mut self, ring: Self::Ring) -> bool;
    /// Lets go of a ring.
    fn close(&mut self, ring: Self::Ring);
    /// The longest payload of a chunk that is never split.
    fn max_single_chunk(&self, ring: Self::Ring) -> Result<usize>;

    /// A sheet, if there is one, or this is the caller's first.
    fn take_batch_buffer(&mut self, is_first: bool) -> Option<u32>;
    /// It is not used any more; or writes from it may go on, though nobody waits for them.
    fn release_batch_buffer(&mut self, batch_buffer: u32, is_quarantined: bool);
    fn write_batch_buffer(&mut self, batch_buffer: u32, at: usize, bytes: &[u8]) -> Result<()>;
    /// Copies a payload to a batch buffer.
    fn gather(
        &mut self,
        batch_buffer: u32,
        at: usize,
        from: &Self::PayloadLocation,
        length: usize,
    ) -> Result<()>;

    /// A slot for pieces of such a payload, likewise.
    fn take_slot(&mut self, like: &Self::PayloadLocation, is_first: bool) -> Result<Option<u32>>;
    fn release_slot(&mut self, slot: u32, is_quarantined: bool);
    fn write_slot(&mut self, slot: u32, at: usize, bytes: &[u8]) -> Result<()>;
    /// Begins to copy a piece of a payload to the start of a slot. Copies of a topic are done in the
    /// order in which they begin.
    fn copy_out(
        &mut self,
        slot: u32,
        from: &Self::PayloadLocation,
        offset: u64,
        length: u64,
    ) -> Result<Self::CopyHandle>;
    fn is_copied(&mut self, copy_handle: &Self::CopyHandle) -> Result<bool>;
}

/// How a topic is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutboundOptions {
    /// Bytes of a piece that is staged.
    pub(crate) piece: u64,
    /// Slots that the topic may have.
    pub(crate) slots: usize,
    /// Messages that are kept for destinations that lag; None: all.
    pub(crate) max_retained: Option<usize>,
    /// Nanoseconds that a device may take for a copy, and a provider for what it was given.
    pub(crate) timeout: u64,
}

/// What was done for a destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DestinationCounters {
    /// Messages that it has delivered.
    pub delivered: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Messages of the ring in which several were written at a time.
    pub batches: u64,
    /// Times that there was no credit.
    pub blocked: u64,
    /// How long it took until there was, in nanoseconds.
    pub blocked_for: u64,
    /// Lanes that large messages go by; 0 while it is not connected.
    pub lanes: u64,
    /// Messages that it missed since it was too far behind.
    pub missed: u64,
}

struct Entry<P> {
    header: MessageHeader,
    place: P,
    /// The first of its pieces.
    piece_index: u64,
    /// How many there are: none if it is not staged.
    pieces: u64,
    copy_begun: Option<u64>,
    /// It was released before its turn: those that have not begun with it miss it.
    is_dropped: bool,
}

impl<P> Entry<P> {
    fn is_small(&self, limit: usize) -> bool {
        self.pieces == 0
            && self.header.length <= MAX_BATCHED_PAYLOAD
            && self.header.batch_length() <= limit
    }
}

/// What a write was made from.
#[derive(Debug, Clone, Copy)]
enum WriteSource {
    BatchBuffer(u32),
    Piece(u64),
}

#[derive(Debug)]
enum MessageInProgress {
    Batch { message: Message, batch_buffer: u32, length: usize, messages: u64 },
    Long { message: Message, batch_buffer: u32, prefix: usize },
}

/// What a message of the ring brings.
#[derive(Debug, Clone, Copy)]
struct UnacknowledgedMessage {
    /// Up to this entry all is delivered with it.
    entry: u64,
    /// Of how many messages it consists.
    messages: u64,
    /// It is written from copies.
    is_copied: bool,
}

struct Destination<R> {
    node: NodeId,
    ring: Option<R>,
    /// The first position that it does not have.
    from: u64,
    /// The number of the entry to be written next.
    next: u64,
    /// Entries before this one are delivered.
    delivered: u64,
    /// What the source was told of that last.
    reported: Option<u64>,
    in_progress: Option<MessageInProgress>,
    /// What writes were made from, and where in the ring they end.
    in_flight_writes: VecDeque<(u64, WriteSource)>,
    /// Where messages end in the ring, and what is delivered then.
    unacknowledged: VecDeque<(u64, UnacknowledgedMessage)>,
    /// The credit that was known when it was looked at last, and what had left.
    credit: u64,
    left: u64,
    blocked_since: Option<u64>,
    /// The provider had no room for it when it had its turn last.
    is_busy: bool,
    counters: DestinationCounters,
}

impl<R> Destination<R> {
    fn end_blocked(&mut self, now: Now) {
        if let Some(since) = self.blocked_since.take() {
            self.counters.blocked_for += now.monotonic - since;
        }
    }
}

/// The first of those that end somewhere, if that is no further than this.
fn pop_through<T>(ends: &mut VecDeque<(u64, T)>, position: u64) -> Option<(u64, T)> {
    match ends.front() {
        Some((end, _)) if *end <= position => ends.pop_front(),
        _ => None,
    }
}

/// A ring that is not written any more, though writes may be on their way to it: what they are made
/// from stays as it is until they are over. Else its reader, who may not know yet, would find
/// other bytes in a message.
struct RetiringRing<R> {
    ring: R,
    /// When it was looked after first.
    since: Option<u64>,
    /// The entries that may be on their way.
    entries: Range<u64>,
}

/// Why something cannot go on.
enum OutboundFailure {
    /// It is the topic's fault.
    Topic(Error),
    /// That of the connection to one node.
    Peer(Error),
}

/// A topic at the node that has its messages.
pub(crate) struct Outbound<W: OutboundTransport> {
    options: OutboundOptions,
    entries: VecDeque<Entry<W::PayloadLocation>>,
    /// The number of the first of them.
    first: u64,
    /// The position after that of the last one that was taken; 0 before the first.
    taken_to: u64,
    /// How many of them are gone.
    dropped: usize,
    /// Since when there was no room for one more, though some want it.
    full_since: Option<u64>,
    /// Pieces of all entries so far.
    next_piece: u64,
    staging: StagingArea<W::CopyHandle>,
    destinations: Vec<Destination<W::Ring>>,
    retiring: Vec<RetiringRing<W::Ring>>,
    /// Whose turn is first.
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

    /// A node that wants the messages, from the first one that is kept on. Nothing is released
    /// that it has not delivered, until it is removed.
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

    /// Writes to a node into this ring, which is empty, from a position on.
    pub(crate) fn connect(&mut self, node: NodeId, ring: W::Ring, from: u64, wire: &mut W) {
        self.add(node);
        self.disconnect(node, wire);
        let Some(place) = self.destination_index(node) else { return };
        let destination = &mut self.destinations[place];
        destination.ring = Some(ring);
        (destination.from, destination.reported) = (from, None);
        // What it has is delivered, and what it has not is written again.
        let is_there = |entry: &&Entry<_>| entry.header.position < from;
        let has = self.entries.iter().take_while(is_there).count() as u64;
        destination.next = destination.delivered.max(self.first + has);
        destination.delivered = destination.next;
    }

    /// The ring to a node is gone: what was written and not delivered is to be written again.
    pub(crate) fn disconnect(&mut self, node: NodeId, wire: &mut W) {
        let Some(place) = self.destination_index(node) else { return };
        let destination = &mut self.destinations[place];
        if let Some(ring) = destination.ring.take() {
            match wire.is_quiescent(ring) {
                true => wire.close(ring),
                false => {
                    let entries = destination.on_its_way();
                    self.retiring.push(RetiringRing { ring, since: None, entries });
                }
            }
        }
        // What was let go of before it was known to be there is not written again.
        destination.counters.missed += self.first.saturating_sub(destination.delivered);
        destination.delivered = destination.delivered.max(self.first);
        destination.next = destination.delivered;
        destination.unacknowledged.clear();
        (destination.credit, destination.left, destination.blocked_since) = (0, 0, None);
        destination.is_busy = false;
        match destination.in_progress.take() {
            // Nothing of a batch buffer that is not among the held ones was written.
            Some(MessageInProgress::Batch { batch_buffer, .. }) => {
                wire.release_batch_buffer(batch_buffer, false)
            }
            Some(MessageInProgress::Long { message, batch_buffer, .. })
                if message.written() == 0 =>
            {
                wire.release_batch_buffer(batch_buffer, false);
            }
            _ => {}
        }
        for (_, hold) in destination.in_flight_writes.drain(..) {
            match hold {
                WriteSource::BatchBuffer(batch_buffer) => {
                    wire.release_batch_buffer(batch_buffer, true)
                }
                WriteSource::Piece(piece_index) => self.staging.write_finished(piece_index, true),
            }
        }
    }

    /// A node does not want the messages any more.
    pub(crate) fn remove(&mut self, node: NodeId, wire: &mut W) {
        self.disconnect(node, wire);
        self.destinations.retain(|destination| destination.node != node);
    }

    /// Looks after rings that are not written any more. True if one is gone.
    fn retire(&mut self, now: Now, wire: &mut W) -> bool {
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

    /// Is nothing that was written on its way any more?
    pub(crate) fn is_quiescent(&mut self, now: Now, wire: &mut W) -> bool {
        self.retire(now, wire);
        self.retiring.is_empty()
    }

    /// Does a provider not say for too long what became of something? Then only closing the
    /// endpoint makes sure that it reads from nowhere any more.
    pub(crate) fn is_overdue(&self, now: Now) -> bool {
        let timeout = self.options.timeout;
        let is_late = |since: u64| now.monotonic.saturating_sub(since) > timeout;
        self.retiring.iter().any(|retiring| retiring.since.is_some_and(is_late))
    }

    /// The endpoint is going to be closed: no ring is written any more.
    pub(crate) fn disconnect_all(&mut self, wire: &mut W) {
        let nodes: Vec<_> = self.destinations.iter().map(|destination| destination.node).collect();
        nodes.into_iter().for_each(|node| self.disconnect(node, wire));
    }

    /// The endpoint is closed, and with it all rings, of which none is to be connected: nothing
    /// is on its way any more.
    pub(crate) fn forget_rings(&mut self) {
        debug_assert!(self.destinations.iter().all(|destination| destination.ring.is_none()));
        self.retiring.clear();
    }

    /// Lets go of everything.
    pub(crate) fn close(&mut self, wire: &mut W) {
        while let Some(destination) = self.destinations.first() {
            self.remove(destination.node, wire);
        }
        for item in self.staging.items() {
            wire.release_slot(item.slot, true);
        }
    }

    /// A ring that broke, and why; it is not used any more.
    pub(crate) fn next_disconnected(&mut self) -> Option<(NodeId, Error)> {
        self.lost.pop()
    }

    /// Those that hold up the others: they do not have the oldest message. If none was taken, that
    /// is because they are not connected.
    pub(crate) fn lagging(&self) -> Vec<NodeId> {
        let is_behind = |destination: &&Destination<_>| match self.entries.is_empty() {
            true => destination.ring.is_none(),
            false => destination.delivered == self.first,
        };
        self.destinations.iter().filter(is_behind).map(|destination| destination.node).collect()
    }

    pub(crate) fn counters(&self) -> Vec<(NodeId, DestinationCounters)> {
        let of = |destination: &Destination<_>| (destination.node, destination.counters);
        self.destinations.iter().map(of).collect()
    }

    /// The ring of a node that is connected.
    pub(crate) fn ring_of(&self, node: NodeId) -> Option<W::Ring> {
        self.destinations[self.destination_index(node)?].ring
    }

    /// Has the provider no room for what a node is to be written next?
    pub(crate) fn is_busy(&self, node: NodeId) -> bool {
        self.destination_index(node).is_some_and(|place| self.destinations[place].is_busy)
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

    /// Does what can be done now, a bounded amount.
    pub(crate) fn advance(
        &mut self,
        now: Now,
        source: &mut (impl Source<W::PayloadLocation> + ?Sized),
        wire: &mut W,
    ) -> Result<Progress> {
        let mut progress = Progress::default();
        progress.has_moved |= self.poll_copies(now, wire)?;
        progress.has_moved |= self.retire(now, wire);
        for place in 0..self.destinations.len() {
            match self.poll_ring(place, now, wire) {
                Ok(has_moved) => progress.has_moved |= has_moved,
                Err(error) => self.disconnect_failed(place, error, wire),
            }
        }
        self.report_delivered(source);
        progress.has_moved |= self.release(source, wire);
        progress.has_moved |= self.read_source(now, source, wire)?;
        let count = self.destinations.len();
        self.turn = if count == 0 { 0 } else { (self.turn + 1) % count };
        let turn = self.turn;
        for place in (0..count).map(|place| (place + turn) % count) {
            match self.write(place, now, wire, &mut progress) {
                Ok(()) => {}
                Err(OutboundFailure::Peer(error)) => self.disconnect_failed(place, error, wire),
                Err(OutboundFailure::Topic(error)) => return Err(error),
            }
        }
        if self.next_piece > 0 {
            progress.has_moved |= self.stage_more(now, wire, &mut progress)?;
        }
        progress.is_waiting |= !self.retiring.is_empty();
        progress.is_copying =
            self.staging.items().iter().any(|item| matches!(item.state, CopyState::Copying(..)));
        progress.is_copying |= source.is_write_pending();
        Ok(progress)
    }

    fn disconnect_failed(&mut self, place: usize, error: Error, wire: &mut W) {
        let node = self.destinations[place].node;
        self.disconnect(node, wire);
        self.lost.push((node, error));
    }

    fn poll_copies(&mut self, now: Now, wire: &mut W) -> Result<bool> {
        let mut has_moved = false;
        // They end in the order in which they began, and to ask a device costs as much as to begin
        // one: so only the oldest is asked for.
        while let Some(item) = self.staging.oldest_copy() {
            let CopyState::Copying(copy_handle, since) = &item.state else { break };
            if !wire.is_copied(copy_handle)? {
                if now.monotonic - since > self.options.timeout {
                    let detail = "a device did not copy a message out in time";
                    return Err(Error::new("stage", ErrorKind::DeadlineExceeded, detail));
                }
                break;
            }
            item.state = CopyState::Ready;
            has_moved = true;
            let place = item.entry.checked_sub(self.first).map(|place| place as usize);
            let Some(entry) = place.and_then(|place| self.entries.get(place)) else { continue };
            if item.piece_index + 1 == entry.piece_index + entry.pieces {
                let took = now.monotonic - entry.copy_begun.unwrap_or(now.monotonic);
                let at = entry.header.length - (entry.pieces - 1) * self.options.piece;
                wire.write_slot(item.slot, at as usize, &took.to_le_bytes())?;
            }
        }
        Ok(has_moved)
    }

    /// What left, and what was delivered.
    fn poll_ring(&mut self, place: usize, now: Now, wire: &mut W) -> Result<bool> {
        let destination = &mut self.destinations[place];
        let Some(ring) = destination.ring else { return Ok(false) };
        let ring_progress = wire.ring_progress(ring)?;
        let mut has_moved = false;
        while let Some((_, hold)) =
            pop_through(&mut destination.in_flight_writes, ring_progress.left)
        {
            has_moved = true;
            match hold {
                WriteSource::BatchBuffer(batch_buffer) => {
                    wire.release_batch_buffer(batch_buffer, false)
                }
                WriteSource::Piece(piece_index) => self.staging.write_finished(piece_index, false),
            }
        }
        destination.left = ring_progress.left;
        // What a reader says that it has read may be more than what has left: then it is not so,
        // and the provider still reads from where the rest lies.
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
