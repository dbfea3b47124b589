//! One node's topic at a node that wants its messages: copies each into memory of the sink, in
//! order, and each once.
//!
//! Chunks are copied as soon as they arrive. Dropping a chunk's view returns its space in the ring.
//! The last view of a message is dropped only when the message is published: credit beyond its end
//! tells the writer that it is delivered. Nothing here knows endpoints, threads or clocks: all
//! effects go through an [`InboundTransport`].

use std::collections::VecDeque;

use fabric::ring::ChunkHeader;
use transfer::device_memory::Part;

use super::probe::RingProbe;
use super::{ClockReading, FinishOutcome, Progress, Sink, StageDurations, TurnFailure};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::message_header::{
    MAX_PREFIX_LENGTH, MessageHeader, RingMessageKind, TRAILER_LENGTH,
};

/// Limit of pending steps: enough for a whole batch, and for copies in progress.
const MAX_STEPS: usize = 256;
const CHUNKS_PER_TURN: usize = 256;

/// A received chunk. Dropping it returns its space in the ring.
pub(crate) trait Chunk {
    fn header(&self) -> &ChunkHeader;
    fn is_last(&self) -> bool;
    fn read(&self, at: usize, into: &mut [u8]) -> Result<()>;
    /// The bytes beside its header.
    fn inline_data(&self) -> Result<Vec<u8>>;
}

pub(crate) trait InboundTransport {
    type Chunk: Chunk;
    type PayloadLocation;
    type CopyHandle;

    fn take(&mut self) -> Result<Option<Self::Chunk>>;
    /// Copies from a chunk to a payload; None if the copy is complete already.
    fn copy_in(
        &mut self,
        chunk: &Self::Chunk,
        from: usize,
        length: usize,
        to: &Self::PayloadLocation,
        at: u64,
    ) -> Result<Option<Self::CopyHandle>>;
    fn is_copied(&mut self, copy_handle: &Self::CopyHandle) -> Result<bool>;
    /// Begins to copy a chunk to where the processor reads it, its end first: that arrives last.
    fn look(&mut self, chunk: &Self::Chunk) -> Result<Self::CopyHandle>;
    /// What the copy of a chunk has seen, once it is over.
    fn seen(&mut self, chunk: &Self::Chunk) -> Result<Vec<u8>>;
}

/// Counters of a topic of one node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InboundCounters {
    /// Published messages.
    pub messages: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Time waiting for memory, in nanoseconds.
    pub waited_for_memory: u64,
    /// Time waiting for a full queue, in nanoseconds.
    pub waited_for_queue: u64,
    /// Lanes for large messages; 0 while it is not connected.
    pub lanes: u64,
    /// The ring lies in device memory.
    pub is_direct: bool,
}

type InboundResult<T> = std::result::Result<T, TurnFailure>;

/// A pending step; steps run in order.
enum PendingStep<C, T> {
    /// Wait for a copy begun at this time, then drop its chunk.
    Copy(T, u64, Option<C>),
    /// Publish the first of the messages that began.
    Finish(StageDurations, CopyTimes),
    ReleaseChunk(C),
    /// Compare a chunk of a probe, once a copy begun at this time is over.
    Look(T, u64, C, Part),
}

/// Times of a message: arrival of its last chunk, begin and end of its copies.
#[derive(Debug, Clone, Copy, Default)]
struct CopyTimes {
    arrived: u64,
    begun: u64,
    /// None: not known yet.
    done: Option<u64>,
}

/// A batch with messages still to be read.
struct Batch<C> {
    chunk: C,
    at: usize,
    arrived: u64,
}

/// A long message with chunks still to come.
struct LongMessage<C, P> {
    kind: RingMessageKind,
    header: MessageHeader,
    /// The first chunk, of a message whose header is beside it.
    first: Option<C>,
    /// None: the message is a duplicate, or waits for memory.
    payload: Option<P>,
    is_wanted: bool,
    prefix: u64,
    has_trailer: bool,
    trailer: [u8; TRAILER_LENGTH],
    copy_begun: Option<u64>,
}

