//! Messages that are released once a stream has reached a point.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::Point;
use ipc::{Block, Caller, MappedWords, Participant, ParticipantTable, SubscriptionId};

use super::Subscription;
use crate::context::TopicContext;
use crate::lock::lock;
use crate::pool::{Direction, PollBackoff, Pool, StreamPoller};
use crate::topic::Topic;

/// How long the end of a subscription waits for streams that hold messages.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Back-off between later polls of streams.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// A message that a stream holds.
#[derive(Debug)]
pub(crate) struct DeferredRelease {
    pub(crate) direction: Direction,
    pub(crate) position: u64,
    pub(crate) block: Block,
    /// The point after all work that reads it; None if that is unknown.
    pub(crate) read: Option<Point>,
}

/// All of a subscription. They do not hold the membership: the polling thread may be the one that
/// ends with it.
#[derive(Debug)]
pub(super) struct DeferredReleases {
    topic: Arc<Topic>,
    me: Participant,
    roster: Arc<ParticipantTable<MappedWords>>,
    local: SubscriptionId,
    inbound: SubscriptionId,
    count: AtomicUsize,
    all: Mutex<Vec<DeferredRelease>>,
}

impl DeferredReleases {
    pub(super) fn new(
        context: &TopicContext,
        local: SubscriptionId,
        inbound: SubscriptionId,
    ) -> Self {
        Self {
            topic: Arc::clone(&context.topic),
            me: context.node.me,
            roster: Arc::clone(&context.node.roster),
            local,
            inbound,
            count: AtomicUsize::new(0),
            all: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    fn subscription_id(&self, direction: Direction) -> SubscriptionId {
        match direction {
            Direction::Local => self.local,
            Direction::Inbound => self.inbound,
        }
    }

    fn is_released(&self, release: &DeferredRelease, pool: &Pool) -> bool {
        let is_read = match release.read.as_ref().map(Point::is_done) {
            Some(Ok(is_read)) => is_read,
            // The device has stopped.
            Some(Err(error)) => error.kind() == gpu::ErrorKind::DeviceFailed,
            None => false,
        };
        if is_read {
            let caller = Caller::new(self.me, &*self.roster);
            let subscription_id = (release.direction, self.subscription_id(release.direction));
            pool.control().end_stream_read(release.block, subscription_id.1.index());
            self.topic.release_in(&caller, subscription_id, release.position, pool.control());
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
    pub(crate) fn defer_release(&self, release: DeferredRelease) {
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
    pub(crate) fn end_stream_read(&self, direction: Direction, block: Block) {
        let control = self.context.pool(direction).control();
        control.end_stream_read(block, self.subscription_id(direction).index());
        control.free_if_idle(&self.context.node.caller(), block);
    }

    /// Releases messages that streams have finished with. True if some are left.
    pub(super) fn poll_streams(&self) -> bool {
        for direction in Direction::BOTH {
            self.deferred_releases.poll_streams(self.context.pool(direction));
        }
        self.deferred_releases.has_any()
    }

    /// Waits for streams at the end of the subscription. After a timeout a thread takes over, and
    /// then ends the subscription. Until then the process stays a member of its node, since streams
    /// may still read its messages.
    pub(super) fn drain_releases(&self) -> bool {
        let (mut backoff, deadline) = (PollBackoff::NEW, Instant::now() + DRAIN_TIMEOUT);
        while self.deferred_releases.has_any() && self.poll_streams() {
            let now = Instant::now();
            if now >= deadline {
                self.transfer_to_streams();
                return false;
            }
            std::thread::sleep(backoff.next(deadline).saturating_duration_since(now));
        }
        true
    }

    /// Starts a thread that ends the subscription once streams have released all messages.
    fn transfer_to_streams(&self) {
        let topic = self.context.topic.name();
        tracing::warn!(
            topic,
            "a stream still reads messages: this process stays a member of its node"
        );
        let (context, deferred_releases) =
            (self.context.clone(), Arc::clone(&self.deferred_releases));
        let subscription_ids = [self.local, self.inbound];
        let wait = move || {
            while deferred_releases.has_any() {
                std::thread::sleep(DRAIN_POLL);
                for direction in Direction::BOTH {
                    deferred_releases.poll_streams(context.pool(direction));
                }
            }
            super::end(&context, subscription_ids);
        };
        let waiting = std::thread::Builder::new().name("fabricast-streams".into()).spawn(wait);
        if let Err(error) = waiting {
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
