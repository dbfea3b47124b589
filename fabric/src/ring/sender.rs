//! The writer of a ring, on an endpoint.

mod striping;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::chunk_poster::{ChunkPoster, Posted};
use super::credit_format;
use super::credit_memory::CreditSlot;
use super::lanes::StripeTracker;
use super::memory::RegistrationScope;
use super::notify::has_tags;
use super::queue_budget::{QueueBudget, QueueQuota};
use super::retries::CloseProgress;
use super::{
    Blocked, Chunk, Credit, EndpointIo, HEADER_LEN, Immediate, Message, NotifyMode, Refused,
    RingAnswer, RingEvent, RingOffer, SenderId, SenderInstance, WriterState,
};
use crate::{Endpoint, Error, ErrorKind, MemoryRegion, Peer, RegionSlice, Result};

use striping::Planned;

/// Outcome of an attempt to write a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// A chunk with this many bytes of payload is in flight.
    Posted(u64),
    /// The reader has to release chunks first.
    Blocked(Blocked),
    /// Chunks have to complete first, or the provider has to make room.
    Busy,
    /// The message is completely written.
    Written,
}

/// Counters of a sender.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SenderStatistics {
    /// Messages written.
    pub messages: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Chunks of these messages.
    pub chunks: u64,
    /// Bytes skipped at the end of the ring.
    pub skipped: u64,
    /// Credits received.
    pub credits: u64,
    /// Times without credit for the next chunk.
    pub blocked: u64,
    /// Time without credit.
    pub blocked_for: Duration,
    /// Times without room in the provider for the next chunk.
    pub busy: u64,
}

/// Writes messages into a peer's ring.
///
/// Driven by a [`Port`](super::Port), which owns endpoint and queue, pushes chunks and passes
/// completions. Payload goes from the caller's registered memory directly into the ring. It must
/// not change until [`next_read`](super::Port::next_read) returns its message.
#[derive(Debug)]
pub struct RingSender {
    writer: WriterState,
    mode: NotifyMode,
    quota: QueueQuota,
    chunk_poster: ChunkPoster,
    /// Tracks which chunks go by which lane, if there are several.
    stripe_tracker: Option<Box<StripeTracker>>,
    is_stopped: bool,
    start: Instant,
    /// Slot for credit, unless credit arrives in messages.
    credit: Option<CreditSlot>,
    statistics: SenderStatistics,
    blocked_since: Option<Instant>,
    /// End of the injected chunks, which have no completion.
    injected_to: u64,
    broken: Option<Error>,
    /// The reader closed the ring and returns no more credit.
    is_reader_closed: bool,
    end: EndNotice,
    /// The user closed the ring: it exists until the end notice is sent.
    is_closing: bool,
    confirms_end_notice: bool,
    is_event_queued: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndNotice {
    /// Chunks may follow.
    NotDue,
    /// To be sent.
    Due,
    /// Sent, not known to have arrived.
    InFlight,
    /// Sent, or impossible to send.
    Sent,
}

impl RingSender {
    /// Opens a sender for a ring that a peer offered, with credit through the port's credit memory
    /// and chunks of at most `max_payload` bytes. Returns the answer to the reader, too.
    pub(super) fn open(
        endpoint: &Endpoint,
        credit_memory: &MemoryRegion,
        peer: Peer,
        offer: &RingOffer,
        instance: SenderInstance,
        (max_payload, queue_budget): (u64, &QueueBudget),
    ) -> Result<(Self, RingAnswer)> {
        let geometry = offer.geometry()?;
        let capabilities = endpoint.domain().capabilities();
        let (epoch, sender_index) = (offer.epoch, instance.sender_index());
        // Credit notices use entries of the local queue.
        let quota = queue_budget.take(offer.notify, geometry.max_chunks())?;
        let max_chunks = quota.max_chunks().min(offer.max_chunks);
        let Some(lane) = offer.lanes.first() else {
            let detail = "the offer has no lanes";
            return Err(Error::new(ErrorKind::MalformedDescriptor, "open ring", detail));
        };
        let (scope, mode) = (RegistrationScope::of(endpoint), (offer.notify, offer.tagged));
        let chunk_poster = ChunkPoster::new(scope, peer, lane, mode, geometry, instance)?;
        let credit = (offer.notify == NotifyMode::Immediate)
            .then(|| CreditSlot::new(credit_memory, sender_index, epoch))
            .transpose()?;
        let (tagged, credit_memory) = (has_tags(capabilities), credit_memory.describe()?);
        let answer = RingAnswer { sender_index, epoch, max_chunks, tagged, credit_memory };
        let longest_write = capabilities.max_message_size as u64;
        let longest = max_payload.min(longest_write.saturating_sub(HEADER_LEN)).max(1);
        let mut writer = WriterState::new(geometry, epoch, longest)
            .with_sender_index(sender_index)
            .limit_chunks(max_chunks);
        if quota.is_limited() {
            writer = writer.limit_notices(max_chunks);
        }
        let sender = Self {
            writer: writer.resume_after(offer.completed_messages),
            mode: offer.notify,
            quota,
            chunk_poster,
            stripe_tracker: None,
            is_stopped: false,
            start: Instant::now(),
            credit,
            statistics: SenderStatistics::default(),
            blocked_since: None,
            injected_to: 0,
            broken: None,
            is_reader_closed: false,
            end: EndNotice::NotDue,
            is_closing: false,
            confirms_end_notice: false,
            is_event_queued: false,
        };
        Ok((sender, answer))
    }

