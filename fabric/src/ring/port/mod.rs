//! One endpoint with its queue, and all the rings that end on it.
//!
//! Whoever owns a port drives it: [`progress`](Port::turn) takes one thing from the queue and gives
//! it to the ring that it concerns. The calls that wait do it by turns, so that all rings of
//! the port go on meanwhile. One thread, no lock.

mod closing;
mod events;
mod lanes;
mod opening;
mod waiting;

pub use events::RingEvent;

use std::collections::VecDeque;
use std::time::Instant;

use super::chunk_poster::{SenderInstance, parse_write_token};
use super::immediate::{Immediate, RingNotice};
use super::lanes::ExtraLanes;
use super::memory::ChunkView;
use super::notice_sender::{NOTICE_TOKEN, parse_credit_token};
use super::notify::NotifyMode;
use super::posted_receives::{PostedReceives, ReceivedNotice};
use super::queue_budget::QueueBudget;
use super::receiver::RingReceiver;
use super::retries::Retries;
use super::sender::{Pushed, RingSender};
use super::writer_state::Message;
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Outcome, Peer, RegionSlice, Result,
};
use closing::QuarantinedMemory;
use events::{queue_receiver_event, queue_sender_event};

/// Turns without anything after which it is quiet: writers are told what was released, and
/// whoever waits may sleep.
const IDLE_POLLS: u32 = 200;

/// A ring that this side writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SenderId(u16);

/// A ring that this side reads. When it is gone no other one is called so, though its number may be
/// another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiverId {
    ring: u16,
    /// The epoch that it was made in, of all rings of the port.
    creation_epoch: u32,
}

/// What a turn did.
#[derive(Debug)]
#[must_use = "what is no ring's business is the caller's"]
pub enum PortEvent {
    /// Nothing.
    Idle,
    /// Something for a ring.
    Ring,
    /// The outcome of an operation that the caller posted.
    Other(Outcome),
}

/// An endpoint with its queue, and the rings that end on it.
///
/// Every immediate that comes to the endpoint is taken for a ring's, and tokens whose upper bits
/// are those of a ring's operations (0x5269, 0x5263_7620, 0x5361_6964, 0x4c61_7374, 0x4372_6564)
/// are not for the caller's own. A peer that has a ring on the port can give notices for the rings of others:
/// those who do not trust each other want ports of their own.
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
/// // To itself, for once; two processes would exchange address, offer and answer.
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
/// // Dropped, its place is the writer's again, who is told by and by.
/// drop(view);
/// port.flush(writing, timeout)?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Port {
    // Closed before the memory below goes.
    endpoint: Endpoint,
    queue: CompletionQueue,
    posted_receives: PostedReceives,
    /// Further lanes, and whether they come first at the next turn.
    extra_lanes: Option<Box<ExtraLanes>>,
    are_lanes_next: bool,
    /// By number.
    receivers: Vec<Option<Box<RingReceiver>>>,
    /// By name.
    senders: Vec<Option<Box<RingSender>>>,
    /// Some rings may want more than to be told of what the queue gave: those that are polled,
    /// or have notices to send, or end. Looked at, and found out anew, when the queue is empty.
    needs_polling: bool,
    /// Peers that cannot be told of ends now.
    retries: Retries,
    /// Where notices without a chunk are written, and credit.
    credit_memory: Option<MemoryRegion>,
    generation: u16,
    quarantine: QuarantinedMemory,
    /// The number of the next ring, if it is free. All take their turns, as names do: a notice
    /// has four bits of the epoch.
    next_ring: u16,
    /// The name of the next sender, if it is free. All take their turns: readers count epochs
    /// each by itself, so credit that is late could not be told from that of another reader
    /// whose ring has the same name.
    next_sender_index: u16,
    epoch: u32,
    /// Notices for rings that there are none of.
    unmatched_notices: u64,
    /// Outcomes of what the caller posted, that came while something else was waited for.
    caller_outcomes: VecDeque<Outcome>,
    /// Rings that something happened for, each once, if somebody wants to know.
    events: Option<VecDeque<RingEvent>>,
    /// Room for notices in the queue.
    queue_budget: QueueBudget,
}

