//! One endpoint with its queue, and all the rings that end on it.
//!
//! Whoever owns a port drives it: [`turn`](Port::turn) takes one thing from the queue and gives
//! it to the ring that it concerns. The calls that wait do it by turns, so that all rings of
//! the port go on meanwhile. One thread, no lock.

mod beside;
mod closing;
mod news;
mod opening;
mod waiting;

pub use news::News;

use std::collections::VecDeque;
use std::time::Instant;

use super::board::{Board, Heard};
use super::capacity::QueueCapacity;
use super::immediate::{Immediate, Notice};
use super::memory::View;
use super::notify::Notify;
use super::outlet::{Title, named};
use super::receiver::RingReceiver;
use super::retries::Retries;
use super::sender::{Pushed, RingSender};
use super::speaker::{NOTICE_TOKEN, of_credit};
use super::stripes::Beside;
use super::writer::Message;
use crate::{
    CompletionQueue, Endpoint, Error, ErrorKind, MemoryRegion, Outcome, Peer, RegionSlice, Result,
};
use closing::Graves;
use news::{list_receiver, list_sender};

/// Turns without anything after which it is quiet: writers are told what was released, and
/// whoever waits may sleep.
const QUIET: u32 = 200;

/// A ring that this side writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SenderId(u16);

/// A ring that this side reads. When it is gone no other one is called so, though its number may be
/// another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiverId {
    ring: u16,
    /// The epoch that it was made in, of all rings of the port.
    born: u32,
}

/// What a turn did.
#[derive(Debug)]
#[must_use = "what is no ring's business is the caller's"]
pub enum Turn {
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
/// let (writing, answer) = port.accept(peer, &port.terms(reading)?, 64 << 10)?;
/// port.connect(reading, peer, &answer)?;
///
/// let patience = Duration::from_secs(5);
/// let source = domain.register(HostMemory::from_vec(b"payload".to_vec())?, Access::WRITE)?;
/// let number = port.send(writing, 3, &source.all(), patience)?;
/// let view = port.receive(reading, patience)?;
/// assert_eq!((view.header().message, view.header().topic, view.is_last()), (number, 3, true));
/// let mut bytes = [0; 7];
/// view.read(0, &mut bytes)?;
/// assert_eq!(&bytes, b"payload");
/// // Dropped, its place is the writer's again, who is told by and by.
/// drop(view);
/// port.flush(writing, patience)?;
/// # Ok::<(), fabric::Error>(())
/// ```
#[derive(Debug)]
pub struct Port {
    // Closed before the memory below goes.
    endpoint: Endpoint,
    queue: CompletionQueue,
    board: Board,
    /// Further lanes, and whether they come first at the next turn.
    beside: Option<Box<Beside>>,
    are_lanes_next: bool,
    /// By number.
    receivers: Vec<Option<Box<RingReceiver>>>,
    /// By name.
    senders: Vec<Option<Box<RingSender>>>,
    /// Some rings may want more than to be told of what the queue gave: those that are polled,
    /// or have notices to send, or end. Looked at, and found out anew, when the queue is empty.
    is_restless: bool,
    /// Peers that cannot be told of ends now.
    retries: Retries,
    /// Where notices without a chunk are written, and credit.
    credit_memory: Option<MemoryRegion>,
    generation: u16,
    graves: Graves,
    /// The number of the next ring, if it is free. All take their turns, as names do: a notice
    /// has four bits of the epoch.
    next_ring: u16,
    /// The name of the next sender, if it is free. All take their turns: readers count epochs
    /// each by itself, so credit that is late could not be told from that of another reader
    /// whose ring has the same name.
    next_name: u16,
    epoch: u32,
    /// Notices for rings that there are none of.
    strangers: u64,
    /// Outcomes of what the caller posted, that came while something else was waited for.
    others: VecDeque<Outcome>,
    /// Rings that something happened for, each once, if somebody wants to know.
    news: Option<VecDeque<News>>,
    /// Room for notices in the queue.
    capacity: QueueCapacity,
}

impl Port {
    /// A port on an endpoint that reports to this queue, and has no other.
    #[must_use]
    pub fn new(endpoint: Endpoint, queue: CompletionQueue) -> Self {
        let board = Board::new(endpoint.domain());
        let capacity = QueueCapacity::of(endpoint.domain().capabilities(), queue.size());
        Self {
            endpoint,
            queue,
            board,
            beside: None,
            are_lanes_next: false,
            receivers: Vec::new(),
            senders: Vec::new(),
            is_restless: false,
            retries: Retries::default(),
            credit_memory: None,
            generation: 0,
            graves: Graves::default(),
            next_ring: 0,
            next_name: 0,
            epoch: 0,
            strangers: 0,
            others: VecDeque::new(),
            news: None,
            capacity,
        }
    }

