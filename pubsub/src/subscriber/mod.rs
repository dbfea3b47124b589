//! Subscribers.

mod close_subscriber;
mod loss_tracker;
mod poll_descriptor;
mod publisher_watch;
mod sample;
mod stream_reads;

use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use gpu::{Slice, Stream};
use ipc::{Block, BlockRange, Caller, QueueError, SubscriptionId, WaitStrategy};

use crate::context::TopicContext;
use crate::endpoint_list::Endpoint;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::event::Event;
use crate::ids::PublisherId;
use crate::pool::{Direction, Pool, STREAM_POLL_BACKOFF};
use crate::text;
use crate::topic::{Entry, LostPublisher, MAX_REMEMBERED_LOSSES, RemoteLastSequence};

pub use self::close_subscriber::Closer;
use self::close_subscriber::EndOfTakes;
pub(crate) use self::loss_tracker::{LossTracker, RemoteAccounts, RemoteStart};
use self::poll_descriptor::{PendingEvents, PollDescriptor};
use self::publisher_watch::PublisherWatch;
use self::stream_reads::DeferredReleases;

/// Receives all messages of one topic that are published after it subscribed, on this node and
/// others.
///
/// Messages of one publisher are received in order; those of different publishers in any order. It
/// alternates between this node and all others.
///
/// A subscriber holds a pulled message until the [`Sample`] is dropped, also after the subscriber.
/// The subscriber is evicted if its samples block publishers for longer than
/// [`release_deadline`](crate::TopicSettings::release_deadline). Then it can pull no more messages
/// ([`Evicted`](ErrorKind::Evicted)), not even queued ones, and its samples [are not
/// valid](Sample::is_valid) any more.
///
/// On a topic that drops messages a slow subscriber misses messages, and others do not. It may hold
/// 16 samples more than the topic's depth, and can pull no more until it drops one of them
/// ([`TooManySamples`](ErrorKind::TooManySamples)), so that others have room. It blocks publishers
/// only where several subscribers together hold all messages that the topic has room for.
#[derive(Debug)]
pub struct Subscriber {
    local: ipc::Subscriber,
    inbound: ipc::Subscriber,
    shared: Arc<Subscription>,
    /// Queue of the next message.
    next: Direction,
    spin: WaitStrategy,
    /// Messages taken from either queue whose memory this process has not received yet, or that a
    /// stream is still writing.
    lookahead: [Option<(u64, Entry)>; 2],
    loss_tracker: LossTracker,
    /// Lost publishers that were reported, on this node and on others.
    losses: [u64; 2],
    is_eviction_reported: bool,
    publisher_watch: PublisherWatch,
    max_samples: usize,
    /// Created on the first request.
    poll_descriptor: OnceLock<PollDescriptor>,
    /// Events for which the descriptor was made readable.
    announced: PendingEvents,
}

/// A received message. It is held until the sample is dropped, by any thread, also after its
/// subscriber. Its bytes lie where its publisher wrote them: none was copied, for any number of
/// readers.
pub struct Sample {
    shared: Arc<Subscription>,
    direction: Direction,
    position: u64,
    entry: Entry,
    slice: Slice,
    /// False if a stream holds it now.
    is_owned: bool,
}

/// A subscription, shared with its samples; ends with the last of them.
#[derive(Debug)]
struct Subscription {
    context: TopicContext,
    /// Of the local and of the inbound queue.
    subscription_ids: [SubscriptionId; 2],
    deferred_releases: Arc<DeferredReleases>,
    end_of_takes: EndOfTakes,
}

impl Subscription {
    #[inline]
    fn subscription_id(&self, direction: Direction) -> SubscriptionId {
        self.subscription_ids[direction as usize]
    }

    fn is_active(&self) -> bool {
        Direction::BOTH.into_iter().all(|direction| self.is_subscription_active(direction))
    }

    #[inline]
    fn is_subscription_active(&self, direction: Direction) -> bool {
        self.context.topic.queue(direction).is_subscription_active(self.subscription_id(direction))
    }

