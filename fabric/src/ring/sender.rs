//! The side that writes, on an endpoint.

mod lanes;

use std::time::{Duration, Instant};

use super::capacity::{QueueCapacity, QueueShare};
use super::credit::{self, Credit};
use super::credit_memory::CreditPlace;
use super::immediate::Immediate;
use super::memory::Site;
use super::notify::{Notify, has_tags, longest_ordered_write};
use super::outlet::{Outlet, Posted, Title};
use super::retries::Ending;
use super::shape::Shape;
use super::stripes::Shares;
use super::terms::{RingAnswer, RingOffer};
use super::writer::{Blocked, Chunk, Message, Refused, Writer};
use crate::{CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Peer, RegionSlice, Result};

use lanes::Planned;

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
    writer: Writer,
    form: Notify,
    /// Its share of the queue.
    share: QueueShare,
    outlet: Outlet,
    /// What goes by which lane, if there are several.
    shares: Option<Box<Shares>>,
    is_stopped: bool,
    start: Instant,
    /// Where credit is written, unless it comes by messages.
    credit: Option<CreditPlace>,
    statistics: SenderStatistics,
    blocked_since: Option<Instant>,
    /// Up to here are chunks that were injected: nobody tells whether they left.
    injected_to: u64,
    /// Why nothing more can be written.
    broken: Option<Error>,
    /// The reader said that nobody reads any more: it tells no more credit.
    is_reader_gone: bool,
    end: End,
    /// Its user let go of it: it is there until the end is said.
    is_retired: bool,
    says_surely: bool,
    /// It is in the port's list of news.
    pub(super) is_listed: bool,
}