pub(crate) struct Inbound<C, P, T> {
    /// The first position that is not published.
    expected: u64,
    /// The first position that has not begun.
    next: u64,
    /// The last position received by this ring.
    last: Option<u64>,
    largest: u64,
    timeout: u64,
    steps: VecDeque<PendingStep<C, T>>,
    batch: Option<Batch<C>>,
    long: Option<LongMessage<C, P>>,
    /// The probe of the ring, until the last of its bytes were right.
    probe: Option<RingProbe>,
    /// They were, and this was not asked for yet.
    has_passed_probe: bool,
    /// Since when memory is exhausted, or the queue is full.
    no_memory_since: Option<u64>,
    queue_full_since: Option<u64>,
    is_draining: bool,
    /// Messages that began, each with a pending `Finish` step.
    begun: VecDeque<MessageHeader>,
    counters: InboundCounters,
}

impl<C: Chunk, P, T> Inbound<C, P, T> {
    /// A topic with messages up to `largest` bytes, from a position on; `timeout` limits a device's
    /// copy.
    pub(crate) fn new(from: u64, largest: u64, timeout: u64) -> Self {
        Self {
            expected: from,
            next: from,
            last: None,
            largest,
            timeout,
            steps: VecDeque::new(),
            batch: None,
            long: None,
            probe: None,
            has_passed_probe: false,
            no_memory_since: None,
            queue_full_since: None,
            is_draining: false,
            begun: VecDeque::new(),
            counters: InboundCounters::default(),
        }
    }

    pub(crate) fn expected(&self) -> u64 {
        self.expected
    }

    /// Since when the sink has no memory or queue space, if so.
    pub(crate) fn waiting_since(&self) -> Option<u64> {
        self.no_memory_since.into_iter().chain(self.queue_full_since).min()
    }

    pub(crate) fn set_largest(&mut self, largest: u64) {
        self.largest = largest;
    }

    pub(crate) fn counters(&self) -> InboundCounters {
        self.counters
    }

    /// The next ring begins with a probe, or not.
    pub(crate) fn expect_probe(&mut self, probe: Option<RingProbe>) {
        (self.probe, self.has_passed_probe) = (probe, false);
    }

    /// Returns true once, after the probe of the ring has passed.
    pub(crate) fn take_passed_probe(&mut self) -> bool {
        std::mem::take(&mut self.has_passed_probe)
    }

    /// Forgets unpublished messages after the ring closed, as soon as no copy is in progress.
    pub(crate) fn disconnect(&mut self) {
        (self.batch, self.long) = (None, None);
        self.expect_probe(None);
        self.is_draining = true;
    }

    /// Returns true if no copy of a closed ring is in progress.
    pub(crate) fn is_drained(&self) -> bool {
        !self.is_draining
    }

    /// Continues draining; true if it is complete.
    pub(crate) fn drain(
        &mut self,
        intake: &mut impl InboundTransport<Chunk = C, PayloadLocation = P, CopyHandle = T>,
        sink: &mut dyn Sink<P>,
    ) -> bool {
        while let Some(step) = self.steps.front() {
            if let PendingStep::Copy(copy_handle, ..) | PendingStep::Look(copy_handle, ..) = step
                && let Ok(false) = intake.is_copied(copy_handle)
            {
                return false;
            }
            self.steps.pop_front();
        }
        if self.is_draining {
            sink.abandon();
            self.begun.clear();
            self.is_draining = false;
            (self.next, self.last) = (self.expected, None);
            (self.no_memory_since, self.queue_full_since) = (None, None);
        }
        true
    }

    /// Runs one turn, with a bounded amount of work.
    pub(crate) fn advance<I: InboundTransport<Chunk = C, PayloadLocation = P, CopyHandle = T>>(
        &mut self,
        now: ClockReading,
        intake: &mut I,
        sink: &mut dyn Sink<P>,
    ) -> InboundResult<Progress> {
        let mut progress = Progress::default();
        if self.is_draining {
            progress.has_moved = self.drain(intake, sink);
            progress.is_copying = !progress.has_moved;
            return Ok(progress);
        }
        let mut turn = InboundTurn { topic: self, now, intake, sink };
        for _ in 0..CHUNKS_PER_TURN {
            turn.run_steps(&mut progress)?;
            let topic = &*turn.topic;
            if topic.queue_full_since.is_some() || topic.steps.len() >= MAX_STEPS {
                break;
            }
            if !turn.read_next()? {
                break;
            }
            progress.has_moved = true;
        }
        turn.run_steps(&mut progress)?;
        progress.is_waiting |= self.no_memory_since.is_some() || self.queue_full_since.is_some();
        let first = self.steps.front();
        progress.is_copying = matches!(first, Some(PendingStep::Copy(..) | PendingStep::Look(..)));
        Ok(progress)
    }