    /// True if everything read before this call was read while the subscription held its messages:
    /// it does so until it ends, even if it was evicted.
    #[inline]
    fn held_messages(&self, direction: Direction) -> bool {
        self.context.topic.queue(direction).held_entries(self.subscription_id(direction))
    }

    /// Copies a message into memory of this process, if it cannot map it. Its block is not reused
    /// meanwhile, not even if the subscriber is evicted.
    #[inline]
    fn fetch(&self, direction: Direction, block: Block, slice: Slice) -> Result<Slice> {
        let pool = self.context.pool(direction);
        if pool.is_mirrored() {
            self.fetch_held(pool, direction, block, &slice)?;
        }
        Ok(slice)
    }

    #[cold]
    fn fetch_held(
        &self,
        pool: &Pool,
        direction: Direction,
        block: Block,
        slice: &Slice,
    ) -> Result<()> {
        let place = self.subscription_id(direction).index();
        // Before the check: a later eviction sees this mark.
        pool.control().begin_stream_read(block, self.context.topic.number(), place);
        let fetched = match self.held_messages(direction) {
            true => pool.fetch(slice),
            false => {
                let detail = "the process was removed from the node";
                Err(Error::new("pull from topic", ErrorKind::Evicted, detail))
            }
        };
        self.end_stream_read(direction, block);
        fetched
    }

