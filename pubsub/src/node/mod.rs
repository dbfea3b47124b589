//! A process at its node.

mod asking;
mod attendance;
mod environment;
mod line;
mod link;
mod options;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Channel, Fate, Incarnation, Life, Participant, Watch};
use std::os::fd::AsFd;

use self::attendance::{Answer, Attendance, Shared, another_answer};
use self::line::{Answered, Coming, OwnService, Welcome, in_words};
use self::link::Link;
use crate::error::{Error, ErrorKind, Result};
use crate::hall::Hall;
use crate::house::{Desk, House};
use crate::interruption::Interruption;
use crate::report::Row;
use crate::service::election::{self, Claim, Membership};
use crate::service::protocol::{LONGEST_LABEL, Request};
use crate::settings::{SharedSettings, TopicSettings};
use crate::wake::WakeFd;
use crate::{Publisher, Subscriber};

pub use self::asking::report;
pub use self::environment::{KNOWN_VARIABLES, nearest_variable};
pub use self::options::{Budgets, NodeOptions, ServiceMode};

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
/// let patience = Duration::from_secs(5);
/// publisher.push(b"hello", patience)?;
/// assert_eq!(subscriber.pull(patience)?.to_vec()?, b"hello");
/// # let path = node.directory().to_owned();
/// # drop((node, topic, subscriber, publisher));
/// # std::fs::remove_dir_all(path).unwrap();
/// # Ok::<(), pubsub::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Node {
    attendance: Arc<Attendance>,
    house: Arc<House>,
}

const JOINING: &str = "join a node";
/// Between two attempts to join.
const PAUSE: Duration = Duration::from_millis(5);

/// A process that was let in, and is about to be a member.
struct Entrance {
    link: Link,
    hall: Hall,
    me: Participant,
    membership: Membership,
}

impl Entrance {
    /// None if the node is not the same any more: then its name is given back.
    fn new(options: &NodeOptions, channel: Channel, welcome: Welcome) -> Result<Option<Self>> {
        let hall = Hall::open(welcome.hall)?;
        let Some(me) = Participant::from_number(welcome.participant) else {
            let detail = "the service gives a name that is none";
            return Err(Error::new(JOINING, ErrorKind::Malformed, detail));
        };
        let life = Life::of_this_process().map_err(|error| Error::of(JOINING, error))?;
        for (who, life) in welcome.lives {
            hall.roster().learn(who, life);
        }
        hall.roster().learn(me, life);
        let membership = Membership::hold(JOINING, &options.directory)?;
        // Whoever founds the node anew says so before it looks for members the last time.
        let is_same = membership.node().is_none_or(|node| node == hall.identity());
        hall.attend(me);
        let is_living = !hall.roster().is_dead(Some(me));
        let link = Link { channel, service: welcome.service };
        if is_same && is_living {
            return Ok(Some(Self { link, hall, me, membership }));
        }
        hall.roster().resign(me);
        Ok(None)
    }
}

/// Says that this process is there to serve, unless another one is.
fn stand(options: &NodeOptions, service: &OwnService, end: Instant) -> Result<()> {
    let claims = || service.claims(JOINING, options);
    one_only(end, claims, || Claim::holder(JOINING, &options.directory))
}

