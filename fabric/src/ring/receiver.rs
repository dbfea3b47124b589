//! The reader of a ring, on an endpoint.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::credit_memory::credit_offset;
use super::geometry::MAX_INLINE_DATA;
use super::memory::{RegistrationScope, RingMemory};
use super::notice_sender::NoticeSender;
use super::notify::has_tags;
use super::queue_budget::QueueBudget;
use super::retries::CloseProgress;
use super::{
    ChunkLayout, ChunkView, EndpointIo, Immediate, NotifyMode, ReaderState, ReceiverId, RingAnswer,
    RingEvent, RingGeometry, RingNotice, RingOffer,
};
use crate::{Endpoint, Error, ErrorKind, MemoryKind, MemoryRegion, Peer, Result};

/// Options of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOptions {
    /// Bytes of the ring: messages may be many times longer.
    pub capacity: u64,
    /// Released bytes after which credit is returned; 0: after each chunk.
    pub watermark: u64,
    /// How the reader is notified of chunks.
    pub notify: NotifyMode,
    /// Messages that an earlier reader completed: this ring continues after them.
    pub completed_messages: u64,
    /// Bytes that the writer may [add](super::Port::push_with) to the header of each chunk, for a
    /// ring in device memory, whose payload the reader's processor cannot read. At most
    /// [`MAX_INLINE_DATA`](super::MAX_INLINE_DATA).
    pub inline_data: u16,
}

impl RingOptions {
    /// A ring of `capacity` bytes with the best notify mode of the endpoint's provider, and credit
    /// for each quarter.
    ///
    /// # Errors
    /// `NotSupported` if the provider supports no notify mode.
    pub fn new(endpoint: &Endpoint, capacity: u64) -> Result<Self> {
        let notify = NotifyMode::best(endpoint.domain().capabilities())?;
        let (watermark, completed_messages, inline_data) = (capacity / 4, 0, 0);
        Ok(Self { capacity, watermark, notify, completed_messages, inline_data })
    }
}

/// Counters of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiverStatistics {
    /// Messages completed.
    pub messages: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Chunks received.
    pub chunks: u64,
    /// Credits sent.
    pub credits: u64,
    /// Duplicate notices.
    pub duplicates: u64,
    /// Notices of other epochs.
    pub unmatched_notices: u64,
}

/// A ring in this process's memory, which one peer writes.
///
/// Driven by a [`Port`](super::Port), which owns endpoint and queue and passes completions.
#[derive(Debug)]
pub struct RingReceiver {
    reader: ReaderState,
    id: ReceiverId,
    mode: NotifyMode,
    memory: Arc<RingMemory>,
    /// Sends credit, once the writer has answered the offer.
    writer: Option<NoticeSender>,
    /// Credit for which the provider had no room.
    is_credit_unsent: bool,
    /// Since when there was no room.
    unsent_since: Option<Instant>,
    /// Times that possibly lost credit was sent again since the writer's last notice.
    credit_resends: u32,
    statistics: ReceiverStatistics,
    broken: Option<Error>,
    /// Why credit cannot be sent: chunks that arrived can still be taken.
    credit_error: Option<Error>,
    /// The user closed it. It stays until the writer has nothing in flight.
    is_closing: bool,
    is_close_notice_due: bool,
    is_event_queued: bool,
    /// The ring is in the port's list of those that may owe credit.
    is_listed_as_owing: bool,
}

