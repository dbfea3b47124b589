//! Publishing.

mod counters;
mod ordered;
mod rights;
mod wait_span;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::Slice;
use ipc::{AllocatorError, Block, Owner, Place, QueueError, Spin};

pub use self::counters::PublisherCounters;
use self::wait_span::WaitSpan;
use crate::below;
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::house::Desk;
use crate::interruption::Interruption;
use crate::loan::{Loan, Sent};
use crate::loans::{Borrower, Loans};
use crate::lock::lock;
use crate::pool::{Stage, Turn};
use crate::settings::Reliability;
use crate::text::counted;
use crate::topic::{Entry, PublisherLine};

const BORROW: &str = "borrow memory";

/// Names a publisher among all that its topic ever had on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublisherId(pub(crate) u64);

impl PublisherId {
    /// As a number.
    #[must_use]
    pub fn as_u64(self) -> u64 {
        self.0
    }
}

impl fmt::Display for PublisherId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 8, self.0 & 0xff)
    }
}

/// Publishes messages of one topic.
///
/// Memory for a message is [borrowed](Self::loan), written by whatever writes it (a kernel of a
/// device, say), and then published where it lies; or a message is [pushed](Self::push), which
/// copies it once. It may be used by several threads at once; their messages then come in the
/// order in which they were published.
///
/// It has no more loans at once than its topic [allows](crate::TopicSettings::loans), and memory for
/// so many is kept for it: what others borrow takes nothing of that. A loan counts until it is
/// published or dropped, whoever then has the message.
///
/// ```
/// use std::time::Duration;
/// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-loans-{}", std::process::id()));
/// # let path = directory.clone();
/// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
/// let topic = node.topic("frames", &TopicSettings { loans: 2, ..TopicSettings::default() })?;
/// let (publisher, patience) = (topic.publisher()?, Duration::from_secs(5));
///
/// let (one, other) = (publisher.loan(100, patience)?, publisher.loan(100, patience)?);
/// let refused = publisher.loan(100, patience).unwrap_err(); // at once
/// assert_eq!(refused.kind(), ErrorKind::TooManyLoans);
/// one.publish(patience)?;
/// assert!(publisher.loan(100, patience).is_ok());
/// # drop((other, publisher, topic, node));
/// # std::fs::remove_dir_all(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// What was published stays when the publisher is dropped.
#[derive(Debug)]
pub struct Publisher {
    post: Arc<Post>,
}

/// A publisher's line in its topic: it is kept as long as a loan needs it.
#[derive(Debug)]
pub(crate) struct Post {
    pub(crate) desk: Desk,
    id: u64,
    /// Subscribers of the topic that were evicted before.
    evicted_before: u64,
    order: Mutex<Order>,
    span: WaitSpan,
    pub(crate) loans: Arc<Loans>,
}

/// One at a time publishes by a line.
#[derive(Debug)]
struct Order {
    /// Of the last message.
    sequence: u64,
    /// How this publisher waits, learnt from how long it had to.
    spin: Spin,
    /// No message of its own is unreleased before this position.
    flushed: u64,
}

/// What is published by one attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outgoing {
    pub(crate) block: Block,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) metadata: u16,
    /// When the publisher had filled it.
    pub(crate) filled: u64,
    /// A stream is at it: then it stays the caller's if it is not published.
    pub(crate) turn: Option<Turn>,
}