/// Takes what only one has: by these, which take it, and who has it.
fn one_only(
    end: Instant,
    takes: impl Fn() -> Result<bool>,
    holder: impl Fn() -> Result<Option<u32>>,
) -> Result<()> {
    let operation = "serve a node";
    while !takes()? {
        if let Some(process) = holder()? {
            let detail = format!("{} does, and stays", in_words(process));
            return Err(Error::new(operation, ErrorKind::AlreadyServed, detail));
        }
        // It has ended just now.
        if Instant::now() >= end {
            let detail = "others say that they do, and do not stay";
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
        if options.label.len() > LONGEST_LABEL {
            let detail = format!("a label of more than {LONGEST_LABEL} bytes");
            return Err(Error::new(JOINING, ErrorKind::InvalidArgument, detail));
        }
        options.budgets.check()?;
        election::prepare(JOINING, &options.directory)?;
        let failed = |error: std::io::Error| Error::of(JOINING, error);
        let end = ipc::deadline(options.patience);
        let service = OwnService::default();
        if options.service == ServiceMode::Standing {
            stand(&options, &service, end)
                .map_err(|error| error.on(options.directory.display()))?;
        }
        loop {
            let coming = Coming {
                operation: JOINING,
                options: &options,
                own: &service,
                end: &|| end,
                serves: &|| true,
                vacant_since: Cell::new(None),
            };
            let life = Life::of_this_process().map_err(failed)?;
            let hello = Request::Hello { label: options.label.clone() };
            let (channel, answered) =
                coming.come_in(|channel| link::say(JOINING, channel, &hello, &[life.as_fd()]))?;
            let refused = match answered {
                Answered::Welcome(welcome) => match Entrance::new(&options, channel, welcome)? {
                    Some(entrance) => return Self::enter(options, service, entrance),
                    None => None,
                },
                Answered::Refused(why) if why.kind() == ErrorKind::Failed => Some(why),
                Answered::Refused(why) => return Err(why.on(options.directory.display())),
            };
            if Instant::now() >= end {
                let detail = "its services end before this process is a member";
                let error =
                    refused.unwrap_or_else(|| Error::new(JOINING, ErrorKind::Closed, detail));
                return Err(error.on(options.directory.display()));
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn enter(options: NodeOptions, service: OwnService, entrance: Entrance) -> Result<Self> {
        let failed = |error: std::io::Error| Error::of(JOINING, error);
        let Entrance { link, hall, me, membership } = entrance;
        let bell = WakeFd::new().map_err(|error| {
            hall.roster().resign(me);
            failed(error)
        })?;
        let (waiting, interruptible) = (options.waiting, options.interruptible);
        let (roster, outward) = (Arc::clone(hall.roster()), Arc::clone(hall.outward()));
        let shared = Arc::new(Shared::new(options, hall, me, bell, service, membership));
        let thread = std::thread::Builder::new().name("fabricast-link".into()).spawn({
            let shared = Arc::clone(&shared);
            move || link::run(&shared, link)
        });
        let thread = thread.map_err(|error| {
            shared.roster().resign(me);
            failed(error)
        })?;
        let attendance = Arc::new(Attendance::new(shared, thread));
        let office = Arc::clone(&attendance) as _;
        let born = Incarnation::current();
        let watch = Watch::new();
        let house = House { me, roster, office, born, outward, waiting, interruptible, watch };
        Ok(Self { attendance, house: Arc::new(house) })
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
        self.house.check_fork("open a topic")?;
        let shared = SharedSettings::of(settings).map_err(|error| error.on(name))?;
        self.ask_for(name, Some(shared), self.answer_timeout())
    }

    /// Opens a topic as whoever made it wanted it. If nobody has at this node, it is made as a node
    /// has it that this one is connected to, in the host's memory.
    ///
    /// # Errors
    /// [`Unknown`](ErrorKind::Unknown) if nobody has made it, as far as is known now;
    /// [`OverBudget`](ErrorKind::OverBudget) if there is no room for it here;
    /// [`NoDevice`](ErrorKind::NoDevice) if its memory is a device's that this process does not
    /// see.
    pub fn open(&self, name: &str) -> Result<Topic> {
        self.open_within(name, self.answer_timeout())
    }

    pub(crate) fn interruption(&self) -> Interruption {
        self.house.interruption()
    }

    /// How long the service may take for an answer.
    pub(crate) fn answer_timeout(&self) -> Duration {
        self.attendance.shared.options.patience
    }

    /// As [`open`](Self::open), but the service may take this long for its answer.
    pub(crate) fn open_within(&self, name: &str, timeout: Duration) -> Result<Topic> {
        self.ask_for(name, None, timeout)
    }

    fn ask_for(
        &self,
        name: &str,
        settings: Option<SharedSettings>,
        timeout: Duration,
    ) -> Result<Topic> {
        let operation = "open a topic";
        self.house.check(operation)?;
        let request = |request| Request::Open { request, name: name.into(), settings };
        let answer = self.attendance.shared.ask_within(operation, timeout, request);
        match answer.map_err(|error| error.on(name))? {
            Answer::Topic { topic, here, arrivals } => {
                Ok(Topic { desk: Desk::new(&self.house, topic, here, arrivals) })
            }
            _ => Err(another_answer(operation)),
        }
    }

    /// Who is there, and what goes on: the first row is the node's.
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), [`Closed`](ErrorKind::Closed).
    pub fn report(&self) -> Result<Vec<Row>> {
        let operation = "report on a node";
        self.house.check(operation)?;
        match self.attendance.shared.ask(operation, |request| Request::Report { request })? {
            Answer::Rows(rows) => Ok(rows),
            _ => Err(another_answer(operation)),
        }
    }

    /// Is this process still at the node?
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) if not: its service was lost, and no other one came in time;
    /// [`Forked`](ErrorKind::Forked).
    pub fn check(&self) -> Result<()> {
        self.house.check("use a node")
    }

    /// The node's identity, in hexadecimal digits: the same for all that are at it, whatever
    /// service serves it.
    #[must_use]
    pub fn identity(&self) -> String {
        self.attendance.shared.hall.identity().to_string()
    }

    /// Does this process serve the node now? Others may do so later, or before; one that is
    /// [standing](ServiceMode::Standing) there begins when who serves in passing has given way.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.attendance.shared.service.is_running()
    }

    /// Where its socket is.
    #[must_use]
    pub fn directory(&self) -> &std::path::Path {
        &self.attendance.shared.options.directory
    }
}

/// A topic that this process uses. Copies are the same.
#[derive(Debug, Clone)]
pub struct Topic {
    desk: Desk,
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
        Publisher::new(self.desk.clone())
    }

    /// One who reads all that is published from now on.
    ///
    /// # Errors
    /// [`TooMany`](ErrorKind::TooMany).
    pub fn subscriber(&self) -> Result<Subscriber> {
        Subscriber::new(self.desk.clone())
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.desk.topic.name()
    }

    /// What it is like.
    ///
    /// # Errors
    /// [`NoDevice`](ErrorKind::NoDevice) if its memory is a device's that this process does not
    /// see.
    pub fn settings(&self) -> Result<TopicSettings> {
        self.desk.topic.settings().seen_here()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_to_serve_does_not_try_for_ever_while_others_come_and_go() {
        let end = Instant::now() + 4 * PAUSE;
        let error = one_only(end, || Ok(false), || Ok(None)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
        assert!(Instant::now() >= end);
        let error = one_only(end, || Ok(false), || Ok(Some(7))).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyServed);
        assert!(error.detail().starts_with("process 7 does"));
        one_only(end, || Ok(true), || Ok(None)).unwrap();
    }
}
