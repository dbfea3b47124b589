//! Publishers.

mod close_publisher;
mod loan;
mod loan_permits;
mod stream_writes;
mod subscriber_watch;
mod wait_span;

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use gpu::Slice;
use ipc::{AllocatorError, Block, BlockRange, Owner, QueueError, WaitStrategy};
use threads::lock;

pub use self::loan::{Attempt, Sent};
use self::stream_writes::RECHECK_BACKOFF;
use self::subscriber_watch::SubscriberWatch;
use self::wait_span::WaitSpan;
use crate::clock;
use crate::context::TopicContext;
use crate::endpoint_list::{ClosedMark, Endpoint};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::ids::PublisherId;
use crate::interruption::Interruption;
use crate::loan_limit::{Borrower, LoanLimit};
use crate::pool::{Direction, InFlightCopies, Stage};
use crate::settings::Reliability;
use crate::text::counted;
use crate::topic::{Entry, PublisherSlot};

const LOAN_MEMORY: &str = "loan memory for topic";

/// Publishes messages of one topic.
///
/// Memory for a message is [loaned](Self::loan), filled (for instance by a kernel of a device), and
/// then published in place; or a message is [pushed](Self::push), which copies it once. Several
/// threads may use a publisher; their messages are ordered as they were published.
///
/// A publisher has at most as many loans at once as its topic
/// [allows](crate::TopicSettings::loans). Memory for that number is reserved for it: loans of other
/// publishers take none of it. A loan counts until it is published or dropped, however long
/// subscribers hold the message.
///
/// ```
/// use std::time::Duration;
/// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
/// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-loans");
/// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
/// let topic = node.topic("frames", &TopicSettings { loans: 2, ..TopicSettings::default() })?;
/// let (publisher, timeout) = (topic.publisher()?, Duration::from_secs(5));
///
/// let (one, other) = (publisher.loan(100, timeout)?, publisher.loan(100, timeout)?);
/// let refused = publisher.loan(100, timeout).unwrap_err(); // at once
/// assert_eq!(refused.kind(), ErrorKind::TooManyLoans);
/// one.publish(timeout)?;
/// assert!(publisher.loan(100, timeout).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Published messages stay when the publisher is dropped.
#[derive(Debug)]
pub struct Publisher {
    state: Arc<PublisherState>,
}

/// A block to fill and then [publish](Self::publish). A dropped loan frees its block.
///
/// Fill it by [`write`](Self::write), by a device through its [`slice`](Self::slice), or by
/// [address](Self::address). Work of a device has to be complete before it is published, or begun
/// on the stream that it is [published on](Self::publish_on). Until then it has zeros, or bytes of an
/// older message of the same topic; never those of another topic.
///
/// A publisher has at most [this many](crate::TopicSettings::loans) at once. A loan that is dropped
/// while a device may still write to it counts until the device has finished.
pub struct Loan {
    state: Arc<PublisherState>,
    borrower: Borrower,
    block: Block,
    slice: Slice,
    metadata: u16,
    is_owned: bool,
    /// Copies of a device to the block that may be unfinished.
    in_flight: Option<InFlightCopies>,
    /// All of them precede the point of the stream that it was to be published on.
    is_stream_ordered: bool,
}

/// Counters of a publisher since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PublisherCounters {
    /// Messages that it published, with or without subscribers.
    pub messages: u64,
    /// Bytes of these messages.
    pub bytes: u64,
    /// Messages that were dropped for lack of room.
    pub dropped: u64,
    /// On a reliable topic, messages of this publisher that another subscribed node is not known to
    /// have when it was [dropped](crate::NetworkOptions::lost_after), counted for each such node.
    /// Messages that [`flush`](Publisher::flush) waited for until then are included when it
    /// returns.
    pub missed_by_nodes: u64,
    /// Subscribers on this node that were evicted since this publisher was created: they held
    /// messages that blocked publishers. They missed their unread messages.
    pub evicted: u64,
}

