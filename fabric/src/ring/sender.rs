//! The side that writes, on an endpoint.

mod striping;

use std::time::{Duration, Instant};

use super::chunk_poster::{ChunkPoster, Posted, SenderInstance};
use super::credit::{self, Credit};
use super::credit_memory::CreditSlot;
use super::geometry::RingGeometry;
use super::immediate::Immediate;
use super::lanes::StripeTracker;
use super::memory::RegistrationScope;
use super::notify::{NotifyMode, has_tags, ordered_write_limit};
use super::queue_budget::{QueueBudget, QueueQuota};
use super::retries::CloseProgress;
use super::ring_offer::{RingAnswer, RingOffer};
use super::writer_state::{Blocked, Chunk, Message, Refused, WriterState};
use crate::{CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Peer, RegionSlice, Result};

use striping::Planned;

/// What came of an attempt to write a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// A chunk is on its way, with so many bytes of payload.
    Posted(u64),
    /// The reader has to let go of something first.
    Blocked(Blocked),
    /// Chunks have to complete first, or the provider has to make room.
    Busy,
    /// Nothing is left of the message to write.
    Written,
}

/// What a sender did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SenderStatistics {
    /// Messages that were written.
    pub messages: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Chunks that they went in.
    pub chunks: u64,
    /// Bytes left out at the end of the ring.
    pub skipped: u64,
    /// Credits that came.
    pub credits: u64,
    /// Times that there was no credit for the next chunk.
    pub blocked: u64,
    /// How long it took until there was.
    pub blocked_for: Duration,
    /// Times that the provider had no room for the next chunk.
    pub busy: u64,
}

/// Writes messages into a peer's ring.
///
/// Driven by its caller, a [`Port`](super::Port): that owns endpoint and queue, pushes chunks
/// and hands over what the queue gives. Payload goes from the caller's registered memory
/// straight into the ring; it must stay as it is until
/// [`next_read`](super::Port::next_read) names its message.
#[derive(Debug)]
pub struct RingSender {
    writer: WriterState,
    mode: NotifyMode,
    /// Its share of the queue.
    quota: QueueQuota,
    chunk_poster: ChunkPoster,
    /// What goes by which lane, if there are several.
    stripe_tracker: Option<Box<StripeTracker>>,
    is_stopped: bool,
    start: Instant,
    /// Where credit is written, unless it comes by messages.
    credit: Option<CreditSlot>,
    statistics: SenderStatistics,
    blocked_since: Option<Instant>,
    /// Up to here are chunks that were injected: nobody tells whether they left.
    injected_to: u64,
    /// Why nothing more can be written.
    broken: Option<Error>,
    /// The reader said that nobody reads any more: it tells no more credit.
    is_reader_closed: bool,
    end: EndNotice,
    /// Its user let go of it: it is there until the end is said.
    is_closing: bool,
    confirms_end_notice: bool,
    /// It is in the port's list of news.
    pub(super) is_event_queued: bool,
}

/// Was the reader told that nothing more comes?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EndNotice {
    /// Something may come.
    NotDue,
    /// It is to be told.
    Due,
    /// It is being told.
    InFlight,
    /// It was told, or there is nobody to be.
    Sent,
}