    #[inline]
    pub(super) fn push_part(
        &mut self,
        io: &mut EndpointIo,
        message: &mut Message,
        part: &RegionSlice,
        at: u64,
        inline: &[u8],
    ) -> Result<Pushed> {
        self.check_inline(inline)?;
        if message.length() == 0 {
            return self.push_from(io, message, (part, 0), (u64::MAX, inline));
        }
        let most = bytes_in_part(message, part, at)?;
        self.push_from(io, message, (part, at), (most, inline))
    }

    /// Has a header room for these bytes?
    #[inline]
    fn check_inline(&self, inline: &[u8]) -> Result<()> {
        let room = self.writer.geometry().inline_data();
        if inline.len() <= usize::from(room) {
            return Ok(());
        }
        Err(no_room_beside_header(inline.len(), room))
    }

    /// Posts a chunk of at most `most` bytes, from a payload that begins at a byte of the message.
    #[inline]
    pub(super) fn push_from(
        &mut self,
        io: &mut EndpointIo,
        message: &mut Message,
        (payload, at): (&RegionSlice, u64),
        (most, inline): (u64, &[u8]),
    ) -> Result<Pushed> {
        let (chunk, body) = match self.plan(message, (payload, at), most)? {
            Planned::Chunk(chunk, body) => (chunk, body),
            Planned::NotPlanned(pushed) => return Ok(pushed),
        };
        let posted = self.chunk_poster.post(io, &chunk, body, inline)?;
        if posted == Posted::Full {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        }
        self.committed(message, &chunk);
        if posted == Posted::Copied {
            self.injected_to = self.writer.tail();
        }
        if self.stripe_tracker.is_some() {
            self.record_posted(0, &chunk);
            if posted == Posted::Copied {
                self.lane_0_completed(chunk.header.payload);
            }
        }
        Ok(Pushed::Posted(chunk.header.payload.into()))
    }

    /// Plans the next chunk of a message, and finds its part of the payload.
    #[inline]
    fn plan<'a>(
        &mut self,
        message: &Message,
        (payload, at): (&'a RegionSlice, u64),
        most: u64,
    ) -> Result<Planned<'a>> {
        if message.is_written() {
            return Ok(Planned::NotPlanned(Pushed::Written));
        }
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let chunk = match self.writer.plan_within(message, most) {
            Ok(chunk) => chunk,
            Err(Refused::Blocked(blocked)) => {
                self.begin_block();
                return Ok(Planned::NotPlanned(Pushed::Blocked(blocked)));
            }
            Err(Refused::Stale) => return Err(stale()),
        };
        let (from, length) = (chunk.header.offset - at, u64::from(chunk.header.payload));
        if from + length > payload.len() as u64 {
            return Err(too_short(payload, &chunk.header));
        }
        let body = (length > 0).then(|| (payload.as_region(), payload.offset() + from as usize));
        Ok(Planned::Chunk(chunk, body))
    }

    #[inline]
    fn committed(&mut self, message: &mut Message, chunk: &Chunk) {
        self.writer.commit(message, chunk);
        self.statistics.chunks += 1;
        self.statistics.bytes += u64::from(chunk.header.payload);
        self.statistics.skipped += chunk.skipped;
        self.statistics.messages += u64::from(message.is_written());
        self.end_block();
    }

