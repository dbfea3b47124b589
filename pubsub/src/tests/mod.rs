//! Publishers and subscribers in one process or a few, with a stand-in for the node service.

mod allocations;
mod deaths;
mod delivery;
mod devices;
mod limits;
mod loans;
mod ordered;
mod ordered_deaths;
mod readiness;
mod waits;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ipc::{
    Caller, Incarnation, Layout, Life, MappedWords, Participant, Roster, Segment, Spin, Watch,
};

use crate::error::{Error, ErrorKind, Result};
use crate::hall::{Bell, Hall};
use crate::house::{Desk, House, Office, Retry};
use crate::peers::NodeIdentity;
use crate::pool::{Direction, Ledger, Pool, PoolId};
use crate::settings::{SharedPlace, SharedSettings};
use crate::topic::Topic;
use crate::{Publisher, Reliability, Subscriber, TopicSettings};

/// Reached only if something is wrong.
const FAR: Duration = Duration::from_secs(60);
/// Waited for in vain.
const SOON: Duration = Duration::from_millis(20);
const LIMIT: u64 = 64 << 20;

fn settings() -> TopicSettings {
    TopicSettings { depth: 4, largest: 1 << 20, ..TopicSettings::default() }
}

/// Does at once, and in the same process, what the node service does.
#[derive(Debug)]
struct Clerk {
    me: Participant,
    roster: Arc<Roster<MappedWords>>,
    pools: Vec<Arc<Pool>>,
    changes: AtomicU64,
    waits: AtomicU64,
    is_closed: AtomicBool,
    outward: Arc<Bell>,
    attempts: Attempts,
}

#[derive(Default)]
struct Attempts(Mutex<Vec<Retry>>);

impl std::fmt::Debug for Attempts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} attempts", self.0.lock().unwrap().len())
    }
}

impl Office for Clerk {
    fn grow(&self, id: PoolId, bytes: u64) {
        let pool = self.pools.iter().find(|pool| pool.id() == id).unwrap();
        let number = pool.held();
        let Ok(piece) = pool.make_piece(bytes) else { return };
        if pool.may_grow(piece.length) {
            pool.follow_piece(number, piece).unwrap();
            pool.admit_piece(&Caller::new(self.me, &*self.roster), number).unwrap();
        }
    }

    fn admit(&self, _topic: u32, _publisher: u64) -> Result<()> {
        Ok(())
    }

    fn changed(&self, _topic: u32) {
        self.changes.fetch_add(1, Relaxed);
    }

    fn waits(&self, _topic: u32) {
        self.waits.fetch_add(1, Relaxed);
    }

    fn forget(&self, _topic: u32) {}

    fn retry(&self, _topic: u32, attempt: Retry) {
        self.attempts.0.lock().unwrap().push(attempt);
    }

    fn check(&self) -> Result<()> {
        if self.is_closed.load(Acquire) {
            return Err(Error::new("use a node", ErrorKind::Closed, "it was left"));
        }
        Ok(())
    }
}

/// A node of one process, with one topic.
#[derive(Debug)]
struct Home {
    hall: Segment,
    clerk: Arc<Clerk>,
    topic: Arc<Topic>,
    here: Arc<Pool>,
    arrivals: Arc<Pool>,
}

const HALL: Layout = Layout::new("test hall", 1);

impl Home {
    fn ledgers(&self) -> [&Ledger<MappedWords>; 2] {
        [self.here.ledger(), self.arrivals.ledger()]
    }

    fn new(settings: &TopicSettings) -> Self {
        Self::with_limit(settings, LIMIT)
    }

    fn with_limit(settings: &TopicSettings, limit: u64) -> Self {
        let settings = SharedSettings::of(settings).unwrap();
        let hall = Segment::create(HALL, Roster::<MappedWords>::WORDS * 8).unwrap();
        hall.mark_ready();
        let roster = Arc::new(Roster::new(hall.words()).unwrap());
        let me = roster.admit(Life::of_this_process().unwrap()).unwrap();
        let pool = |direction| {
            let id = PoolId { place: settings.place, direction };
            Arc::new(Pool::create(id, limit, 256).unwrap())
        };
        let (here, arrivals) = (pool(Direction::Here), pool(Direction::Arrivals));
        let topic = Arc::new(Topic::create(3, "test", &settings).unwrap());
        Self::with_parts(hall, roster, me, topic, here, arrivals)
    }

    fn with_parts(
        hall: Segment,
        roster: Arc<Roster<MappedWords>>,
        me: Participant,
        topic: Arc<Topic>,
        here: Arc<Pool>,
        arrivals: Arc<Pool>,
    ) -> Self {
        let clerk = Clerk {
            me,
            roster,
            pools: vec![Arc::clone(&here), Arc::clone(&arrivals)],
            changes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            attempts: Attempts::default(),
            outward: Arc::clone(Hall::create(NodeIdentity([1; 16])).unwrap().outward()),
        };
        Self { hall, clerk: Arc::new(clerk), topic, here, arrivals }
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(self.clerk.me, &*self.clerk.roster)
    }

    fn desk_of(&self, me: Participant) -> Desk {
        let house = House {
            me,
            roster: Arc::clone(&self.clerk.roster),
            office: Arc::clone(&self.clerk) as Arc<dyn Office>,
            born: Incarnation::current(),
            outward: Arc::clone(&self.clerk.outward),
            waiting: Spin::default(),
            interruptible: false,
            watch: Watch::new(),
        };
        let (here, arrivals) = (Arc::clone(&self.here), Arc::clone(&self.arrivals));
        Desk::new(&Arc::new(house), Arc::clone(&self.topic), here, arrivals)
    }

    fn desk(&self) -> Desk {
        self.desk_of(self.clerk.me)
    }

    fn publisher(&self) -> Publisher {
        Publisher::new(self.desk()).unwrap()
    }

    fn subscriber(&self) -> Subscriber {
        Subscriber::new(self.desk()).unwrap()
    }

    fn blocks_taken(&self) -> u64 {
        let taken = |pool: &Pool| pool.statistics(&self.caller()).unwrap().blocks_taken;
        taken(&self.here) + taken(&self.arrivals)
    }

    /// Tries again what a lock was in the way of; gives how much is left.
    fn retry(&self) -> usize {
        let mut attempts = self.clerk.attempts.0.lock().unwrap();
        let caller = Caller { patience: SOON, ..self.caller() };
        attempts.retain_mut(|attempt| !attempt(&caller));
        attempts.len()
    }

    fn close(&self) {
        self.clerk.is_closed.store(true, Release);
    }

    fn open(&self) {
        self.clerk.is_closed.store(false, Release);
    }

    /// How many publishers wait for something at this moment.
    fn waiting(&self) -> usize {
        let publishers = self.topic.census().publishers;
        publishers.into_iter().filter(|seen| seen.waits_since.is_some()).count()
    }
}