/// A publisher's slot in its topic, and its state; its loans hold it, too.
#[derive(Debug)]
struct PublisherState {
    context: TopicContext,
    id: u64,
    /// Evictions of the topic before this publisher.
    evicted_before: u64,
    sequencer: Mutex<Sequencer>,
    span: WaitSpan,
    loans: Arc<LoanLimit>,
    closed: ClosedMark,
    /// Counters when it was closed.
    last_counters: OnceLock<PublisherCounters>,
    subscriber_watch: SubscriberWatch,
}

/// Serialises the publishes of one publisher.
#[derive(Debug)]
struct Sequencer {
    sequence: u64,
    /// Wait strategy of this publisher, adapted to earlier waits.
    spin: WaitStrategy,
    /// All its messages before this position are released.
    flushed: u64,
}

impl PublisherState {
    fn slot(&self) -> PublisherSlot<'_, ipc::MappedWords> {
        self.context.topic.publisher(self.id)
    }

    #[inline]
    fn check(&self, operation: &'static str) -> Result<()> {
        self.context.node.check_not_forked(operation)?;
        if self.slot().is_of(self.context.node.me, self.id) {
            return Ok(());
        }
        self.closed.check(operation).on(self.context.topic.name())?;
        let detail = "this process was removed from the node, or left it";
        Err(Error::new(operation, ErrorKind::Closed, detail).on(self.context.topic.name()))
    }

    /// Allocates a block for a message; None if that is not possible now, and more memory was
    /// requested.
    #[inline]
    fn borrow_now(&self, length: u64) -> Result<Option<(Block, BlockRange)>> {
        let TopicContext { node, local: pool, .. } = &self.context;
        // Before the attempt: a request must not add a second piece to one that arrives meanwhile.
        let admitted = pool.admitted();
        let caller = node.short_caller();
        let owner = Owner::participant(node.me);
        match pool.control().allocate(&caller, owner, length) {
            Ok(found) => Ok(Some(found)),
            // More memory would not add blocks; and a stopped process may hold the lock.
            Err(AllocatorError::OutOfBlocks { .. } | AllocatorError::LockTimeout(_)) => Ok(None),
            Err(AllocatorError::OutOfMemory { .. }) => {
                if let Some(request) = pool.growth_request(admitted, length.max(1)) {
                    node.service.request_growth(request);
                }
                self.slot().backpressure().refused();
                self.context.publisher_blocked();
                // For the next attempt.
                pool.free_completed(&caller);
                Ok(None)
            }
            Err(cause) => Err(cause.during(LOAN_MEMORY).on(self.context.topic.name())),
        }
    }

    fn borrow_until(&self, length: u64, deadline: Instant) -> Result<Option<(Block, BlockRange)>> {
        let control = self.context.local.control();
        let mut seen = control.changes();
        if let Some(found) = self.borrow_now(length)? {
            return Ok(Some(found));
        }
        let mut spin = lock(&self.sequencer).spin;
        let mut tried = Instant::now();
        let look = || {
            if let Err(error) = self.check_open(LOAN_MEMORY) {
                return Some(Err(error));
            }
            // The lock is not taken while nothing changes, but growth is requested again.
            let (changes, now) = (control.changes(), Instant::now());
            if changes == seen && now.saturating_duration_since(tried) < Duration::from_secs(1) {
                return None;
            }
            (seen, tried) = (changes, now);
            self.borrow_now(length).transpose()
        };
        let found = self.wait(LOAN_MEMORY, deadline, None, look, |end, look| {
            control.wait(&mut spin, end, look)
        });
        lock(&self.sequencer).spin = spin;
        found.transpose()
    }

    /// Publishes a message that was filled at the time of its entry; None if there is no room. If a
    /// stream writes it and it is not published, the block stays the caller's.
    #[inline]
    fn attempt(&self, filled: Entry, is_retry: bool) -> Result<Option<Sent>> {
        let operation = "publish to topic";
        let TopicContext { node, topic, local, .. } = &self.context;
        let control = local.control();
        let mut sequencer = lock(&self.sequencer);
        self.check(operation)?;
        let now = if is_retry { clock::now() } else { filled.published_at };
        let sample_info = control.sample_info(filled.block);
        sample_info.stamp(Stage::Filled, filled.published_at);
        sample_info.stamp(Stage::Published, now);
        let sequence = sequencer.sequence + 1;
        let entry = Entry { sequence, published_at: now, ..filled };
        let caller = node.short_caller();
        let dispose = || {
            if entry.sync_point.is_none() {
                control.dispose(&caller, entry.block, Owner::participant(node.me));
            }
        };
        let sent = match topic.publish_in(&caller, entry, control) {
            Ok(published) => {
                if topic.is_replicated() {
                    node.publish_doorbell.ring(topic.number());
                }
                self.subscriber_watch.note(published.readers);
                Sent {
                    position: Some(published.position),
                    subscribers: published.readers,
                    is_dropped: false,
                }
            }
            Err(QueueError::NoSubscribers) => {
                self.slot().count(entry.length);
                dispose();
                Sent { position: None, subscribers: 0, is_dropped: false }
            }
            Err(QueueError::Full) if topic.settings().reliability == Reliability::Reliable => {
                self.slot().backpressure().refused();
                self.context.publisher_blocked();
                // For the next attempt: streams of this process may have finished with older
                // messages.
                local.poll_streams(&caller);
                return Ok(None);
            }
            Err(QueueError::Full) => {
                if !topic.local().has_room() {
                    // Subscribers hold all messages that the topic has room for; they may do so for
                    // a while.
                    self.slot().backpressure().refused();
                    self.context.report_blocked();
                }
                self.slot().count_dropped();
                dispose();
                Sent { position: None, subscribers: 0, is_dropped: true }
            }
            // A stopped process holds the lock: nothing has changed, and there may be time left.
            Err(QueueError::LockTimeout(_)) => return Ok(None),
            Err(cause) => return Err(cause.during(operation).on(topic.name())),
        };
        sequencer.sequence = sequence;
        self.span.relieved();
        Ok(Some(sent))
    }

    /// Publishes once there is room; None at the deadline, or at once without a deadline.
    fn publish_by(&self, filled: Entry, deadline: Option<Instant>) -> Result<Option<Sent>> {
        let sent = self.attempt(filled, false)?;
        let (None, Some(deadline)) = (sent, deadline) else { return Ok(sent) };
        let queue = self.context.topic.local();
        let mut spin = lock(&self.sequencer).spin;
        let look = || match self.check_open("publish to topic") {
            Err(error) => Some(Err(error)),
            // Without subscribers none is needed: samples may outlive them.
            Ok(()) if queue.has_room() || queue.subscribers() == 0 => {
                self.attempt(filled, true).transpose()
            }
            Ok(()) => None,
        };
        let recheck = Some(RECHECK_BACKOFF);
        let sent = self.wait("publish to topic", deadline, recheck, look, |end, look| {
            queue.room().wait(&mut spin, end, look)
        });
        lock(&self.sequencer).spin = spin;
        sent.transpose()
    }

    fn give_back(&self, block: Block) {
        let node = &self.context.node;
        if node.fork_generation.is_current() {
            let owner = Owner::participant(node.me);
            self.context.local.control().dispose(&node.caller(), block, owner);
        }
    }

    /// Why a message found no room until the deadline.
    fn why_full(&self) -> String {
        let evicted = self.context.topic.evicted_holders(Direction::Local);
        if evicted.is_empty() || !self.context.topic.holders(Direction::Local).is_empty() {
            return "the topic is full: subscribers have not read or released messages, or a stopped \
                    process holds a lock. Release samples, or increase depth or max_held of the topic"
                .to_owned();
        }
        let held = evicted.into_iter().map(|(holder, held)| {
            let participant = holder.participant().map(|it| it.to_string()).unwrap_or_default();
            format!("participant {participant} holds {}", counted(held.into(), "message"))
        });
        let held = held.collect::<Vec<_>>().join(", ");
        format!(
            "evicted subscribers hold the maximum of messages ({held}): release their samples, or end their processes. \
             `fabricast topics --verbose` lists them"
        )
    }

    fn timeout_error(&self, operation: &'static str, detail: &str) -> Error {
        Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.context.topic.name())
    }
}

