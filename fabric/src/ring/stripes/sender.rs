//! The writing side of a ring over several lanes.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use super::super::header::HEADER;
use super::super::immediate::Immediate;
use super::super::memory::Site;
use super::super::notify::{Notify, has_tags};
use super::super::outlet::{Outlet, Title};
use super::super::sender::{Pushed, SenderStatistics, stale};
use super::super::terms::{RingAnswer, RingOffer};
use super::super::writer::{Message, Refused, Writer};
use super::lane::{Ear, Event, JOBS, Job, Kept, Lane, Parts};
use super::shares::DEPTH;
use super::spread::Spread;
use super::{LOOKS, MOST_AT_ONCE, Opened, StripedSlice, Stripes};
use crate::waiting::Deadline;
use crate::{Address, Error, ErrorKind, Result};

/// There is one ring, and one writer of it.
const TITLE: Title = Title { name: 0, generation: 0 };
/// Longest wait between two looks at the clock, and whether the lanes still live.
const LOOK: Duration = Duration::from_millis(20);

/// Writes messages into a peer's ring, by several lanes. Made by
/// [`Stripes::sender`].
///
/// A payload must stay as it is until [`next_read`](Self::next_read) names its message.
#[derive(Debug)]
pub struct StripedSender {
    writer: Writer,
    lanes: Vec<Lane>,
    events: Receiver<Event>,
    spread: Spread,
    start: Instant,
    statistics: SenderStatistics,
    blocked_since: Option<Instant>,
    broken: Option<Error>,
    is_done_said: bool,
    /// The reader is gone, and is to be told that nothing more comes.
    owes_end: bool,
}

impl Stripes {
    /// Makes these lanes the writing side of a ring that a peer offered over as many, whose
    /// addresses are in the same order. Chunks have at most so many bytes of payload. With
    /// what is to be answered.
    ///
    /// # Errors
    /// `InvalidArgument` for another number of lanes; what is wrong with the offer, or not
    /// possible.
    pub fn sender(
        self,
        peers: &[Address],
        offer: &RingOffer,
        longest_payload: u64,
    ) -> Result<(StripedSender, RingAnswer)> {
        let peers = self.insert(peers)?;
        let shape = offer.shape()?;
        if offer.lanes.len() != peers.len() || offer.notify == Notify::Polling {
            let detail = format!(
                "{} lanes, told of by {}, for {} of ours",
                offer.lanes.len(),
                offer.notify.name(),
                peers.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, "opening a ring", detail));
        }
        let slate = &self.lanes[0].slate;
        let tagged = has_tags(slate.domain().capabilities());
        let answer = RingAnswer { name: 0, epoch: offer.epoch, tagged, credit: slate.describe()? };
        let events_held = peers.len() * JOBS * 4 + 1024;
        let (sender, events) = sync_channel(events_held);
        let mut lanes = Vec::with_capacity(peers.len());
        let mut most = u64::MAX;
        for (number, ((lane, peer), terms)) in
            self.lanes.into_iter().zip(peers).zip(&offer.lanes).enumerate()
        {
            let mut board = lane.board();
            let Opened { mut endpoint, mut queue, slate, .. } = lane;
            most = most.min(endpoint.domain().capabilities().max_message_size as u64);
            let (title, form) = (TITLE, (offer.notify, offer.tagged));
            let outlet = Outlet::new(Site::of(&endpoint), peer, terms, form, shape, title)?;
            board.expect(&endpoint, offer.notify)?;
            board.refill(&mut endpoint, &mut queue)?;
            let outlet = Some(outlet);
            let kept = Kept::default();
            let parts = Parts { endpoint, queue, board, outlet, speaker: None, slate, kept };
            let ear = Ear { events: sender.clone(), owner: None };
            lanes.push(Lane::start(number, parts, ear, LOOKS)?);
        }
        let longest = longest_payload.min(most.saturating_sub(HEADER)).max(1);
        let mut writer = Writer::new(shape, offer.epoch, longest).known_as(0);
        writer.restart(offer.epoch, offer.whole);
        let in_flight = DEPTH * longest.min(shape.longest_chunk());
        let sender = StripedSender {
            writer,
            spread: Spread::new(lanes.len(), in_flight),
            lanes,
            events,
            start: Instant::now(),
            statistics: SenderStatistics::default(),
            blocked_since: None,
            broken: None,
            is_done_said: false,
            owes_end: false,
        };
        Ok((sender, answer))
    }
}