    /// Chunks that end at or below this position are locally complete: their source memory may be
    /// reused, even if the reader does not have them yet. To write a message again after a loss,
    /// keep it until credit ([`known_head`](WriterState::known_head)) has passed it.
    #[must_use]
    #[inline]
    pub fn completed_to(&self) -> u64 {
        match &self.stripe_tracker {
            None => self.chunk_poster.completed_to(),
            Some(stripe_tracker) => stripe_tracker.completed_to(self.writer.tail()),
        }
    }

    #[cold]
    fn begin_block(&mut self) {
        if self.blocked_since.is_none() {
            self.blocked_since = Some(Instant::now());
            self.statistics.blocked += 1;
        }
    }

    #[inline]
    fn end_block(&mut self) {
        if let Some(since) = self.blocked_since.take() {
            self.statistics.blocked_for += since.elapsed();
        }
    }

    #[inline]
    pub(super) fn handle_notice(
        &mut self,
        immediate: &Immediate,
        credit: Option<[u8; credit_format::LENGTH]>,
    ) {
        if self.writer.take_credit_notice(immediate) {
            let credit = match &self.credit {
                Some(slot) => slot.read(),
                None => credit.and_then(|bytes| Credit::decode(bytes, self.writer.epoch())),
            };
            let is_new = credit.is_some_and(|credit| self.writer.credit(&credit));
            self.statistics.credits += u64::from(is_new);
        } else if self.writer.is_reader_closed(immediate) {
            self.is_reader_closed = true;
            let detail = "the reader closed the ring";
            self.fail(Error::new(ErrorKind::Closed, "write to ring", detail));
            if self.end == EndNotice::NotDue {
                self.end = EndNotice::Due;
            }
        }
    }

    #[inline]
    pub(super) fn completed(&mut self, slot: u16) {
        if let Some(bytes) = self.chunk_poster.completed(slot)
            && self.stripe_tracker.is_some()
        {
            self.lane_0_completed(bytes);
        }
    }

    /// A chunk on the port's endpoint is complete.
    fn lane_0_completed(&mut self, bytes: u32) {
        self.lane_completed(0, self.chunk_poster.completed_to(), bytes.into());
    }

    pub(super) fn failed(&mut self, slot: u16, error: Error) {
        self.chunk_poster.failed(slot);
        self.lane_failed(0, self.chunk_poster.completed_to(), error);
    }

    /// An injected write of some ring was lost. True if it may have been a chunk of this ring,
    /// which is then incomplete.
    pub(super) fn handle_lost_inject(&mut self, error: &Error) -> bool {
        let may_be_ours =
            self.injected_to > self.writer.known_head() && self.end == EndNotice::NotDue;
        if may_be_ours {
            self.fail(error.clone());
        }
        may_be_ours
    }

    /// The user closes the ring: the reader gets an end notice. It is sent with delivery complete
    /// only if the reader is known to be alive: shm makes no progress for a peer whose memory is
    /// gone.
    pub(super) fn begin_close(&mut self, confirm_delivery: bool) {
        (self.is_closing, self.confirms_end_notice) = (true, confirm_delivery);
        if self.end == EndNotice::NotDue {
            self.end = if self.broken.is_none() { EndNotice::Due } else { EndNotice::Sent };
        }
    }

    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    #[inline]
    pub(super) fn is_end_notice_due(&self) -> bool {
        self.end == EndNotice::Due
    }

    /// Can the end notice be sent now? The notices of all chunks come first.
    pub(super) fn is_end_notice_ready(&self) -> bool {
        let are_chunks_notified = match self.mode {
            NotifyMode::Message => self.chunk_poster.unfinished() == 0,
            NotifyMode::Immediate => !self.chunk_poster.has_partial_chunk(),
        };
        self.end == EndNotice::Due && are_chunks_notified
    }

    pub(super) fn abandon_end_notice(&mut self) {
        if self.end == EndNotice::Due {
            self.end = EndNotice::Sent;
        }
    }

    pub(super) fn progress_close(&mut self, io: &mut EndpointIo) -> CloseProgress {
        if self.is_end_notice_ready() {
            let notice = (self.writer.end_notice(), self.confirms_end_notice);
            self.end = match self.chunk_poster.send_end_notice(io, notice) {
                Ok(Posted::Sent) => EndNotice::InFlight,
                Ok(Posted::Full) => return CloseProgress::Refused,
                // Sent; or the connection is broken, and no reader can receive it.
                Ok(Posted::Copied) | Err(_) => EndNotice::Sent,
            };
        }
        match self.end {
            EndNotice::NotDue | EndNotice::Sent => CloseProgress::Complete,
            EndNotice::Due | EndNotice::InFlight => CloseProgress::Pending,
        }
    }

