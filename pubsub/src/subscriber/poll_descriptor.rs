//! Waiting for a subscriber by a descriptor, together with others.
//!
//! A publisher rings a bell in shared memory, which nobody can poll. So a thread of this
//! process sleeps at the bells of all subscribers whose descriptors were asked for
//! ([`ipc::Watch`]), and makes those readable. Who reads says at the bell that it waits, when it
//! finds nothing, and looks once more: only then a publisher has somebody to wake.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use gpu::Stream;
use ipc::{Doorbell, DoorbellListener, ForkGeneration, ListenerGuard, MappedWords, WordRange};

use super::{Subscriber, Subscription};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pool::Direction;
use crate::sample::Sample;
use crate::wake::WakeFd;

/// What happened beside messages, as far as it was noticed: gaps and losses, in all.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingEvents {
    missed: u64,
    losses: [u64; 2],
}

/// A descriptor, and whether it is readable.
#[derive(Debug)]
struct Flag {
    descriptor: WakeFd,
    is_raised: AtomicBool,
    /// Held while that changes, so that the two agree.
    changing: Mutex<()>,
}

impl Flag {
    #[inline]
    fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    /// Makes it readable: those are told that wait for that to change, too.
    fn raise(&self) {
        let _changing = lock(&self.changing);
        if !self.is_raised() {
            // First: who is told, by an edge that does not come again, finds that it is to be
            // lowered.
            self.is_raised.store(true, Ordering::Release);
            self.descriptor.ring();
        }
    }

    fn lower(&self) {
        let _changing = lock(&self.changing);
        if self.is_raised() {
            // Somebody may have read it whose it is not.
            self.descriptor.silence();
            self.is_raised.store(false, Ordering::Release);
        }
    }
}

/// What the watch has of a subscriber: gone at once when that is dropped.
#[derive(Debug)]
struct BellListener {
    /// In a forked child, where the watch's own is never dropped, the descriptor is closed with
    /// the subscriber all the same.
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

    fn look(&self) {
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
    /// Is there a message, or a reason why there will be none? Of messages that were pulled just
    /// now other threads may not know yet.
    fn has_more(&self) -> bool {
        let Self { context, .. } = self;
        let has_more = |direction| {
            let subscription_id = self.subscription_id(direction);
            context.topic.queue(direction).has_more(subscription_id)
                || !self.is_subscription_active(direction)
        };
        Direction::BOTH.into_iter().any(has_more) || context.node.service.check().is_err()
    }
}

/// A subscriber's descriptor.
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
        // Who delivers what arrives rings there, too.
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
        // From here on nobody else has it, or raises it.
        drop(self.listening.take());
        // Where somebody else has a copy, as a forked child does, pollers go on after it is
        // closed here. The child's own copy is the parent's to change.
        if self.fork_generation.is_current() {
            self.flag.lower();
        }
    }
}