impl Drop for PublisherState {
    fn drop(&mut self) {
        let node = &self.context.node;
        if !node.fork_generation.is_current() {
            return;
        }
        self.context.local.poll_streams(&node.caller());
        if self.slot().is_held_by(node.me, self.id) {
            self.slot().give_back();
            // Subscribers may wait for its end.
            self.context.topic.local().messages().ring();
            self.context.participants_changed();
        }
    }
}

impl PublisherState {
    fn counters(&self) -> PublisherCounters {
        let Self { context, id, evicted_before, .. } = self;
        let topic = &context.topic;
        let seen = self.slot().seen().filter(|seen| seen.id == *id);
        seen.map_or_else(PublisherCounters::default, |seen| PublisherCounters {
            messages: seen.messages,
            bytes: seen.bytes,
            dropped: seen.dropped,
            missed_by_nodes: topic.missed_by_nodes_of(*id),
            evicted: topic.evictions().saturating_sub(*evicted_before),
        })
    }
}

impl Publisher {
    pub(crate) fn new(context: TopicContext) -> Result<Self> {
        let operation = "create publisher of topic";
        context.check(operation)?;
        context.local.find_access().on(context.topic.name())?;
        context.local.check_writable(operation).on(context.topic.name())?;
        let id = context.topic.claim(context.node.me)?;
        // The slot comes first: then the order of failures of both processes does not matter.
        let admitted = context.node.service.admit(context.topic.number(), id);
        admitted.map_err(|error| {
            // Unless it was marked dead, and the slot was reused.
            let slot = context.topic.publisher(id);
            if slot.is_of(context.node.me, id) {
                slot.abandon();
                context.topic.local().messages().ring();
            }
            context.participants_changed();
            error.on(context.topic.name())
        })?;
        let sequencer = Sequencer {
            sequence: 0,
            spin: context.node.waiting,
            flushed: context.topic.local().position(),
        };
        let evicted_before = context.topic.evictions();
        let loans = Arc::new(LoanLimit::new(context.topic.settings().loans));
        context.participants_changed();
        let state = Arc::new(PublisherState {
            context,
            id,
            evicted_before,
            sequencer: Mutex::new(sequencer),
            span: WaitSpan::default(),
            loans,
            closed: ClosedMark::default(),
            last_counters: OnceLock::new(),
            subscriber_watch: SubscriberWatch::default(),
        });
        let endpoint: Weak<dyn Endpoint> = Arc::<PublisherState>::downgrade(&state);
        state.context.add_endpoint(operation, endpoint)?;
        Ok(Self { state })
    }