    #[inline]
    fn release(&self, direction: Direction, position: u64) {
        let TopicContext { node, topic, .. } = &self.context;
        let subscription_id = (direction, self.subscription_id(direction));
        let control = self.context.pool(direction).control();
        topic.release_in(&node.caller(), subscription_id, position, control);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if self.context.node.fork_generation.is_current() && self.drain_releases() {
            self.context.end_subscriptions(self.subscription_ids, EndScope::Everything);
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum EndScope {
    /// All messages but those that its samples hold.
    Unread,
    /// All messages.
    Everything,
}

impl TopicContext {
    /// Ends the subscriptions of both queues: now or, while a stopped process holds a queue's lock,
    /// later.
    fn end_subscriptions(&self, subscription_ids: [SubscriptionId; 2], end: EndScope) {
        for (direction, id) in Direction::BOTH.into_iter().zip(subscription_ids) {
            let pool = Arc::clone(direction.of(&self.local, &self.inbound));
            let topic = Arc::clone(&self.topic);
            let attempt = move |caller: &Caller<'_>| {
                let dispose = |words| _ = topic.dispose(caller, pool.control(), words);
                let queue = topic.queue(direction);
                let ended = match end {
                    EndScope::Unread => queue.stop_subscription(caller, id, dispose).map(drop),
                    EndScope::Everything => queue.end_subscription(caller, id, dispose),
                };
                !matches!(ended, Err(QueueError::LockTimeout(_)))
            };
            if !attempt(&self.node.short_caller()) {
                self.node.service.retry(self.topic.number(), Box::new(attempt));
            }
        }
    }
}

impl Subscriber {
    pub(crate) fn new(context: TopicContext) -> Result<Self> {
        let operation = "subscribe to topic";
        context.check(operation)?;
        let topic = &context.topic;
        let losses = Direction::BOTH.map(|direction| topic.publishers_lost(direction));
        let refused = |cause: QueueError| cause.during(operation).on(topic.name());
        let caller = context.node.caller();
        // Before it subscribes: later changes are checked again.
        let changes = topic.remote_last_sequence_changes();
        let inbound = topic.inbound().subscribe(&caller).map_err(refused)?;
        let local = match topic.local().subscribe(&caller) {
            Ok(local) => local,
            Err(cause) => {
                let dispose = |words| _ = topic.dispose(&caller, context.inbound.control(), words);
                let id = inbound.subscription_id();
                topic.inbound().end_subscription(&caller, id, dispose).map_err(refused)?;
                return Err(refused(cause));
            }
        };
        let subscription_ids = [local.subscription_id(), inbound.subscription_id()];
        topic.join_subscriptions(subscription_ids[0], subscription_ids[1]);
        // All later messages are for this subscriber.
        let drops = topic.drops();
        let since = inbound.position();
        let other_nodes = RemoteAccounts::new(topic.expected_of_remote(since), changes);
        let loss_tracker = LossTracker::new(&topic.published(), drops, &other_nodes, since);
        context.participants_changed();
        let spin = context.node.waiting;
        let max_samples = topic.settings().max_held as usize;
        let publisher_watch = PublisherWatch::new(topic);
        let deferred_releases = Arc::new(DeferredReleases::new(&context, subscription_ids));
        let end_of_takes = EndOfTakes::default();
        let shared = Subscription { context, subscription_ids, deferred_releases, end_of_takes };
        let shared = Arc::new(shared);
        let endpoint: Weak<dyn Endpoint> = Arc::<Subscription>::downgrade(&shared);
        shared.context.add_endpoint(operation, endpoint)?;
        Ok(Self {
            local,
            inbound,
            shared,
            next: Direction::Local,
            spin,
            lookahead: [None; 2],
            loss_tracker,
            losses,
            is_eviction_reported: false,
            publisher_watch,
            max_samples,
            poll_descriptor: OnceLock::new(),
            announced: PendingEvents::default(),
        })
    }

    /// The topic's name.
    #[must_use]
    pub fn topic(&self) -> &str {
        self.shared.context.topic.name()
    }

    /// Sets its wait strategy.
    pub fn set_wait_strategy(&mut self, spin: WaitStrategy) {
        self.spin = spin;
    }

    /// Number of messages that it missed of all that were published since it subscribed.
    ///
    /// Publishers number their messages, and each skipped number counts, whatever the cause. The
    /// message may have been dropped here or on the way from another node, or never written. It may
    /// also have been published while the other node had
    /// [dropped](crate::NetworkOptions::lost_after) this one as a destination. A gap counts when
    /// the next message of the same publisher is pulled. Messages missing behind the last one count
    /// once no message is left to pull; for publishers on other nodes that is a second or two after
    /// the last message was published. An [evicted](ErrorKind::Evicted) subscriber missed
    /// everything that was published on this node until [`poll_event`](Self::poll_event) reports
    /// the eviction.
    ///
    /// For a publisher on another node counting starts when that node learns that this one subscribes
    /// to the topic. Messages that are published while the nodes cannot reach each other, or after the
    /// other node has given up waiting, are missed and count once it is reached again. A later
    /// subscriber of this node starts where the node has got: what the node misses from then on, it
    /// misses, too.
    #[must_use]
    pub fn missed(&self) -> u64 {
        let (tracker, local, remote) =
            (&self.loss_tracker, self.missing_after_last(), self.missing_remote());
        let local = local.map_or(0, |(last, _)| tracker.missing_after_last(&last));
        let remote = remote.map_or(0, |(found, _)| tracker.missing_remote(&found));
        tracker.missed().wrapping_add(local).wrapping_add(remote)
    }

    /// Returns true if all messages published before this call were pulled.
    fn has_all(&self, direction: Direction) -> bool {
        let is_ahead = self.lookahead[direction as usize].is_some();
        !is_ahead && !self.has_more(direction) && self.shared.is_subscription_active(direction)
    }

    /// The last sequences of publishers of this node, if messages are missing behind those that can
    /// be pulled.
    fn missing_after_last(&self) -> Option<(Vec<(u64, u64)>, u64)> {
        let topic = &self.shared.context.topic;
        // First: later drops are detected by the next call.
        let drops = topic.drops();
        if !self.loss_tracker.has_new_drops(drops) {
            return None;
        }
        let last = topic.settled()?;
        // Afterwards: a settled message that is not in the queue is missing.
        self.has_all(Direction::Local).then_some((last, drops))
    }

    /// The last sequences of other nodes, if they are new and none of their messages can be pulled.
    fn missing_remote(&self) -> Option<(Vec<RemoteLastSequence>, u64)> {
        let topic = &self.shared.context.topic;
        // First: later ones are handled by the next call.
        let changes = topic.remote_last_sequence_changes();
        if !self.loss_tracker.has_new_last_sequences(changes) {
            return None;
        }
        let last_sequences = topic.remote_last_sequences(self.loss_tracker.changes_seen());
        // Afterwards: all messages up to a last sequence were delivered before it was recorded.
        self.has_all(Direction::Inbound).then_some((last_sequences, changes))
    }

    fn count_missing_after_last(&mut self) {
        let missed = self.loss_tracker.missed();
        if let Some((last, drops)) = self.missing_after_last() {
            self.loss_tracker.settle(&last, drops);
        }
        if let Some((last_sequences, changes)) = self.missing_remote() {
            self.loss_tracker.settle_remote(&last_sequences, changes);
        }
        if self.loss_tracker.missed() != missed {
            self.report_missed();
        }
    }

    #[cold]
    fn report_missed(&self) {
        let topic = &self.shared.context.topic;
        topic.report_missed(self.local.subscription_id(), self.loss_tracker.missed());
    }

    /// The next message, if there is one. A message that a [stream writes](crate::Loan::publish_on)
    /// is returned once it is written; later messages wait for it. If it will never be written,
    /// since its publisher was lost, it is skipped and counts as [missed](Self::missed).
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted), [`TooManySamples`](ErrorKind::TooManySamples),
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked);
    /// [`NoPublishers`](ErrorKind::NoPublishers) if it is [asked
    /// to](Self::end_without_publishers); [`Failed`](ErrorKind::Failed) if its memory can neither be mapped nor copied now: it remains the next one. A process that cannot
    /// map the memory waits for the copy service to copy the message, 30 s at most.
    #[inline]
    pub fn try_pull(&mut self) -> Result<Option<Sample>> {
        self.try_pull_with(None)
    }

