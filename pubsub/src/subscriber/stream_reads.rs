//! Pulling messages that a stream still writes, and releasing messages that a stream still reads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::{Point, Stream};
use ipc::{Block, BlockRange, Caller, MappedWords, Participant, ParticipantTable, SubscriptionId};
use threads::{DeferredDrop, DeferredValue, lock};

use super::{EndScope, Sample, Subscriber, Subscription};
use crate::context::TopicContext;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::During;
use crate::pool::{Direction, Pool, Readiness, STREAM_POLL_BACKOFF, StreamPoller};
use crate::topic::{Entry, Topic};

const OPERATION: &str = "pull in stream order from topic";
/// How long the end of a subscription waits for streams that hold messages.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

impl Subscriber {
    /// The next message, for work that is begun on this stream afterwards. If it was [published on
    /// a stream](crate::Loan::publish_on) and is not written yet, this stream waits for it, and the
    /// caller does not. Waits for a message as [`pull`](Self::pull) does.
    ///
    /// The stream continues even if the message will never be written, since its publisher died.
    /// Check [`readiness`](Sample::readiness) afterwards. Hold the sample until the stream has
    /// finished with it, or [release it there](Sample::release_on).
    ///
    /// [`Publisher::push_on`](crate::Publisher::push_on) has an example.
    ///
    /// # Errors
    /// As [`pull`](Self::pull); [`InvalidArgument`](crate::ErrorKind::InvalidArgument) for a stream
    /// of another kind of device than that of the messages. If the device fails the call, the
    /// message remains the next one.
    pub fn pull_on(&mut self, stream: &Stream, timeout: Duration) -> Result<Sample> {
        self.check_stream(stream)?;
        self.pull_in_time(OPERATION, timeout, Some(stream))
    }

    /// Like [`pull_on`](Self::pull_on), if there is a message now.
    ///
    /// # Errors
    /// As [`pull_on`](Self::pull_on), except for the deadline.
    pub fn try_pull_on(&mut self, stream: &Stream) -> Result<Option<Sample>> {
        self.check_stream(stream)?;
        self.try_pull_with(Some(stream))
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        self.shared.context.node.check_not_forked(OPERATION)?;
        let pool = self.shared.context.pool(Direction::Local);
        // Messages in host memory are complete when they are published.
        if pool.is_stream_ordered() { pool.check_stream(OPERATION, stream) } else { Ok(()) }
    }

    /// Returns true if this subscriber waits for work that rings no doorbell.
    pub(super) fn is_waiting_for_streams(&self) -> bool {
        self.shared.deferred_releases.has_any() || self.is_next_unwritten()
    }

    /// Returns true if a stream is still writing the next message.
    #[inline]
    pub(super) fn is_next_unwritten(&self) -> bool {
        self.lookahead.iter().flatten().any(|(_, entry)| entry.sync_point.is_some())
    }

    /// From a message that a stream writes onwards: the first one that is written, or for which
    /// this stream waits from now on. None if there is none yet.
    #[cold]
    pub(super) fn take_stream_ordered(
        &mut self,
        direction: Direction,
        mut taken: (u64, Entry),
        stream: Option<&Stream>,
    ) -> Result<Option<(u64, Entry)>> {
        loop {
            let (position, entry) = taken;
            let Some(sync_point) = entry.sync_point else { return Ok(Some(taken)) };
            let pool = self.shared.context.pool(direction);
            match pool.control().readiness(entry.block, sync_point) {
                Some(Readiness::Ready) => return Ok(Some(taken)),
                Some(Readiness::Pending) => {
                    // With the message's memory it is known whether it is copied, once it is written.
                    let place = BlockRange { offset: entry.offset, length: entry.length };
                    let is_mapped =
                        || pool.slice(place, entry.length).is_ok() && !pool.is_mirrored();
                    let Some(stream) = stream.filter(|_| is_mapped()) else {
                        self.lookahead[direction as usize] = Some(taken);
                        return Ok(None);
                    };
                    let wait = pool.sync_word(entry.block).and_then(|word| {
                        stream.wait_for_word(&word, sync_point.ready()).during(OPERATION)
                    });
                    if wait.is_err() {
                        self.lookahead[direction as usize] = Some(taken);
                    }
                    return wait.map(|()| Some(taken));
                }
                // The subscriber was evicted, or this is no message: detected later.
                None => return Ok(Some(taken)),
                Some(Readiness::Poisoned) => {
                    self.shared.release(direction, position);
                    self.loss_tracker.add_missed(1);
                }
            }
            match self.take_from(direction) {
                Some(next) => taken = next,
                None => return Ok(None),
            }
        }
    }
}