    /// Returns true if a message is wanted; false for a duplicate.
    fn check(&mut self, header: &MessageHeader) -> InboundResult<bool> {
        if self.last.is_some_and(|last| header.position <= last) {
            return Err(violation("message position does not follow the last one"));
        }
        if header.length > self.largest {
            return Err(violation("message is longer than the topic allows"));
        }
        self.last = Some(header.position);
        Ok(header.position >= self.next)
    }

    fn release_chunk(&mut self, chunk: Option<C>) {
        if !self.steps.is_empty() {
            self.steps.extend(chunk.map(PendingStep::ReleaseChunk));
        }
    }

    /// The first chunk of a long message: header and metadata only.
    fn read_prefix(&mut self, chunk: &C) -> InboundResult<()> {
        let ring = *chunk.header();
        let length = ring.payload as usize;
        if ring.offset != 0 || length > MAX_PREFIX_LENGTH {
            return Err(violation("message does not begin with its header"));
        }
        let decoded = MessageHeader::decode_from(length, |from, into| chunk.read(from, into));
        let (header, has_trailer) = decoded.map_err(TurnFailure::Connection)?.map_err(violation)?;
        let trailer = if has_trailer { TRAILER_LENGTH as u64 } else { 0 };
        let whole = header.prefix() as u64 + header.length + trailer;
        if length != header.prefix() || whole != ring.length || header.length == 0 {
            return Err(violation("message length differs from its header"));
        }
        let prefix = length as u64;
        self.begin_long((RingMessageKind::Long, header), (prefix, has_trailer), None)
    }

    /// The first chunk of a message whose header and metadata are beside it.
    fn read_inline(&mut self, chunk: C) -> InboundResult<()> {
        let ring = *chunk.header();
        let bytes = chunk.inline_data().map_err(TurnFailure::Connection)?;
        let (header, has_trailer) = MessageHeader::decode(&bytes).map_err(violation)?;
        if ring.offset != 0
            || bytes.len() != header.prefix()
            || has_trailer
            || header.length != ring.length
        {
            return Err(violation("message length differs from its header"));
        }
        self.begin_long((RingMessageKind::Inline, header), (0, false), Some(chunk))
    }

    fn begin_long(
        &mut self,
        (kind, header): (RingMessageKind, MessageHeader),
        (prefix, has_trailer): (u64, bool),
        first: Option<C>,
    ) -> InboundResult<()> {
        let is_wanted = self.check(&header)?;
        self.long = Some(LongMessage {
            kind,
            header,
            first,
            payload: None,
            is_wanted,
            prefix,
            has_trailer,
            trailer: [0; TRAILER_LENGTH],
            copy_begun: None,
        });
        Ok(())
    }
}

/// One turn of an inbound topic, with its transport and sink.
struct InboundTurn<'a, I: InboundTransport> {
    topic: &'a mut Inbound<I::Chunk, I::PayloadLocation, I::CopyHandle>,
    now: ClockReading,
    intake: &'a mut I,
    sink: &'a mut dyn Sink<I::PayloadLocation>,
}