    /// The endpoint.
    #[must_use]
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Endpoint and queue, to post other operations with. What the queue gives must be
    /// fetched by [`turn`](Self::turn).
    pub fn parts(&mut self) -> (&mut Endpoint, &mut CompletionQueue) {
        (&mut self.endpoint, &mut self.queue)
    }

    /// Takes one thing from the queue, and does what is to be done for the rings.
    ///
    /// # Errors
    /// What concerns all rings: receives that cannot be posted. What concerns one is
    /// told when that one is used.
    #[inline]
    pub fn turn(&mut self) -> Result<Turn> {
        if let Some(other) = self.others.pop_front() {
            return Ok(Turn::Other(other));
        }
        self.fresh_turn()
    }

    #[inline]
    fn fresh_turn(&mut self) -> Result<Turn> {
        if self.beside.is_some()
            && let Some(turn) = self.turn_lanes()
        {
            return Ok(turn);
        }
        match self.queue.poll() {
            Some(outcome) => self.sort(outcome),
            None if !self.are_lanes_next && self.hear_lane() => Ok(Turn::Ring),
            None => self.idle(),
        }
    }

    /// The queue had nothing.
    #[inline]
    fn idle(&mut self) -> Result<Turn> {
        let is_due = || self.retries.next().is_some_and(|next| Instant::now() >= next);
        if self.is_restless || is_due() { self.look_around() } else { Ok(Turn::Idle) }
    }

    #[inline]
    fn sort(&mut self, outcome: Outcome) -> Result<Turn> {
        let completion = match &outcome {
            Ok(completion) => completion,
            Err(_) => return self.sort_failure(outcome),
        };
        if let Some(heard) = self.board.hear(completion)? {
            self.hear(heard);
            self.board.refill(&mut self.endpoint, &mut self.queue)?;
        } else if let Some((title, slot)) = named(completion.token) {
            if let Some(Some(sender)) = self.senders.get_mut(usize::from(title.name)) {
                sender.completed(title, slot);
                list_sender(&mut self.news, title.name, sender);
                if sender.is_restless() || sender.owes_end() {
                    self.is_restless = true;
                    self.settle_sender(title.name);
                }
            }
        } else if let Some(title) = Title::of_last(completion.token) {
            self.was_said(title);
        } else if let Some(number) = of_credit(completion.token) {
            self.credit_completed(number, None);
        } else if completion.token != NOTICE_TOKEN {
            return Ok(Turn::Other(outcome));
        }
        Ok(Turn::Ring)
    }

    /// The last word to a reader came, or never will.
    fn was_said(&mut self, title: Title) {
        if let Some(Some(sender)) = self.senders.get_mut(usize::from(title.name)) {
            sender.was_said(title);
            self.is_restless = true;
        }
    }

    /// A credit that the next one waits for arrived, or was lost.
    fn credit_completed(&mut self, number: u32, lost: Option<&Error>) {
        if let Some(Some(receiver)) = self.receivers.get_mut(usize::from(number as u16))
            && receiver.credit_completed(number, lost)
        {
            // The next one may be told.
            self.is_restless |= receiver.is_closing();
            list_receiver(&mut self.news, number as u16, receiver);
        }
    }

    /// Gives a notice to whom it concerns.
    #[inline]
    fn hear(&mut self, heard: Heard) {
        let immediate = Immediate::decode(heard.bits);
        let place = usize::from(immediate.ring);
        match immediate.notice {
            Notice::Chunk { .. } | Notice::Done { .. } => match self.receivers.get_mut(place) {
                Some(Some(receiver)) => {
                    if let Err(error) = receiver.hear(&immediate, heard.length) {
                        receiver.fail(error);
                    }
                    self.is_restless |= receiver.is_closing();
                    list_receiver(&mut self.news, immediate.ring, receiver);
                }
                _ => self.strangers += 1,
            },
            Notice::Credit { .. } | Notice::Gone => match self.senders.get_mut(place) {
                Some(Some(sender)) => {
                    sender.hear(&immediate, heard.credit);
                    list_sender(&mut self.news, immediate.ring, sender);
                    // One that is gone may have waited for its last credit.
                    self.is_restless |= immediate.notice == Notice::Gone || sender.is_retired();
                }
                _ => self.strangers += 1,
            },
        }
    }