impl RingSender {
    /// A sender into a ring that a peer offered, with this title among the port's, and told of
    /// credit through the port's credit memory. Chunks have at most so many bytes of payload. With
    /// what is to be answered.
    pub(super) fn open(
        endpoint: &Endpoint,
        credit_memory: &MemoryRegion,
        peer: Peer,
        offer: &RingOffer,
        instance: SenderInstance,
        (max_payload, queue_budget): (u64, &QueueBudget),
    ) -> Result<(Self, RingAnswer)> {
        let geometry = offer.geometry()?;
        // Credit takes place in the queue here, too.
        let quota = queue_budget.take(offer.notify, geometry.max_chunks())?;
        let max_chunks = quota.max_chunks().min(offer.max_chunks);
        let Connected { chunk_poster, credit, answer } =
            connect(endpoint, credit_memory, peer, offer, geometry, (instance, max_chunks))?;
        let longest = max_payload.min(max_chunk_payload(endpoint, offer.notify)).max(1);
        let writer = WriterState::new(geometry, offer.epoch, longest)
            .with_sender_index(instance.sender_index);
        let mut writer = writer.limit_chunks(max_chunks);
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
    pub(super) fn push(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        message: &mut Message,
        payload: &RegionSlice,
    ) -> Result<Pushed> {
        self.push_from(endpoint, queue, message, (payload, 0), u64::MAX)
    }

    #[inline]
    pub(super) fn push_part(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        message: &mut Message,
        part: &RegionSlice,
        at: u64,
    ) -> Result<Pushed> {
        if message.length() == 0 {
            return self.push(endpoint, queue, message, part);
        }
        let end = at.saturating_add(part.len() as u64);
        if !message.is_written() && !(at..end).contains(&message.written()) {
            return Err(not_in_part(message, at, end));
        }
        let most = end.saturating_sub(message.written());
        self.push_from(endpoint, queue, message, (part, at), most)
    }

    #[inline]
    fn push_from(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        message: &mut Message,
        (payload, at): (&RegionSlice, u64),
        most: u64,
    ) -> Result<Pushed> {
        let (chunk, body) = match self.plan(message, (payload, at), most)? {
            Planned::Chunk(chunk, body) => (chunk, body),
            Planned::No(pushed) => return Ok(pushed),
        };
        let posted = self.chunk_poster.post(endpoint, queue, &chunk, body)?;
        if posted == Posted::No {
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
                self.lane_completed(
                    0,
                    self.chunk_poster.completed_to(),
                    chunk.header.payload.into(),
                );
            }
        }
        Ok(Pushed::Posted(chunk.header.payload.into()))
    }

    /// The next chunk of a message, with what of the payload belongs to it.
    #[inline]
    fn plan<'a>(
        &mut self,
        message: &Message,
        (payload, at): (&'a RegionSlice, u64),
        most: u64,
    ) -> Result<Planned<'a>> {
        if message.is_written() {
            return Ok(Planned::No(Pushed::Written));
        }
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let chunk = match self.writer.plan_within(message, most) {
            Ok(chunk) => chunk,
            Err(Refused::Blocked(blocked)) => {
                self.begin_block();
                return Ok(Planned::No(Pushed::Blocked(blocked)));
            }
            Err(Refused::Stale) => return Err(stale()),
        };
        let (from, length) = (chunk.header.offset - at, u64::from(chunk.header.payload));
        if from + length > payload.len() as u64 {
            return Err(too_short(payload, &chunk.header));
        }
        let body = (length > 0).then(|| (&payload.region, payload.offset() + from as usize));
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

    /// The position in this epoch up to which the provider is done with what chunks were written
    /// from: that memory may be written again, though the reader may not have it yet. A message
    /// that may have to be written once more after a loss is to be kept until credit
    /// ([`known_head`](Writer::known_head)) has passed it.
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

    /// A notice came that is meant for this ring.
    #[inline]
    pub(super) fn handle_notice(
        &mut self,
        immediate: &Immediate,
        credit: Option<[u8; credit::LENGTH]>,
    ) -> bool {
        if self.writer.take_credit_notice(immediate) {
            let credit = match &self.credit {
                Some(place) => place.read(),
                None => credit.and_then(|bytes| Credit::decode(bytes, self.writer.epoch())),
            };
            return self.take_credit(credit);
        }
        if self.writer.is_reader_closed(immediate) {
            self.is_reader_closed = true;
            let detail = "the reader closed the ring";
            self.fail(Error::new(ErrorKind::Closed, "writing to a ring", detail));
            if self.end == EndNotice::NotDue {
                self.end = EndNotice::Due;
            }
            return true;
        }
        false
    }

    #[inline]
    fn take_credit(&mut self, credit: Option<Credit>) -> bool {
        let is_new = credit.is_some_and(|credit| self.writer.credit(&credit));
        self.statistics.credits += u64::from(is_new);
        is_new
    }

    /// One of the writes of a slot completed: false if it was of an outlet that is no more.
    #[inline]
    pub(super) fn completed(&mut self, instance: SenderInstance, slot: u16) -> bool {
        let is_ours = self.chunk_poster.instance() == instance;
        if is_ours
            && let Some(bytes) = self.chunk_poster.completed(slot)
            && self.stripe_tracker.is_some()
        {
            self.lane_completed(0, self.chunk_poster.completed_to(), bytes.into());
        }
        is_ours
    }