impl StripedSender {
    /// Begins a message of so many bytes: see [`Writer::begin`].
    #[must_use]
    pub fn begin(&self, topic: u32, length: u64) -> Message {
        self.writer.begin(topic, length)
    }

    /// Gives the message's next chunk to a lane, if there is room for it. `payload` is the whole
    /// message, in memory that was registered with these lanes.
    ///
    /// # Errors
    /// Why nothing more can be written; `OutOfBounds` if the payload is shorter than the
    /// message.
    pub fn push(&mut self, message: &mut Message, payload: &StripedSlice<'_>) -> Result<Pushed> {
        if message.is_written() {
            return Ok(Pushed::Written);
        }
        self.listen();
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let chunk = match self.writer.plan(message) {
            Ok(chunk) => chunk,
            Err(Refused::Stale) => return Err(stale()),
            Err(Refused::Blocked(blocked)) => {
                if self.blocked_since.is_none() {
                    self.blocked_since = Some(Instant::now());
                    self.statistics.blocked += 1;
                }
                return Ok(Pushed::Blocked(blocked));
            }
        };
        let (from, length) = (chunk.header.offset, u64::from(chunk.header.payload));
        let is_ours = payload.region.regions.len() == self.lanes.len();
        if !is_ours || from + length > payload.length as u64 {
            let detail = format!(
                "{} bytes in memory for {} lanes, of a message of {} by {}",
                payload.length,
                payload.region.regions.len(),
                chunk.header.length,
                self.lanes.len()
            );
            return Err(Error::new(ErrorKind::OutOfBounds, "writing to a ring", detail));
        }
        let Some(number) = self.spread.pick(length) else {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        };
        let region = &payload.region.regions[number];
        let body = (length > 0).then(|| (region.clone(), payload.offset + from as usize));
        if self.lanes[number].give(Job::Write { title: TITLE, chunk, payload: body }).is_err() {
            self.statistics.busy += 1;
            return Ok(Pushed::Busy);
        }
        self.spread.posted(number, length, self.now());
        self.writer.commit(message, &chunk);
        self.statistics.chunks += 1;
        self.statistics.bytes += length;
        self.statistics.skipped += chunk.skipped;
        self.statistics.messages += u64::from(message.is_written());
        if let Some(since) = self.blocked_since.take() {
            self.statistics.blocked_for += since.elapsed();
        }
        Ok(Pushed::Posted(length))
    }

    /// Writes a whole message and gives its number.
    ///
    /// # Errors
    /// Why nothing more can be written; `DeadlineExceeded`, with how much was written: if that is
    /// nothing at all it can be sent again, else the ring takes no other message.
    pub fn send(
        &mut self,
        topic: u32,
        payload: &StripedSlice<'_>,
        timeout: Duration,
    ) -> Result<u64> {
        let mut message = self.begin(topic, payload.length as u64);
        let deadline = Deadline::after(timeout);
        loop {
            match self.push(&mut message, payload)? {
                Pushed::Written => return Ok(message.number()),
                Pushed::Posted(_) => continue,
                Pushed::Blocked(_) | Pushed::Busy => {}
            }
            if !self.wait(&deadline) {
                let detail = format!(
                    "{} of {} bytes of message {} are written",
                    message.written(),
                    message.length(),
                    message.number()
                );
                return Err(late("writing to a ring", timeout, &detail));
            }
        }
    }