impl Sample {
    /// Tells whether the message is written. A message that was [published on a
    /// stream](crate::Loan::publish_on) may be [pulled on one](crate::Subscriber::pull_on). Call
    /// this after the latter stream has read it, to know whether the data was valid.
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted) if it is not [valid](Self::is_valid) any more.
    pub fn readiness(&self) -> Result<Readiness> {
        let operation = "check message of topic";
        let Some(sync_point) = self.entry.sync_point else { return Ok(Readiness::Ready) };
        let found = self.pool().control().readiness(self.entry.block, sync_point);
        // Afterwards: a state that was read while it was held is valid.
        self.check(operation)?;
        found.ok_or_else(|| {
            let detail = "the block holds another message";
            let error = Error::new(operation, ErrorKind::Malformed, detail);
            error.on(self.shared.context.topic.name())
        })
    }

    /// Releases it once all work that was begun on this stream so far is done, without waiting.
    ///
    /// Until then it is held like any message, and its block is not reused, not even if its
    /// subscriber is evicted; if this process dies, it is released with it. The end of the work is
    /// detected within some milliseconds, or when this process pulls, or waits for room. The end of
    /// a subscription waits for it, at most ten seconds. A stream that takes longer keeps this
    /// process a member of its node until it has finished.
    ///
    /// This holds for host memory, too: a stream of any device may read it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryLocation, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-release-on");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// # let timeout = Duration::from_secs(10);
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = MemoryLocation::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// # let (frame, producing) = (device.allocate(4096)?, device.stream()?);
    /// # publisher.push_on(&producing, &frame.whole(), timeout)?;
    ///
    /// let (result, stream) = (device.allocate(4096)?, device.stream()?);
    /// let sample = subscriber.pull_on(&stream, timeout)?;
    /// stream.copy(&result.whole(), sample.slice())?;
    /// sample.release_on(&stream)?; // after the copy
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted): the subscriber was evicted before, and the stream may read
    /// another message. If the device fails the call, the message is held as long as its subscriber
    /// exists.
    pub fn release_on(mut self, stream: &Stream) -> Result<()> {
        let operation = "release stream-ordered message of topic";
        self.shared.context.node.check_not_forked(operation)?;
        let (direction, block) = (self.direction, self.entry.block);
        let control = self.pool().control();
        // Before the check: if the subscription is still active then, a later eviction sees this
        // mark.
        let place = self.shared.subscription_id(direction).index();
        control.begin_stream_read(block, self.shared.context.topic.number(), place);
        let read = stream.point();
        if let Err(error) = self.check(operation) {
            self.shared.end_stream_read(direction, block);
            return Err(error);
        }
        self.is_owned = false;
        let (read, done) = match read {
            Ok(point) => (Some(point), Ok(())),
            Err(cause) => (None, Err(cause.during(operation))),
        };
        let position = self.position;
        self.shared.defer_release(DeferredRelease { direction, position, block, read });
        done
    }

    /// Waits until it is written, at most for the timeout of a device.
    pub(super) fn await_ready(&self, operation: &'static str) -> Result<()> {
        let deadline = Instant::now() + gpu::DEFAULT_TIMEOUT;
        let mut backoff = STREAM_POLL_BACKOFF;
        loop {
            let (kind, detail) = match self.readiness()? {
                Readiness::Ready => return Ok(()),
                Readiness::Poisoned => {
                    (ErrorKind::Poisoned, "its publisher was lost before it was written")
                }
                Readiness::Pending if Instant::now() >= deadline => {
                    (ErrorKind::DeadlineExceeded, "its publisher's stream has not written it")
                }
                Readiness::Pending => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    std::thread::sleep(backoff.next_pause().min(left));
                    continue;
                }
            };
            return Err(Error::new(operation, kind, detail).on(self.shared.context.topic.name()));
        }
    }
}

/// A message that a stream holds.
#[derive(Debug)]
struct DeferredRelease {
    direction: Direction,
    position: u64,
    block: Block,
    /// The point after all work that reads it; None if that is unknown.
    read: Option<Point>,
}

/// All of a subscription. They do not hold the membership: the polling thread may be the one that
/// ends with it.
#[derive(Debug)]
pub(super) struct DeferredReleases {
    topic: Arc<Topic>,
    me: Participant,
    participants: Arc<ParticipantTable<MappedWords>>,
    subscription_ids: [SubscriptionId; 2],
    count: AtomicUsize,
    all: Mutex<Vec<DeferredRelease>>,
}