    /// A stream, if given, waits for an unwritten message.
    #[inline]
    fn try_pull_with(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        match self.take_next(stream) {
            Ok(None) if self.is_readable() => self.rearm_and_pull(stream),
            pulled => pulled,
        }
    }

    #[inline]
    fn take_next(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        self.shared.context.node.check_not_forked("pull from topic")?;
        if self.shared.is_closed() {
            return Err(self.give_up_lookahead());
        }
        // First: what they published is found below.
        let is_over = self.publisher_watch.is_over(&self.shared.context.topic);
        for _ in 0..2 {
            let direction = self.next;
            self.next = direction.of(Direction::Inbound, Direction::Local);
            if let Some(sample) = self.try_pull_from(direction, stream)? {
                return Ok(Some(sample));
            }
            if !self.shared.is_subscription_active(direction) {
                // Evicted from one queue: the other one has no messages for it either.
                break;
            }
        }
        self.check_subscription()?;
        // A message that is still awaited is no end.
        if is_over && self.lookahead.iter().all(Option::is_none) {
            return Err(self.no_publishers());
        }
        Ok(None)
    }

    /// Waits for the next message, and until it is written; [`try_pull`](Self::try_pull) does not
    /// wait.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Evicted`](ErrorKind::Evicted),
    /// [`TooManySamples`](ErrorKind::TooManySamples), [`Closed`](ErrorKind::Closed),
    /// [`Forked`](ErrorKind::Forked), [`NoPublishers`](ErrorKind::NoPublishers) if it is [asked
    /// to](Self::end_without_publishers).
    pub fn pull(&mut self, timeout: Duration) -> Result<Sample> {
        self.pull_in_time("pull from topic", timeout, None)
    }

