//! One process's membership in a node, as publishers and subscribers see it.

use std::fmt::Debug;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ipc::{
    Caller, DoorbellWatcher, ForkGeneration, MappedWords, Participant, ParticipantTable,
    WaitStrategy,
};

use crate::endpoint_list::{Endpoint, Endpoints};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::On;
use crate::interruption::Interruption;
use crate::node_segment::PublishDoorbell;
use crate::pool::{Direction, GrowthRequest, Pool};
use crate::settings::Reliability;
use crate::topic::Topic;

/// What publishers and subscribers need of the node service.
pub(crate) trait ServiceClient: Send + Sync + Debug {
    /// Requests more memory without waiting for it: the pool's doorbell rings once the memory is
    /// admitted.
    fn request_growth(&self, request: GrowthRequest);
    /// Reserves memory for the loans of a publisher of this process.
    fn admit(&self, topic: u32, publisher: u64) -> Result<()>;
    /// Reports that publishers or subscribers of this topic joined or left.
    fn participants_changed(&self, topic: u32);
    /// Reports that a publisher of this process waits at this topic. The service then checks for
    /// blocking subscribers until no publisher of the process waits.
    fn publisher_blocked(&self, topic: u32);
    /// Ends one use of the topic by this process.
    fn forget(&self, topic: u32);
    /// Streams of this process use messages: a thread polls them from now on.
    fn poll_streams(&self) {}
    /// Repeats an operation at this topic that failed since another process held a lock, until it
    /// succeeds.
    fn retry(&self, topic: u32, attempt: Retry);
    /// Fails once the node is closed.
    fn check(&self, operation: &'static str) -> Result<()>;
    /// The topics that this process has opened: they end when it closes the node.
    fn open_topics(&self) -> &Endpoints;
}

/// Returns true once it is done. It waits for a lock no longer than the caller allows.
pub(crate) type Retry = Box<dyn FnMut(&Caller<'_>) -> bool + Send>;

#[derive(Debug)]
pub(crate) struct NodeContext {
    pub(crate) me: Participant,
    pub(crate) participants: Arc<ParticipantTable<MappedWords>>,
    pub(crate) service: Arc<dyn ServiceClient>,
    pub(crate) fork_generation: ForkGeneration,
    pub(crate) publish_doorbell: Arc<PublishDoorbell>,
    /// Default wait strategy of this node.
    pub(crate) waiting: WaitStrategy,
    /// A signal handler that runs ends waits.
    pub(crate) interruptible: bool,
    /// Sleeps on the doorbell for subscribers with a poll descriptor.
    pub(crate) watch: DoorbellWatcher,
}

impl NodeContext {
    #[inline]
    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &*self.participants)
    }

    /// For calls with a deadline, which they check between attempts. Only a stopped or starved
    /// process holds a lock for longer than this.
    #[inline]
    pub(crate) fn short_caller(&self) -> Caller<'_> {
        const LOCK_TIMEOUT: Duration = Duration::from_millis(50);
        Caller { timeout: LOCK_TIMEOUT, ..self.caller() }
    }

    /// For a wait that begins now.
    pub(crate) fn interruption(&self) -> Interruption {
        Interruption::watch(self.interruptible)
    }

    /// Fails in a forked child: only the process that joined may use the node.
    #[inline]
    pub(crate) fn check_not_forked(&self, operation: &'static str) -> Result<()> {
        if self.fork_generation.is_current() {
            return Ok(());
        }
        Err(Error::new(operation, ErrorKind::Forked, "a child process has to join the node itself"))
    }

    /// Fails in a forked child, or if the node is closed.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.check_not_forked(operation)?;
        self.service.check(operation)
    }
}

/// The context that publishers and subscribers of one topic share.
#[derive(Debug, Clone)]
pub(crate) struct TopicContext {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) local: Arc<Pool>,
    pub(crate) inbound: Arc<Pool>,
    topic_use: Arc<TopicUse>,
}

/// One use of a topic; dropping it is reported to the service.
#[derive(Debug)]
struct TopicUse {
    node: Arc<NodeContext>,
    topic: u32,
    /// Publishers and subscribers made from it.
    endpoints: Endpoints,
}

impl Endpoint for TopicUse {
    fn close(&self, reason: &Arc<str>) {
        self.endpoints.close(reason);
    }

    fn on_lost_membership(&self, reason: &Arc<str>) {
        self.endpoints.on_lost_membership(reason);
    }
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
    ) -> Result<Self> {
        let topic_use = TopicUse {
            node: Arc::clone(node),
            topic: topic.number(),
            endpoints: Endpoints::default(),
        };
        let topic_use = Arc::new(topic_use);
        let weak = Arc::downgrade(&topic_use);
        node.service.open_topics().add("open topic", weak).on(topic.name())?;
        Ok(Self { node: Arc::clone(node), topic, local, inbound, topic_use })
    }

    /// Adds a publisher or subscriber, which ends with the topic. Fails if that was closed.
    pub(crate) fn add_endpoint(
        &self,
        operation: &'static str,
        endpoint: Weak<dyn Endpoint>,
    ) -> Result<()> {
        self.topic_use.endpoints.add(operation, endpoint).on(self.topic.name())
    }

    /// Fails in a forked child, or if the node or this use of the topic is closed.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.node.check_not_forked(operation)?;
        self.topic_use.endpoints.check(operation).on(self.topic.name())?;
        self.node.service.check(operation).on(self.topic.name())
    }

    /// Closes this use of the topic, with its publishers and subscribers.
    pub(crate) fn close(&self) {
        if self.node.fork_generation.is_current() {
            self.topic_use.close(&Arc::from("the topic was closed"));
        }
    }

    #[inline]
    pub(crate) fn pool(&self, direction: Direction) -> &Pool {
        direction.of(&self.local, &self.inbound)
    }

    pub(crate) fn participants_changed(&self) {
        self.node.service.participants_changed(self.topic.number());
    }

    /// Called after the [backpressure](crate::topic::PublisherSlot::backpressure) of a publisher
    /// has begun: the service looks for the blocking subscriber. Topics that drop messages have
    /// none.
    #[cold]
    pub(crate) fn publisher_blocked(&self) {
        if self.topic.settings().reliability == Reliability::Reliable {
            self.report_blocked();
        }
    }

    /// Starts the service's check for how long subscribers have held messages at this full topic.
    pub(crate) fn report_blocked(&self) {
        if self.topic.mark_blocked() {
            self.node.service.publisher_blocked(self.topic.number());
        }
    }
}