impl Post {
    fn line(&self) -> PublisherLine<'_, ipc::MappedWords> {
        self.desk.topic.publisher(self.id)
    }

    #[inline]
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.desk.house.check_fork(operation)?;
        if self.line().is_of(self.desk.house.me, self.id) {
            return Ok(());
        }
        let detail = "this process was taken for dead, or left its node";
        Err(Error::new(operation, ErrorKind::Closed, detail).on(self.desk.topic.name()))
    }

    /// Says that it waits for room, until it [has](Self::has_waited).
    fn begins_to_wait(&self) {
        self.line().pressure().begin_since(self.span.begin());
        self.desk.waits();
    }

    /// It has found room, or has given up.
    fn has_waited(&self, has_found: bool) {
        self.span.end(has_found);
        self.line().pressure().end(has_found);
    }

    /// Memory for a message, if there is some.
    #[inline]
    fn allocate(&self, length: u64) -> std::result::Result<(Block, Place), AllocatorError> {
        let house = &self.desk.house;
        let ledger = self.desk.here.ledger();
        ledger.allocate(&house.brief_caller(), Owner::participant(house.me), length)
    }

    /// Memory for a message; None if there is none now, and more was asked for.
    #[inline]
    fn borrow_now(&self, length: u64) -> Result<Option<(Block, Place)>> {
        match self.allocate(length) {
            Ok(found) => Ok(Some(found)),
            // More memory has no more blocks; and a process that is stopped may hold the lock.
            Err(AllocatorError::OutOfBlocks { .. } | AllocatorError::Held(_)) => Ok(None),
            Err(AllocatorError::OutOfMemory { .. }) => {
                let (pool, bytes) = (&self.desk.here, length.max(1));
                if pool.should_ask(bytes) {
                    self.desk.house.office.grow(pool.id(), bytes);
                }
                self.line().pressure().refused();
                self.desk.waits();
                // For the next attempt.
                pool.free_what_is_done(&self.desk.house.brief_caller());
                Ok(None)
            }
            Err(cause) => Err(below::of_allocator(BORROW, cause).on(self.desk.topic.name())),
        }
    }

    fn borrow_until(&self, length: u64, deadline: Instant) -> Result<Option<(Block, Place)>> {
        let ledger = self.desk.here.ledger();
        let mut seen = ledger.changes();
        if let Some(found) = self.borrow_now(length)? {
            return Ok(Some(found));
        }
        let mut spin = lock(&self.order).spin;
        self.begins_to_wait();
        let mut asked = Instant::now();
        let look = || {
            // The lock is left alone while nothing changes; but more is asked for again.
            let (changes, now) = (ledger.changes(), Instant::now());
            if changes == seen && now.saturating_duration_since(asked) < Duration::from_secs(1) {
                return None;
            }
            (seen, asked) = (changes, now);
            let checked = self.desk.house.check(BORROW);
            checked.and_then(|()| self.borrow_now(length)).transpose()
        };
        let found =
            self.wait(BORROW, deadline, look, |end, look| ledger.wait(&mut spin, end, look));
        let found = found.transpose();
        self.has_waited(matches!(found, Ok(Some(_))));
        lock(&self.order).spin = spin;
        found
    }

    /// Publishes; None if there is no room.
    #[inline]
    pub(crate) fn attempt(&self, outgoing: Outgoing, is_again: bool) -> Result<Option<Sent>> {
        let operation = "publish";
        let Desk { house, topic, here, .. } = &self.desk;
        let ledger = here.ledger();
        let mut order = lock(&self.order);
        self.check(operation)?;
        let now = if is_again { clock::now() } else { outgoing.filled };
        let note = ledger.note(outgoing.block);
        note.stamp(Stage::Filled, outgoing.filled);
        note.stamp(Stage::Published, now);
        let sequence = order.sequence + 1;
        let entry = Entry {
            block: outgoing.block,
            offset: outgoing.offset,
            length: outgoing.length,
            publisher: self.id,
            sequence,
            published_at: now,
            metadata: outgoing.metadata,
            has_origin: false,
            turn: outgoing.turn,
        };
        let caller = house.brief_caller();
        let dispose = || {
            if outgoing.turn.is_none() {
                ledger.dispose(&caller, outgoing.block, Owner::participant(house.me));
            }
        };
        let sent = match topic.publish_in(&caller, entry, ledger) {
            Ok(published) => {
                if topic.is_carried() {
                    house.outward.ring(topic.number());
                }
                Sent {
                    position: Some(published.position),
                    readers: published.readers,
                    is_dropped: false,
                }
            }
            Err(QueueError::NoSubscribers) => {
                self.line().count(outgoing.length);
                dispose();
                Sent { position: None, readers: 0, is_dropped: false }
            }
            Err(QueueError::Full) if topic.settings().reliability == Reliability::Reliable => {
                self.line().pressure().refused();
                self.desk.waits();
                // For the next attempt: streams of this process may have passed what fills it.
                here.tend(&caller);
                return Ok(None);
            }
            Err(QueueError::Full) => {
                if !topic.here().has_room() {
                    // Subscribers hold all messages that there may be: they may do so for a while.
                    self.line().pressure().refused();
                    self.desk.is_held_up();
                }
                self.line().count_dropped();
                dispose();
                Sent { position: None, readers: 0, is_dropped: true }
            }
            // By a process that is stopped: nothing has changed, and there may be time left.
            Err(QueueError::Held(_)) => return Ok(None),
            Err(cause) => return Err(below::of_queue(operation, cause).on(topic.name())),
        };
        order.sequence = sequence;
        self.span.relieved();
        Ok(Some(sent))
    }

    /// Publishes when there is room; None once the deadline has passed, or without one at once.
    pub(crate) fn publish_by(
        &self,
        outgoing: Outgoing,
        deadline: Option<Instant>,
    ) -> Result<Option<Sent>> {
        let sent = self.attempt(outgoing, false)?;
        let (None, Some(deadline)) = (sent, deadline) else { return Ok(sent) };
        let queue = self.desk.topic.here();
        let mut spin = lock(&self.order).spin;
        self.begins_to_wait();
        let look = || {
            if let Err(error) = self.desk.house.check("publish") {
                return Some(Err(error));
            }
            if queue.has_room() { self.attempt(outgoing, true).transpose() } else { None }
        };
        let sent = self.wait("publish", deadline, look, |end, look| {
            queue.wait_for_room_with(&mut spin, end, look)
        });
        let sent = sent.transpose();
        self.has_waited(matches!(sent, Ok(Some(_))));
        lock(&self.order).spin = spin;
        sent
    }

    /// Gives back what was borrowed.
    pub(crate) fn give_back(&self, block: Block) {
        let house = &self.desk.house;
        if house.born.is_current() {
            let owner = Owner::participant(house.me);
            self.desk.here.ledger().dispose(&house.caller(), block, owner);
        }
    }

    pub(crate) fn too_late(&self, operation: &'static str, detail: &str) -> Error {
        Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.desk.topic.name())
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        let house = &self.desk.house;
        if !house.born.is_current() {
            return;
        }
        self.desk.here.tend(&house.caller());
        if self.line().is_of(house.me, self.id) {
            self.line().give_back();
            self.desk.changed();
        }
    }
}

