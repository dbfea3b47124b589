//! A process's membership in its node.

mod connector;
mod link;
mod membership;
mod query;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ipc::{Channel, DoorbellWatcher, ForkGeneration, Liveness, Participant, PidFd};

use self::connector::{LocalService, PAUSE, ServiceConnector};
use self::membership::{Answer, MembershipInner, unexpected_answer};
use crate::context::{NodeContext, Retry, TopicContext};
use crate::endpoint_list::Endpoints;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::interruption::Interruption;
use crate::node_options::{NodeOptions, ServiceMode};
use crate::node_segment::NodeSegment;
use crate::report::Row;
use crate::service::describe_process;
use crate::service::election::{self, MemberLock, PriorityLock};
use crate::service::protocol::{MAX_LABEL, Request};
use crate::settings::{MemoryLocation, SharedSettings, TopicSettings};
use crate::wake::WakeFd;
use crate::{Publisher, Subscriber, TopicPublisher};

pub use self::query::report;

/// A process's membership in a node; opens topics.
///
/// Clones share the membership. It ends when the last clone, and the last publisher, subscriber,
/// loan and sample made from it, is dropped. [`close`](Self::close) ends at once what hangs on it. A
/// forked child has to join by itself.
///
/// ```
/// use std::time::Duration;
/// use pubsub::{Node, NodeOptions, TopicSettings};
/// # let parent = testkit::temp_dir::TempDir::new("fabricast-doc-node");
/// # let directory = parent.join("node");
/// let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
/// let topic = node.topic("greetings", &TopicSettings::default())?;
/// let mut subscriber = topic.subscriber()?;
/// let publisher = topic.publisher()?;
///
/// let timeout = Duration::from_secs(5);
/// publisher.push(b"hello", timeout)?;
/// assert_eq!(subscriber.pull(timeout)?.to_vec()?, b"hello");
/// # Ok::<(), pubsub::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Node {
    membership: Arc<Membership>,
    context: Arc<NodeContext>,
}

/// Held by all objects of a node in this process; dropping the last one leaves the node.
struct Membership {
    shared: Arc<MembershipState>,
    thread: Option<JoinHandle<()>>,
    fork_generation: ForkGeneration,
}

/// State that a membership shares with its thread.
struct MembershipState {
    options: NodeOptions,
    node_segment: NodeSegment,
    me: Participant,
    bell: WakeFd,
    service: LocalService,
    state: Mutex<MembershipInner>,
    /// Checked for each message, so without a lock.
    is_closed: AtomicBool,
    polls_streams: AtomicBool,
    /// Operations that wait for locks of topics.
    unfinished: Mutex<Vec<(u32, Retry)>>,
    leaving_since: OnceLock<Instant>,
    /// The service has confirmed the end of this membership: the participant is free.
    has_left: AtomicBool,
    /// The topics that this process has opened.
    open_topics: Endpoints,
    /// While any process holds it, the node segment exists.
    member_lock: Mutex<Option<MemberLock>>,
}

struct Link {
    channel: Channel,
    /// Signals the end of the service, even if its connections outlive it in a child.
    service: PidFd,
}

/// What a service answers to a process that it accepts.
struct Welcome {
    participant: u32,
    node_segment: OwnedFd,
    /// The service's process: its exit is the end of the service, whatever descriptors children
    /// keep open.
    service: PidFd,
    pidfds: Vec<(Participant, PidFd)>,
}

const JOINING: &str = "join node";

/// A process that was accepted, and is about to become a member.
struct JoinedNode {
    link: Link,
    node_segment: NodeSegment,
    me: Participant,
    member_lock: MemberLock,
}

impl JoinedNode {
    /// None if the node was re-created in the meantime: then the participant is freed.
    fn new(options: &NodeOptions, channel: Channel, welcome: Welcome) -> Result<Option<Self>> {
        let node_segment = NodeSegment::open(welcome.node_segment)?;
        let Some(me) = Participant::from_number(welcome.participant) else {
            let detail = "the service assigned an invalid participant number";
            return Err(Error::new(JOINING, ErrorKind::Malformed, detail));
        };
        let pidfd = PidFd::of_this_process().during(JOINING)?;
        for (participant, pidfd) in welcome.pidfds {
            node_segment.participants().add_pidfd(participant, pidfd);
        }
        node_segment.participants().add_pidfd(me, pidfd);
        let member_lock = MemberLock::hold(JOINING, &options.directory)?;
        // A service that re-creates the node writes its identity before it checks for members the
        // last time.
        let is_same = member_lock.node().is_none_or(|node| node == node_segment.identity());
        node_segment.mark_member(me);
        let is_living = !node_segment.participants().is_dead(Some(me));
        let link = Link { channel, service: welcome.service };
        if is_same && is_living {
            return Ok(Some(Self { link, node_segment, me, member_lock }));
        }
        node_segment.participants().leave(me);
        Ok(None)
    }
}