impl RingReceiver {
    /// Opens a ring in memory that is registered for writes through this endpoint and those of extra
    /// lanes.
    pub(super) fn open(
        io: &EndpointIo,
        extra: &[RegistrationScope<'_>],
        id: ReceiverId,
        (options, queue_budget): (&RingOptions, &QueueBudget),
        kind: MemoryKind,
        register: impl FnOnce(&[RegistrationScope<'_>]) -> Result<Vec<MemoryRegion>>,
    ) -> Result<Self> {
        let geometry = geometry_of(&io.endpoint, id.ring, options, kind)?;
        let scopes = [&[RegistrationScope::of(&io.endpoint)], extra].concat();
        let quota = queue_budget.take(options.notify, geometry.max_chunks())?;
        let max_chunks = quota.max_chunks();
        let regions = register(&scopes)?;
        let memory = RingMemory::new(&scopes, geometry, regions, (quota, io.queue.waker()))?;
        let mut reader = ReaderState::new(geometry, id.creation_epoch, options.watermark)
            .resume_after(options.completed_messages);
        reader.limit_chunks(max_chunks);
        Ok(Self {
            reader,
            id,
            mode: options.notify,
            memory: Arc::new(memory),
            writer: None,
            is_credit_unsent: false,
            unsent_since: None,
            credit_resends: 0,
            statistics: ReceiverStatistics::default(),
            broken: None,
            credit_error: None,
            is_closing: false,
            is_close_notice_due: false,
            is_event_queued: false,
            is_listed_as_owing: false,
        })
    }

    /// The offer to the writer, with the target of notices on each lane.
    pub(super) fn offer(&self, credit_memories: &[MemoryRegion]) -> Result<RingOffer> {
        let geometry = self.reader.geometry();
        Ok(RingOffer {
            ring: geometry.ring(),
            epoch: self.reader.epoch(),
            capacity: geometry.capacity(),
            notify: self.mode,
            tagged: has_tags(self.memory.domain().capabilities()),
            layout: geometry.layout(),
            inline_data: geometry.inline_data(),
            max_chunks: self.memory.quota().max_chunks(),
            completed_messages: self.reader.completed_messages(),
            lanes: self.memory.lane_offers(credit_memories)?,
        })
    }

    #[inline]
    pub(super) fn id(&self) -> ReceiverId {
        self.id
    }

    /// The writer, once it has answered.
    pub(super) fn peer(&self) -> Option<Peer> {
        self.writer.as_ref().map(NoticeSender::peer)
    }

    /// Takes the writer's answer: from now on it gets credit.
    pub(super) fn connect(
        &mut self,
        endpoint: &Endpoint,
        peer: Peer,
        answer: &RingAnswer,
    ) -> Result<()> {
        let operation = "connect ring";
        if answer.epoch != self.reader.epoch() {
            let (answered, epoch) = (answer.epoch, self.reader.epoch());
            let detail = format!("the answer has epoch {answered}, the ring epoch {epoch}");
            return Err(Error::new(ErrorKind::VersionMismatch, operation, detail));
        }
        if answer.sender_index >= super::immediate::MAX_RINGS {
            let detail = format!("sender index {} is not below 1024", answer.sender_index);
            return Err(Error::new(ErrorKind::MalformedDescriptor, operation, detail));
        }
        let (scope, mode) = (RegistrationScope::of(endpoint), (self.mode, answer.tagged));
        let credit_memory = (&answer.credit_memory, credit_offset(answer.sender_index));
        let notice_sender = NoticeSender::new(scope, mode, peer, credit_memory)?;
        self.reader.set_sender_index(answer.sender_index);
        self.reader.limit_chunks(answer.max_chunks);
        if notice_sender.credits_may_reorder(endpoint.domain()) {
            self.reader.serialize_credits();
        }
        self.writer = Some(notice_sender);
        Ok(())
    }

    /// The ring's memory, unless it is drained: writes may still be in flight.
    pub(super) fn into_quarantined(self) -> Option<Arc<RingMemory>> {
        // The end notice of a broken ring cannot be trusted.
        let is_drained = self.broken().is_none() && self.is_end_of_stream();
        (!is_drained).then_some(self.memory)
    }

    /// Fails if the peer violates the protocol.
    #[inline]
    pub(super) fn handle_notice(&mut self, immediate: &Immediate, length: u64) -> Result<()> {
        debug_assert!(matches!(
            immediate.notice,
            RingNotice::Chunk { .. } | RingNotice::WriterClosed { .. }
        ));
        self.credit_resends = 0;
        self.reader.notice(immediate, length).map_err(protocol_error)
    }

    /// The next chunk, if it has arrived. Fails if the peer violates the protocol.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<ChunkView>> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let memory = &*self.memory;
        let taken = self.reader.take(|location| memory.read_header(location));
        let taken = taken.map_err(protocol_error);
        let Some(arrived) = taken.inspect_err(|error| self.fail(error.clone()))? else {
            return Ok(None);
        };
        self.statistics.chunks += 1;
        self.statistics.bytes += u64::from(arrived.header.payload);
        self.statistics.messages += u64::from(arrived.is_last);
        Ok(Some(ChunkView::new(&arrived, Arc::clone(&self.memory))))
    }

    /// Returns credit if it is due: the watermark was passed, or the port is idle. True if it was
    /// sent.
    #[inline]
    pub(super) fn return_credit(&mut self, io: &mut EndpointIo, is_idle: bool) -> Result<bool> {
        if self.is_closing || self.credit_error.is_some() {
            return Ok(false);
        }
        self.collect_released();
        // A later credit includes an earlier one.
        let due = self.reader.credit(is_idle);
        if due.is_none() && !self.is_credit_unsent {
            return Ok(false);
        }
        self.send_credit(io)
    }

    /// Collects dropped views.
    #[inline]
    fn collect_released(&mut self) {
        let unreleased = self.reader.unreleased();
        for sequence in unreleased {
            if !self.memory.take_released(sequence) {
                break;
            }
            self.reader.release_first();
        }
    }

    fn send_credit(&mut self, io: &mut EndpointIo) -> Result<bool> {
        self.is_credit_unsent = true;
        let Some(notice_sender) = &self.writer else { return Ok(false) };
        let number = self.reader.is_credit_in_flight().then(|| self.credit_number());
        let credit = (self.reader.credit_notice(), self.reader.last_credit());
        let is_sent = notice_sender.send_credit(io, credit, number)?;
        self.is_credit_unsent = !is_sent;
        let since = self.unsent_since.take();
        self.unsent_since = (!is_sent).then(|| since.unwrap_or_else(Instant::now));
        self.statistics.credits += u64::from(is_sent);
        Ok(is_sent)
    }

    /// Number in the completions of its credit: the ring's index, and above it the lower bits of
    /// the creation epoch.
    fn credit_number(&self) -> u32 {
        self.id.creation_epoch << 16 | u32::from(self.id.ring)
    }

    /// A credit with this number arrived, or was lost, if there is an error. False if it belongs to
    /// another ring.
    pub(super) fn credit_completed(&mut self, number: u32, lost: Option<&Error>) -> bool {
        let is_ours = number == self.credit_number();
        if is_ours {
            self.reader.credit_completed();
            lost.into_iter().for_each(|error| self.resend_lost_credit(error));
        }
        is_ours
    }

    /// An injected write of some ring was lost, perhaps this ring's credit. Credit with completions
    /// is never injected.
    pub(super) fn handle_lost_inject(&mut self, error: &Error) {
        if !self.reader.serializes_credits() {
            self.resend_lost_credit(error);
        }
    }

    /// Possibly lost credit is sent again, as duplicates do no harm; but not endlessly to a dead
    /// peer.
    fn resend_lost_credit(&mut self, error: &Error) {
        const MAX_RESENDS: u32 = 8;
        let has_returned = self.statistics.credits > 0 && self.writer.is_some();
        if !has_returned || self.is_closing || self.broken().is_some() {
            return;
        }
        self.credit_resends += 1;
        if self.credit_resends > MAX_RESENDS {
            self.set_credit_error(error.clone());
        } else {
            self.reader.resend_credit();
            self.is_credit_unsent = true;
        }
    }

    /// Closes the ring. Its memory stays until the writer's end notice arrives.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.is_close_notice_due = true;
    }

    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Is a notice due that the ring is closed, or the last credit?
    pub(super) fn is_end_notice_ready(&self) -> bool {
        let is_credit_due = self.memory.quota().is_limited() && self.has_unsent_credit();
        self.is_closing
            && if self.is_end_of_stream() { is_credit_due } else { self.is_close_notice_due }
    }

    /// Gives up the notice that the ring is closed. True if that ends the ring: the writer has
    /// closed it.
    pub(super) fn abandon_end_notice(&mut self) -> bool {
        self.is_close_notice_due = false;
        self.is_end_of_stream()
    }

    /// Continues closing. It is complete once no peer needs the ring.
    pub(super) fn progress_close(&mut self, io: &mut EndpointIo) -> Result<CloseProgress> {
        // Without a writer no notice can arrive.
        if self.writer.is_none() || self.broken().is_some() {
            return Ok(CloseProgress::Complete);
        }
        while self.take()?.is_some() {}
        if self.is_end_of_stream() {
            return self.send_last_credit(io);
        }
        if self.is_close_notice_due
            && let Some(notice_sender) = &self.writer
        {
            self.is_close_notice_due =
                !notice_sender.send_notice(io, self.reader.close_notice())?;
        }
        Ok(if self.is_close_notice_due { CloseProgress::Refused } else { CloseProgress::Pending })
    }

    /// The end notice arrived and every chunk was taken. Where the writer's queue may overrun, it
    /// keeps its quota until the credit of the last chunk.
    fn send_last_credit(&mut self, io: &mut EndpointIo) -> Result<CloseProgress> {
        if !self.memory.quota().is_limited() || self.credit_error.is_some() {
            return Ok(CloseProgress::Complete);
        }
        // The writer has nothing in flight, so existing views do not matter.
        while !self.reader.unreleased().is_empty() {
            self.reader.release_first();
        }
        if self.reader.credit(true).is_some() || self.is_credit_unsent {
            self.send_credit(io)?;
        }
        Ok(match (self.is_credit_unsent, self.has_unsent_credit()) {
            (true, _) => CloseProgress::Refused,
            (false, true) => CloseProgress::Pending,
            (false, false) => CloseProgress::Complete,
        })
    }

    /// Adds the ring, once, to those whose writers may be owed credit: after a chunk was taken, or
    /// credit was lost.
    #[inline]
    pub(super) fn note_owed_credit(&mut self, owing: &mut Vec<ReceiverId>) {
        if !std::mem::replace(&mut self.is_listed_as_owing, true) {
            owing.push(self.id);
        }
    }

    /// Notes whether the ring stays in that list. False if no credit can be owed: then the list drops
    /// it, and no dropped view wakes the port any more.
    pub(super) fn update_owed_credit(&mut self) -> bool {
        let has_credit = self.has_unsent_credit() || !self.reader.unreleased().is_empty();
        self.is_listed_as_owing = has_credit && self.credit_error.is_none();
        if !self.is_listed_as_owing {
            self.memory.set_sleeping(false);
        }
        self.is_listed_as_owing
    }

    /// Queues an event, once until it was returned.
    #[inline]
    pub(super) fn queue_event(&mut self, events: &mut Option<VecDeque<RingEvent>>) {
        if let Some(events) = events
            && !std::mem::replace(&mut self.is_event_queued, true)
        {
            events.push_back(RingEvent::Receiver(self.id));
        }
    }

    #[inline]
    pub(super) fn event_returned(&mut self) {
        self.is_event_queued = false;
    }

    /// Marks the ring broken; the first cause stays.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    /// Credit cannot be sent any more. Chunks that arrived can still be taken.
    #[cold]
    pub(super) fn set_credit_error(&mut self, error: Error) {
        self.is_credit_unsent = false;
        self.credit_error.get_or_insert(error);
    }

    #[inline]
    pub(super) fn credit_error(&self) -> Option<&Error> {
        self.credit_error.as_ref()
    }

    /// Why the ring cannot be read.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref().or(self.credit_error.as_ref())
    }

