//! The side that reads, on an endpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::credit_memory::credit_offset;
use super::geometry::RingGeometry;
use super::immediate::{Immediate, RingNotice};
use super::memory::{ChunkView, RegistrationScope, RingMemory};
use super::notice_sender::NoticeSender;
use super::notify::{NotifyMode, has_tags};
use super::queue_budget::QueueBudget;
use super::reader_state::ReaderState;
use super::retries::CloseProgress;
use super::ring_offer::{LaneOffer, RingAnswer, RingOffer};
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, Memory, MemoryKind, MemoryRegion, Peer, Result,
    Waker,
};

/// How a ring is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingOptions {
    /// Bytes of the ring: a message may be many times longer.
    pub capacity: u64,
    /// Bytes that are released before the writer is told; 0: after each chunk.
    pub watermark: u64,
    /// How the reader learns of what was written.
    pub notify: NotifyMode,
    /// Messages that came whole to a reader that is no more: this one goes on from there.
    pub completed_messages: u64,
}

impl RingOptions {
    /// A ring of so many bytes, told of by the best form that the endpoint's provider can do,
    /// with credit for each quarter.
    ///
    /// # Errors
    /// `NotSupported` where rings are impossible.
    pub fn new(endpoint: &Endpoint, capacity: u64) -> Result<Self> {
        let notify = NotifyMode::best(endpoint.domain().capabilities())?;
        Ok(Self { capacity, watermark: capacity / 4, notify, completed_messages: 0 })
    }
}

/// What a receiver did so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReceiverStatistics {
    /// Messages that came whole.
    pub messages: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// Chunks that they came in.
    pub chunks: u64,
    /// Credits that were told.
    pub credits: u64,
    /// Notices that came more than once.
    pub duplicates: u64,
    /// Notices of other epochs.
    pub unmatched_notices: u64,
}

/// A ring in this process's memory, which one peer writes.
///
/// Driven by its caller, a [`Port`](super::Port): that owns endpoint and queue and hands over
/// what the queue gives.
#[derive(Debug)]
pub struct RingReceiver {
    reader: ReaderState,
    /// The epoch that it was made in: no other ring of its port was.
    creation_epoch: u32,
    mode: NotifyMode,
    memory: Arc<RingMemory>,
    /// Tells what was released, once the writer said where to.
    writer: Option<NoticeSender>,
    /// Credit that the provider had no room for.
    is_credit_unsent: bool,
    /// Since when there was none.
    unsent_since: Option<Instant>,
    /// How often credit was told again since the writer was heard, since it may be lost.
    credit_resends: u32,
    statistics: ReceiverStatistics,
    /// Why nothing more can be read.
    broken: Option<Error>,
    /// Why the writer cannot be told: what came is still to be had.
    credit_error: Option<Error>,
    /// Nobody reads any more. It stays until the writer has nothing on its way.
    is_closing: bool,
    is_close_notice_due: bool,
    /// It is in the port's list of news.
    pub(super) is_event_queued: bool,
}