    /// A failure is one ring's, the caller's, or the queue's.
    #[cold]
    fn sort_failure(&mut self, outcome: Outcome) -> Result<Turn> {
        let Err(failure) = &outcome else { return Ok(Turn::Other(outcome)) };
        if failure.operation.is_none() {
            return match failure.error.kind() {
                ErrorKind::ConnectionLost | ErrorKind::ConnectionRefused | ErrorKind::Cancelled => {
                    Ok(self.lost_somewhere(&failure.error))
                }
                _ => Err(failure.error.clone()),
            };
        }
        if let Some((title, slot)) = named(failure.token) {
            if let Some(Some(sender)) = self.senders.get_mut(usize::from(title.name)) {
                sender.failed(title, slot, failure.error.clone());
                list_sender(&mut self.news, title.name, sender);
                self.is_restless = true;
            }
            return Ok(Turn::Ring);
        }
        if let Some(title) = Title::of_last(failure.token) {
            self.was_said(title);
            return Ok(Turn::Ring);
        }
        if let Some(number) = of_credit(failure.token) {
            self.credit_completed(number, Some(&failure.error));
            return Ok(Turn::Ring);
        }
        if failure.token == NOTICE_TOKEN {
            // Credit to a writer that is gone: which one shows when it is told next.
            return Ok(Turn::Ring);
        }
        if Board::is_ours(failure.token) {
            // The receives of an endpoint fail when it is closed, or its one peer is gone.
            if failure.error.kind() != ErrorKind::Truncated {
                return Err(failure.error.clone());
            }
            // Somebody sent a message that is too long for a notice.
            self.board.missed(failure.token);
            self.strangers += 1;
            self.board.refill(&mut self.endpoint, &mut self.queue)?;
            return Ok(Turn::Ring);
        }
        Ok(Turn::Other(outcome))
    }

    /// Something that was injected did not leave; whose it was is not said. It may have been
    /// for a peer that is gone, and the rings of all others go on.
    pub(super) fn lost_somewhere(&mut self, error: &Error) -> Turn {
        for (name, sender) in (0..).zip(&mut self.senders) {
            let Some(sender) = sender else { continue };
            if sender.has_lost(error) {
                self.is_restless = true;
                list_sender(&mut self.news, name, sender);
            }
        }
        for (ring, receiver) in (0..).zip(&mut self.receivers) {
            let Some(receiver) = receiver else { continue };
            receiver.has_lost(error);
            list_receiver(&mut self.news, ring, receiver);
        }
        Turn::Ring
    }

    /// For rings that nobody tells: what they want to be looked after.
    fn look_around(&mut self) -> Result<Turn> {
        let mut has_moved = false;
        for name in 0..self.senders.len() {
            has_moved |= self.settle_sender(name as u16);
        }
        has_moved |= self.go_on_closing();
        if self.news.is_some() {
            // Nobody tells of these.
            for (ring, receiver) in (0..).zip(&mut self.receivers) {
                let Some(receiver) = receiver else { continue };
                if receiver.notify() == Notify::Polling || receiver.misses_header() {
                    list_receiver(&mut self.news, ring, receiver);
                }
            }
        }
        self.board.refill(&mut self.endpoint, &mut self.queue)?;
        self.is_restless = self.senders.iter().flatten().any(|sender| sender.is_restless())
            || self.receivers.iter().flatten().any(|receiver| receiver.is_restless());
        Ok(if has_moved { Turn::Ring } else { Turn::Idle })
    }