impl Subscriber {
    /// A descriptor that is readable as long as there may be something to pull, for `poll`,
    /// `select`, `epoll` and what stands on these. Made when first asked for; closed with the
    /// subscriber.
    ///
    /// - *It is readable* when a message came, other nodes' included; when the subscriber was
    ///   [evicted](crate::ErrorKind::Evicted) or its node [closed](crate::ErrorKind::Closed); and
    ///   once more when there are [events](crate::Event) that were not asked for.
    /// - *It stays readable* until [`try_pull`](Self::try_pull), or a [`pull`](Self::pull) that
    ///   waits, finds no message: so who pulls one each time is told of the next. After an error
    ///   it stays so for good, as that of a connection that has ended.
    /// - *With edge triggering*, too, every message that comes after a `try_pull` that gave None
    ///   is told. So pull until None, and [ask for events](Self::poll_event), before waiting
    ///   again.
    /// - It can be readable for nothing: a `try_pull` that gives None then is no error. It stays
    ///   so while the next message is one that a [stream writes](crate::Loan::publish_on), for
    ///   who does not [pull on a stream](Self::pull_on), too.
    ///
    /// Never read, write or change it: it is close-on-exec and does not block. It may be watched
    /// for reading by any number of pollers; take it from them before the subscriber is dropped.
    /// In a forked child there is no subscriber: it watches its own. It stays the same: event loops
    /// that want an owner of a descriptor, such as tokio's `AsyncFd`, take a struct of both.
    ///
    /// A thread makes them readable, one for each 127 of a membership, on kernels before 5.16 one
    /// for each; it wakes once a second when nothing happens. As long as no descriptor was asked
    /// for there is none, and a publisher makes no call of the system for one that does not wait.
    ///
    /// ```
    /// use std::time::Duration;
    /// use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    /// use pubsub::{Error, Node, NodeOptions, Subscriber, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-poll-{}", std::process::id()));
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
    /// let news = node.topic("news", &TopicSettings::default())?;
    /// let weather = node.topic("weather", &TopicSettings::default())?;
    /// let mut subscribers = [news.subscriber()?, weather.subscriber()?];
    /// weather.publisher()?.push(b"rain", Duration::from_secs(5))?;
    ///
    /// let mut heard = Vec::new();
    /// while heard.is_empty() {
    ///     let entry = |subscriber| Ok(PollFd::new(Subscriber::descriptor(subscriber)?, PollFlags::POLLIN));
    ///     let mut entries = subscribers.iter().map(entry).collect::<Result<Vec<_>, Error>>()?;
    ///     assert!(poll(&mut entries, PollTimeout::from(5000_u16))? > 0);
    ///     let ready: Vec<_> = entries.iter().map(|entry| entry.any() == Some(true)).collect();
    ///     for (subscriber, _) in subscribers.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
    ///         while let Some(sample) = subscriber.try_pull()? {
    ///             heard.push((subscriber.topic().to_owned(), sample.to_vec()?));
    ///         }
    ///     }
    /// }
    /// assert_eq!(heard, [("weather".to_owned(), b"rain".to_vec())]);
    /// # let path = node.directory().to_owned();
    /// # drop((node, news, weather, subscribers));
    /// # std::fs::remove_dir_all(path).unwrap();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Forked`](crate::ErrorKind::Forked); [`Failed`](crate::ErrorKind::Failed), if this
    /// process can have no more descriptors or threads.
    pub fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.ready()?.flag.descriptor.as_fd())
    }

    fn ready(&self) -> Result<&PollDescriptor> {
        let operation = "create the descriptor of a subscriber";
        self.shared.context.node.check_not_forked(operation)?;
        if let Some(poll_descriptor) = self.poll_descriptor.get() {
            return Ok(poll_descriptor);
        }
        // Of two threads that come here at once one was in vain.
        let made = PollDescriptor::new(operation, &self.shared)?;
        let poll_descriptor = self.poll_descriptor.get_or_init(|| made);
        poll_descriptor.bell.announce_waiter();
        let waits_for_memory = self.lookahead.iter().any(Option::is_some);
        if waits_for_memory || self.shared.has_more() || self.news().is_some() {
            poll_descriptor.flag.raise();
        }
        Ok(poll_descriptor)
    }

    #[inline]
    pub(super) fn is_readable(&self) -> bool {
        self.poll_descriptor.get().is_some_and(|poll_descriptor| poll_descriptor.flag.is_raised())
    }

    /// Nothing was found, and the descriptor is readable: it should not be, and the next message
    /// should make it so.
    #[cold]
    pub(super) fn rearm_and_pull(&mut self, stream: Option<&Stream>) -> Result<Option<Sample>> {
        // A stream that writes the next one rings no bell: somebody has to look again.
        if self.is_next_unwritten() {
            return Ok(None);
        }
        if let Some(poll_descriptor) = self.poll_descriptor.get() {
            poll_descriptor.flag.lower();
            poll_descriptor.bell.announce_waiter();
        }
        // From here on whoever publishes rings; before, this look finds it.
        let pulled = self.take_next(stream);
        self.count_missing_after_last();
        let news = self.news();
        if let Some(poll_descriptor) = self.poll_descriptor.get()
            && (news.is_some() || !matches!(pulled, Ok(None)) || self.is_next_unwritten())
        {
            poll_descriptor.flag.raise();
        }
        self.announced = news.unwrap_or(self.announced);
        pulled
    }

    /// Events that were not asked for, if the descriptor was not made readable for them before.
    fn news(&self) -> Option<PendingEvents> {
        let topic = &self.shared.context.topic;
        let losses = Direction::BOTH.map(|direction| topic.publishers_lost(direction));
        let is_some = self.loss_tracker.unreported() > 0 || self.losses != losses;
        let news = PendingEvents { missed: self.missed(), losses };
        (is_some && news != self.announced).then_some(news)
    }
}