/// Was the reader told that nothing more comes?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Something may come.
    Open,
    /// It is to be told.
    Owed,
    /// It is being told.
    Saying,
    /// It was told, or there is nobody to be.
    Said,
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
        title: Title,
        (longest_payload, capacity): (u64, &QueueCapacity),
    ) -> Result<(Self, RingAnswer)> {
        let shape = offer.shape()?;
        // Credit takes place in the queue here, too.
        let share = capacity.take(offer.notify, shape.most_chunks())?;
        let most_chunks = share.most_chunks().min(offer.most_chunks);
        let Connected { outlet, credit, answer } =
            connect(endpoint, credit_memory, peer, offer, shape, (title, most_chunks))?;
        let longest = longest_payload.min(longest_write(endpoint, offer.notify)).max(1);
        let writer = Writer::new(shape, offer.epoch, longest).known_as(title.name);
        let mut writer = writer.limit_chunks(most_chunks);
        if share.is_limited() {
            writer = writer.limit_notices(most_chunks);
        }
        let sender = Self {
            writer: writer.after(offer.whole),
            form: offer.notify,
            share,
            outlet,
            shares: None,
            is_stopped: false,
            start: Instant::now(),
            credit,
            statistics: SenderStatistics::default(),
            blocked_since: None,
            injected_to: 0,
            broken: None,
            is_reader_gone: false,
            end: End::Open,
            is_retired: false,
            says_surely: false,
            is_listed: false,
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
        let posted = self.outlet.post(endpoint, queue, &chunk, body)?;
        if posted == Posted::No {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        }
        self.committed(message, &chunk);
        if posted == Posted::Copied {
            self.injected_to = self.writer.tail();
        }
        if self.shares.is_some() {
            self.gave(0, &chunk);
            if posted == Posted::Copied {
                self.is_done(0, self.outlet.left_to(), chunk.header.payload.into());
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
    pub fn left_to(&self) -> u64 {
        match &self.shares {
            None => self.outlet.left_to(),
            Some(shares) => shares.left_to(self.writer.tail()),
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
    pub(super) fn hear(
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
        if self.writer.is_told_gone(immediate) {
            self.is_reader_gone = true;
            let detail = "the reader let go of it";
            self.fail(Error::new(ErrorKind::Closed, "writing to a ring", detail));
            if self.end == End::Open {
                self.end = End::Owed;
            }
            return true;
        }
        false
    }

    #[inline]
    fn take_credit(&mut self, credit: Option<Credit>) -> bool {
        let is_news = credit.is_some_and(|credit| self.writer.credit(&credit));
        self.statistics.credits += u64::from(is_news);
        is_news
    }

    /// One of the writes of a slot completed: false if it was of an outlet that is no more.
    #[inline]
    pub(super) fn completed(&mut self, title: Title, slot: u16) -> bool {
        let is_ours = self.outlet.title() == title;
        if is_ours
            && let Some(bytes) = self.outlet.completed(slot)
            && self.shares.is_some()
        {
            self.is_done(0, self.outlet.left_to(), bytes.into());
        }
        is_ours
    }

    /// One of the writes of a slot failed: false if it was of an outlet that is no more.
    pub(super) fn failed(&mut self, title: Title, slot: u16, error: Error) -> bool {
        let is_ours = self.outlet.title() == title;
        if is_ours {
            self.outlet.failed(slot);
            self.is_done(0, self.outlet.left_to(), 0);
            self.end = End::Said;
            self.fail(error);
        }
        is_ours
    }

    /// Something that was injected by somebody is lost. True if it may have been a chunk of
    /// this ring: then there may be a hole in it.
    pub(super) fn has_lost(&mut self, error: &Error) -> bool {
        let may_be_ours = self.injected_to > self.writer.known_head() && self.end == End::Open;
        if may_be_ours {
            self.fail(error.clone());
        }
        may_be_ours
    }

    /// Its user lets go of it: the reader is to be told that nothing more comes, if it can hear
    /// that. Surely, if it is known to be there: shm does not go on with anything for a peer
    /// that a write was to be delivered to, and whose memory is gone.
    pub(super) fn retire(&mut self, surely: bool) {
        (self.is_retired, self.says_surely) = (true, surely);
        if self.end == End::Open {
            let can_hear = self.form != Notify::Polling && self.broken.is_none();
            self.end = if can_hear { End::Owed } else { End::Said };
        }
    }

    /// Is there no user any more?
    #[inline]
    pub(super) fn is_retired(&self) -> bool {
        self.is_retired
    }

    /// Is the reader to be told of the end?
    #[inline]
    pub(super) fn owes_end(&self) -> bool {
        self.end == End::Owed
    }

    /// Is the reader to be told of the end now? What has to be told of each chunk is told first.
    pub(super) fn tells_end(&self) -> bool {
        let is_told = match self.form {
            Notify::Message => self.outlet.unfinished() == 0,
            Notify::Immediate | Notify::Polling => !self.outlet.has_half(),
        };
        self.end == End::Owed && is_told
    }

    /// The reader cannot be told of the end, and is not to be any more.
    pub(super) fn give_up_telling(&mut self) {
        if self.end == End::Owed {
            self.end = End::Said;
        }
    }

    /// Goes on with the end.
    pub(super) fn go_on_ending(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Ending {
        if self.tells_end() {
            let bits = self.writer.done();
            let (speaker, number) = (&self.outlet.speaker, self.outlet.title().number());
            let said = match self.says_surely {
                true => speaker.send_last_notice(endpoint, queue, bits, number),
                false => {
                    speaker.send_notice(endpoint, queue, bits).map(|said| (!said).then_some(false))
                }
            };
            self.end = match said {
                Ok(Some(true)) => End::Saying,
                Ok(Some(false)) => return Ending::Refused,
                // Said; or the connection is broken, and there is nobody to be told.
                Ok(None) | Err(_) => End::Said,
            };
        }
        match self.end {
            End::Open | End::Said => Ending::Over,
            End::Owed | End::Saying => Ending::Waits,
        }
    }

    /// May the reader still tell credit, for which the ring keeps its share of the queue?
    pub(super) fn expects_credit(&self) -> bool {
        self.share.is_limited() && !self.is_reader_gone && self.writer.unnoticed() > 0
    }

    /// Was the reader told of the end, if it is to be?
    pub(super) fn has_ended(&self) -> bool {
        self.end == End::Said
    }

    /// What was said last came, or never will.
    pub(super) fn was_said(&mut self, title: Title) {
        if self.outlet.title() == title {
            self.end = End::Said;
        }
    }

    /// Does it want to be looked after, though the queue has nothing for it, beside when the
    /// reader can be told of the end?
    #[inline]
    pub(super) fn is_restless(&self) -> bool {
        self.form != Notify::Immediate
    }

    /// Does what is to be done besides pushing: sends notices that are messages, and looks
    /// for credit where nobody is told of it. True if something happened.
    #[inline]
    pub(super) fn settle(
        &mut self,
        endpoint: &mut Endpoint,
        queue: &mut CompletionQueue,
    ) -> Result<bool> {
        match self.form {
            Notify::Immediate => Ok(false),
            Notify::Message => {
                if self.broken.is_none() || self.end == End::Owed {
                    self.outlet.settle(endpoint, queue)?;
                }
                Ok(false)
            }
            Notify::Polling => {
                if self.broken.is_none() {
                    self.outlet.settle(endpoint, queue)?;
                }
                let credit = self.credit.as_ref().and_then(CreditPlace::read);
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
    pub fn writer(&self) -> &Writer {
        &self.writer
    }

    /// What it did so far.
    #[must_use]
    pub fn statistics(&self) -> SenderStatistics {
        self.statistics
    }

    /// How the reader is told.
    #[must_use]
    pub fn notify(&self) -> Notify {
        self.form
    }

    /// Writes and notices that are on their way.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        // Those that went by the endpoint are counted twice, which does no harm.
        let given = self.shares.as_ref().map_or(0, |shares| shares.unfinished());
        self.outlet.unfinished() + given
    }

    /// Whom it writes to.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.outlet.peer()
    }
}

/// The most payload of one write. A flag is written behind it where the reader looks for one, which
/// providers may let overtake a long write.
fn longest_write(endpoint: &Endpoint, form: Notify) -> u64 {
    let facts = endpoint.domain().capabilities();
    let most = match form {
        Notify::Polling => longest_ordered_write(facts),
        Notify::Immediate | Notify::Message => facts.max_message_size as u64,
    };
    most.saturating_sub(super::header::HEADER)
}

struct Connected {
    outlet: Outlet,
    credit: Option<CreditPlace>,
    answer: RingAnswer,
}

/// An outlet into the first of the lanes, and where to be told of credit.
fn connect(
    endpoint: &Endpoint,
    credit_memory: &MemoryRegion,
    peer: Peer,
    offer: &RingOffer,
    shape: Shape,
    (title, most_chunks): (Title, u64),
) -> Result<Connected> {
    let Some(lane) = offer.lanes.first() else {
        let detail = "without lanes";
        return Err(Error::new(ErrorKind::MalformedDescriptor, "opening a ring", detail));
    };
    let form = (offer.notify, offer.tagged);
    let outlet = Outlet::new(Site::of(endpoint), peer, lane, form, shape, title)?;
    let credit = match offer.notify {
        Notify::Immediate | Notify::Polling => {
            Some(CreditPlace::new(credit_memory, title.name, offer.epoch)?)
        }
        Notify::Message => None,
    };
    let tagged = has_tags(endpoint.domain().capabilities());
    let (name, epoch) = (title.name, offer.epoch);
    let answer =
        RingAnswer { name, epoch, most_chunks, tagged, credit_memory: credit_memory.describe()? };
    Ok(Connected { outlet, credit, answer })
}

#[cold]
fn too_short(payload: &RegionSlice, header: &super::Header) -> Error {
    let detail = format!("{} bytes, of a message of {}", payload.len(), header.length);
    Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail)
}

#[cold]
fn not_in_part(message: &Message, at: u64, end: u64) -> Error {
    let detail = format!("byte {} is next, and the part has {at} to {end}", message.written());
    Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail)
}

#[cold]
fn stale() -> Error {
    let detail = "another message is written in part, or was written first since this one was \
                  begun, or it is another ring's";
    Error::new(ErrorKind::InvalidArgument, "writing to a ring", detail)
}
