//! The side that reads, on an endpoint.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::capacity::QueueCapacity;
use super::credit_memory::credit_at;
use super::immediate::{Immediate, Notice};
use super::memory::{RingMemory, Site, View};
use super::notify::{Notify, has_tags};
use super::reader::Reader;
use super::retries::Ending;
use super::shape::Shape;
use super::speaker::Speaker;
use super::terms::{LaneOffer, RingAnswer, RingOffer};
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
    pub notify: Notify,
    /// Messages that came whole to a reader that is no more: this one goes on from there.
    pub whole: u64,
}

impl RingOptions {
    /// A ring of so many bytes, told of by the best form that the endpoint's provider can do,
    /// with credit for each quarter.
    ///
    /// # Errors
    /// `NotSupported` where rings are impossible.
    pub fn new(endpoint: &Endpoint, capacity: u64) -> Result<Self> {
        let notify = Notify::best(endpoint.domain().capabilities())?;
        Ok(Self { capacity, watermark: capacity / 4, notify, whole: 0 })
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
    pub strangers: u64,
}

/// A ring in this process's memory, which one peer writes.
///
/// Driven by its caller, a [`Port`](super::Port): that owns endpoint and queue and hands over
/// what the queue gives.
#[derive(Debug)]
pub struct RingReceiver {
    reader: Reader,
    /// The epoch that it was made in: no other ring of its port was.
    born: u32,
    form: Notify,
    memory: Arc<RingMemory>,
    /// Tells what was released, once the writer said where to.
    writer: Option<Speaker>,
    /// Credit that the provider had no room for.
    is_credit_unsent: bool,
    /// Since when there was none.
    unsent_since: Option<Instant>,
    /// How often credit was told again since the writer was heard, since it may be lost.
    told_again: u32,
    statistics: ReceiverStatistics,
    /// Why nothing more can be read.
    broken: Option<Error>,
    /// Why the writer cannot be told: what came is still to be had.
    mute: Option<Error>,
    /// Nobody reads any more. It stays until the writer has nothing on its way.
    is_closing: bool,
    owes_gone: bool,
    /// It is in the port's list of news.
    pub(super) is_listed: bool,
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
        further: &[Site<'_>],
        (ring, epoch): (u16, u32),
        (options, capacity): (&RingOptions, &QueueCapacity),
        memory: impl Memory,
    ) -> Result<Self> {
        let shape = shape_of(endpoint, ring, options, memory.kind())?;
        let sites: Vec<_> =
            std::iter::once(Site::of(endpoint)).chain(further.iter().copied()).collect();
        let share = capacity.take(options.notify, shape.most_chunks())?;
        let most_chunks = share.most_chunks();
        let memory = RingMemory::over(&sites, shape, memory, share)?;
        let mut reader = Reader::new(memory.shape, epoch, options.watermark).after(options.whole);
        reader.limit_chunks(most_chunks);
        Ok(Self {
            reader,
            born: epoch,
            form: options.notify,
            memory: Arc::new(memory),
            writer: None,
            is_credit_unsent: false,
            unsent_since: None,
            told_again: 0,
            statistics: ReceiverStatistics::default(),
            broken: None,
            mute: None,
            is_closing: false,
            owes_gone: false,
            is_listed: false,
        })
    }

    /// What the writer has to know; with where notices without a chunk go, for each lane.
    pub(super) fn offer(&self, credit_memories: &[MemoryRegion]) -> Result<RingOffer> {
        let shape = self.reader.shape();
        let memory = &self.memory;
        let first = (&memory.region, memory.headers.as_ref());
        let others = memory.others.iter().map(|(region, headers)| (region, headers.as_ref()));
        let lanes = std::iter::once(first).chain(others).zip(credit_memories);
        let lanes = lanes.map(|((ring, headers), credit_memory)| {
            Ok(LaneOffer {
                ring: ring.describe()?,
                headers: headers.map(MemoryRegion::describe).transpose()?,
                credit_memory: credit_memory.describe()?,
            })
        });
        Ok(RingOffer {
            ring: shape.ring(),
            epoch: self.reader.epoch(),
            capacity: shape.capacity(),
            notify: self.form,
            tagged: has_tags(memory.region.domain().capabilities()),
            layout: shape.layout(),
            most_chunks: memory.share.most_chunks(),
            whole: self.reader.whole(),
            lanes: lanes.collect::<Result<_>>()?,
        })
    }

    /// Tells it from others that had its number before.
    #[inline]
    pub(super) fn born(&self) -> u32 {
        self.born
    }