impl<I: InboundTransport> InboundTurn<'_, I> {
    fn run_steps(&mut self, progress: &mut Progress) -> InboundResult<()> {
        while let Some(step) = self.topic.steps.front_mut() {
            match step {
                PendingStep::Copy(copy_handle, since, _) => {
                    if !self.intake.is_copied(copy_handle)? {
                        if self.now.monotonic - *since > self.topic.timeout {
                            let detail = "a device or copy thread did not copy a message in within \
                                          the timeout";
                            let kind = ErrorKind::DeadlineExceeded;
                            return Err(Error::new("copy message in", kind, detail).into());
                        }
                        return Ok(());
                    }
                }
                PendingStep::Finish(stages, times) => {
                    let Some(header) = self.topic.begun.front() else { break };
                    let done = *times.done.get_or_insert(self.now.monotonic);
                    stages.copy_in = done - times.begun;
                    stages.after_copy = self.now.monotonic - done;
                    stages.after_arrival = self.now.monotonic - times.arrived;
                    match self.sink.finish(header, stages)? {
                        FinishOutcome::Retry => {
                            self.topic.queue_full_since.get_or_insert(self.now.monotonic);
                            return Ok(());
                        }
                        FinishOutcome::Published => {
                            if let Some(since) = self.topic.queue_full_since.take() {
                                self.topic.counters.waited_for_queue += self.now.monotonic - since;
                            }
                            self.topic.expected = header.position + 1;
                            self.topic.counters.messages += 1;
                            self.topic.counters.bytes += header.length;
                            self.topic.begun.pop_front();
                        }
                    }
                }
                PendingStep::ReleaseChunk(_) => {}
                PendingStep::Look(copy_handle, since, chunk, part) => {
                    if !self.intake.is_copied(copy_handle)? {
                        if self.now.monotonic - *since > self.topic.timeout {
                            let detail = "the device did not copy the bytes of a probe within the \
                                          timeout";
                            let kind = ErrorKind::DeadlineExceeded;
                            return Err(TurnFailure::Connection(Error::new(READ, kind, detail)));
                        }
                        return Ok(());
                    }
                    let bytes = self.intake.seen(chunk).map_err(TurnFailure::Connection)?;
                    let Some(probe) = &self.topic.probe else { return Ok(()) };
                    if let Some(fault) = probe.fault(*part, &bytes) {
                        return Err(TurnFailure::Probe(fault));
                    }
                    let is_last = chunk.is_last() && probe.message().is_none();
                    if is_last && self.topic.steps.len() == 1 {
                        self.topic.expect_probe(None);
                        self.topic.has_passed_probe = true;
                    }
                }
            }
            progress.has_moved = true;
            self.topic.steps.pop_front();
        }
        Ok(())
    }

    /// Reads the next message of a batch, or takes the next chunk. False if nothing can be done
    /// now.
    fn read_next(&mut self) -> InboundResult<bool> {
        if self.topic.batch.is_some() {
            return self.read_batch();
        }
        let waiting =
            self.topic.long.as_ref().filter(|long| long.is_wanted && long.payload.is_none());
        if let Some(header) = waiting.map(|long| long.header) {
            let Some(payload) = self.allocate(&header)? else { return Ok(false) };
            if let Some(long) = &mut self.topic.long {
                long.payload = Some(payload);
            }
        }
        if let Some(chunk) = self.topic.long.as_mut().and_then(|long| long.first.take()) {
            self.continue_long_message(chunk)?;
            return Ok(true);
        }
        // No message of the topic is taken before the probe is over.
        let is_probed = |probe: &RingProbe| probe.message().is_none();
        if self.topic.probe.as_ref().is_some_and(is_probed) {
            return Ok(false);
        }
        let Some(chunk) = self.intake.take().map_err(TurnFailure::Connection)? else {
            return Ok(false);
        };
        let header = *chunk.header();
        match RingMessageKind::of(header.topic) {
            None => return Err(violation("unknown kind of ring message")),
            Some(RingMessageKind::Probe) => self.begin_look(chunk)?,
            Some(_) if self.topic.probe.is_some() => {
                return Err(violation("the ring does not begin with the probe"));
            }
            Some(_) if self.topic.long.is_some() => self.continue_long_message(chunk)?,
            Some(RingMessageKind::Batch) => {
                if header.offset != 0 || !chunk.is_last() {
                    return Err(violation("batch is split into several chunks"));
                }
                self.topic.batch = Some(Batch { chunk, at: 0, arrived: self.now.monotonic });
            }
            Some(RingMessageKind::Long) => {
                self.topic.read_prefix(&chunk)?;
                // Nothing of this chunk is needed any more.
                self.topic.release_chunk(Some(chunk));
            }
            Some(RingMessageKind::Inline) => self.topic.read_inline(chunk)?,
        }
        Ok(true)
    }

    /// Looks at a chunk of a probe as soon as it has arrived.
    fn begin_look(&mut self, chunk: I::Chunk) -> InboundResult<()> {
        let header = *chunk.header();
        let expected = self.topic.probe.as_ref().and_then(RingProbe::message);
        let Some(message) = expected.filter(|it| it.length() == header.length) else {
            return Err(violation("a probe that was not asked for, or of another length"));
        };
        if chunk.is_last()
            && let Some(probe) = &mut self.topic.probe
        {
            probe.advance();
        }
        let part = Part::new(message.offset() + header.offset, header.payload.into());
        let copy_handle = self.intake.look(&chunk)?;
        self.topic.steps.push_back(PendingStep::Look(copy_handle, self.now.monotonic, chunk, part));
        Ok(())
    }

    fn allocate(&mut self, header: &MessageHeader) -> InboundResult<Option<I::PayloadLocation>> {
        let payload = self.sink.begin(header)?;
        if payload.is_none() {
            self.topic.no_memory_since.get_or_insert(self.now.monotonic);
        } else {
            let since = self.topic.no_memory_since.take();
            self.topic.counters.waited_for_memory +=
                since.map_or(0, |since| self.now.monotonic - since);
            self.topic.next = header.position + 1;
        }
        Ok(payload)
    }

    fn read_batch(&mut self) -> InboundResult<bool> {
        let Some(batch) = self.topic.batch.take() else { return Ok(false) };
        let length = batch.chunk.header().payload as usize;
        let Batch { chunk, at, arrived } = batch;
        if at == length {
            self.topic.release_chunk(Some(chunk));
            return Ok(true);
        }
        let left = length - at;
        let decoded = MessageHeader::decode_from(left, |from, into| chunk.read(at + from, into));
        let (header, has_trailer) = decoded.map_err(TurnFailure::Connection)?.map_err(violation)?;
        if has_trailer || header.length > left as u64 || header.batch_length() > left {
            return Err(violation("message extends beyond its batch"));
        }
        let next = Batch { at: at + header.batch_length(), chunk, arrived };
        // A message that waits for memory was checked before.
        if self.topic.no_memory_since.is_none() && !self.topic.check(&header)? {
            self.topic.batch = Some(next);
            return Ok(true);
        }
        let Some(payload) = self.allocate(&header)? else {
            self.topic.batch = Some(Batch { at, ..next });
            return Ok(false);
        };
        let mut times =
            CopyTimes { arrived, begun: self.now.monotonic, done: Some(self.now.monotonic) };
        if header.length > 0 {
            let from = at + header.prefix();
            let copy = self.intake.copy_in(&next.chunk, from, header.length as usize, &payload, 0);
            if let Some(copy_handle) = copy? {
                let step = PendingStep::Copy(copy_handle, self.now.monotonic, None);
                self.topic.steps.push_back(step);
                times.done = None;
            }
        }
        self.topic.begun.push_back(header);
        self.topic.steps.push_back(PendingStep::Finish(StageDurations::default(), times));
        self.topic.batch = Some(next);
        Ok(true)
    }

    /// A further chunk of a long message.
    fn continue_long_message(&mut self, chunk: I::Chunk) -> InboundResult<()> {
        let Some(mut long) = self.topic.long.take() else { return Ok(()) };
        let (ring, is_last) = (*chunk.header(), chunk.is_last());
        if ring.topic != long.kind.number() {
            return Err(violation("chunk kind differs from its message"));
        }
        // The ring's reader has checked that chunks follow one another up to the length.
        let from = ring.offset - long.prefix;
        let payload = u64::from(ring.payload);
        let of_payload = long.header.length.saturating_sub(from).min(payload);
        for at in of_payload..payload {
            // Bytes after the payload are the trailer, which may span chunks.
            let index = (from + at - long.header.length) as usize;
            if long.has_trailer
                && let Some(byte) = long.trailer.get_mut(index..=index)
            {
                chunk.read(at as usize, byte).map_err(TurnFailure::Connection)?;
            }
        }
        let (mut chunk, mut is_done) = (Some(chunk), true);
        if let (Some(payload), Some(received)) = (&long.payload, &chunk)
            && of_payload > 0
        {
            long.copy_begun.get_or_insert(self.now.monotonic);
            let copy = self.intake.copy_in(received, 0, of_payload as usize, payload, from)?;
            if let Some(copy_handle) = copy {
                is_done = false;
                // The last chunk is kept until its message is published.
                let copied = chunk.take_if(|_| !is_last);
                let step = PendingStep::Copy(copy_handle, self.now.monotonic, copied);
                self.topic.steps.push_back(step);
            }
        }
        if !is_last {
            self.topic.release_chunk(chunk);
            self.topic.long = Some(long);
            return Ok(());
        }
        if long.payload.is_some() {
            let copy_out = if long.has_trailer { u64::from_le_bytes(long.trailer) } else { 0 };
            let is_direct = long.kind == RingMessageKind::Inline;
            let stages = StageDurations { copy_out, is_direct, ..StageDurations::default() };
            let done = (is_done && self.topic.steps.is_empty()).then_some(self.now.monotonic);
            let begun = long.copy_begun.unwrap_or(self.now.monotonic);
            let times = CopyTimes { arrived: self.now.monotonic, begun, done };
            self.topic.begun.push_back(long.header);
            self.topic.steps.push_back(PendingStep::Finish(stages, times));
        }
        self.topic.release_chunk(chunk);
        Ok(())
    }
}

const READ: &str = "read message from node";

fn violation(detail: &'static str) -> TurnFailure {
    TurnFailure::Connection(Error::new(READ, ErrorKind::Malformed, detail))
}