    /// One of the writes of a slot failed: false if it was of an outlet that is no more.
    pub(super) fn failed(&mut self, instance: SenderInstance, slot: u16, error: Error) -> bool {
        let is_ours = self.chunk_poster.instance() == instance;
        if is_ours {
            self.chunk_poster.failed(slot);
            self.lane_completed(0, self.chunk_poster.completed_to(), 0);
            self.end = EndNotice::Sent;
            self.fail(error);
        }
        is_ours
    }

    /// Something that was injected by somebody is lost. True if it may have been a chunk of
    /// this ring: then there may be a hole in it.
    pub(super) fn handle_lost_inject(&mut self, error: &Error) -> bool {
        let may_be_ours =
            self.injected_to > self.writer.known_head() && self.end == EndNotice::NotDue;
        if may_be_ours {
            self.fail(error.clone());
        }
        may_be_ours
    }

    /// Its user lets go of it: the reader is to be told that nothing more comes, if it can hear
    /// that. Surely, if it is known to be there: shm does not go on with anything for a peer
    /// that a write was to be delivered to, and whose memory is gone.
    pub(super) fn begin_close(&mut self, confirm_delivery: bool) {
        (self.is_closing, self.confirms_end_notice) = (true, confirm_delivery);
        if self.end == EndNotice::NotDue {
            let can_hear = self.mode != NotifyMode::Polling && self.broken.is_none();
            self.end = if can_hear { EndNotice::Due } else { EndNotice::Sent };
        }
    }

    /// Is there no user any more?
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Is the reader to be told of the end?
    #[inline]
    pub(super) fn is_end_notice_due(&self) -> bool {
        self.end == EndNotice::Due
    }

    /// Is the reader to be told of the end now? What has to be told of each chunk is told first.
    pub(super) fn is_end_notice_ready(&self) -> bool {
        let is_told = match self.mode {
            NotifyMode::Message => self.chunk_poster.unfinished() == 0,
            NotifyMode::Immediate | NotifyMode::Polling => !self.chunk_poster.has_partial_chunk(),
        };
        self.end == EndNotice::Due && is_told
    }

    /// The reader cannot be told of the end, and is not to be any more.
    pub(super) fn abandon_end_notice(&mut self) {
        if self.end == EndNotice::Due {
            self.end = EndNotice::Sent;
        }
    }

    /// Goes on with the end.
    pub(super) fn progress_close(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> CloseProgress {
        if self.is_end_notice_ready() {
            let bits = self.writer.end_notice();
            let (notice_sender, number) =
                (&self.chunk_poster.notice_sender, self.chunk_poster.instance().number());
            let said = match self.confirms_end_notice {
                true => notice_sender.send_last_notice(endpoint, queue, bits, number),
                false => notice_sender
                    .send_notice(endpoint, queue, bits)
                    .map(|said| (!said).then_some(false)),
            };
            self.end = match said {
                Ok(Some(true)) => EndNotice::InFlight,
                Ok(Some(false)) => return CloseProgress::Refused,
                // Said; or the connection is broken, and there is nobody to be told.
                Ok(None) | Err(_) => EndNotice::Sent,
            };
        }
        match self.end {
            EndNotice::NotDue | EndNotice::Sent => CloseProgress::Complete,
            EndNotice::Due | EndNotice::InFlight => CloseProgress::Pending,
        }
    }

    /// May the reader still tell credit, for which the ring keeps its share of the queue?
    pub(super) fn expects_credit(&self) -> bool {
        self.quota.is_limited() && !self.is_reader_closed && self.writer.unnoticed() > 0
    }

    /// Was the reader told of the end, if it is to be?
    pub(super) fn is_end_notice_sent(&self) -> bool {
        self.end == EndNotice::Sent
    }

    /// What was said last came, or never will.
    pub(super) fn end_notice_completed(&mut self, instance: SenderInstance) {
        if self.chunk_poster.instance() == instance {
            self.end = EndNotice::Sent;
        }
    }

    /// Does it want to be looked after, though the queue has nothing for it, beside when the
    /// reader can be told of the end?
    #[inline]
    pub(super) fn needs_polling(&self) -> bool {
        self.mode != NotifyMode::Immediate
    }

    /// Does what is to be done besides pushing: sends notices that are messages, and looks
    /// for credit where nobody is told of it. True if something happened.
    #[inline]
    pub(super) fn send_pending(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<bool> {
        match self.mode {
            NotifyMode::Immediate => Ok(false),
            NotifyMode::Message => {
                if self.broken.is_none() || self.end == EndNotice::Due {
                    self.chunk_poster.send_pending(endpoint, queue)?;
                }
                Ok(false)
            }
            NotifyMode::Polling => {
                if self.broken.is_none() {
                    self.chunk_poster.send_pending(endpoint, queue)?;
                }
                let credit = self.credit.as_ref().and_then(CreditSlot::read);
                Ok(self.take_credit(credit))
            }
        }
    }

    /// Nothing more can be written, and why.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        self.end_block();
        self.broken.get_or_insert(error);
    }

    /// Why nothing more can be written.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
    }