    /// Who writes, once that is known.
    pub(super) fn peer(&self) -> Option<Peer> {
        self.writer.as_ref().map(Speaker::peer)
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
            let detail = format!("of epoch {}, not {}", answer.epoch, self.reader.epoch());
            return Err(Error::new(ErrorKind::VersionMismatch, operation, detail));
        }
        if answer.name >= super::immediate::RINGS {
            let detail = format!("a ring by the name of {}", answer.name);
            return Err(Error::new(ErrorKind::MalformedDescriptor, operation, detail));
        }
        let (site, form) = (Site::of(endpoint), (self.form, answer.tagged));
        let credit_memory = (&answer.credit_memory, credit_at(answer.name));
        let speaker = Speaker::new(site, form, peer, credit_memory)?;
        self.reader.set_writer_name(answer.name);
        self.reader.limit_chunks(answer.most_chunks);
        if speaker.may_overtake(endpoint.domain()) {
            self.reader.serialize_credits();
        }
        self.writer = Some(speaker);
        Ok(())
    }

    /// Its memory, unless the writer has said that nothing more comes: something may still be on
    /// its way there.
    pub(super) fn into_grave(self) -> Option<Arc<RingMemory>> {
        (!self.is_drained()).then_some(self.memory)
    }

    /// Did the writer say that nothing more comes, and is all of it here? A reader that looks
    /// hears nothing, and a ring that is broken cannot be believed.
    fn is_drained(&self) -> bool {
        self.form != Notify::Polling && self.broken().is_none() && self.is_over()
    }

    /// A notice came that may be meant for this ring.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    #[inline]
    pub(super) fn hear(&mut self, immediate: &Immediate, length: u64) -> Result<()> {
        debug_assert!(matches!(immediate.notice, Notice::Chunk { .. } | Notice::Done { .. }));
        self.told_again = 0;
        self.reader.notice(immediate, length).map_err(broken)
    }

    /// The next chunk, if it is there.
    ///
    /// # Errors
    /// A peer that breaks the protocol.
    #[inline]
    pub(super) fn take(&mut self) -> Result<Option<View>> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let memory = &*self.memory;
        let look = |place| memory.look(place);
        if self.form == Notify::Polling {
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
        Ok(Some(View::new(header, is_last, arrived.offset, Arc::clone(&self.memory))))
    }

    /// Tells the writer what was released, if it is time: a watermark was passed, or
    /// nothing else is going on. True if something was told.
    ///
    /// # Errors
    /// What the fabric says.
    #[inline]
    pub(super) fn tell(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
        is_quiet: bool,
    ) -> Result<bool> {
        if self.is_closing || self.mute.is_some() {
            return Ok(false);
        }
        self.collect();
        // A later one tells all that an earlier one would have.
        let due = self.reader.credit(is_quiet);
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
        let Some(speaker) = &self.writer else { return Ok(false) };
        let number = self.reader.is_credit_on_its_way().then(|| self.credit_number());
        let credit = (self.reader.credit_notice(), self.reader.told_credit());
        let is_sent = speaker.send_credit(endpoint, queue, credit, number)?;
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
        self.born << 16 | u32::from(self.reader.shape().ring())
    }

    /// A credit with this number arrived; or was lost, if there is an error. False for that of
    /// another ring.
    pub(super) fn credit_completed(&mut self, number: u32, lost: Option<&Error>) -> bool {
        let is_ours = number == self.credit_number();
        if is_ours {
            self.reader.credit_completed();
            lost.into_iter().for_each(|error| self.has_lost_credit(error));
        }
        is_ours
    }

    /// Something that was injected by somebody is lost: it may have been this ring's credit. Where
    /// credits complete, none is injected.
    pub(super) fn has_lost(&mut self, error: &Error) {
        if !self.reader.serializes_credits() {
            self.has_lost_credit(error);
        }
    }

    /// Credit that may be lost is told again: twice does no harm. But not for ever to one that is
    /// gone.
    fn has_lost_credit(&mut self, error: &Error) {
        const MOST: u32 = 8;
        let has_told = self.statistics.credits > 0 && self.writer.is_some();
        if !has_told || self.is_closing || self.broken().is_some() {
            return;
        }
        self.told_again += 1;
        if self.told_again > MOST {
            self.cannot_tell(error.clone());
        } else {
            self.reader.tell_again();
            self.is_credit_unsent = true;
        }
    }

