//! An endpoint with its completion queue, and all rings on it.
//!
//! The owner of a port drives it: [`progress`](Port::progress) takes one completion and passes it
//! to its ring. The calls that wait make progress for all rings of the port. One thread, no lock.

mod blocking_calls;
mod closing;
mod events;
mod lane_operations;
mod opening;

pub use events::RingEvent;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chunk_poster::{parse_last_notice_token, parse_write_token};
use super::lanes::ExtraLanes;
use super::memory::RingMemory;
use super::notice_sender::{NOTICE_TOKEN, parse_credit_token};
use super::posted_receives::PostedReceives;
use super::queue_budget::QueueBudget;
use super::retries::Retries;
use super::{
    ChunkView, EndpointIo, Immediate, Message, Pushed, ReceivedNotice, ReceiverId, RingNotice,
    RingReceiver, RingSender, SenderId, SenderInstance,
};
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Outcome, Peer, RegionSlice, Result,
};
use blocking_calls::deadline_exceeded;

/// Steps without an event after which a port is idle: credit is returned, and calls that wait may
/// sleep.
const IDLE_POLLS: u32 = 200;

/// Outcome of one step.
#[derive(Debug)]
#[must_use = "outcomes of the caller's operations are returned here"]
pub enum PortEvent {
    /// Nothing happened.
    Idle,
    /// Something happened for a ring.
    Ring,
    /// The outcome of an operation that the caller posted.
    Other(Outcome),
}

/// An endpoint with its completion queue, and the rings on it.
///
/// Every immediate that arrives at the endpoint is taken for a ring's. The caller must not use
/// tokens whose upper bits are those of rings (0x5269, 0x5263_7620, 0x5361_6964, 0x4c61_7374,
/// 0x4372_6564). A peer with a ring on the port can forge notices for the other rings: peers that
/// do not trust each other need separate ports.
///
/// ```
/// use std::time::Duration;
/// use fabric::ring::*;
/// use fabric::*;
///
/// let offer = Query::new(EndpointKind::Rdm).source("127.0.0.1").first()?;
/// let domain = Domain::open(&offer)?;
/// let addresses = AddressVector::open(&domain)?;
/// let mut queue = CompletionQueue::open(&domain)?;
/// let endpoint = Endpoint::builder(&domain).addresses(&addresses).queue(&mut queue).open()?;
/// // A ring to itself; two processes would exchange address, offer and answer.
/// let peer = addresses.insert(&endpoint.address()?)?;
/// let mut port = Port::new(endpoint, queue);
/// let options = RingOptions::new(port.endpoint(), 1 << 20)?;
/// let reading = port.offer(&options)?;
/// let (writing, answer) = port.accept(peer, &port.ring_offer(reading)?, 64 << 10)?;
/// port.connect(reading, peer, &answer)?;
///
/// let timeout = Duration::from_secs(5);
/// let source = domain.register(HostMemory::from_vec(b"payload".to_vec())?, Access::WRITE)?;
/// let number = port.send(writing, 3, &source.all(), timeout)?;
/// let view = port.receive(reading, timeout)?;
/// assert_eq!((view.header().message, view.header().topic, view.is_last()), (number, 3, true));
/// let mut bytes = [0; 7];
/// view.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"payload");
/// // Dropping the view releases its part of the ring.
/// drop(view);
/// port.flush(writing, timeout)?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Port {
    // Closed before the memory below is freed.
    io: EndpointIo,
    posted_receives: PostedReceives,
    /// Extra lanes, and whether the next step begins with them.
    extra_lanes: Option<Box<ExtraLanes>>,
    are_lanes_next: bool,
    /// By ring index.
    receivers: Vec<Option<Box<RingReceiver>>>,
    /// Receivers whose writers may be owed credit: only these are visited before a sleep.
    owing_receivers: Vec<ReceiverId>,
    /// By sender index.
    senders: Vec<Option<Box<RingSender>>>,
    /// Some rings may need polling besides the completion queue: those in message mode, that await
    /// a header, or being closed. Serviced and computed anew when the queue is empty.
    needs_polling: bool,
    /// Peers that cannot take end notices now.
    retries: Retries,
    /// Target of notices without a chunk, and of credit.
    credit_memory: Option<MemoryRegion>,
    generation: u16,
    /// Memory of rings that peers may still write to.
    quarantine: Vec<Arc<RingMemory>>,
    /// Index of the next ring, if it is free. Indexes are used round robin, since a notice has only
    /// four bits of the epoch.
    next_ring: u16,
    /// Index of the next sender, if it is free. Indexes are used round robin: each reader counts
    /// its own epochs, so a late credit would be valid for the next ring with the same index.
    next_sender_index: u16,
    epoch: u32,
    unmatched_notices: u64,
    /// Outcomes of the caller's operations that completed during a call that waits.
    caller_outcomes: VecDeque<Outcome>,
    /// Events of rings, at most one of each, if enabled.
    events: Option<VecDeque<RingEvent>>,
    /// Entries of the queue that notices may use.
    queue_budget: QueueBudget,
}

