//! Descriptors of subscribers for `poll`.
//!
//! A publisher rings a doorbell in shared memory, which `poll` cannot wait for. So a thread of this
//! process sleeps on the doorbells of all subscribers with a descriptor ([`ipc::DoorbellWatcher`]),
//! and makes the descriptors readable. A reader that finds no message announces itself at the
//! doorbell, and tries once more: only then a publisher rings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use gpu::Stream;
use ipc::{Doorbell, DoorbellListener, ForkGeneration, ListenerGuard, MappedWords, WordRange};
use threads::lock;

use super::{Sample, Subscriber, Subscription};
use crate::error::{Error, Result};
use crate::pool::Direction;
use crate::wake::WakeFd;

/// Totals of events that made the descriptor readable: gaps, losses, and changes of publishers by
/// which the last one has gone.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingEvents {
    missed: u64,
    losses: [u64; 2],
    publisher_changes: u64,
}

/// A descriptor, and whether it is readable.
#[derive(Debug)]
struct Flag {
    descriptor: WakeFd,
    is_raised: AtomicBool,
    /// Locked during a change, so that both agree.
    changing: Mutex<()>,
}

impl Flag {
    #[inline]
    fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    /// Makes it readable, also for edge-triggered pollers.
    fn raise(&self) {
        let _changing = lock(&self.changing);
        if !self.is_raised() {
            // First: a poller that is woken by the edge then finds that it has to lower the flag.
            self.is_raised.store(true, Ordering::Release);
            self.descriptor.ring();
        }
    }

    fn lower(&self) {
        let _changing = lock(&self.changing);
        if self.is_raised() {
            // Another holder of the descriptor may have read it.
            self.descriptor.silence();
            self.is_raised.store(false, Ordering::Release);
        }
    }
}

/// The doorbell listener of a subscriber, removed when that is dropped.
#[derive(Debug)]
struct BellListener {
    /// Weak: in a forked child the watcher is never dropped, and the descriptor is closed with the
    /// subscriber all the same.
    flag: Weak<Flag>,
    bell: Doorbell<WordRange<MappedWords>>,
    subscription: Arc<Subscription>,
}

impl DoorbellListener for BellListener {
    fn rung(&self) {
        if let Some(flag) = self.flag.upgrade() {
            flag.raise();
        }
    }

    fn check(&self) {
        let Some(flag) = self.flag.upgrade() else { return };
        if flag.is_raised() {
            return;
        }
        self.bell.announce_waiter();
        if self.subscription.has_more() {
            flag.raise();
        }
    }
}

impl Subscription {
    /// Returns true if there is a message, or a reason why there will be none. Other threads may
    /// not yet see messages as pulled.
    fn has_more(&self) -> bool {
        let Self { context, .. } = self;
        let has_more = |direction| {
            let subscription_id = self.subscription_id(direction);
            context.topic.queue(direction).has_more(subscription_id)
                || !self.is_subscription_active(direction)
        };
        let is_closed = || self.is_closed() || context.node.service.check("poll topic").is_err();
        Direction::BOTH.into_iter().any(has_more) || is_closed()
    }
}

#[derive(Debug)]
pub(super) struct PollDescriptor {
    listening: Option<ListenerGuard>,
    bell: Doorbell<WordRange<MappedWords>>,
    flag: Arc<Flag>,
    fork_generation: ForkGeneration,
}

impl PollDescriptor {
    fn new(operation: &'static str, subscription: &Arc<Subscription>) -> Result<Self> {
        let context = &subscription.context;
        let failed = |cause: std::io::Error| Error::of(operation, cause).on(context.topic.name());
        let descriptor = WakeFd::new().map_err(failed)?;
        let is_raised = AtomicBool::new(false);
        let flag = Arc::new(Flag { descriptor, is_raised, changing: Mutex::default() });
        // Replication rings the same doorbell for inbound messages.
        let bell = context.topic.local().message_doorbell();
        let lookout = BellListener {
            flag: Arc::downgrade(&flag),
            bell: bell.clone(),
            subscription: Arc::clone(subscription),
        };
        let listening =
            context.node.watch.listen(bell.clone(), Arc::new(lookout)).map_err(failed)?;
        let fork_generation = context.node.fork_generation;
        Ok(Self { listening: Some(listening), bell, flag, fork_generation })
    }
}

impl Drop for PollDescriptor {
    fn drop(&mut self) {
        // From here on no other thread uses or raises it.
        drop(self.listening.take());
        // A duplicate, for instance in a forked child, keeps pollers active after this close. Only
        // the parent may change the state of the child's duplicate.
        if self.fork_generation.is_current() {
            self.flag.lower();
        }
    }
}

