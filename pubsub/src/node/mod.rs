//! A process at its node.

mod connector;
mod environment;
mod link;
mod membership;
mod options;
mod query;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Channel, DoorbellWatcher, ForkGeneration, Liveness, Participant, PidFd};
use std::os::fd::AsFd;

use self::connector::{HandshakeResult, LocalService, ServiceConnector, Welcome, describe_process};
use self::link::Link;
use self::membership::{Answer, Membership, MembershipState, unexpected_answer};
use crate::context::{NodeContext, TopicContext};
use crate::error::{Error, ErrorKind, Result};
use crate::interruption::Interruption;
use crate::node_segment::NodeSegment;
use crate::report::Row;
use crate::service::election::{self, MemberLock, PriorityLock};
use crate::service::protocol::{MAX_LABEL, Request};
use crate::settings::{SharedSettings, TopicSettings};
use crate::wake::WakeFd;
use crate::{Publisher, Subscriber};

pub use self::environment::{KNOWN_VARIABLES, nearest_variable};
pub use self::options::{Budgets, NodeOptions, ServiceMode};
pub use self::query::report;

/// A process's membership in a node: where topics come from.
///
/// Copies are the same membership. It ends when the last of them, and the last publisher,
/// subscriber, loan and sample that came of it, is dropped. A forked child joins by itself.
///
/// ```
/// use std::time::Duration;
/// use pubsub::{Node, NodeOptions, TopicSettings};
/// # let directory = std::env::temp_dir().join(format!("fabricast-doc-node-{}", std::process::id()));
/// let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
/// let topic = node.topic("greetings", &TopicSettings::default())?;
/// let mut subscriber = topic.subscriber()?;
/// let publisher = topic.publisher()?;
///
/// let service_timeout = Duration::from_secs(5);
/// publisher.push(b"hello", service_timeout)?;
/// assert_eq!(subscriber.pull(service_timeout)?.to_vec()?, b"hello");
/// # let path = node.directory().to_owned();
/// # drop((node, topic, subscriber, publisher));
/// # std::fs::remove_dir_all(path).unwrap();
/// # Ok::<(), pubsub::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Node {
    membership: Arc<Membership>,
    context: Arc<NodeContext>,
}

const JOINING: &str = "join a node";
/// Between two attempts to join.
const PAUSE: Duration = Duration::from_millis(5);

/// A process that was let in, and is about to be a member.
struct JoinedNode {
    link: Link,
    node_segment: NodeSegment,
    me: Participant,
    member_lock: MemberLock,
}

impl JoinedNode {
    /// None if the node is not the same any more: then its name is given back.
    fn new(options: &NodeOptions, channel: Channel, welcome: Welcome) -> Result<Option<Self>> {
        let node_segment = NodeSegment::open(welcome.node_segment)?;
        let Some(me) = Participant::from_number(welcome.participant) else {
            let detail = "the service assigned an invalid participant number";
            return Err(Error::new(JOINING, ErrorKind::Malformed, detail));
        };
        let pidfd = PidFd::of_this_process().map_err(|error| Error::of(JOINING, error))?;
        for (who, pidfd) in welcome.pidfds {
            node_segment.roster().add_pidfd(who, pidfd);
        }
        node_segment.roster().add_pidfd(me, pidfd);
        let member_lock = MemberLock::hold(JOINING, &options.directory)?;
        // Whoever founds the node anew says so before it looks for members the last time.
        let is_same = member_lock.node().is_none_or(|node| node == node_segment.identity());
        node_segment.mark_member(me);
        let is_living = !node_segment.roster().is_dead(Some(me));
        let link = Link { channel, service: welcome.service };
        if is_same && is_living {
            return Ok(Some(Self { link, node_segment, me, member_lock }));
        }
        node_segment.roster().leave(me);
        Ok(None)
    }
}

/// Says that this process is there to serve, unless another one is.
fn take_priority(options: &NodeOptions, service: &LocalService, end: Instant) -> Result<()> {
    let acquire_priority = || service.acquire_priority(JOINING, options);
    acquire_exclusive(end, acquire_priority, || PriorityLock::holder(JOINING, &options.directory))
}