    fn pull_in_time(
        &mut self,
        operation: &'static str,
        timeout: Duration,
        stream: Option<&Stream>,
    ) -> Result<Sample> {
        if let Some(sample) = self.try_pull_with(stream)? {
            return Ok(sample);
        }
        let mut spin = self.spin;
        let topic = Arc::clone(&self.shared.context.topic);
        let deadline = ipc::deadline(timeout);
        let interruption = self.shared.context.node.interruption();
        let mut backoff = STREAM_POLL_BACKOFF;
        let pulled = loop {
            // Streams ring no doorbell.
            let is_watched = self.is_waiting_for_streams();
            if is_watched {
                self.shared.deferred_releases.poll_all(&self.shared.context);
            }
            let next_poll = is_watched.then(|| Instant::now() + backoff.next_pause());
            let end = next_poll.map_or(deadline, |next_poll| next_poll.min(deadline));
            // Replication rings the same doorbell for inbound messages.
            let waited = topic.local().messages().wait(&mut spin, end, || {
                match self.try_pull_with(stream).transpose() {
                    None if !is_watched && self.is_waiting_for_streams() => Some(None),
                    None => {
                        let ended = interruption.check(operation).on(topic.name()).err();
                        ended.map(|error| Some(Err(error)))
                    }
                    pulled => pulled.map(Some),
                }
            });
            match waited {
                Some(Some(pulled)) => break pulled,
                None if end >= deadline => {
                    let detail = format!("no message within {timeout:?}");
                    let error = Error::new(operation, ErrorKind::DeadlineExceeded, detail);
                    break Err(error.on(topic.name()));
                }
                None | Some(None) => {}
            }
        };
        self.spin = spin;
        pulled
    }

    #[cold]
    fn check_subscription(&self) -> Result<()> {
        let operation = "pull from topic";
        self.shared.check_open(operation)?;
        if self.shared.is_active() {
            return self.shared.context.node.check(operation).on(self.topic());
        }
        let detail = match self.evicted() {
            Some(held_for) => {
                let held_for = text::format_duration(held_for);
                let max_held = self.max_samples;
                format!(
                    "it blocked publishers for {held_for}: by messages that it had not read, or by its \
                     samples, when all subscribers together held the maximum of {max_held}. Its samples \
                     stay valid, and count until they are released. Release them, subscribe again, and \
                     read or release faster, or increase release_deadline, depth or max_held of the topic"
                )
            }
            None => "its process was removed from the node, or left it".to_owned(),
        };
        Err(Error::new(operation, ErrorKind::Evicted, detail).on(self.topic()))
    }

    fn evicted(&self) -> Option<Duration> {
        self.shared.context.topic.evicted(self.local.subscription_id())
    }

    /// A subscriber may hold so many messages, and then pulls no more: its unread ones block
    /// publishers, or are dropped.
    #[inline]
    fn check_samples(&self, direction: Direction) -> Result<()> {
        // Each sample has a reference, and so do this subscriber and its descriptor.
        let others = 1 + usize::from(self.poll_descriptor.get().is_some());
        let held = Arc::strong_count(&self.shared).saturating_sub(others);
        if held < self.max_samples || !self.has_more(direction) {
            return Ok(());
        }
        let detail = format!(
            "it holds {held} and may hold {}. Drop samples, or increase max_held of the topic",
            self.max_samples
        );
        Err(Error::new("pull from topic", ErrorKind::TooManySamples, detail).on(self.topic()))
    }

    fn has_more(&self, direction: Direction) -> bool {
        let queue = self.shared.context.topic.queue(direction);
        self.shared.is_subscription_active(direction)
            && queue.has_more(self.shared.subscription_id(direction))
    }

    /// The next message, readable or not.
    #[inline]
    fn take_from(&mut self, direction: Direction) -> Option<(u64, Entry)> {
        if let Some(lookahead) = self.lookahead[direction as usize].take() {
            return Some(lookahead);
        }
        let topic = &self.shared.context.topic;
        let taken = match direction {
            Direction::Local => topic.local().take(&mut self.local),
            Direction::Inbound => topic.inbound().take(&mut self.inbound),
        }?;
        if !self.shared.end_of_takes.admits() {
            self.shared.release(direction, taken.position);
            return None;
        }
        let entry = Entry::from_words(taken.entry);
        let is_behind_others = match direction {
            Direction::Local => self.loss_tracker.on_local(entry.publisher, entry.sequence),
            Direction::Inbound => {
                let sample_info = self.shared.context.inbound.control().sample_info(entry.block);
                let start = RemoteStart::of(&sample_info);
                self.loss_tracker.on_inbound(start, entry.publisher, entry.sequence)
            }
        };
        if is_behind_others {
            self.report_missed();
        }
        Some((taken.position, entry))
    }