    /// Waits until the reader has let go of all that was written.
    ///
    /// # Errors
    /// `DeadlineExceeded`, with how much it has not; why the ring is broken.
    pub fn flush(&mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::after(timeout);
        loop {
            self.listen();
            if self.writer.unread() == 0 && self.spread.in_flight() == 0 {
                return Ok(());
            }
            if let Some(broken) = &self.broken {
                return Err(broken.clone());
            }
            if !self.wait(&deadline) {
                let (read, written) = (self.writer.known_head(), self.writer.tail());
                let detail = format!("{read} of {written} bytes are read");
                return Err(late("flushing a ring", timeout, &detail));
            }
        }
    }

    /// Tells the reader that there will be nothing more, once it has read everything.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn close(mut self, timeout: Duration) -> Result<SenderStatistics> {
        self.flush(timeout)?;
        let deadline = Deadline::after(timeout);
        let bits = self.writer.done();
        let mut job = Some(Job::SayLast(bits));
        while !self.is_done_said {
            if let Some(unsaid) = job.take() {
                job = self.lanes[0].give(unsaid).err();
            }
            if let Some(broken) = &self.broken {
                return Err(broken.clone());
            }
            if !self.wait(&deadline) {
                return Err(late("closing a ring", timeout, "the reader may not know of the end"));
            }
        }
        Ok(self.statistics)
    }

    /// The next message that the reader let go of: its memory is free.
    pub fn next_read(&mut self) -> Option<u64> {
        self.listen();
        self.writer.next_read()
    }

    /// Waits a little for something to happen; false once the time is over.
    fn wait(&mut self, deadline: &Deadline) -> bool {
        match self.events.recv_timeout(deadline.left().min(LOOK)) {
            Ok(event) => {
                self.hear(event);
                self.listen();
            }
            Err(RecvTimeoutError::Timeout) if deadline.has_passed() => return false,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.all_are_gone(),
        }
        if self.lanes.iter().any(Lane::is_over) {
            self.listen();
            self.all_are_gone();
        }
        true
    }

    /// Waits, for whoever pushes by itself: until something may have changed, or so long.
    pub fn rest(&mut self, longest: Duration) {
        let deadline = Deadline::after(longest);
        self.wait(&deadline);
    }

    fn all_are_gone(&mut self) {
        let detail = "a lane's thread has ended";
        self.fail(Error::new(ErrorKind::Closed, "writing to a ring", detail));
    }

    /// Takes note of what the lanes told.
    fn listen(&mut self) {
        // No more at a time: peers may have something to say without end.
        for _ in 0..MOST_AT_ONCE {
            let Ok(event) = self.events.try_recv() else { break };
            self.hear(event);
        }
        if self.owes_end {
            // The reader waits for this, to let go of its memory.
            self.owes_end = self.lanes[0].give(Job::Say(self.writer.done())).is_err();
        }
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Done { lane, bytes, .. } => {
                let now = self.now();
                self.spread.done(lane, bytes, now);
            }
            Event::Heard(heard) => {
                let immediate = Immediate::decode(heard.bits);
                if self.writer.credit(&immediate) {
                    self.statistics.credits += 1;
                } else if self.writer.is_told_gone(&immediate) {
                    let detail = "the reader let go of it";
                    self.fail(Error::new(ErrorKind::Closed, "writing to a ring", detail));
                    self.owes_end = true;
                }
            }
            Event::Said => self.is_done_said = true,
            Event::Undone { error, .. } | Event::Lost(error) | Event::Failed(error) => {
                self.fail(error);
            }
        }
    }

    #[cold]
    fn fail(&mut self, error: Error) {
        self.broken.get_or_insert(error);
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Why nothing more can be written.
    #[must_use]
    pub fn broken(&self) -> Option<&Error> {
        self.broken.as_ref()
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
}

impl Drop for StripedSender {
    fn drop(&mut self) {
        self.lanes.iter().for_each(Lane::end);
    }
}

#[cold]
pub(super) fn late(operation: &'static str, timeout: Duration, detail: &str) -> Error {
    let detail = format!("not within {timeout:?}; {detail}");
    Error::new(ErrorKind::DeadlineExceeded, operation, detail)
}