impl Port {
    /// A port on an endpoint that reports to this queue and no other.
    #[must_use]
    pub fn new(endpoint: Endpoint, queue: CompletionQueue) -> Self {
        let posted_receives = PostedReceives::new(endpoint.domain());
        let queue_budget = QueueBudget::of(endpoint.domain().capabilities(), queue.size());
        Self {
            io: EndpointIo { endpoint, queue },
            posted_receives,
            extra_lanes: None,
            are_lanes_next: false,
            receivers: Vec::new(),
            owing_receivers: Vec::new(),
            senders: Vec::new(),
            needs_polling: false,
            retries: Retries::default(),
            credit_memory: None,
            generation: 0,
            quarantine: Vec::new(),
            next_ring: 0,
            next_sender_index: 0,
            epoch: 0,
            unmatched_notices: 0,
            caller_outcomes: VecDeque::new(),
            events: None,
            queue_budget,
        }
    }

    /// The endpoint.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.io.endpoint
    }

    /// Endpoint and queue, to post other operations. Their completions are returned by
    /// [`progress`](Self::progress).
    pub fn parts(&mut self) -> (&mut Endpoint, &mut CompletionQueue) {
        (&mut self.io.endpoint, &mut self.io.queue)
    }

    /// Takes one completion, and does what follows for the rings.
    ///
    /// # Errors
    /// Errors that concern all rings, such as receives that cannot be posted. An error of one ring
    /// is reported by the next call for that ring.
    #[inline]
    pub fn progress(&mut self) -> Result<PortEvent> {
        if let Some(other) = self.caller_outcomes.pop_front() {
            return Ok(PortEvent::Other(other));
        }
        self.progress_queue()
    }

    #[inline]
    fn progress_queue(&mut self) -> Result<PortEvent> {
        if self.extra_lanes.is_some() {
            // Every other step handles a lane event, if there is one.
            self.are_lanes_next = !self.are_lanes_next;
            if self.are_lanes_next && self.handle_lane_event() {
                return Ok(PortEvent::Ring);
            }
        }
        match self.io.queue.poll() {
            Some(outcome) => self.dispatch(outcome),
            None if !self.are_lanes_next && self.handle_lane_event() => Ok(PortEvent::Ring),
            None => self.idle(),
        }
    }

    #[inline]
    fn idle(&mut self) -> Result<PortEvent> {
        let is_due = || self.retries.next().is_some_and(|next| Instant::now() >= next);
        if self.needs_polling || is_due() { self.service_rings() } else { Ok(PortEvent::Idle) }
    }

    #[inline]
    fn dispatch(&mut self, outcome: Outcome) -> Result<PortEvent> {
        let completion = match &outcome {
            Ok(completion) => completion,
            Err(_) => return self.dispatch_failure(outcome),
        };
        if let Some(notice) = self.posted_receives.handle_notice(completion)? {
            self.handle_notice(notice);
            self.posted_receives.refill(&mut self.io)?;
        } else if let Some((instance, slot)) = parse_write_token(completion.token) {
            if let Some(sender) = sender_of(&mut self.senders, instance) {
                sender.completed(slot);
                sender.queue_event(&mut self.events);
                if sender.needs_polling() || sender.is_end_notice_due() {
                    self.needs_polling = true;
                    self.send_pending_of(instance.sender_index());
                }
            }
        } else if let Some(instance) = parse_last_notice_token(completion.token) {
            self.end_notice_completed(instance);
        } else if let Some(number) = parse_credit_token(completion.token) {
            self.credit_completed(number, None);
        } else if completion.token != NOTICE_TOKEN {
            return Ok(PortEvent::Other(outcome));
        }
        Ok(PortEvent::Ring)
    }

    /// The end notice to a reader has arrived, or never will.
    fn end_notice_completed(&mut self, instance: SenderInstance) {
        if let Some(sender) = sender_of(&mut self.senders, instance) {
            sender.end_notice_completed();
            self.needs_polling = true;
        }
    }

    /// A credit with a completion has arrived, or was lost.
    pub(super) fn credit_completed(&mut self, number: u32, lost: Option<&Error>) {
        if let Some(Some(receiver)) = self.receivers.get_mut(usize::from(number as u16))
            && receiver.credit_completed(number, lost)
        {
            // The next one may be sent.
            self.needs_polling |= receiver.is_closing();
            receiver.note_owed_credit(&mut self.owing_receivers);
            receiver.queue_event(&mut self.events);
        }
    }

    #[inline]
    fn handle_notice(&mut self, notice: ReceivedNotice) {
        let immediate = Immediate::decode(notice.bits);
        let index = usize::from(immediate.ring);
        match immediate.notice {
            RingNotice::Chunk { .. } | RingNotice::WriterClosed { .. } => {
                match self.receivers.get_mut(index) {
                    Some(Some(receiver)) => {
                        if let Err(error) = receiver.handle_notice(&immediate, notice.length) {
                            receiver.fail(error);
                        }
                        self.needs_polling |= receiver.is_closing();
                        receiver.queue_event(&mut self.events);
                    }
                    _ => self.unmatched_notices += 1,
                }
            }
            RingNotice::Credit { .. } | RingNotice::ReaderClosed => {
                match self.senders.get_mut(index) {
                    Some(Some(sender)) => {
                        sender.handle_notice(&immediate, notice.credit);
                        sender.queue_event(&mut self.events);
                        // A closed sender may have waited for its last credit.
                        self.needs_polling |=
                            immediate.notice == RingNotice::ReaderClosed || sender.is_closing();
                    }
                    _ => self.unmatched_notices += 1,
                }
            }
        }
    }

    /// A failure belongs to one ring, the caller, or the queue.
    #[cold]
    fn dispatch_failure(&mut self, outcome: Outcome) -> Result<PortEvent> {
        let Err(failure) = &outcome else { return Ok(PortEvent::Other(outcome)) };
        if failure.operation.is_none() {
            return match failure.error.kind() {
                ErrorKind::ConnectionLost | ErrorKind::ConnectionRefused | ErrorKind::Cancelled => {
                    Ok(self.handle_lost_injects(&failure.error))
                }
                _ => Err(failure.error.clone()),
            };
        }
        if let Some((instance, slot)) = parse_write_token(failure.token) {
            if let Some(sender) = sender_of(&mut self.senders, instance) {
                sender.failed(slot, failure.error.clone());
                sender.queue_event(&mut self.events);
                self.needs_polling = true;
            }
        } else if let Some(instance) = parse_last_notice_token(failure.token) {
            self.end_notice_completed(instance);
        } else if let Some(number) = parse_credit_token(failure.token) {
            self.credit_completed(number, Some(&failure.error));
        } else if PostedReceives::owns_token(failure.token) {
            // The receives of an endpoint fail when it is closed, or its only peer disconnects.
            if failure.error.kind() != ErrorKind::Truncated {
                return Err(failure.error.clone());
            }
            // A peer sent a message that is too long for a notice.
            self.posted_receives.receive_failed(failure.token);
            self.unmatched_notices += 1;
            self.posted_receives.refill(&mut self.io)?;
        } else if failure.token != NOTICE_TOKEN {
            return Ok(PortEvent::Other(outcome));
        }
        // A lost notice was credit to a dead writer: the next credit finds out which one.
        Ok(PortEvent::Ring)
    }

    /// An injected write was lost; the provider does not report which. It may have been for a dead
    /// peer, so all rings continue.
    pub(super) fn handle_lost_injects(&mut self, error: &Error) -> PortEvent {
        for sender in self.senders.iter_mut().flatten() {
            if sender.handle_lost_inject(error) {
                self.needs_polling = true;
                sender.queue_event(&mut self.events);
            }
        }
        for receiver in self.receivers.iter_mut().flatten() {
            receiver.handle_lost_inject(error);
            receiver.note_owed_credit(&mut self.owing_receivers);
            receiver.queue_event(&mut self.events);
        }
        PortEvent::Ring
    }

    fn service_rings(&mut self) -> Result<PortEvent> {
        let mut has_moved = false;
        for sender_index in 0..self.senders.len() {
            has_moved |= self.send_pending_of(sender_index as u16);
        }
        has_moved |= self.progress_close();
        if self.events.is_some() {
            // A header gets no notice.
            for receiver in self.receivers.iter_mut().flatten().filter(|it| it.awaits_header()) {
                receiver.queue_event(&mut self.events);
            }
        }
        self.posted_receives.refill(&mut self.io)?;
        self.needs_polling = self.senders.iter().flatten().any(|sender| sender.needs_polling())
            || self.receivers.iter().flatten().any(|receiver| receiver.needs_polling());
        Ok(if has_moved { PortEvent::Ring } else { PortEvent::Idle })
    }

    /// Sends the pending notices of a sender. True if it failed.
    fn send_pending_of(&mut self, sender_index: u16) -> bool {
        let Some(Some(sender)) = self.senders.get_mut(usize::from(sender_index)) else {
            return false;
        };
        let Err(error) = sender.send_pending(&mut self.io) else { return false };
        sender.fail(error);
        sender.queue_event(&mut self.events);
        true
    }

    /// Begins a message of `length` bytes, to be [pushed](Self::push). It can be abandoned until a
    /// chunk of it was posted; afterwards it must be written to its end before another one.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    #[inline]
    pub fn begin(&self, id: SenderId, topic: u32, length: u64) -> Result<Message> {
        Ok(self.sender(id)?.writer().begin(topic, length))
    }

    /// Posts a message's next chunk, if there is room. `payload` is the whole message.
    ///
    /// # Errors
    /// Why the ring is broken; `OutOfBounds` if the payload is shorter than the message;
    /// `InvalidArgument` if another message has to be written first.
    #[inline]
    pub fn push(
        &mut self,
        id: SenderId,
        message: &mut Message,
        payload: &RegionSlice,
    ) -> Result<Pushed> {
        let sender = sender_mut(&mut self.senders, id.0)?;
        sender.push_from(&mut self.io, message, (payload, 0), (u64::MAX, &[]))
    }

    /// Like [`push`](Self::push), where `part` begins at byte `at` of the message: so a message can
    /// be assembled from several memories, such as a header and a payload.
    ///
    /// # Errors
    /// As [`push`](Self::push); `OutOfBounds` if the next byte to be written is not in the part.
    #[inline]
    pub fn push_part(
        &mut self,
        id: SenderId,
        message: &mut Message,
        part: &RegionSlice,
        at: u64,
    ) -> Result<Pushed> {
        let sender = sender_mut(&mut self.senders, id.0)?;
        sender.push_part(&mut self.io, message, part, at, &[])
    }

    /// The next message that the reader has released: its memory is free.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    #[inline]
    pub fn next_read(&mut self, id: SenderId) -> Result<Option<u64>> {
        Ok(sender_mut(&mut self.senders, id.0)?.next_read())
    }

    /// The next chunk of a ring, if it has arrived.
    ///
    /// # Errors
    /// Why the ring is broken; `Closed` once the writer has closed it and every chunk was taken.
    #[inline]
    pub fn take(&mut self, id: ReceiverId) -> Result<Option<ChunkView>> {
        let receiver = receiver_mut(&mut self.receivers, id)?;
        match receiver.take()? {
            None if receiver.is_end_of_stream() => Err(end_of_stream()),
            None if receiver.credit_error().is_some() => self.take_remaining(id),
            None => {
                self.needs_polling |= receiver.awaits_header();
                Ok(None)
            }
            view => {
                receiver.note_owed_credit(&mut self.owing_receivers);
                Ok(view)
            }
        }
    }

    /// Credit cannot be sent, so the writer is probably dead. Its last chunks are in the ring, but
    /// their notices may still be in the queue.
    #[cold]
    fn take_remaining(&mut self, id: ReceiverId) -> Result<Option<ChunkView>> {
        /// Other rings may be busy without end, and the caller has a deadline.
        const MAX_POLLS: usize = 4096;
        for _ in 0..MAX_POLLS {
            let progress = self.progress_queue()?;
            let receiver = receiver_mut(&mut self.receivers, id)?;
            if let Some(view) = receiver.take()? {
                return Ok(Some(view));
            }
            match (progress, receiver.credit_error()) {
                (PortEvent::Ring, _) | (_, None) => {}
                (PortEvent::Idle, Some(credit_error)) => return Err(credit_error.clone()),
                (PortEvent::Other(outcome), _) => self.caller_outcomes.push_back(outcome),
            }
        }
        Ok(None)
    }

    /// Returns credit to a ring's writer if it is due: the watermark was passed, or, if `is_idle`,
    /// anything was released. The calls that wait do this themselves. True if credit was sent.
    ///
    /// # Errors
    /// `Closed` if there is no such ring; errors of the provider.
    #[inline]
    pub fn return_credit(&mut self, id: ReceiverId, is_idle: bool) -> Result<bool> {
        let receiver = receiver_mut(&mut self.receivers, id)?;
        let was_returned = receiver.return_credit(&mut self.io, is_idle);
        was_returned.inspect_err(|error| receiver.set_credit_error(error.clone()))
    }

    /// Like [`return_credit`](Self::return_credit), for all rings. If credit cannot be sent, only
    /// that ring is broken.
    pub fn return_all_credit(&mut self, is_idle: bool) -> bool {
        let mut has_returned = false;
        let io = &mut self.io;
        let events = &mut self.events;
        let receivers = &mut self.receivers;
        self.owing_receivers.retain(|id| {
            // It may have been closed since.
            let Ok(receiver) = receiver_mut(receivers, *id) else { return false };
            match receiver.return_credit(io, is_idle) {
                Ok(was_returned) => has_returned |= was_returned,
                Err(error) => {
                    receiver.set_credit_error(error);
                    receiver.queue_event(events);
                }
            }
            receiver.update_owed_credit()
        });
        has_returned
    }

    /// To be called between two steps without an event, in a loop that polls: see
    /// [`CompletionQueue::pause`].
    #[inline]
    pub fn pause(&self) {
        self.io.queue.pause();
    }

    /// The sender of a ring.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn sender(&self, id: SenderId) -> Result<&RingSender> {
        let sender = self.senders.get(usize::from(id.0)).and_then(Option::as_deref);
        sender.filter(|sender| !sender.is_closing()).ok_or_else(no_ring)
    }

    /// The receiver of a ring.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn receiver(&self, id: ReceiverId) -> Result<&RingReceiver> {
        let receiver = self.receivers.get(usize::from(id.ring)).and_then(Option::as_deref);
        receiver.filter(|it| it.id() == id && !it.is_closing()).ok_or_else(no_ring)
    }

    /// Number of receivers and senders, including those being closed.
    #[must_use]
    pub fn rings(&self) -> (usize, usize) {
        (self.receivers.iter().flatten().count(), self.senders.iter().flatten().count())
    }

    /// Notices for unknown rings.
    #[must_use]
    pub fn unmatched_notices(&self) -> u64 {
        self.unmatched_notices
    }

    /// No progress within a timeout, with the provider and the ring's peer.
    #[cold]
    fn deadline_error(
        &self,
        operation: &'static str,
        timeout: Duration,
        detail: String,
        peer: Option<Peer>,
    ) -> Error {
        let endpoint = &self.io.endpoint;
        let error = endpoint.domain().add_provider(deadline_exceeded(operation, timeout, &detail));
        error.with_known_peer(peer.and_then(|peer| endpoint.name_of(peer)))
    }
}