impl DeferredReleases {
    pub(super) fn new(context: &TopicContext, subscription_ids: [SubscriptionId; 2]) -> Self {
        Self {
            topic: Arc::clone(&context.topic),
            me: context.node.me,
            participants: Arc::clone(&context.node.participants),
            subscription_ids,
            count: AtomicUsize::new(0),
            all: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Releases messages that streams have finished with. True if some are left.
    pub(super) fn poll_all(&self, context: &TopicContext) -> bool {
        for direction in Direction::BOTH {
            self.poll_streams(context.pool(direction));
        }
        self.has_any()
    }

    fn is_released(&self, release: &DeferredRelease, pool: &Pool) -> bool {
        let is_read = match release.read.as_ref().map(Point::is_done) {
            Some(Ok(is_read)) => is_read,
            // The device has stopped.
            Some(Err(error)) => error.kind() == gpu::ErrorKind::DeviceFailed,
            None => false,
        };
        if is_read {
            let caller = Caller::new(self.me, &*self.participants);
            let id = self.subscription_ids[release.direction as usize];
            pool.control().end_stream_read(release.block, id.index());
            let (id, control) = ((release.direction, id), pool.control());
            self.topic.release_in(&caller, id, release.position, control);
            // The block is owned by streams, if the subscriber was evicted in the meantime.
            pool.control().free_if_idle(&caller, release.block);
        }
        is_read
    }
}

impl StreamPoller for DeferredReleases {
    fn poll_streams(&self, pool: &Pool) -> bool {
        if !self.has_any() {
            return false;
        }
        let direction = pool.id().direction;
        let mut all = lock(&self.all);
        all.retain(|it| it.direction != direction || !self.is_released(it, pool));
        self.count.store(all.len(), Ordering::Relaxed);
        all.iter().any(|release| release.direction == direction)
    }
}

impl Subscription {
    /// Holds the message until a stream has reached a point.
    fn defer_release(&self, release: DeferredRelease) {
        let pool = self.context.pool(release.direction);
        let mut all = lock(&self.deferred_releases.all);
        all.push(release);
        self.deferred_releases.count.store(all.len(), Ordering::Relaxed);
        drop(all);
        let deferred_releases = Arc::downgrade(&self.deferred_releases);
        pool.register_poller(deferred_releases as Weak<dyn StreamPoller>);
        self.context.node.service.poll_streams();
    }

    /// Ends the stream reads of a message that this subscription no longer holds.
    pub(super) fn end_stream_read(&self, direction: Direction, block: Block) {
        let control = self.context.pool(direction).control();
        control.end_stream_read(block, self.subscription_id(direction).index());
        control.free_if_idle(&self.context.node.caller(), block);
    }

    /// Waits for streams at the end of the subscription. After a timeout a thread takes over, and
    /// then ends the subscription. Until then the process stays a member of its node, since streams
    /// may still read its messages.
    pub(super) fn drain_releases(&self) -> bool {
        let (mut backoff, deadline) = (STREAM_POLL_BACKOFF, Instant::now() + DRAIN_TIMEOUT);
        let deferred_releases = &self.deferred_releases;
        while deferred_releases.has_any() && deferred_releases.poll_all(&self.context) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                self.transfer_to_streams();
                return false;
            }
            std::thread::sleep(backoff.next_pause().min(left));
        }
        true
    }

    /// A thread ends the subscription once streams have released all messages. Each subscription
    /// has its own, because ending one may wait for a lock.
    fn transfer_to_streams(&self) {
        let topic = self.context.topic.name();
        tracing::warn!(
            topic,
            "a stream still reads messages: this process stays a member of its node"
        );
        let ended = EndedSubscription {
            context: self.context.clone(),
            deferred_releases: Arc::clone(&self.deferred_releases),
        };
        if let Err(error) = DeferredDrop::default().push(ended) {
            tracing::error!(
                %error,
                topic,
                "cannot start a thread to wait for streams: messages are not released"
            );
            // Streams may still read them.
            std::mem::forget(self.context.clone());
        }
    }
}

/// A subscription without a subscriber, whose messages streams still read.
struct EndedSubscription {
    context: TopicContext,
    deferred_releases: Arc<DeferredReleases>,
}

impl DeferredValue for EndedSubscription {
    const THREAD_NAME: &'static str = "fabricast-streams";
    const CHECK_INTERVAL: Duration = Duration::from_millis(20);

    fn is_unused(&mut self) -> bool {
        !self.deferred_releases.poll_all(&self.context)
    }

    fn end(self) {
        let subscription_ids = self.deferred_releases.subscription_ids;
        self.context.end_subscriptions(subscription_ids, EndScope::Everything);
    }
}