/// Takes an exclusive lock; fails if another process holds it.
fn acquire_exclusive(
    end: Instant,
    acquire: impl Fn() -> Result<bool>,
    holder: impl Fn() -> Result<Option<u32>>,
) -> Result<()> {
    let operation = "serve node";
    while !acquire()? {
        if let Some(process) = holder()? {
            let detail = format!("{} already serves the node", describe_process(process));
            return Err(Error::new(operation, ErrorKind::AlreadyServed, detail));
        }
        // It has ended just now.
        if Instant::now() >= end {
            let detail = "other processes claim priority, but exit";
            return Err(Error::new(operation, ErrorKind::DeadlineExceeded, detail));
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

impl Node {
    /// Joins the node of a directory, and serves it if there is no service and the options allow
    /// it.
    ///
    /// Threads that this starts, also those of replication, run on the cores of the calling thread.
    /// A thread that polls on a core of its own therefore joins first and is pinned to that core
    /// afterwards.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if no service is found within
    /// [`service_timeout`](NodeOptions::service_timeout);
    /// [`AlreadyServed`](ErrorKind::AlreadyServed) if this process is to be a dedicated service,
    /// and another one is; [`InvalidArgument`](ErrorKind::InvalidArgument) for invalid
    /// [budgets](crate::Budgets::check), labels, or a [network](crate::NetworkOptions::check) that could
    /// never take effect; [`NoProvider`](ErrorKind::NoProvider) for its provider;
    /// [`Denied`](ErrorKind::Denied), [`TooMany`](ErrorKind::TooMany).
    ///
    /// Joining does not check that other nodes can be reached.
    pub fn join(options: NodeOptions) -> Result<Self> {
        if options.label.len() > MAX_LABEL {
            let detail = format!("a label of more than {MAX_LABEL} bytes");
            return Err(Error::new(JOINING, ErrorKind::InvalidArgument, detail));
        }
        options.budgets.check()?;
        // Whichever process serves the node: what was asked for here could never take effect.
        if let Some(network) = &options.network {
            network.check(&options.label)?;
            network.check_provider()?;
        }
        election::prepare(JOINING, &options.directory)?;
        let end = ipc::deadline(options.service_timeout);
        let service = LocalService::default();
        if options.service == ServiceMode::Dedicated {
            let acquire = || service.acquire_priority(JOINING, &options);
            let holder = || PriorityLock::holder(JOINING, &options.directory);
            acquire_exclusive(end, acquire, holder).at(options.directory.display())?;
        }
        loop {
            let (end_at, serves) = (|| end, || true);
            let connector = ServiceConnector::new(JOINING, &options, &service, &end_at, &serves);
            let pidfd = PidFd::of_this_process().during(JOINING)?;
            let hello = Request::Hello { label: options.label.clone() };
            let (channel, answered) = connector.handshake(|channel| {
                link::send_request(JOINING, channel, &hello, &[pidfd.as_fd()])
            })?;
            let refused = match answered {
                Ok(welcome) => match JoinedNode::new(&options, channel, welcome)? {
                    Some(joined) => return Self::start(options, service, joined),
                    None => None,
                },
                Err(reason) if reason.kind() == ErrorKind::Failed => Some(reason),
                Err(reason) => return Err(reason.at(options.directory.display())),
            };
            if Instant::now() >= end {
                let detail = "its services exit before this process has joined";
                let error =
                    refused.unwrap_or_else(|| Error::new(JOINING, ErrorKind::Closed, detail));
                return Err(error.at(options.directory.display()));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn start(options: NodeOptions, service: LocalService, joined: JoinedNode) -> Result<Self> {
        let JoinedNode { link, node_segment, me, member_lock } = joined;
        let (participants, publish_doorbell) =
            (Arc::clone(node_segment.participants()), Arc::clone(node_segment.publish_doorbell()));
        let bell = WakeFd::new().during(JOINING).inspect_err(|_| _ = participants.leave(me))?;
        let (waiting, interruptible) = (options.waiting, options.interruptible);
        let shared =
            Arc::new(MembershipState::new(options, node_segment, me, bell, service, member_lock));
        let thread = threads::spawn("fabricast-link", {
            let shared = Arc::clone(&shared);
            move || link::run(&shared, link)
        });
        let thread = thread.during(JOINING).inspect_err(|_| _ = participants.leave(me))?;
        let fork_generation = ForkGeneration::current();
        let membership = Arc::new(Membership { shared, thread: Some(thread), fork_generation });
        let context = NodeContext {
            me,
            participants,
            service: Arc::clone(&membership) as _,
            fork_generation,
            publish_doorbell,
            waiting,
            interruptible,
            watch: DoorbellWatcher::new(),
        };
        Ok(Self { membership, context: Arc::new(context) })
    }

    /// Opens a topic, and creates it if it does not exist. It is removed when no process uses it
    /// any more.
    ///
    /// Processes may see different devices (`CUDA_VISIBLE_DEVICES`): a topic is created on a device
    /// that a process of the node sees, and any process with a device may use it.
    ///
    /// # Errors
    /// [`SettingsDiffer`](ErrorKind::SettingsDiffer) if it exists with other settings;
    /// [`OverBudget`](ErrorKind::OverBudget), with the figures; [`NoDevice`](ErrorKind::NoDevice)
    /// if the device of its memory does not exist, or this process has no device to map the memory;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    pub fn topic(&self, name: &str, settings: &TopicSettings) -> Result<Topic> {
        // A child would fail later, since it does not find the device, with a misleading error.
        self.context.check_not_forked("open topic")?;
        // Kept open until the topic is: opening a device again takes long.
        let device = settings.memory.open().on(name)?;
        let shared = SharedSettings::of(settings).on(name)?;
        if let Some(device) = &device {
            self.membership.shared.report_device(device);
        }
        self.open_topic(name, Some(shared), self.answer_timeout())
    }

    /// Opens a topic with its existing settings. If it does not exist on this node, it is created
    /// in host memory with the settings of a connected node.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if no known node has it;
    /// [`OverBudget`](ErrorKind::OverBudget) if its memory exceeds the budget here;
    /// [`NoDevice`](ErrorKind::NoDevice) if it uses memory of a device, and this process has no device
    /// to map the memory.
    pub fn open(&self, name: &str) -> Result<Topic> {
        self.open_topic(name, None, self.answer_timeout())
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.context.interruption()
    }

    pub(crate) fn answer_timeout(&self) -> Duration {
        self.membership.shared.options.service_timeout
    }

    /// Opens a topic, or creates it if settings are given; with a timeout of its own for the answer.
    pub(crate) fn open_topic(
        &self,
        name: &str,
        settings: Option<SharedSettings>,
        timeout: Duration,
    ) -> Result<Topic> {
        let operation = "open topic";
        self.context.check(operation)?;
        let request = |request| Request::Open { request, name: name.into(), settings };
        let answer = self.membership.shared.call(operation, timeout, request);
        match answer.on(name)? {
            Answer::Topic { topic, local, inbound } => {
                let context = TopicContext::new(&self.context, topic, local, inbound)?;
                let topic = Topic { context };
                for pool in [&topic.context.local, &topic.context.inbound] {
                    pool.find_access().on(name)?;
                }
                Ok(topic)
            }
            _ => Err(unexpected_answer(operation)),
        }
    }

    /// Processes, topics, publishers, subscribers and connections of the node; the first row is the
    /// node's.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed).
    pub fn report(&self) -> Result<Vec<Row>> {
        let operation = "report on node";
        self.context.check(operation)?;
        let request = |request| Request::Report { request };
        match self.membership.shared.call(operation, self.answer_timeout(), request)? {
            Answer::Rows(rows) => Ok(rows),
            _ => Err(unexpected_answer(operation)),
        }
    }

    /// Checks that this process is still a member.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if its service was lost, and no other one started in time;
    /// [`Forked`](ErrorKind::Forked).
    pub fn check(&self) -> Result<()> {
        self.context.check("use node")
    }

    /// Closes the node for this process: all its topics, publishers and subscribers end at once, and
    /// fail with [`Closed`](ErrorKind::Closed) from now on. So do waits of other threads, and clones.
    /// Unread messages are given up, so that publishers of other processes do not wait for them.
    ///
    /// Samples stay valid until they are dropped. The process stays a member of the node, and serves
    /// it if it does so now, until the last object made from the node is dropped.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-close-node");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("lines", &TopicSettings::default())?;
    /// let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
    /// publisher.push(b"read", Duration::from_secs(5))?;
    /// publisher.push(b"given up", Duration::from_secs(5))?;
    /// let sample = subscriber.pull(Duration::from_secs(5))?;
    /// node.close();
    /// assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Closed);
    /// assert_eq!(publisher.try_push(b"late").unwrap_err().kind(), ErrorKind::Closed);
    /// assert_eq!(sample.to_vec()?, b"read");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&self) {
        if self.context.fork_generation.is_current() {
            self.membership.shared.close_topics();
        }
    }

    /// The node's identity in hexadecimal digits; all members and services of the node share it.
    #[must_use]
    pub fn identity(&self) -> String {
        self.membership.shared.node_segment.identity().to_string()
    }

    /// Returns true if this process serves the node now; that can change. A
    /// [dedicated](ServiceMode::Dedicated) service starts once the embedded one has handed over.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.membership.shared.service.is_running()
    }

    /// The directory of the node's socket.
    #[must_use]
    pub fn directory(&self) -> &std::path::Path {
        &self.membership.shared.options.directory
    }
}

/// A topic that this process uses. Clones share it.
#[derive(Debug, Clone)]
pub struct Topic {
    context: TopicContext,
}

impl Topic {
    /// Creates a publisher. Memory for its [loans](TopicSettings::loans) is reserved until the
    /// publisher and its last loan are dropped. The memory of a topic's first publisher was
    /// reserved with the topic.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), with the figures, if there is not so much left;
    /// [`TooMany`](ErrorKind::TooMany); [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if the
    /// node's service does not answer within [`service_timeout`](NodeOptions::service_timeout).
    pub fn publisher(&self) -> Result<Publisher> {
        Publisher::new(self.context.clone())
    }

    /// Creates a subscriber, which receives all messages published from now on.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany).
    pub fn subscriber(&self) -> Result<Subscriber> {
        Subscriber::new(self.context.clone())
    }

    /// The topic's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.context.topic.name()
    }

    /// Lists the publishers of the topic: those of this node, each with its process, and the other
    /// nodes that publish to it. The list is read from shared memory, and has no order.
    ///
    /// ```
    /// # use pubsub::{Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-publishers");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings::default())?;
    /// assert!(topic.publishers().is_empty());
    /// let publisher = topic.publisher()?;
    /// assert_eq!(topic.publishers()[0].publisher, Some(publisher.id()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn publishers(&self) -> Vec<TopicPublisher> {
        TopicPublisher::all(&self.context)
    }

    /// Closes the topic as it was opened here: publishers and subscribers made from it and its clones
    /// end at once, and fail with [`Closed`](ErrorKind::Closed) from now on, as do waits of other
    /// threads. Unread messages are given up; samples stay valid until they are dropped. A topic that
    /// was opened another time, also by this process, stays open.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-close-topic");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("lines", &TopicSettings::default())?;
    /// let other = node.open("lines")?;
    /// let (mut subscriber, mut other_subscriber) = (topic.subscriber()?, other.subscriber()?);
    /// topic.close();
    /// let error = subscriber.pull(Duration::from_secs(60)).unwrap_err();
    /// assert_eq!((error.kind(), error.detail()), (ErrorKind::Closed, "the topic was closed"));
    /// assert!(other_subscriber.try_pull()?.is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn close(&self) {
        self.context.close();
    }

    /// The topic's settings. A device that this process does not see is named by its
    /// [UUID](crate::MemoryLocation::DeviceUuid).
    ///
    /// # Errors
    /// [`Forked`](ErrorKind::Forked) for memory of a device in a child process, which has none.
    pub fn settings(&self) -> Result<TopicSettings> {
        let settings = self.context.topic.settings().to_local();
        if matches!(settings.memory, MemoryLocation::DeviceUuid(_)) {
            self.context.node.check_not_forked("read settings of topic")?;
        }
        Ok(settings)
    }

    /// Location of its messages as this process accesses them: for a device that it does not see, the
    /// device that maps the memory.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if this process has no device to map the memory.
    pub fn place(&self) -> Result<MemoryLocation> {
        self.context.local.mapped_location()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acquire_exclusive_ends_at_its_deadline() {
        let end = Instant::now() + 4 * PAUSE;
        let error = acquire_exclusive(end, || Ok(false), || Ok(None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(Instant::now() >= end);
        let error = acquire_exclusive(end, || Ok(false), || Ok(Some(7))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyServed);
        assert!(error.detail().starts_with("process 7 already serves"));
        acquire_exclusive(end, || Ok(true), || Ok(None)).unwrap();
    }
}