    #[inline]
    pub(super) fn next_read(&mut self) -> Option<u64> {
        self.writer.next_read()
    }

    /// The positions behind it.
    #[must_use]
    pub fn writer(&self) -> &WriterState {
        &self.writer
    }

    /// What it did so far.
    #[must_use]
    pub fn statistics(&self) -> SenderStatistics {
        self.statistics
    }

    /// How the reader is told.
    #[must_use]
    pub fn notify(&self) -> NotifyMode {
        self.mode
    }

    /// Writes and notices that are on their way.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        // Those that went by the endpoint are counted twice, which does no harm.
        let given =
            self.stripe_tracker.as_ref().map_or(0, |stripe_tracker| stripe_tracker.unfinished());
        self.chunk_poster.unfinished() + given
    }

    /// Whom it writes to.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.chunk_poster.peer()
    }
}

/// The most payload of one write. A flag is written behind it where the reader looks for one, which
/// providers may let overtake a long write.
fn max_chunk_payload(endpoint: &Endpoint, mode: NotifyMode) -> u64 {
    let facts = endpoint.domain().capabilities();
    let most = match mode {
        NotifyMode::Polling => ordered_write_limit(facts),
        NotifyMode::Immediate | NotifyMode::Message => facts.max_message_size as u64,
    };
    most.saturating_sub(super::header::HEADER_LEN)
}

struct Connected {
    chunk_poster: ChunkPoster,
    credit: Option<CreditSlot>,
    answer: RingAnswer,
}

/// An outlet into the first of the lanes, and where to be told of credit.
fn connect(
    endpoint: &Endpoint,
    credit_memory: &MemoryRegion,
    peer: Peer,
    offer: &RingOffer,
    geometry: RingGeometry,
    (instance, max_chunks): (SenderInstance, u64),
) -> Result<Connected> {
    let Some(lane) = offer.lanes.first() else {
        let detail = "the offer has no lanes";
        return Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail));
    };
    let mode = (offer.notify, offer.tagged);
    let chunk_poster =
        ChunkPoster::new(RegistrationScope::of(endpoint), peer, lane, mode, geometry, instance)?;
    let credit = match offer.notify {
        NotifyMode::Immediate | NotifyMode::Polling => {
            Some(CreditSlot::new(credit_memory, instance.sender_index, offer.epoch)?)
        }
        NotifyMode::Message => None,
    };
    let tagged = has_tags(endpoint.domain().capabilities());
    let (sender_index, epoch) = (instance.sender_index, offer.epoch);
    let answer = RingAnswer {
        sender_index,
        epoch,
        max_chunks,
        tagged,
        credit_memory: credit_memory.describe()?,
    };
    Ok(Connected { chunk_poster, credit, answer })
}

#[cold]
fn too_short(payload: &RegionSlice, header: &super::ChunkHeader) -> Error {
    let detail = format!("the payload has {} bytes, the message {}", payload.len(), header.length);
    Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail)
}

#[cold]
fn not_in_part(message: &Message, at: u64, end: u64) -> Error {
    let detail =
        format!("byte {} of the message is next, the part covers {at} to {end}", message.written());
    Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail)
}

#[cold]
fn stale() -> Error {
    let detail = "another message is written in part, or was written first since this one was \
                  begun, or it is another ring's";
    Error::new(ErrorKind::InvalidArgument, "writing to a ring", detail)
}