impl Port {
    /// A port on an endpoint that reports to this queue, and has no other.
    #[must_use]
    pub fn new(endpoint: Endpoint, queue: CompletionQueue) -> Self {
        let posted_receives = PostedReceives::new(endpoint.domain());
        let queue_budget = QueueBudget::of(endpoint.domain().capabilities(), queue.size());
        Self {
            endpoint,
            queue,
            posted_receives,
            extra_lanes: None,
            are_lanes_next: false,
            receivers: Vec::new(),
            senders: Vec::new(),
            needs_polling: false,
            retries: Retries::default(),
            credit_memory: None,
            generation: 0,
            quarantine: QuarantinedMemory::default(),
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
        &self.endpoint
    }

    /// Endpoint and queue, to post other operations with. What the queue gives must be
    /// fetched by [`progress`](Self::turn).
    pub fn parts(&mut self) -> (&mut Endpoint, &mut CompletionQueue) {
        (&mut self.endpoint, &mut self.queue)
    }

    /// Takes one thing from the queue, and does what is to be done for the rings.
    ///
    /// # Errors
    /// What concerns all rings: receives that cannot be posted. What concerns one is
    /// told when that one is used.
    #[inline]
    pub fn progress(&mut self) -> Result<PortEvent> {
        if let Some(other) = self.caller_outcomes.pop_front() {
            return Ok(PortEvent::Other(other));
        }
        self.progress_queue()
    }

    #[inline]
    fn progress_queue(&mut self) -> Result<PortEvent> {
        if self.extra_lanes.is_some()
            && let Some(progress) = self.progress_lanes()
        {
            return Ok(progress);
        }
        match self.queue.poll() {
            Some(outcome) => self.dispatch(outcome),
            None if !self.are_lanes_next && self.handle_lane_event() => Ok(PortEvent::Ring),
            None => self.idle(),
        }
    }

    /// The queue had nothing.
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
            self.posted_receives.refill(&mut self.endpoint, &mut self.queue)?;
        } else if let Some((instance, slot)) = parse_write_token(completion.token) {
            if let Some(Some(sender)) = self.senders.get_mut(usize::from(instance.sender_index)) {
                sender.completed(instance, slot);
                queue_sender_event(&mut self.events, instance.sender_index, sender);
                if sender.needs_polling() || sender.is_end_notice_due() {
                    self.needs_polling = true;
                    self.send_pending_of(instance.sender_index);
                }
            }
        } else if let Some(instance) = SenderInstance::from_last_notice_token(completion.token) {
            self.end_notice_completed(instance);
        } else if let Some(number) = parse_credit_token(completion.token) {
            self.credit_completed(number, None);
        } else if completion.token != NOTICE_TOKEN {
            return Ok(PortEvent::Other(outcome));
        }
        Ok(PortEvent::Ring)
    }

    /// The last word to a reader came, or never will.
    fn end_notice_completed(&mut self, instance: SenderInstance) {
        if let Some(Some(sender)) = self.senders.get_mut(usize::from(instance.sender_index)) {
            sender.end_notice_completed(instance);
            self.needs_polling = true;
        }
    }

    /// A credit that the next one waits for arrived, or was lost.
    fn credit_completed(&mut self, number: u32, lost: Option<&Error>) {
        if let Some(Some(receiver)) = self.receivers.get_mut(usize::from(number as u16))
            && receiver.credit_completed(number, lost)
        {
            // The next one may be told.
            self.needs_polling |= receiver.is_closing();
            queue_receiver_event(&mut self.events, number as u16, receiver);
        }
    }

    /// Gives a notice to whom it concerns.
    #[inline]
    fn handle_notice(&mut self, notice: ReceivedNotice) {
        let immediate = Immediate::decode(notice.bits);
        let place = usize::from(immediate.ring);
        match immediate.notice {
            RingNotice::Chunk { .. } | RingNotice::WriterClosed { .. } => {
                match self.receivers.get_mut(place) {
                    Some(Some(receiver)) => {
                        if let Err(error) = receiver.handle_notice(&immediate, notice.length) {
                            receiver.fail(error);
                        }
                        self.needs_polling |= receiver.is_closing();
                        queue_receiver_event(&mut self.events, immediate.ring, receiver);
                    }
                    _ => self.unmatched_notices += 1,
                }
            }
            RingNotice::Credit { .. } | RingNotice::ReaderClosed => {
                match self.senders.get_mut(place) {
                    Some(Some(sender)) => {
                        sender.handle_notice(&immediate, notice.credit);
                        queue_sender_event(&mut self.events, immediate.ring, sender);
                        // One that is gone may have waited for its last credit.
                        self.needs_polling |=
                            immediate.notice == RingNotice::ReaderClosed || sender.is_closing();
                    }
                    _ => self.unmatched_notices += 1,
                }
            }
        }
    }

    /// A failure is one ring's, the caller's, or the queue's.
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
            if let Some(Some(sender)) = self.senders.get_mut(usize::from(instance.sender_index)) {
                sender.failed(instance, slot, failure.error.clone());
                queue_sender_event(&mut self.events, instance.sender_index, sender);
                self.needs_polling = true;
            }
            return Ok(PortEvent::Ring);
        }
        if let Some(instance) = SenderInstance::from_last_notice_token(failure.token) {
            self.end_notice_completed(instance);
            return Ok(PortEvent::Ring);
        }
        if let Some(number) = parse_credit_token(failure.token) {
            self.credit_completed(number, Some(&failure.error));
            return Ok(PortEvent::Ring);
        }
        if failure.token == NOTICE_TOKEN {
            // Credit to a writer that is gone: which one shows when it is told next.
            return Ok(PortEvent::Ring);
        }
        if PostedReceives::owns_token(failure.token) {
            // The receives of an endpoint fail when it is closed, or its one peer is gone.
            if failure.error.kind() != ErrorKind::Truncated {
                return Err(failure.error.clone());
            }
            // Somebody sent a message that is too long for a notice.
            self.posted_receives.receive_failed(failure.token);
            self.unmatched_notices += 1;
            self.posted_receives.refill(&mut self.endpoint, &mut self.queue)?;
            return Ok(PortEvent::Ring);
        }
        Ok(PortEvent::Other(outcome))
    }

    /// Something that was injected did not leave; whose it was is not said. It may have been
    /// for a peer that is gone, and the rings of all others go on.
    pub(super) fn handle_lost_injects(&mut self, error: &Error) -> PortEvent {
        for (sender_index, sender) in (0..).zip(&mut self.senders) {
            let Some(sender) = sender else { continue };
            if sender.handle_lost_inject(error) {
                self.needs_polling = true;
                queue_sender_event(&mut self.events, sender_index, sender);
            }
        }
        for (ring, receiver) in (0..).zip(&mut self.receivers) {
            let Some(receiver) = receiver else { continue };
            receiver.handle_lost_inject(error);
            queue_receiver_event(&mut self.events, ring, receiver);
        }
        PortEvent::Ring
    }

    /// For rings that nobody tells: what they want to be looked after.
    fn service_rings(&mut self) -> Result<PortEvent> {
        let mut has_moved = false;
        for sender_index in 0..self.senders.len() {
            has_moved |= self.send_pending_of(sender_index as u16);
        }
        has_moved |= self.progress_close();
        if self.events.is_some() {
            // Nobody tells of these.
            for (ring, receiver) in (0..).zip(&mut self.receivers) {
                let Some(receiver) = receiver else { continue };
                if receiver.notify() == NotifyMode::Polling || receiver.awaits_header() {
                    queue_receiver_event(&mut self.events, ring, receiver);
                }
            }
        }
        self.posted_receives.refill(&mut self.endpoint, &mut self.queue)?;
        self.needs_polling = self.senders.iter().flatten().any(|sender| sender.needs_polling())
            || self.receivers.iter().flatten().any(|receiver| receiver.needs_polling());
        Ok(if has_moved { PortEvent::Ring } else { PortEvent::Idle })
    }

    fn send_pending_of(&mut self, sender_index: u16) -> bool {
        let Some(Some(sender)) = self.senders.get_mut(usize::from(sender_index)) else {
            return false;
        };
        let has_moved = match sender.send_pending(&mut self.endpoint, &mut self.queue) {
            Ok(has_moved) => has_moved,
            Err(error) => {
                sender.fail(error);
                true
            }
        };
        if has_moved {
            queue_sender_event(&mut self.events, sender_index, sender);
        }
        has_moved
    }

    /// Begins a message of so many bytes in a ring, to be [pushed](Self::push). It can be let go of
    /// until a chunk of it was posted; after that it must be written to its end before another
    /// one is.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    #[inline]
    pub fn begin(&self, id: SenderId, topic: u32, length: u64) -> Result<Message> {
        Ok(self.sender(id)?.writer().begin(topic, length))
    }

    /// Posts a message's next chunk, if there is room for it. `payload` is the whole message.
    ///
    /// # Errors
    /// Why nothing more can be written to this ring; `OutOfBounds` if the payload is shorter
    /// than the message; `InvalidArgument` if it is not this message's turn.
    #[inline]
    pub fn push(
        &mut self,
        id: SenderId,
        message: &mut Message,
        payload: &RegionSlice,
    ) -> Result<Pushed> {
        let sender = find(&mut self.senders, id.0)?;
        sender.push(&mut self.endpoint, &mut self.queue, message, payload)
    }

    /// The same, where `part` is what lies in the message from byte `at` on: so a message is put
    /// together from pieces of several memories, such as a header and what it is about.
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
        let sender = find(&mut self.senders, id.0)?;
        sender.push_part(&mut self.endpoint, &mut self.queue, message, part, at)
    }

    /// The next message that the reader let go of: its memory is free.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    #[inline]
    pub fn next_read(&mut self, id: SenderId) -> Result<Option<u64>> {
        Ok(find(&mut self.senders, id.0)?.next_read())
    }

    /// The next chunk of a ring, if it is there.
    ///
    /// # Errors
    /// Why nothing more can be read from this ring; `Closed` once the writer is done and
    /// everything is taken.
    #[inline]
    pub fn take(&mut self, id: ReceiverId) -> Result<Option<ChunkView>> {
        let receiver = open(&mut self.receivers, id)?;
        match receiver.take()? {
            None if receiver.is_end_of_stream() => Err(end_of_stream()),
            None if receiver.credit_error().is_some() => self.take_remaining(id),
            None => {
                self.needs_polling |= receiver.awaits_header();
                Ok(None)
            }
            view => Ok(view),
        }
    }

    /// The writer cannot be told any more, so it is most likely gone. What it wrote before is in
    /// the ring, and may not have been heard yet.
    #[cold]
    fn take_remaining(&mut self, id: ReceiverId) -> Result<Option<ChunkView>> {
        /// Others may keep us busy without end; our caller has a deadline.
        const MAX_POLLS: usize = 4096;
        for _ in 0..MAX_POLLS {
            let progress = self.progress_queue()?;
            let receiver = open(&mut self.receivers, id)?;
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

    /// Tells a ring's writer what was released, if it is time: a watermark was passed, or, if
    /// it is quiet, something was released at all. The calls that wait do this by themselves.
    /// True if something was told.
    ///
    /// # Errors
    /// `Closed` if there is no such ring; what the fabric says.
    #[inline]
    pub fn return_credit(&mut self, id: ReceiverId, is_idle: bool) -> Result<bool> {
        let receiver = open(&mut self.receivers, id)?;
        let was_returned = receiver.return_credit(&mut self.endpoint, &mut self.queue, is_idle);
        was_returned.inspect_err(|error| receiver.set_credit_error(error.clone()))
    }

    /// The same for all rings. A writer that cannot be told does not keep others from it; that
    /// ring is broken.
    pub fn return_all_credit(&mut self, is_idle: bool) -> bool {
        let mut has_returned = false;
        for (ring, receiver) in (0..).zip(&mut self.receivers) {
            let Some(receiver) = receiver else { continue };
            match receiver.return_credit(&mut self.endpoint, &mut self.queue, is_idle) {
                Ok(was_returned) => has_returned |= was_returned,
                Err(error) => {
                    receiver.set_credit_error(error);
                    queue_receiver_event(&mut self.events, ring, receiver);
                }
            }
        }
        has_returned
    }

    /// What to do between two turns that find nothing, in a loop that polls all the time: see
    /// [`CompletionQueue::pause`].
    #[inline]
    pub fn pause(&self) {
        self.queue.pause();
    }

    /// A ring's writing side.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn sender(&self, id: SenderId) -> Result<&RingSender> {
        let sender = self.senders.get(usize::from(id.0)).and_then(Option::as_deref);
        sender.filter(|sender| !sender.is_closing()).ok_or_else(no_ring)
    }

    /// A ring's reading side.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn receiver(&self, id: ReceiverId) -> Result<&RingReceiver> {
        let receiver = self.receivers.get(usize::from(id.ring)).and_then(Option::as_deref);
        receiver
            .filter(|it| it.creation_epoch() == id.creation_epoch && !it.is_closing())
            .ok_or_else(no_ring)
    }

    /// How many rings are read and written here, with those that are being closed.
    #[must_use]
    pub fn rings(&self) -> (usize, usize) {
        (self.receivers.iter().flatten().count(), self.senders.iter().flatten().count())
    }

    /// Notices for rings that there are none of.
    #[must_use]
    pub fn unmatched_notices(&self) -> u64 {
        self.unmatched_notices
    }

    #[cold]
    fn error_with_sender_peer(&self, error: Error, id: SenderId) -> Error {
        self.with_peer_name(error, self.sender(id).ok().map(RingSender::peer))
    }

    /// Adds to an error whom it is about.
    #[cold]
    fn with_peer_name(&self, error: Error, peer: Option<Peer>) -> Error {
        let error = self.endpoint.domain().add_provider(error);
        match peer.and_then(|peer| self.endpoint.name_of(peer)) {
            Some(name) => error.with_peer(name),
            None => error,
        }
    }
}

/// A writing side that its user has not let go of.
#[inline]
fn find(places: &mut [Option<Box<RingSender>>], place: u16) -> Result<&mut RingSender> {
    match places.get_mut(usize::from(place)) {
        Some(Some(sender)) if !sender.is_closing() => Ok(sender),
        _ => Err(no_ring()),
    }
}

/// A ring that is not being closed.
#[inline]
fn open(places: &mut [Option<Box<RingReceiver>>], id: ReceiverId) -> Result<&mut RingReceiver> {
    match places.get_mut(usize::from(id.ring)) {
        Some(Some(it)) if it.creation_epoch() == id.creation_epoch && !it.is_closing() => Ok(it),
        _ => Err(no_ring()),
    }
}

#[cold]
fn no_ring() -> Error {
    Error::new(ErrorKind::Closed, "using a ring", "there is no such ring on this port")
}

#[cold]
fn end_of_stream() -> Error {
    Error::new(
        ErrorKind::Closed,
        "reading a ring",
        "the writer closed the ring, and every message was read",
    )
}
