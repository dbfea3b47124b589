//! One process's membership in a node, as publishers and subscribers see it.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use ipc::{
    Caller, DoorbellWatcher, ForkGeneration, MappedWords, Participant, ParticipantTable,
    WaitStrategy,
};

use crate::error::{Error, ErrorKind, Result};
use crate::interruption::Interruption;
use crate::node_segment::PublishDoorbell;
use crate::pool::{Direction, Pool, PoolId};
use crate::settings::Reliability;
use crate::topic::Topic;

/// What publishers and subscribers need of the node service.
pub(crate) trait ServiceClient: Send + Sync + Debug {
    /// Asks for more memory, and does not wait for it: the pool's bell rings when it came.
    fn request_growth(&self, pool: PoolId, bytes: u64);
    /// Reserves memory for the loans of a publisher that this process has made.
    fn admit(&self, topic: u32, publisher: u64) -> Result<()>;
    /// Publishers or subscribers of this topic came or went.
    fn participants_changed(&self, topic: u32);
    /// A publisher of this process waits at this topic. From now on the office looks, until none
    /// of its publishers does.
    fn publisher_blocked(&self, topic: u32);
    /// This process does not use the topic any more, or one handle of it less.
    fn forget(&self, topic: u32);
    /// Streams of this process are at messages: somebody looks now and then how far they are.
    fn poll_streams(&self) {}
    /// What could not be done at this topic, since another process holds a lock, is tried again until
    /// it is done.
    fn retry(&self, topic: u32, attempt: Retry);
    /// Fails once the node is closed.
    fn check(&self) -> Result<()>;
}

/// True if it is done. It waits no longer for a lock than the caller does.
pub(crate) type Retry = Box<dyn FnMut(&Caller<'_>) -> bool + Send>;

/// A process in its node.
#[derive(Debug)]
pub(crate) struct NodeContext {
    pub(crate) me: Participant,
    pub(crate) roster: Arc<ParticipantTable<MappedWords>>,
    pub(crate) service: Arc<dyn ServiceClient>,
    pub(crate) fork_generation: ForkGeneration,
    /// Rung when something was published that other nodes want.
    pub(crate) publish_doorbell: Arc<PublishDoorbell>,
    /// How those wait that are not told otherwise.
    pub(crate) waiting: WaitStrategy,
    /// Do waits end when a signal handler has run?
    pub(crate) interruptible: bool,
    /// Sleeps for those subscribers that are waited for by their descriptors.
    pub(crate) watch: DoorbellWatcher,
}

impl NodeContext {
    #[inline]
    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &*self.roster)
    }

    /// For calls that have a deadline: they look at it between attempts. A lock that is not had within
    /// this time is held by a process that is stopped, or starved.
    #[inline]
    pub(crate) fn short_caller(&self) -> Caller<'_> {
        const LOCK_TIMEOUT: Duration = Duration::from_millis(50);
        Caller { timeout: LOCK_TIMEOUT, ..self.caller() }
    }

    /// Of a wait that begins now.
    pub(crate) fn interruption(&self) -> Interruption {
        Interruption::watch(self.interruptible)
    }

    /// Is this still the process that joined?
    #[inline]
    pub(crate) fn check_not_forked(&self, operation: &'static str) -> Result<()> {
        if self.fork_generation.is_current() {
            return Ok(());
        }
        let detail = "a child process has to join the node itself";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }

    /// Is it, and is the node open?
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.check_not_forked(operation)?;
        self.service.check()
    }
}

/// What a publisher or a subscriber of a topic works with.
#[derive(Debug, Clone)]
pub(crate) struct TopicContext {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) local: Arc<Pool>,
    pub(crate) inbound: Arc<Pool>,
    _topic_use: Arc<TopicUse>,
}

/// One use of a topic, of which the service is told when it ends.
#[derive(Debug)]
struct TopicUse {
    node: Arc<NodeContext>,
    topic: u32,
}

impl Drop for TopicUse {
    fn drop(&mut self) {
        if self.node.fork_generation.is_current() {
            self.node.service.forget(self.topic);
        }
    }
}

impl TopicContext {
    pub(crate) fn new(
        node: &Arc<NodeContext>,
        topic: Arc<Topic>,
        local: Arc<Pool>,
        inbound: Arc<Pool>,
    ) -> Self {
        let _topic_use = Arc::new(TopicUse { node: Arc::clone(node), topic: topic.number() });
        Self { node: Arc::clone(node), topic, local, inbound, _topic_use }
    }

    #[inline]
    pub(crate) fn pool(&self, direction: Direction) -> &Pool {
        match direction {
            Direction::Local => &self.local,
            Direction::Inbound => &self.inbound,
        }
    }

    pub(crate) fn participants_changed(&self) {
        self.node.service.participants_changed(self.topic.number());
    }

    /// Said after a publisher's [pressure](crate::topic::PublisherSlot::pressure) has begun: who is in the way
    /// is to be found. Where messages are dropped nobody is.
    #[cold]
    pub(crate) fn publisher_blocked(&self) {
        if self.topic.settings().reliability == Reliability::Reliable {
            self.report_blocked();
        }
    }

    /// Subscribers hold what a publisher of this process has no room for: the service looks how long.
    pub(crate) fn report_blocked(&self) {
        if self.topic.mark_blocked() {
            self.node.service.publisher_blocked(self.topic.number());
        }
    }
}