    /// Identifies it among all publishers that the topic ever had on this node.
    #[must_use]
    pub fn id(&self) -> PublisherId {
        PublisherId(self.state.id)
    }

    /// Fails once it cannot publish any more.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.state.check_open(operation)?;
        self.state.check(operation)
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.state.context.node.interruption()
    }

    /// The topic's name.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.state.context.topic.name()
    }

    /// Counters since it was created, until it was closed.
    #[must_use]
    pub fn counters(&self) -> PublisherCounters {
        let last = self.state.last_counters.get().copied();
        last.unwrap_or_else(|| self.state.counters())
    }

    /// Sets its wait strategy.
    pub fn set_wait_strategy(&self, spin: WaitStrategy) {
        lock(&self.state.sequencer).spin = spin;
    }

    /// Loans memory for a message of this length; waits for it if necessary.
    ///
    /// If this publisher has all the [loans](crate::TopicSettings::loans) that it may have, it
    /// waits only for those that return by themselves: of another thread that pushes, or of a
    /// device that still writes to a dropped loan. It does not wait for loans that callers hold,
    /// since the caller may hold them itself. Threads that must not delay each other use a
    /// publisher each.
    ///
    /// # Errors
    /// [`TooManyLoans`](ErrorKind::TooManyLoans), at once; [`TooLong`](ErrorKind::TooLong) beyond the
    /// topic's largest; [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn loan(&self, length: u64, timeout: Duration) -> Result<Loan> {
        self.borrow(length, Borrower::Caller, || ipc::deadline(timeout))
    }

    /// Loans once there is room. The usual case does not read the clock.
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
        let operation = LOAN_MEMORY;
        self.check_length(length)?;
        self.state.check_open(operation)?;
        let interruption = self.state.context.node.interruption();
        let permit = match self.state.acquire_permit(borrower)? {
            Some(permit) => permit,
            None => self.state.acquire_permit_until(borrower, deadline)?,
        };
        loop {
            let Some((block, place)) = self.state.borrow_until(length, deadline)? else {
                let mut detail = format!("no room for {} in its pool", counted(length, "byte"));
                if !self.state.context.local.id().place.is_visible() {
                    detail.push_str(
                        ". This process does not see the device of the topic: the pool grows while a \
                         process that does has the topic open, or serves the node",
                    );
                }
                return Err(self.state.timeout_error(operation, &detail));
            };
            match Loan::new(&self.state, borrower, (block, place), length) {
                // It lies in memory that this process is about to receive.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(self.state.timeout_error(operation, &error.to_string()));
                    }
                    interruption.check(operation).on(self.topic())?;
                    self.state.check_open(operation)?;
                    ipc::sleep_interruptible(Duration::from_millis(1));
                }
                Ok(loan) => {
                    permit.detach();
                    return Ok(loan);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Loans memory, if some is free; if not, more is requested. None also if this publisher has
    /// all the [loans](crate::TopicSettings::loans) that it may have, and one returns by itself.
    ///
    /// # Errors
    /// As [`loan`](Self::loan), except for the deadline.
    #[inline]
    pub fn try_loan(&self, length: u64) -> Result<Option<Loan>> {
        self.try_borrow(length, Borrower::Caller)
    }

    #[inline]
    fn try_borrow(&self, length: u64, borrower: Borrower) -> Result<Option<Loan>> {
        self.check_length(length)?;
        self.state.check(LOAN_MEMORY)?;
        let permit = match self.state.acquire_permit(borrower)? {
            None => {
                // Devices may have finished with dropped loans.
                let context = &self.state.context;
                context.local.free_completed(&context.node.short_caller());
                self.state.acquire_permit(borrower)?
            }
            permit => permit,
        };
        let Some(permit) = permit else { return Ok(None) };
        self.state.context.topic.local().prefetch_for_publish();
        let Some(found) = self.state.borrow_now(length)? else { return Ok(None) };
        match Loan::new(&self.state, borrower, found, length) {
            Ok(loan) => {
                permit.detach();
                Ok(Some(loan))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn check_length(&self, length: u64) -> Result<()> {
        let largest = self.state.context.topic.settings().largest;
        if length <= largest {
            return Ok(());
        }
        let length = counted(length, "byte");
        let detail = format!("{length} exceed the topic's largest message of {largest}");
        Err(Error::new(LOAN_MEMORY, ErrorKind::TooLong, detail).on(self.topic()))
    }

    /// Publishes these bytes with one copy, to where all subscribers read them.
    ///
    /// # Errors
    /// As [`loan`](Self::loan) and [`Loan::publish`].
    pub fn push(&self, bytes: &[u8], timeout: Duration) -> Result<Sent> {
        self.send(bytes.len() as u64, timeout, |loan| loan.write(0, bytes))
    }

    /// Publishes these bytes, if there is room now; otherwise None.
    ///
    /// # Errors
    /// As [`push`](Self::push), except for the deadline.
    pub fn try_push(&self, bytes: &[u8]) -> Result<Option<Sent>> {
        self.try_send(bytes.len() as u64, |loan| loan.write(0, bytes))
    }

    /// Publishes a copy of device memory, and waits for the copy.
    ///
    /// The copy runs after work on the device's [default stream](gpu::Device::default_stream).
    /// Work that this stream does not wait for has to be complete.
    ///
    /// # Errors
    /// As [`push`](Self::push); also if the topic's device cannot reach that memory.
    pub fn push_slice(&self, from: &Slice, timeout: Duration) -> Result<Sent> {
        self.send(from.length(), timeout, |loan| loan.copy(from, timeout))
    }

    /// Publishes a copy of device memory, if there is room now; otherwise None. Waits for the copy.
    ///
    /// # Errors
    /// As [`push_slice`](Self::push_slice); only the copy has a deadline.
    pub fn try_push_slice(&self, from: &Slice) -> Result<Option<Sent>> {
        self.try_send(from.length(), |loan| loan.copy(from, gpu::DEFAULT_TIMEOUT))
    }

    fn try_send(
        &self,
        length: u64,
        fill: impl FnOnce(&mut Loan) -> Result<()>,
    ) -> Result<Option<Sent>> {
        let Some(mut loan) = self.try_borrow(length, Borrower::Transient)? else { return Ok(None) };
        fill(&mut loan)?;
        Ok(loan.try_publish()?.sent())
    }

    fn send(
        &self,
        length: u64,
        timeout: Duration,
        fill: impl FnOnce(&mut Loan) -> Result<()>,
    ) -> Result<Sent> {
        let deadline = ipc::deadline(timeout);
        let mut loan = self.borrow(length, Borrower::Transient, || deadline)?;
        fill(&mut loan)?;
        let interruption = self.state.context.node.interruption();
        loan.publish_by(Some(deadline))?.into_sent("publish to topic", &interruption)
    }

    /// Waits until all subscribers have released all messages that it has published so far; what
    /// evicted ones hold does not count. For another node it waits until that node has them or is dropped as a destination;
    /// [`counters`](Self::counters) then has the number that it missed. A subscriber of a full
    /// reliable topic that holds messages blocks its publishers, and may be evicted. While the
    /// topic has room, it may hold messages for longer than this waits.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked).
    pub fn flush(&self, timeout: Duration) -> Result<()> {
        let operation = "flush topic";
        let state = &*self.state;
        state.check(operation)?;
        let queue = state.context.topic.local();
        // All its messages up to this sequence lie before this position.
        let (mut spin, mut from, sequence, end) = {
            let sequencer = lock(&state.sequencer);
            (sequencer.spin, sequencer.flushed, sequencer.sequence, queue.position())
        };
        let is_own = |words| {
            let entry = Entry::from_words(words);
            entry.publisher == state.id && entry.sequence <= sequence
        };
        let look = || match queue.find_unreleased(from, is_own) {
            Some(position) => {
                from = position;
                state.check_open(operation).err().map(Err)
            }
            None => Some(Ok(())),
        };
        let flushed = state.wait(operation, ipc::deadline(timeout), None, look, |end, look| {
            queue.room().wait(&mut spin, end, look)
        });
        flushed.unwrap_or_else(|| {
            let detail = format!("subscribers have not released message {from} of the topic");
            Err(state.timeout_error(operation, &detail))
        })?;
        let mut sequencer = lock(&state.sequencer);
        sequencer.flushed = sequencer.flushed.max(end);
        Ok(())
    }
}