impl Subscriber {
    /// A descriptor that is readable as long as there may be a message, for `poll`, `select`,
    /// `epoll` and libraries on top of these. Created on the first call; closed with the
    /// subscriber.
    ///
    /// - *It becomes readable* for a message of any node; for an
    ///   [eviction](crate::ErrorKind::Evicted), or when it, its topic or its
    ///   node is [closed](crate::ErrorKind::Closed); and once for unread [events](crate::Event).
    /// - *It stays readable* until [`try_pull`](Self::try_pull), or a [`pull`](Self::pull) that
    ///   waits, finds no message: a reader that pulls one message each time is woken for the next
    ///   one. After an error it stays readable for good, like an ended connection.
    /// - *With edge triggering*, every message after a `try_pull` that returned None gives an edge.
    ///   So pull until None, and [poll events](Self::poll_event), before waiting again.
    /// - It may be readable without a message: then `try_pull` returns None. It stays so while a
    ///   [stream writes](crate::Loan::publish_on) the next message, also for readers that do not
    ///   [pull on a stream](Self::pull_on).
    ///
    /// Never read, write or change it: it is close-on-exec and non-blocking. Any number of pollers
    /// may watch it for reading; remove it from them before the subscriber is dropped. A forked
    /// child has no subscriber, and watches its own. The descriptor stays the same. Event loops
    /// that own a descriptor, such as tokio's `AsyncFd`, take a struct of both.
    ///
    /// One thread serves 127 descriptors of a membership, on kernels before 5.16 one descriptor; it
    /// wakes up once a second without messages. Without a descriptor there is no such thread, and a
    /// publisher makes no system call for a subscriber that does not wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    /// use pubsub::{Error, Node, NodeOptions, Subscriber, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-poll");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let traffic = node.topic("traffic", &TopicSettings::default())?;
    /// let weather = node.topic("weather", &TopicSettings::default())?;
    /// let mut subscribers = [traffic.subscriber()?, weather.subscriber()?];
    /// weather.publisher()?.push(b"rain", Duration::from_secs(5))?;
    ///
    /// let mut received = Vec::new();
    /// while received.is_empty() {
    ///     let entry = |subscriber| Ok(PollFd::new(Subscriber::descriptor(subscriber)?, PollFlags::POLLIN));
    ///     let mut entries = subscribers.iter().map(entry).collect::<Result<Vec<_>, Error>>()?;
    ///     assert!(poll(&mut entries, PollTimeout::from(5000_u16))? > 0);
    ///     let ready: Vec<_> = entries.iter().map(|entry| entry.any() == Some(true)).collect();
    ///     for (subscriber, _) in subscribers.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
    ///         while let Some(sample) = subscriber.try_pull()? {
    ///             received.push((subscriber.topic().to_owned(), sample.to_vec()?));
    ///         }
    ///     }
    /// }
    /// assert_eq!(received, [("weather".to_owned(), b"rain".to_vec())]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Forked`](crate::ErrorKind::Forked); [`Failed`](crate::ErrorKind::Failed), if this process
    /// has reached its limit of descriptors or threads.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.ready()?.flag.descriptor.as_fd())
    }

    fn ready(&self) -> Result<&PollDescriptor> {
        let operation = "create subscriber descriptor of topic";
        self.shared.context.node.check_not_forked(operation)?;
        if let Some(poll_descriptor) = self.poll_descriptor.get() {
            return Ok(poll_descriptor);
        }
        // If two threads get here at once, one result is dropped.
        let made = PollDescriptor::new(operation, &self.shared)?;
        let poll_descriptor = self.poll_descriptor.get_or_init(|| made);
        poll_descriptor.bell.announce_waiter();
        if self.has_message_or_event() {
            poll_descriptor.flag.raise();
        }
        Ok(poll_descriptor)
    }

    /// True if [`try_pull`](Self::try_pull) may find a message, or [`poll_event`](Self::poll_event) an
    /// event. A message is seen at once; the descriptor becomes readable for it a little later.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-ready");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("weather", &TopicSettings::default())?;
    /// let mut subscriber = topic.subscriber()?;
    /// let publisher = topic.publisher()?;
    /// assert!(!subscriber.is_ready());
    /// publisher.push(b"rain", Duration::from_secs(5))?;
    /// assert!(subscriber.is_ready());
    /// subscriber.pull(Duration::ZERO)?;
    /// assert!(!subscriber.is_ready());
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        if self.has_message_or_event() {
            return true;
        }
        if self.is_readable() {
            self.lower_descriptor();
            // From here on publishers ring; earlier messages are found here.
            if self.has_message_or_event() {
                self.raise_descriptor();
                return true;
            }
        }
        false
    }

    /// Is there a message, an event, or a reason why there will be no message?
    fn has_message_or_event(&self) -> bool {
        self.lookahead.iter().any(Option::is_some)
            || self.shared.has_more()
            || self.pending_events().is_some()
    }

    fn lower_descriptor(&self) {
        if let Some(poll_descriptor) = self.poll_descriptor.get() {
            poll_descriptor.flag.lower();
            poll_descriptor.bell.announce_waiter();
        }
    }

    fn raise_descriptor(&self) {
        if let Some(poll_descriptor) = self.poll_descriptor.get() {
            poll_descriptor.flag.raise();
        }
    }

    #[inline]
    pub(super) fn is_readable(&self) -> bool {
        self.poll_descriptor.get().is_some_and(|poll_descriptor| poll_descriptor.flag.is_raised())
    }

    /// The descriptor is readable, but there is no message: lowers it, and lets the next message
    /// raise it.
    #[cold]
    pub(super) fn rearm_and_pull(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        // A stream that writes the next one rings no doorbell: the reader has to poll.
        if self.is_next_unwritten() {
            return Ok(None);
        }
        self.lower_descriptor();
        // From here on publishers ring; earlier messages are found here.
        let pulled = self.take_next(stream);
        self.count_missing_after_last();
        let pending_events = self.pending_events();
        if pending_events.is_some() || !matches!(pulled, Ok(None)) || self.is_next_unwritten() {
            self.raise_descriptor();
        }
        self.announced = pending_events.unwrap_or(self.announced);
        pulled
    }

    /// Unread events, if the descriptor was not made readable for them before.
    fn pending_events(&self) -> Option<PendingEvents> {
        let topic = &self.shared.context.topic;
        let losses = Direction::BOTH.map(|direction| topic.publishers_lost(direction));
        let publisher_changes = self.publisher_watch.changes_with_event(topic);
        let is_some =
            self.loss_tracker.unreported() > 0 || self.losses != losses || publisher_changes > 0;
        let pending_events = PendingEvents { missed: self.missed(), losses, publisher_changes };
        (is_some && pending_events != self.announced).then_some(pending_events)
    }
}