    /// Does it need polling besides the completion queue, apart from notices on closing?
    #[inline]
    pub(super) fn needs_polling(&self) -> bool {
        self.mode != NotifyMode::Immediate || self.awaits_header()
    }

    /// Was the notice of the next chunk taken before its header arrived? Separate headers are writes
    /// of their own, which a notice may overtake.
    #[inline]
    pub(super) fn awaits_header(&self) -> bool {
        self.broken.is_none() && self.reader.awaits_header()
    }

    /// Sets whether dropping a view wakes the thread that sleeps in the queue. Without views it
    /// stays unset.
    pub(super) fn set_sleeping(&self, is_asleep: bool) {
        self.memory.set_sleeping(is_asleep && !self.reader.unreleased().is_empty());
    }

    /// Did the end notice arrive, and was every chunk taken?
    #[must_use]
    pub fn is_end_of_stream(&self) -> bool {
        self.reader.is_end_of_stream()
    }

    /// How long the provider has had no room for pending credit, if there is any.
    pub(super) fn credit_unsent_for(&self) -> Option<Duration> {
        let is_unsent = self.is_credit_unsent
            && !self.is_closing
            && self.credit_error.is_none()
            && self.writer.is_some();
        is_unsent.then(|| self.unsent_since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Is there credit that was not sent, for lack of room or because it is not due?
    #[must_use]
    pub fn has_unsent_credit(&self) -> bool {
        self.is_credit_unsent || self.reader.head() != self.reader.credited_head()
    }

    /// Lanes of the ring.
    #[must_use]
    pub fn lanes(&self) -> usize {
        self.memory.lanes()
    }

    /// The state of the protocol.
    #[must_use]
    pub fn reader(&self) -> &ReaderState {
        &self.reader
    }

    pub(super) fn memory(&self) -> Arc<RingMemory> {
        Arc::clone(&self.memory)
    }

    /// How the reader is notified.
    #[must_use]
    pub fn notify(&self) -> NotifyMode {
        self.mode
    }

    /// Counters since it was opened.
    #[must_use]
    pub fn statistics(&self) -> ReceiverStatistics {
        let (duplicates, unmatched_notices) = self.reader.ignored();
        ReceiverStatistics { duplicates, unmatched_notices, ..self.statistics }
    }
}

pub(super) fn geometry_of(
    endpoint: &Endpoint,
    ring: u16,
    options: &RingOptions,
    memory: MemoryKind,
) -> Result<RingGeometry> {
    let capabilities = endpoint.domain().capabilities();
    options.notify.check(capabilities)?;
    // Header and payload share one write only where two pieces can be gathered.
    let layout = match memory.is_device() || capabilities.limits.iov_limit < 2 {
        true => ChunkLayout::SeparateHeader,
        false => ChunkLayout::InlineHeader,
    };
    let Some(geometry) = RingGeometry::new(options.capacity, ring) else {
        let detail = format!(
            "a ring of {} bytes with index {ring} is impossible. Use 1 KiB to 1 TiB, and a multiple of two granules",
            options.capacity
        );
        return Err(Error::new(ErrorKind::InvalidArgument, "open ring", detail));
    };
    geometry.with_layout(layout).with_inline_data(options.inline_data).ok_or_else(|| {
        let detail = format!(
            "{} bytes cannot accompany a header of layout {layout:?}. Use a ring in device memory, and at most {MAX_INLINE_DATA} bytes",
            options.inline_data
        );
        Error::new(ErrorKind::InvalidArgument, "open ring", detail)
    })
}

#[cold]
pub(super) fn protocol_error(error: super::ProtocolError) -> Error {
    Error::new(ErrorKind::ConnectionLost, "read from ring", error.to_string())
}