    /// Nobody reads any more. The memory stays until the writer said that it has nothing on
    /// its way, and that came.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.owes_gone = true;
    }

    /// Is nobody going to read any more?
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Is the writer to be told that nothing is read any more, or of what was read last?
    pub(super) fn tells_end(&self) -> bool {
        let tells_last = self.memory.share.is_limited() && self.has_untold();
        self.is_closing && if self.is_over() { tells_last } else { self.owes_gone }
    }

    /// The writer cannot be told that nothing is read any more, and is not to be. True if that
    /// ends the ring: the writer is done.
    pub(super) fn give_up_telling(&mut self) -> bool {
        self.owes_gone = false;
        self.is_over()
    }

    /// Goes on with closing. It is over once nothing of it is needed.
    pub(super) fn go_on_closing(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<Ending> {
        // Whoever looks, and who never had a writer, hears nothing.
        if self.form == Notify::Polling || self.writer.is_none() || self.broken().is_some() {
            return Ok(Ending::Over);
        }
        while self.take()?.is_some() {}
        if self.is_over() {
            return self.tell_last(endpoint, queue);
        }
        if self.owes_gone
            && let Some(speaker) = &self.writer
        {
            self.owes_gone = !speaker.send_notice(endpoint, queue, self.reader.gone())?;
        }
        Ok(if self.owes_gone { Ending::Refused } else { Ending::Waits })
    }

    /// The writer is done, and all of it was taken. Where its queue may overrun, it keeps its share
    /// until it is told of the last chunk.
    fn tell_last(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<Ending> {
        if !self.memory.share.is_limited() || self.mute.is_some() || self.writer.is_none() {
            return Ok(Ending::Over);
        }
        // Nothing is written any more, so views that somebody has do not matter.
        while !self.reader.unreleased().is_empty() {
            self.reader.release_first();
        }
        if self.reader.credit(true).is_some() || self.is_credit_unsent {
            self.send_credit(endpoint, queue)?;
        }
        Ok(match (self.is_credit_unsent, self.has_untold()) {
            (true, _) => Ending::Refused,
            (false, true) => Ending::Waits,
            (false, false) => Ending::Over,
        })
    }

    /// Nothing more can be read, and why.
    #[cold]
    pub(super) fn fail(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    /// The writer cannot be told any more, and why. What came can still be taken.
    #[cold]
    pub(super) fn cannot_tell(&mut self, error: Error) {
        self.is_credit_unsent = false;
        self.mute.get_or_insert(error);
    }

    /// Why the writer cannot be told.
    #[inline]
    pub(super) fn mute(&self) -> Option<&Error> {
        self.mute.as_ref()
    }

    /// Why nothing more can be read.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref().or(self.mute.as_ref())
    }

    /// Does it want to be looked after, though the queue has nothing for it, beside when the
    /// writer can be told of the end?
    #[inline]
    pub(super) fn is_restless(&self) -> bool {
        self.form != Notify::Immediate || self.misses_header()
    }

    /// Was its next chunk told of, and not its header there when it was looked for? Where headers
    /// lie apart they are writes of their own, which a notice may overtake.
    #[inline]
    pub(super) fn misses_header(&self) -> bool {
        self.broken.is_none() && self.reader.misses_header()
    }

    /// While it is said to sleep, whoever drops a view wakes the sleeper in the queue: said only
    /// if there are views that could be.
    pub(super) fn sleeps(&self) {
        self.memory.sleeps(!self.reader.unreleased().is_empty());
    }

    /// It does not sleep any more, whatever became of the views meanwhile.
    pub(super) fn is_awake(&self) {
        self.memory.sleeps(false);
    }

    /// Whom to wake when a view is dropped.
    pub(super) fn wakes(&self, waker: Waker) {
        self.memory.wakes(waker);
    }

    /// Is the writer done, and everything taken?
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.reader.is_over()
    }

    /// How long there was no room for credit that is to be told, if there is such.
    pub(super) fn unsent_for(&self) -> Option<Duration> {
        let is_unsent = self.is_credit_unsent
            && !self.is_closing
            && self.mute.is_none()
            && self.writer.is_some();
        is_unsent.then(|| self.unsent_since.map_or(Duration::ZERO, |since| since.elapsed()))
    }

    /// Is there credit that is not told, for lack of room or because it is not due?
    #[must_use]
    pub fn has_untold(&self) -> bool {
        self.is_credit_unsent || self.reader.head() != self.reader.told()
    }

    /// Endpoints that it may be written through.
    #[must_use]
    pub fn lanes(&self) -> usize {
        1 + self.memory.others.len()
    }

    /// The positions behind it.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The same, with all that belongs to it.
    pub(super) fn memory(&self) -> Arc<RingMemory> {
        Arc::clone(&self.memory)
    }

    /// How the reader is told.
    #[must_use]
    pub fn notify(&self) -> Notify {
        self.form
    }

    /// What it did so far.
    #[must_use]
    pub fn statistics(&self) -> ReceiverStatistics {
        let (duplicates, strangers) = self.reader.ignored();
        ReceiverStatistics { duplicates, strangers, ..self.statistics }
    }
}

/// The shape of a ring with these options.
pub(super) fn shape_of(
    endpoint: &Endpoint,
    ring: u16,
    options: &RingOptions,
    memory: MemoryKind,
) -> Result<Shape> {
    let capabilities = endpoint.domain().capabilities();
    options.notify.check(capabilities)?;
    let layout = options.notify.layout(capabilities, memory)?;
    let Some(shape) = Shape::new(options.capacity, ring) else {
        let detail = format!(
            "there is no ring of {} bytes with number {ring}: from 1 KiB to 1 TiB, and two halves of whole granules",
            options.capacity
        );
        return Err(Error::new(ErrorKind::InvalidArgument, "opening a ring", detail));
    };
    Ok(shape.laid_out(layout))
}

#[cold]
pub(super) fn broken(error: super::ProtocolError) -> Error {
    Error::new(ErrorKind::ConnectionLost, "reading a ring", error.to_string())
}
