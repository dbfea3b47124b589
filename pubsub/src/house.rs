//! One process's membership in a node, as publishers and subscribers see it.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use ipc::{Caller, Incarnation, MappedWords, Participant, Roster, Spin, Watch};

use crate::error::{Error, ErrorKind, Result};
use crate::hall::Bell;
use crate::interruption::Interruption;
use crate::pool::{Direction, Pool, PoolId};
use crate::settings::Reliability;
use crate::topic::Topic;

/// What publishers and subscribers need of the node service.
pub(crate) trait Office: Send + Sync + Debug {
    /// Asks for more memory, and does not wait for it: the pool's bell rings when it came.
    fn grow(&self, pool: PoolId, bytes: u64);
    /// Reserves memory for the loans of a publisher that this process has made.
    fn admit(&self, topic: u32, publisher: u64) -> Result<()>;
    /// Publishers or subscribers of this topic came or went.
    fn changed(&self, topic: u32);
    /// A publisher of this process waits at this topic. From now on the office looks, until none
    /// of its publishers does.
    fn waits(&self, topic: u32);
    /// This process does not use the topic any more, or one handle of it less.
    fn forget(&self, topic: u32);
    /// Streams of this process are at messages: somebody looks now and then how far they are.
    fn tend(&self) {}
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
pub(crate) struct House {
    pub(crate) me: Participant,
    pub(crate) roster: Arc<Roster<MappedWords>>,
    pub(crate) office: Arc<dyn Office>,
    pub(crate) born: Incarnation,
    /// Rung when something was published that other nodes want.
    pub(crate) outward: Arc<Bell>,
    /// How those wait that are not told otherwise.
    pub(crate) waiting: Spin,
    /// Do waits end when a signal handler has run?
    pub(crate) interruptible: bool,
    /// Sleeps for those subscribers that are waited for by their descriptors.
    pub(crate) watch: Watch,
}

impl House {
    #[inline]
    pub(crate) fn caller(&self) -> Caller<'_> {
        Caller::new(self.me, &*self.roster)
    }

    /// For calls that have a deadline: they look at it between attempts. A lock that is not had within
    /// this time is held by a process that is stopped, or starved.
    #[inline]
    pub(crate) fn brief_caller(&self) -> Caller<'_> {
        const BRIEF: Duration = Duration::from_millis(50);
        Caller { patience: BRIEF, ..self.caller() }
    }

    /// Of a wait that begins now.
    pub(crate) fn interruption(&self) -> Interruption {
        Interruption::watch(self.interruptible)
    }

    /// Is this still the process that joined?
    #[inline]
    pub(crate) fn check_fork(&self, operation: &'static str) -> Result<()> {
        if self.born.is_current() {
            return Ok(());
        }
        let detail = "a child joins the node by itself";
        Err(Error::new(operation, ErrorKind::Forked, detail))
    }

    /// Is it, and is the node open?
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        self.check_fork(operation)?;
        self.office.check()
    }
}

/// What a publisher or a subscriber of a topic works with.
#[derive(Debug, Clone)]
pub(crate) struct Desk {
    pub(crate) house: Arc<House>,
    pub(crate) topic: Arc<Topic>,
    pub(crate) here: Arc<Pool>,
    pub(crate) arrivals: Arc<Pool>,
    _use: Arc<Use>,
}

/// One use of a topic, of which the service is told when it ends.
#[derive(Debug)]
struct Use {
    house: Arc<House>,
    topic: u32,
}

impl Drop for Use {
    fn drop(&mut self) {
        if self.house.born.is_current() {
            self.house.office.forget(self.topic);
        }
    }
}

impl Desk {
    pub(crate) fn new(
        house: &Arc<House>,
        topic: Arc<Topic>,
        here: Arc<Pool>,
        arrivals: Arc<Pool>,
    ) -> Self {
        let _use = Arc::new(Use { house: Arc::clone(house), topic: topic.number() });
        Self { house: Arc::clone(house), topic, here, arrivals, _use }
    }

    #[inline]
    pub(crate) fn pool(&self, direction: Direction) -> &Pool {
        match direction {
            Direction::Here => &self.here,
            Direction::Arrivals => &self.arrivals,
        }
    }

    pub(crate) fn changed(&self) {
        self.house.office.changed(self.topic.number());
    }

    /// Said after a publisher's [pressure](crate::topic::PublisherLine::pressure) has begun: who is in the way
    /// is to be found. Where messages are dropped nobody is.
    #[cold]
    pub(crate) fn waits(&self) {
        if self.topic.settings().reliability == Reliability::Reliable {
            self.is_held_up();
        }
    }

    /// Subscribers hold what a publisher of this process has no room for: the service looks how long.
    pub(crate) fn is_held_up(&self) {
        if self.topic.begins_to_wait() {
            self.house.office.waits(self.topic.number());
        }
    }
}