    fn settle_sender(&mut self, name: u16) -> bool {
        let Some(Some(sender)) = self.senders.get_mut(usize::from(name)) else { return false };
        let has_moved = match sender.settle(&mut self.endpoint, &mut self.queue) {
            Ok(has_moved) => has_moved,
            Err(error) => {
                sender.fail(error);
                true
            }
        };
        if has_moved {
            list_sender(&mut self.news, name, sender);
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
    pub fn take(&mut self, id: ReceiverId) -> Result<Option<View>> {
        let receiver = open(&mut self.receivers, id)?;
        match receiver.take()? {
            None if receiver.is_over() => Err(over()),
            None if receiver.mute().is_some() => self.take_the_rest(id),
            None => {
                self.is_restless |= receiver.misses_header();
                Ok(None)
            }
            view => Ok(view),
        }
    }

    /// The writer cannot be told any more, so it is most likely gone. What it wrote before is in
    /// the ring, and may not have been heard yet.
    #[cold]
    fn take_the_rest(&mut self, id: ReceiverId) -> Result<Option<View>> {
        /// Others may keep us busy without end; our caller has a deadline.
        const MOST: usize = 4096;
        for _ in 0..MOST {
            let turn = self.fresh_turn()?;
            let receiver = open(&mut self.receivers, id)?;
            if let Some(view) = receiver.take()? {
                return Ok(Some(view));
            }
            match (turn, receiver.mute()) {
                (Turn::Ring, _) | (_, None) => {}
                (Turn::Idle, Some(mute)) => return Err(mute.clone()),
                (Turn::Other(outcome), _) => self.others.push_back(outcome),
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
    pub fn tell(&mut self, id: ReceiverId, is_quiet: bool) -> Result<bool> {
        let receiver = open(&mut self.receivers, id)?;
        let told = receiver.tell(&mut self.endpoint, &mut self.queue, is_quiet);
        told.inspect_err(|error| receiver.cannot_tell(error.clone()))
    }

    /// The same for all rings. A writer that cannot be told does not keep others from it; that
    /// ring is broken.
    pub fn tell_all(&mut self, is_quiet: bool) -> bool {
        let mut has_told = false;
        for (ring, receiver) in (0..).zip(&mut self.receivers) {
            let Some(receiver) = receiver else { continue };
            match receiver.tell(&mut self.endpoint, &mut self.queue, is_quiet) {
                Ok(told) => has_told |= told,
                Err(error) => {
                    receiver.cannot_tell(error);
                    list_receiver(&mut self.news, ring, receiver);
                }
            }
        }
        has_told
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
        sender.filter(|sender| !sender.is_retired()).ok_or_else(no_ring)
    }

    /// A ring's reading side.
    ///
    /// # Errors
    /// `Closed` if there is no such ring.
    pub fn receiver(&self, id: ReceiverId) -> Result<&RingReceiver> {
        let receiver = self.receivers.get(usize::from(id.ring)).and_then(Option::as_deref);
        receiver.filter(|it| it.born() == id.born && !it.is_closing()).ok_or_else(no_ring)
    }

    /// How many rings are read and written here, with those that are being closed.
    #[must_use]
    pub fn rings(&self) -> (usize, usize) {
        (self.receivers.iter().flatten().count(), self.senders.iter().flatten().count())
    }

    /// Notices for rings that there are none of.
    #[must_use]
    pub fn strangers(&self) -> u64 {
        self.strangers
    }

    #[cold]
    fn name_peer(&self, error: Error, id: SenderId) -> Error {
        self.name(error, self.sender(id).ok().map(RingSender::peer))
    }

    /// Adds to an error whom it is about.
    #[cold]
    fn name(&self, error: Error, peer: Option<Peer>) -> Error {
        let error = self.endpoint.domain().blame(error);
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
        Some(Some(sender)) if !sender.is_retired() => Ok(sender),
        _ => Err(no_ring()),
    }
}

/// A ring that is not being closed.
#[inline]
fn open(places: &mut [Option<Box<RingReceiver>>], id: ReceiverId) -> Result<&mut RingReceiver> {
    match places.get_mut(usize::from(id.ring)) {
        Some(Some(it)) if it.born() == id.born && !it.is_closing() => Ok(it),
        _ => Err(no_ring()),
    }
}

#[cold]
fn no_ring() -> Error {
    Error::new(ErrorKind::Closed, "using a ring", "there is no such ring on this port")
}

#[cold]
fn over() -> Error {
    Error::new(ErrorKind::Closed, "reading a ring", "the writer is done, and all of it was read")
}