    #[inline]
    fn try_pull_from(
        &mut self,
        direction: Direction,
        stream: Option<&Stream>,
    ) -> Result<Option<Sample>> {
        self.check_samples(direction)?;
        let Some((position, entry)) = self.take_from(direction) else { return Ok(None) };
        let (position, entry) = match entry.sync_point {
            None => (position, entry),
            Some(_) => match self.take_stream_ordered(direction, (position, entry), stream)? {
                Some(taken) => taken,
                None => return Ok(None),
            },
        };
        let pool = self.shared.context.pool(direction);
        let place = BlockRange { offset: entry.offset, length: entry.length };
        let slice = pool.slice(place, entry.length);
        match slice.and_then(|slice| self.shared.fetch(direction, entry.block, slice)) {
            Ok(slice) => {
                let shared = Arc::clone(&self.shared);
                Ok(Some(Sample { shared, direction, position, entry, slice, is_owned: true }))
            }
            // The service is about to send that memory to this process.
            Err(cause) if cause.kind() == ErrorKind::WouldBlock => {
                self.lookahead[direction as usize] = Some((position, entry));
                Ok(None)
            }
            // The subscriber was evicted: the message is given up with those that it had not read.
            Err(_) if !self.shared.is_subscription_active(direction) => {
                self.shared.release(direction, position);
                Ok(None)
            }
            // The message stays the next one: the device or the copy service may work again.
            Err(cause) if is_temporary(cause.kind()) => {
                self.lookahead[direction as usize] = Some((position, entry));
                let error = Error::because("pull from topic", ErrorKind::Failed, cause);
                Err(error.on(self.topic()))
            }
            Err(cause) => {
                self.shared.release(direction, position);
                let error = Error::because("pull from topic", ErrorKind::Malformed, cause);
                Err(error.on(self.topic()))
            }
        }
    }

    /// The next event since the last call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.count_missing_after_last();
        if self.loss_tracker.unreported() > 0 {
            return Some(Event::Gap { missed: self.loss_tracker.take_unreported() });
        }
        let topic = &self.shared.context.topic;
        // First: the loss of a publisher is recorded before it counts as gone, so that the event of
        // its loss comes before that of its absence.
        self.publisher_watch.look(topic);
        for (direction, reported) in Direction::BOTH.into_iter().zip(&mut self.losses) {
            let lost = topic.publishers_lost(direction);
            // Only the last of many are kept.
            *reported = (*reported).max(lost.saturating_sub(MAX_REMEMBERED_LOSSES));
            while *reported < lost {
                *reported += 1;
                if let Some(LostPublisher { node, publisher }) =
                    topic.publisher_lost(direction, *reported - 1)
                {
                    let publisher = PublisherId(publisher);
                    return Some(match direction {
                        Direction::Local => Event::PublisherLost { publisher },
                        Direction::Inbound => Event::RemotePublisherLost { node, publisher },
                    });
                }
            }
        }
        if self.publisher_watch.take_event() {
            return Some(Event::NoPublishers);
        }
        if !self.shared.is_active()
            && !self.shared.is_closed()
            && !self.is_eviction_reported
            && self.shared.context.node.fork_generation.is_current()
        {
            self.is_eviction_reported = true;
            let topic = &self.shared.context.topic;
            self.loss_tracker.settle(&topic.last_of_all(), topic.drops());
            self.report_missed();
            return Some(Event::Evicted { held_for: self.evicted() });
        }
        None
    }
}

/// May a message be read later whose memory could not be mapped, or copied, for such a reason?
fn is_temporary(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Failed
            | ErrorKind::NoDevice
            | ErrorKind::OverBudget
            | ErrorKind::DeadlineExceeded
            | ErrorKind::Denied
    )
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        if !self.shared.context.node.fork_generation.is_current() {
            return;
        }
        for direction in Direction::BOTH {
            if let Some((position, _)) = self.lookahead[direction as usize] {
                self.shared.release(direction, position);
            }
        }
        let subscription_ids = self.shared.subscription_ids;
        self.shared.context.end_subscriptions(subscription_ids, EndScope::Unread);
        self.shared.context.participants_changed();
    }
}