/// Takes what only one has: by these, which take it, and who has it.
fn acquire_exclusive(
    end: Instant,
    takes: impl Fn() -> Result<bool>,
    holder: impl Fn() -> Result<Option<u32>>,
) -> Result<()> {
    let operation = "serve a node";
    while !takes()? {
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
    /// Joins the node of a directory, and serves it if nobody does and the options allow it.
    ///
    /// Threads that this starts, those that carry messages to other nodes among them, run on the
    /// cores of the calling thread: one that looks for messages all the time on a core of its own
    /// joins first and confines itself to that core then.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if no service is found within the
    /// patience; [`AlreadyServed`](ErrorKind::AlreadyServed) if this process is to stand there, and
    /// another one does; [`InvalidArgument`](ErrorKind::InvalidArgument) for
    /// [budgets](Budgets::check) or labels that cannot be; [`Denied`](ErrorKind::Denied),
    /// [`TooMany`](ErrorKind::TooMany).
    ///
    /// Whether other nodes can be reached is known later: [`NetworkOptions::check`] and
    /// [`check_provider`] refuse before what can never be.
    ///
    /// [`NetworkOptions::check`]: crate::NetworkOptions::check
    /// [`check_provider`]: crate::NetworkOptions::check_provider
    pub fn join(options: NodeOptions) -> Result<Self> {
        if options.label.len() > MAX_LABEL {
            let detail = format!("a label of more than {MAX_LABEL} bytes");
            return Err(Error::new(JOINING, ErrorKind::InvalidArgument, detail));
        }
        options.budgets.check()?;
        election::prepare(JOINING, &options.directory)?;
        let failed = |error: std::io::Error| Error::of(JOINING, error);
        let end = ipc::deadline(options.service_timeout);
        let service = LocalService::default();
        if options.service == ServiceMode::Dedicated {
            take_priority(&options, &service, end)
                .map_err(|error| error.on(options.directory.display()))?;
        }
        loop {
            let connector = ServiceConnector {
                operation: JOINING,
                options: &options,
                own: &service,
                end: &|| end,
                serves: &|| true,
                leaderless_since: Cell::new(None),
            };
            let pidfd = PidFd::of_this_process().map_err(failed)?;
            let hello = Request::Hello { label: options.label.clone() };
            let (channel, answered) = connector.handshake(|channel| {
                link::send_request(JOINING, channel, &hello, &[pidfd.as_fd()])
            })?;
            let refused = match answered {
                HandshakeResult::Welcome(welcome) => {
                    match JoinedNode::new(&options, channel, welcome)? {
                        Some(joined) => return Self::start(options, service, joined),
                        None => None,
                    }
                }
                HandshakeResult::Refused(reason) if reason.kind() == ErrorKind::Failed => {
                    Some(reason)
                }
                HandshakeResult::Refused(reason) => {
                    return Err(reason.on(options.directory.display()));
                }
            };
            if Instant::now() >= end {
                let detail = "its services exit before this process has joined";
                let error =
                    refused.unwrap_or_else(|| Error::new(JOINING, ErrorKind::Closed, detail));
                return Err(error.on(options.directory.display()));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn start(options: NodeOptions, service: LocalService, joined: JoinedNode) -> Result<Self> {
        let failed = |error: std::io::Error| Error::of(JOINING, error);
        let JoinedNode { link, node_segment, me, member_lock } = joined;
        let bell = WakeFd::new().map_err(|error| {
            node_segment.roster().leave(me);
            failed(error)
        })?;
        let (waiting, interruptible) = (options.waiting, options.interruptible);
        let (roster, publish_doorbell) =
            (Arc::clone(node_segment.roster()), Arc::clone(node_segment.publish_doorbell()));
        let shared =
            Arc::new(MembershipState::new(options, node_segment, me, bell, service, member_lock));
        let thread = std::thread::Builder::new().name("fabricast-link".into()).spawn({
            let shared = Arc::clone(&shared);
            move || link::run(&shared, link)
        });
        let thread = thread.map_err(|error| {
            shared.roster().leave(me);
            failed(error)
        })?;
        let membership = Arc::new(Membership::new(shared, thread));
        let service = Arc::clone(&membership) as _;
        let fork_generation = ForkGeneration::current();
        let watch = DoorbellWatcher::new();
        let context = NodeContext {
            me,
            roster,
            service,
            fork_generation,
            publish_doorbell,
            waiting,
            interruptible,
            watch,
        };
        Ok(Self { membership, context: Arc::new(context) })
    }

    /// Opens a topic, and makes it if nobody has. It goes when no process uses it any more.
    ///
    /// # Errors
    /// [`SettingsDiffer`](ErrorKind::SettingsDiffer) if it exists and is another one;
    /// [`OverBudget`](ErrorKind::OverBudget), with the figures;
    /// [`NoDevice`](ErrorKind::NoDevice) if the device of its memory is not there;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    pub fn topic(&self, name: &str, settings: &TopicSettings) -> Result<Topic> {
        // In a child a device would not be found, which is not why.
        self.context.check_not_forked("open a topic")?;
        let shared = SharedSettings::of(settings).map_err(|error| error.on(name))?;
        self.open_topic(name, Some(shared), self.answer_timeout())
    }

    /// Opens a topic as whoever made it wanted it. If nobody has at this node, it is made as a node
    /// has it that this one is connected to, in the host's memory.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if nobody has made it, as far as is known now;
    /// [`OverBudget`](ErrorKind::OverBudget) if there is no room for it here;
    /// [`NoDevice`](ErrorKind::NoDevice) if its memory is a device's that this process does not
    /// see.
    pub fn open(&self, name: &str) -> Result<Topic> {
        self.open_within(name, self.answer_timeout())
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.context.interruption()
    }

    /// How long the service may take for an answer.
    pub(crate) fn answer_timeout(&self) -> Duration {
        self.membership.shared.options.service_timeout
    }

    /// As [`open`](Self::open), but the service may take this long for its answer.
    pub(crate) fn open_within(&self, name: &str, timeout: Duration) -> Result<Topic> {
        self.open_topic(name, None, timeout)
    }

    fn open_topic(
        &self,
        name: &str,
        settings: Option<SharedSettings>,
        timeout: Duration,
    ) -> Result<Topic> {
        let operation = "open a topic";
        self.context.check(operation)?;
        let request = |request| Request::Open { request, name: name.into(), settings };
        let answer = self.membership.shared.call_within(operation, timeout, request);
        match answer.map_err(|error| error.on(name))? {
            Answer::Topic { topic, local, inbound } => {
                Ok(Topic { context: TopicContext::new(&self.context, topic, local, inbound) })
            }
            _ => Err(unexpected_answer(operation)),
        }
    }

    /// Who is there, and what goes on: the first row is the node's.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed).
    pub fn report(&self) -> Result<Vec<Row>> {
        let operation = "report on a node";
        self.context.check(operation)?;
        match self.membership.shared.call(operation, |request| Request::Report { request })? {
            Answer::Rows(rows) => Ok(rows),
            _ => Err(unexpected_answer(operation)),
        }
    }

    /// Is this process still at the node?
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if not: its service was lost, and no other one came in time;
    /// [`Forked`](ErrorKind::Forked).
    pub fn check(&self) -> Result<()> {
        self.context.check("use a node")
    }

    /// The node's identity, in hexadecimal digits: the same for all that are at it, whatever
    /// service serves it.
    #[must_use]
    pub fn identity(&self) -> String {
        self.membership.shared.node_segment.identity().to_string()
    }

    /// Does this process serve the node now? Others may do so later, or before; one that is
    /// [standing](ServiceMode::Standing) there begins when who serves in passing has given way.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.membership.shared.service.is_running()
    }

    /// Where its socket is.
    #[must_use]
    pub fn directory(&self) -> &std::path::Path {
        &self.membership.shared.options.directory
    }
}

/// A topic that this process uses. Copies are the same.
#[derive(Debug, Clone)]
pub struct Topic {
    context: TopicContext,
}

impl Topic {
    /// One who publishes. Memory for its [loans](TopicSettings::loans) is reserved until it, and the
    /// last of them, is dropped; that of a topic's first publisher was reserved with the topic.
    ///
    /// # Errors
    /// [`OverBudget`](ErrorKind::OverBudget), with the figures, if there is not so much left;
    /// [`TooMany`](ErrorKind::TooMany); [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if the
    /// node's service does not answer within the patience.
    pub fn publisher(&self) -> Result<Publisher> {
        Publisher::new(self.context.clone())
    }

    /// One who reads all that is published from now on.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany).
    pub fn subscriber(&self) -> Result<Subscriber> {
        Subscriber::new(self.context.clone())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.context.topic.name()
    }

    /// What it is like.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if its memory is a device's that this process does not
    /// see.
    pub fn settings(&self) -> Result<TopicSettings> {
        self.context.topic.settings().to_local()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_to_serve_does_not_try_for_ever_while_others_come_and_go() {
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