    /// May the reader still send credit notices? Until then the ring keeps its quota.
    pub(super) fn expects_credit(&self) -> bool {
        self.quota.is_limited() && !self.is_reader_closed && self.writer.unnoticed() > 0
    }

    pub(super) fn is_end_notice_sent(&self) -> bool {
        self.end == EndNotice::Sent
    }

    /// The end notice has arrived, or never will.
    pub(super) fn end_notice_completed(&mut self) {
        self.end = EndNotice::Sent;
    }

    /// Does it need polling besides the completion queue, apart from end notices?
    #[inline]
    pub(super) fn needs_polling(&self) -> bool {
        self.mode != NotifyMode::Immediate
    }

    /// Sends notices that are messages.
    #[inline]
    pub(super) fn send_pending(&mut self, io: &mut EndpointIo) -> Result<()> {
        let is_usable = self.broken.is_none() || self.end == EndNotice::Due;
        if is_usable { self.chunk_poster.send_pending(io) } else { Ok(()) }
    }

    /// Queues an event, once until it was returned.
    #[inline]
    pub(super) fn queue_event(&mut self, events: &mut Option<VecDeque<RingEvent>>) {
        if let Some(events) = events
            && !std::mem::replace(&mut self.is_event_queued, true)
        {
            events.push_back(RingEvent::Sender(SenderId(self.instance().sender_index())));
        }
    }

    #[inline]
    pub(super) fn event_returned(&mut self) {
        self.is_event_queued = false;
    }

    /// Marks the ring broken; the first cause stays.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        self.end_block();
        self.broken.get_or_insert(error);
    }

    /// Why the ring cannot be written.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    #[inline]
    pub(super) fn next_read(&mut self) -> Option<u64> {
        self.writer.next_read()
    }

    /// The state of the protocol.
    #[must_use]
    pub fn writer(&self) -> &WriterState {
        &self.writer
    }

    /// Counters since it was opened.
    #[must_use]
    pub fn statistics(&self) -> SenderStatistics {
        self.statistics
    }

    /// How the reader is notified.
    #[must_use]
    pub fn notify(&self) -> NotifyMode {
        self.mode
    }

    /// Writes and notices in flight.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        // Chunks on the port's own endpoint are counted twice, which does no harm.
        let on_lanes = self.stripe_tracker.as_ref().map_or(0, |it| it.unfinished());
        self.chunk_poster.unfinished() + on_lanes
    }

    /// The reader's address handle.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.chunk_poster.peer()
    }
}

/// The most bytes of the next chunk of a message, of which this part begins at byte `at`.
#[inline]
fn bytes_in_part(message: &Message, part: &RegionSlice, at: u64) -> Result<u64> {
    let end = at.saturating_add(part.len() as u64);
    match message.is_written() || (at..end).contains(&message.written()) {
        true => Ok(end.saturating_sub(message.written())),
        false => Err(not_in_part(message, part, at)),
    }
}

#[cold]
fn not_in_part(message: &Message, part: &RegionSlice, at: u64) -> Error {
    let (next, end) = (message.written(), at.saturating_add(part.len() as u64));
    let detail = format!("byte {next} of the message is next, the part covers {at} to {end}");
    Error::new(ErrorKind::OutOfBounds, "write to ring", detail)
}

#[cold]
fn no_room_beside_header(bytes: usize, room: u16) -> Error {
    let detail = format!("{bytes} bytes beside a header, the ring has room for {room}");
    Error::new(ErrorKind::OutOfBounds, "write to ring", detail)
}

#[cold]
fn too_short(payload: &RegionSlice, header: &super::ChunkHeader) -> Error {
    let detail = format!("the payload has {} bytes, the message {}", payload.len(), header.length);
    Error::new(ErrorKind::OutOfBounds, "write to ring", detail)
}

#[cold]
fn stale() -> Error {
    let detail = "another message is partly written or was written first, or the message \
                  belongs to another ring. Begin it again";
    Error::new(ErrorKind::InvalidArgument, "write to ring", detail)
}