impl RingReceiver {
    /// A ring in memory that the caller made, known by this number among those of the endpoint. To be
    /// written through that endpoint, and those of further sites.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity that no ring has, `NotSupported` where the provider
    /// cannot do what is asked for, `OutOfBounds` if the memory is too small, or if it cannot be
    /// registered.
    pub(super) fn open(
        endpoint: &Endpoint,
        further: &[RegistrationScope<'_>],
        (ring, epoch): (u16, u32),
        (options, capacity): (&RingOptions, &QueueBudget),
        memory: impl Memory,
    ) -> Result<Self> {
        let geometry = geometry_of(endpoint, ring, options, memory.kind())?;
        let registration_scopes: Vec<_> = std::iter::once(RegistrationScope::of(endpoint))
            .chain(further.iter().copied())
            .collect();
        let quota = capacity.take(options.notify, geometry.max_chunks())?;
        let max_chunks = quota.max_chunks();
        let memory = RingMemory::over(&registration_scopes, geometry, memory, quota)?;
        let mut reader = ReaderState::new(memory.geometry, epoch, options.watermark)
            .resume_after(options.completed_messages);
        reader.limit_chunks(max_chunks);
        Ok(Self {
            reader,
            creation_epoch: epoch,
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
        })
    }

    /// What the writer has to know; with where notices without a chunk go, for each lane.
    pub(super) fn offer(&self, credit_memories: &[MemoryRegion]) -> Result<RingOffer> {
        let geometry = self.reader.geometry();
        let memory = &self.memory;
        let first = (&memory.region, memory.headers.as_ref());
        let lane_regions =
            memory.lane_regions.iter().map(|(region, headers)| (region, headers.as_ref()));
        let lanes = std::iter::once(first).chain(lane_regions).zip(credit_memories);
        let lanes = lanes.map(|((ring, headers), credit_memory)| {
            Ok(LaneOffer {
                ring: ring.describe()?,
                headers: headers.map(MemoryRegion::describe).transpose()?,
                credit_memory: credit_memory.describe()?,
            })
        });
        Ok(RingOffer {
            ring: geometry.ring(),
            epoch: self.reader.epoch(),
            capacity: geometry.capacity(),
            notify: self.mode,
            tagged: has_tags(memory.region.domain().capabilities()),
            layout: geometry.layout(),
            max_chunks: memory.quota.max_chunks(),
            completed_messages: self.reader.completed_messages(),
            lanes: lanes.collect::<Result<_>>()?,
        })
    }

    /// Tells it from others that had its number before.
    #[inline]
    pub(super) fn creation_epoch(&self) -> u32 {
        self.creation_epoch
    }

    /// Who writes, once that is known.
    pub(super) fn peer(&self) -> Option<Peer> {
        self.writer.as_ref().map(NoticeSender::peer)
    }

    /// Takes the writer's answer: from now on it is told of credit.
    pub(super) fn connect(
        &mut self,
        endpoint: &Endpoint,
        peer: Peer,
        answer: &RingAnswer,
    ) -> Result<()> {
        let operation = "connecting a ring";
        if answer.epoch != self.reader.epoch() {
            let detail = format!(
                "the answer is of epoch {}, the ring of epoch {}",
                answer.epoch,
                self.reader.epoch()
            );
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

    /// Its memory, unless the writer has said that nothing more comes: something may still be on
    /// its way there.
    pub(super) fn into_quarantined(self) -> Option<Arc<RingMemory>> {
        (!self.is_drained()).then_some(self.memory)
    }

    /// Did the writer say that nothing more comes, and is all of it here? A reader that looks
    /// hears nothing, and a ring that is broken cannot be believed.
    fn is_drained(&self) -> bool {
        self.mode != NotifyMode::Polling && self.broken().is_none() && self.is_end_of_stream()
    }

    /// A notice came that may be meant for this ring.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    #[inline]
    pub(super) fn handle_notice(&mut self, immediate: &Immediate, length: u64) -> Result<()> {
        debug_assert!(matches!(
            immediate.notice,
            RingNotice::Chunk { .. } | RingNotice::WriterClosed { .. }
        ));
        self.credit_resends = 0;
        self.reader.notice(immediate, length).map_err(broken)
    }

    /// The next chunk, if it is there.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<ChunkView>> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let memory = &*self.memory;
        let look = |place| memory.look(place);
        if self.mode == NotifyMode::Polling {
            self.reader.look(look, |offset| memory.flag(offset));
        }
        let arrived = match self.reader.take(look) {
            Ok(Some(arrived)) => arrived,
            Ok(None) => return Ok(None),
            Err(error) => {
                let error = broken(error);
                self.fail(error.clone());
                return Err(error);
            }
        };
        let (header, is_last) = (arrived.header, arrived.is_last);
        self.statistics.chunks += 1;
        self.statistics.bytes += u64::from(header.payload);
        self.statistics.messages += u64::from(is_last);
        Ok(Some(ChunkView::new(header, is_last, arrived.offset, Arc::clone(&self.memory))))
    }

    /// Tells the writer what was released, if it is time: a watermark was passed, or
    /// nothing else is going on. True if something was told.
    ///
    /// # Errors
    /// What the fabric says.
    #[inline]
    pub(super) fn return_credit(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        is_idle: bool,
    ) -> Result<bool> {
        if self.is_closing || self.credit_error.is_some() {
            return Ok(false);
        }
        self.collect();
        // A later one tells all that an earlier one would have.
        let due = self.reader.credit(is_idle);
        if due.is_none() && !self.is_credit_unsent {
            return Ok(false);
        }
        self.send_credit(endpoint, queue)
    }

    /// Takes note of views that were dropped.
    #[inline]
    fn collect(&mut self) {
        let unreleased = self.reader.unreleased();
        for sequence in unreleased {
            if !self.memory.take_released(sequence) {
                break;
            }
            self.reader.release_first();
        }
    }

    fn send_credit(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<bool> {
        self.is_credit_unsent = true;
        let Some(notice_sender) = &self.writer else { return Ok(false) };
        let number = self.reader.is_credit_in_flight().then(|| self.credit_number());
        let credit = (self.reader.credit_notice(), self.reader.last_credit());
        let is_sent = notice_sender.send_credit(endpoint, queue, credit, number)?;
        self.is_credit_unsent = !is_sent;
        if is_sent {
            self.unsent_since = None;
        } else {
            self.unsent_since.get_or_insert_with(Instant::now);
        }
        self.statistics.credits += u64::from(is_sent);
        Ok(is_sent)
    }

    /// What a completion of its credit is known by: the ring's number, and above it what fits of
    /// the epoch that it was made in.
    fn credit_number(&self) -> u32 {
        self.creation_epoch << 16 | u32::from(self.reader.geometry().ring())
    }

    /// A credit with this number arrived; or was lost, if there is an error. False for that of
    /// another ring.
    pub(super) fn credit_completed(&mut self, number: u32, lost: Option<&Error>) -> bool {
        let is_ours = number == self.credit_number();
        if is_ours {
            self.reader.credit_completed();
            lost.into_iter().for_each(|error| self.resend_lost_credit(error));
        }
        is_ours
    }

    /// Something that was injected by somebody is lost: it may have been this ring's credit. Where
    /// credits complete, none is injected.
    pub(super) fn handle_lost_inject(&mut self, error: &Error) {
        if !self.reader.serializes_credits() {
            self.resend_lost_credit(error);
        }
    }

    /// Credit that may be lost is told again: twice does no harm. But not for ever to one that is
    /// gone.
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

    /// Nobody reads any more. The memory stays until the writer said that it has nothing on
    /// its way, and that came.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.is_close_notice_due = true;
    }

    /// Is nobody going to read any more?
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Is the writer to be told that nothing is read any more, or of what was read last?
    pub(super) fn is_end_notice_ready(&self) -> bool {
        let tells_last = self.memory.quota.is_limited() && self.has_unsent_credit();
        self.is_closing
            && if self.is_end_of_stream() { tells_last } else { self.is_close_notice_due }
    }

    /// The writer cannot be told that nothing is read any more, and is not to be. True if that
    /// ends the ring: the writer is done.
    pub(super) fn abandon_end_notice(&mut self) -> bool {
        self.is_close_notice_due = false;
        self.is_end_of_stream()
    }

    /// Goes on with closing. It is over once nothing of it is needed.
    pub(super) fn progress_close(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<CloseProgress> {
        // Whoever looks, and who never had a writer, hears nothing.
        if self.mode == NotifyMode::Polling || self.writer.is_none() || self.broken().is_some() {
            return Ok(CloseProgress::Complete);
        }
        while self.take()?.is_some() {}
        if self.is_end_of_stream() {
            return self.send_last_credit(endpoint, queue);
        }
        if self.is_close_notice_due
            && let Some(notice_sender) = &self.writer
        {
            self.is_close_notice_due =
                !notice_sender.send_notice(endpoint, queue, self.reader.close_notice())?;
        }
        Ok(if self.is_close_notice_due { CloseProgress::Refused } else { CloseProgress::Pending })
    }

    /// The writer is done, and all of it was taken. Where its queue may overrun, it keeps its share
    /// until it is told of the last chunk.
    fn send_last_credit(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<CloseProgress> {
        if !self.memory.quota.is_limited() || self.credit_error.is_some() || self.writer.is_none() {
            return Ok(CloseProgress::Complete);
        }
        // Nothing is written any more, so views that somebody has do not matter.
        while !self.reader.unreleased().is_empty() {
            self.reader.release_first();
        }
        if self.reader.credit(true).is_some() || self.is_credit_unsent {
            self.send_credit(endpoint, queue)?;
        }
        Ok(match (self.is_credit_unsent, self.has_unsent_credit()) {
            (true, _) => CloseProgress::Refused,
            (false, true) => CloseProgress::Pending,
            (false, false) => CloseProgress::Complete,
        })
    }

    /// Nothing more can be read, and why.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    /// The writer cannot be told any more, and why. What came can still be taken.
    #[cold]
    pub(super) fn set_credit_error(&mut self, error: Error) {
        self.is_credit_unsent = false;
        self.credit_error.get_or_insert(error);
    }

    /// Why the writer cannot be told.
    #[inline]
    pub(super) fn credit_error(&self) -> Option<&Error> {
        self.credit_error.as_ref()
    }

    /// Why nothing more can be read.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref().or(self.credit_error.as_ref())
    }

    /// Does it want to be looked after, though the queue has nothing for it, beside when the
    /// writer can be told of the end?
    #[inline]
    pub(super) fn needs_polling(&self) -> bool {
        self.mode != NotifyMode::Immediate || self.awaits_header()
    }

    /// Was its next chunk told of, and not its header there when it was looked for? Where headers
    /// lie apart they are writes of their own, which a notice may overtake.
    #[inline]
    pub(super) fn awaits_header(&self) -> bool {
        self.broken.is_none() && self.reader.awaits_header()
    }

    /// While it is said to sleep, whoever drops a view wakes the sleeper in the queue: said only
    /// if there are views that could be.
    pub(super) fn set_sleeping(&self) {
        self.memory.set_sleeping(!self.reader.unreleased().is_empty());
    }

    /// It does not sleep any more, whatever became of the views meanwhile.
    pub(super) fn clear_sleeping(&self) {
        self.memory.set_sleeping(false);
    }

    /// Whom to wake when a view is dropped.
    pub(super) fn set_waker(&self, waker: Waker) {
        self.memory.set_waker(waker);
    }

    /// Is the writer done, and everything taken?
    #[must_use]
    pub fn is_end_of_stream(&self) -> bool {
        self.reader.is_end_of_stream()
    }

    /// How long there was no room for credit that is to be told, if there is such.
    pub(super) fn credit_unsent_for(&self) -> Option<Duration> {
        let is_unsent = self.is_credit_unsent
            && !self.is_closing
            && self.credit_error.is_none()
            && self.writer.is_some();
        is_unsent.then(|| self.unsent_since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Is there credit that is not told, for lack of room or because it is not due?
    #[must_use]
    pub fn has_unsent_credit(&self) -> bool {
        self.is_credit_unsent || self.reader.head() != self.reader.credited_head()
    }

    /// Endpoints that it may be written through.
    #[must_use]
    pub fn lanes(&self) -> usize {
        1 + self.memory.lane_regions.len()
    }

    /// The positions behind it.
    #[must_use]
    pub fn reader(&self) -> &ReaderState {
        &self.reader
    }

    /// The same, with all that belongs to it.
    pub(super) fn memory(&self) -> Arc<RingMemory> {
        Arc::clone(&self.memory)
    }

    /// How the reader is told.
    #[must_use]
    pub fn notify(&self) -> NotifyMode {
        self.mode
    }

    /// What it did so far.
    #[must_use]
    pub fn statistics(&self) -> ReceiverStatistics {
        let (duplicates, unmatched_notices) = self.reader.ignored();
        ReceiverStatistics { duplicates, unmatched_notices, ..self.statistics }
    }
}

/// The shape of a ring with these options.
pub(super) fn geometry_of(
    endpoint: &Endpoint,
    ring: u16,
    options: &RingOptions,
    memory: MemoryKind,
) -> Result<RingGeometry> {
    let capabilities = endpoint.domain().capabilities();
    options.notify.check(capabilities)?;
    let layout = options.notify.layout(capabilities, memory)?;
    let Some(geometry) = RingGeometry::new(options.capacity, ring) else {
        let detail = format!(
            "there is no ring of {} bytes with number {ring}: from 1 KiB to 1 TiB, and two halves of whole granules",
            options.capacity
        );
        return Err(Error::new(ErrorKind::InvalidArgument, "opening a ring", detail));
    };
    Ok(geometry.with_layout(layout))
}

#[cold]
pub(super) fn broken(error: super::ProtocolError) -> Error {
    Error::new(ErrorKind::ConnectionLost, "reading a ring", error.to_string())
}