impl Publisher {
    pub(crate) fn new(desk: Desk) -> Result<Self> {
        desk.house.check("make a publisher")?;
        let id = desk.topic.claim(desk.house.me)?;
        // It has its line first: so it does not matter who of the two dies, or gives up, when.
        let admitted = desk.house.office.admit(desk.topic.number(), id);
        admitted.map_err(|error| {
            // Unless it was taken for dead, and the line is another's.
            let line = desk.topic.publisher(id);
            if line.is_of(desk.house.me, id) {
                line.give_back();
            }
            desk.changed();
            error.on(desk.topic.name())
        })?;
        let order =
            Order { sequence: 0, spin: desk.house.waiting, flushed: desk.topic.here().position() };
        let evicted_before = desk.topic.evictions();
        let loans = Arc::new(Loans::new(desk.topic.settings().loans));
        desk.changed();
        let (order, span) = (Mutex::new(order), WaitSpan::default());
        Ok(Self { post: Arc::new(Post { desk, id, evicted_before, order, span, loans }) })
    }

    /// Its name among all publishers that the topic ever had on this node.
    #[must_use]
    pub fn id(&self) -> PublisherId {
        PublisherId(self.post.id)
    }

    /// Fails once nothing can be published any more.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.post.desk.house.check(operation)?;
        self.post.check(operation)
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.post.desk.house.interruption()
    }

    /// The topic's name.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.post.desk.topic.name()
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> PublisherCounters {
        let Post { desk, id, evicted_before, .. } = &*self.post;
        let topic = &desk.topic;
        let seen = self.post.line().seen().filter(|seen| seen.id == *id);
        seen.map_or_else(PublisherCounters::default, |seen| PublisherCounters {
            messages: seen.messages,
            bytes: seen.bytes,
            dropped: seen.dropped,
            missed_by_nodes: topic.missed_by_nodes_of(*id),
            evicted: topic.evictions().saturating_sub(*evicted_before),
        })
    }

    /// How it waits from now on.
    pub fn set_spin(&self, spin: Spin) {
        lock(&self.post.order).spin = spin;
    }

    /// How many would get a message that is published now, on this node: those that carry it
    /// to others count as one.
    #[must_use]
    pub fn subscribers(&self) -> u32 {
        self.post.desk.topic.here().subscribers()
    }

    /// Borrows memory for a message of so many bytes; waits for it, if there is none.
    ///
    /// If this publisher has all the [loans](crate::TopicSettings::loans) that it may have, waits as
    /// long as one comes back by itself: from another thread that pushes, or a device that has still to
    /// write to one that was dropped. It does not wait for those that callers keep, which may be its
    /// own; threads that are not to be in each other's way have publishers of their own.
    ///
    /// # Errors
    /// [`TooManyLoans`](ErrorKind::TooManyLoans), at once; [`TooLong`](ErrorKind::TooLong) beyond the
    /// topic's largest; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn loan(&self, length: u64, patience: Duration) -> Result<Loan> {
        self.borrow(length, Borrower::Caller, || ipc::deadline(patience))
    }

    /// As soon as there is room. The usual case needs no look at the clock.
    fn borrow(
        &self,
        length: u64,
        borrower: Borrower,
        deadline: impl FnOnce() -> Instant,
    ) -> Result<Loan> {
        match self.try_borrow(length, borrower)? {
            Some(loan) => Ok(loan),
            None => self.borrow_until(length, borrower, deadline()),
        }
    }

    fn borrow_until(&self, length: u64, borrower: Borrower, deadline: Instant) -> Result<Loan> {
        let operation = BORROW;
        self.check_length(length)?;
        self.post.desk.house.check(operation)?;
        let interruption = self.post.desk.house.interruption();
        let right = match self.post.may_borrow(borrower)? {
            Some(right) => right,
            None => self.post.may_borrow_until(borrower, deadline)?,
        };
        loop {
            let Some((block, place)) = self.post.borrow_until(length, deadline)? else {
                let detail = format!("no room for {} in its pool", counted(length, "byte"));
                return Err(self.post.too_late(operation, &detail));
            };
            match Loan::new(&self.post, borrower, (block, place), length) {
                // It lies in memory that this process is about to be given.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(self.post.too_late(operation, &error.to_string()));
                    }
                    let topic = self.post.desk.topic.name();
                    interruption.check(operation).map_err(|error| error.on(topic))?;
                    ipc::nap(Duration::from_millis(1));
                }
                Ok(loan) => {
                    right.hand_over();
                    return Ok(loan);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Borrows memory, if there is some; if not, more is asked for. None also if this
    /// publisher has all the [loans](crate::TopicSettings::loans) that it may have, and one comes back by
    /// itself.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), but for the deadline.
    #[inline]
    pub fn try_loan(&self, length: u64) -> Result<Option<Loan>> {
        self.try_borrow(length, Borrower::Caller)
    }

    #[inline]
    fn try_borrow(&self, length: u64, borrower: Borrower) -> Result<Option<Loan>> {
        self.check_length(length)?;
        self.post.check(BORROW)?;
        let right = match self.post.may_borrow(borrower)? {
            None => self.post.may_borrow_by_now(borrower)?,
            right => right,
        };
        let Some(right) = right else { return Ok(None) };
        self.post.desk.topic.here().will_publish();
        let Some(found) = self.post.borrow_now(length)? else { return Ok(None) };
        match Loan::new(&self.post, borrower, found, length) {
            Ok(loan) => {
                right.hand_over();
                Ok(Some(loan))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn check_length(&self, length: u64) -> Result<()> {
        let largest = self.post.desk.topic.settings().largest;
        if length <= largest {
            return Ok(());
        }
        let length = counted(length, "byte");
        let detail = format!("{length}; the topic's largest message has {largest}");
        Err(Error::new(BORROW, ErrorKind::TooLong, detail).on(self.topic()))
    }

    /// Publishes these bytes: copies them once, to where all subscribers read them.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`Loan::publish`].
    pub fn push(&self, bytes: &[u8], patience: Duration) -> Result<Sent> {
        self.send(bytes.len() as u64, patience, |loan| loan.write(0, bytes))
    }

    /// Publishes these bytes, if there is room now; None if there is not.
    ///
    /// # Errors
    /// As [`push`](Self::push), but for the deadline.
    pub fn try_push(&self, bytes: &[u8]) -> Result<Option<Sent>> {
        self.try_send(bytes.len() as u64, |loan| loan.write(0, bytes))
    }

    /// Publishes what lies in a device's memory: copies it once, and waits until it is copied.
    ///
    /// What was begun on the device's [default stream](gpu::Device::default_stream) is done
    /// before; what others do that it does not wait for has to be over.
    ///
    /// # Errors
    /// As [`push`](Self::push); if the topic's device cannot reach that memory.
    pub fn push_slice(&self, from: &Slice, patience: Duration) -> Result<Sent> {
        self.send(from.length(), patience, |loan| loan.copy(from, patience))
    }

    /// Publishes what lies in a device's memory, if there is room now; None if there is not.
    /// Waits until it is copied.
    ///
    /// # Errors
    /// As [`push_slice`](Self::push_slice); the deadline is one of the copy.
    pub fn try_push_slice(&self, from: &Slice) -> Result<Option<Sent>> {
        self.try_send(from.length(), |loan| loan.copy(from, gpu::PATIENCE))
    }

    fn try_send(
        &self,
        length: u64,
        fill: impl FnOnce(&mut Loan) -> Result<()>,
    ) -> Result<Option<Sent>> {
        let Some(mut loan) = self.try_borrow(length, Borrower::Passing)? else { return Ok(None) };
        fill(&mut loan)?;
        Ok(loan.try_publish()?.sent())
    }

    fn send(
        &self,
        length: u64,
        patience: Duration,
        fill: impl FnOnce(&mut Loan) -> Result<()>,
    ) -> Result<Sent> {
        let deadline = ipc::deadline(patience);
        let mut loan = self.borrow(length, Borrower::Passing, || deadline)?;
        fill(&mut loan)?;
        let interruption = self.post.desk.house.interruption();
        loan.publish_by(Some(deadline))?.in_time("publish", &interruption)
    }

    /// Waits until everything that it has published so far was released by all that got it;
    /// messages for other nodes count as released when those have them, or were given up: then
    /// [`counters`](Self::counters) say how many they missed. Who holds messages of a
    /// reliable topic that is full meanwhile is in the way; who holds some of one that has room
    /// is not, and may hold them for longer than this waits.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn flush(&self, patience: Duration) -> Result<()> {
        let operation = "flush";
        let post = &*self.post;
        post.check(operation)?;
        let queue = post.desk.topic.here();
        // All of its own up to this sequence have their places before this end.
        let (mut spin, mut from, sequence, end) = {
            let order = lock(&post.order);
            (order.spin, order.flushed, order.sequence, queue.position())
        };
        let is_mine = |words| {
            let entry = Entry::from_words(words);
            entry.publisher == post.id && entry.sequence <= sequence
        };
        let look = || match queue.find_unreleased(from, is_mine) {
            Some(position) => {
                from = position;
                post.desk.house.check(operation).err().map(Err)
            }
            None => Some(Ok(())),
        };
        post.begins_to_wait();
        let flushed = post.wait(operation, ipc::deadline(patience), look, |end, look| {
            queue.wait_for_room_with(&mut spin, end, look)
        });
        post.has_waited(matches!(flushed, Some(Ok(()))));
        match flushed {
            Some(Ok(())) => {
                let mut order = lock(&post.order);
                order.flushed = order.flushed.max(end);
                Ok(())
            }
            Some(Err(error)) => Err(error),
            None => {
                let detail = format!("message {from} of the topic is not released by all");
                Err(post.too_late(operation, &detail))
            }
        }
    }
}