/// The sender with this index, unless that is a later instance.
#[inline]
fn sender_of(
    senders: &mut [Option<Box<RingSender>>],
    instance: SenderInstance,
) -> Option<&mut RingSender> {
    let sender = senders.get_mut(usize::from(instance.sender_index()))?.as_deref_mut();
    sender.filter(|sender| sender.instance() == instance)
}

/// A sender that is not being closed.
#[inline]
fn sender_mut(senders: &mut [Option<Box<RingSender>>], index: u16) -> Result<&mut RingSender> {
    match senders.get_mut(usize::from(index)) {
        Some(Some(sender)) if !sender.is_closing() => Ok(sender),
        _ => Err(no_ring()),
    }
}

/// A receiver that is not being closed.
#[inline]
fn receiver_mut(
    receivers: &mut [Option<Box<RingReceiver>>],
    id: ReceiverId,
) -> Result<&mut RingReceiver> {
    match receivers.get_mut(usize::from(id.ring)) {
        Some(Some(it)) if it.id() == id && !it.is_closing() => Ok(it),
        _ => Err(no_ring()),
    }
}

#[cold]
fn no_ring() -> Error {
    Error::new(ErrorKind::Closed, "use ring", "the port has no such ring")
}

#[cold]
fn end_of_stream() -> Error {
    let detail = "the writer closed the ring, and every message was read";
    Error::new(ErrorKind::Closed, "read from ring", detail)
}
