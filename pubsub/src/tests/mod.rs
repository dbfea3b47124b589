//! Publishers and subscribers in one or several processes, with a fake node service.

mod allocations;
mod closed_objects;
mod deaths;
mod delivery;
mod devices;
mod limits;
mod polled_subscribers;
mod publisher_loans;
mod stream_order;
mod stream_order_deaths;
mod waiting;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use ipc::{
    Caller, DoorbellWatcher, ForkGeneration, Layout, MappedWords, Participant, ParticipantTable,
    PidFd, Segment, WaitStrategy,
};

use crate::context::{NodeContext, Retry, ServiceClient, TopicContext};
use crate::endpoint_list::Endpoints;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::NodeId;
use crate::node_segment::{NodeSegment, PublishDoorbell};
use crate::pool::{Direction, GrowthRequest, Pool, PoolControl, PoolId};
use crate::settings::{SharedLocation, SharedSettings};
use crate::topic::Topic;
use crate::{Publisher, Reliability, Subscriber, TopicSettings};

/// Reached only on failure.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of waits that fail.
const SHORT_TIMEOUT: Duration = Duration::from_millis(20);
const LIMIT: u64 = 64 << 20;

fn settings() -> TopicSettings {
    TopicSettings { depth: 4, max_held: 4, largest: 1 << 20, ..TopicSettings::default() }
}

/// Does what the node service does, at once and in the same process.
#[derive(Debug)]
struct FakeService {
    me: Participant,
    participants: Arc<ParticipantTable<MappedWords>>,
    pools: Vec<Arc<Pool>>,
    topic: Weak<Topic>,
    changes: AtomicU64,
    publisher_blocked: AtomicU64,
    is_closed: AtomicBool,
    publish_doorbell: Arc<PublishDoorbell>,
    attempts: Attempts,
    open_topics: Endpoints,
}

#[derive(Default)]
struct Attempts(Mutex<Vec<Retry>>);

impl std::fmt::Debug for Attempts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} attempts", self.0.lock().unwrap().len())
    }
}

impl FakeService {
    /// Grows a pool as far as its limit allows.
    fn grow(&self, id: PoolId, bytes: u64) {
        let pool = self.pools.iter().find(|pool| pool.id() == id).unwrap();
        let number = pool.held();
        let Ok(piece) = pool.make_piece(bytes) else { return };
        if pool.may_grow(piece.length) {
            pool.adopt_piece(number, piece).unwrap();
            pool.admit_piece(&Caller::new(self.me, &*self.participants), number).unwrap();
        }
    }
}

impl ServiceClient for FakeService {
    fn request_growth(&self, request: GrowthRequest) {
        self.grow(request.pool(), request.bytes());
    }

    fn admit(&self, _topic: u32, publisher: u64) -> Result<()> {
        if let Some(topic) = self.topic.upgrade() {
            topic.name_publisher(publisher, std::process::id(), "test");
            // False for another process.
            topic.publisher(publisher).reserve(self.me);
        }
        Ok(())
    }

    fn participants_changed(&self, _topic: u32) {
        self.changes.fetch_add(1, Relaxed);
    }

    fn publisher_blocked(&self, _topic: u32) {
        self.publisher_blocked.fetch_add(1, Relaxed);
    }

    fn forget(&self, _topic: u32) {}

    fn retry(&self, _topic: u32, attempt: Retry) {
        self.attempts.0.lock().unwrap().push(attempt);
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        if self.is_closed.load(Acquire) {
            return Err(Error::new(operation, ErrorKind::Closed, "the node is closed"));
        }
        Ok(())
    }

    fn open_topics(&self) -> &Endpoints {
        &self.open_topics
    }
}

/// A node of one process, with one topic.
#[derive(Debug)]
struct TestNode {
    node_segment: Segment,
    service: Arc<FakeService>,
    topic: Arc<Topic>,
    local: Arc<Pool>,
    inbound: Arc<Pool>,
}

const NODE_SEGMENT: Layout = Layout::new("test segment", 1);

impl TestNode {
    fn controls(&self) -> [&PoolControl<MappedWords>; 2] {
        [self.local.control(), self.inbound.control()]
    }

    fn new(settings: &TopicSettings) -> Self {
        Self::with_limit(settings, LIMIT)
    }

    fn with_limit(settings: &TopicSettings, limit: u64) -> Self {
        let settings = SharedSettings::of(settings).unwrap();
        let node_segment =
            Segment::create(NODE_SEGMENT, ParticipantTable::<MappedWords>::WORDS * 8).unwrap();
        node_segment.mark_ready();
        let participants = Arc::new(ParticipantTable::new(node_segment.words()).unwrap());
        let me = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        let pool = |direction| {
            let id = PoolId { place: settings.place, direction };
            Arc::new(Pool::create(id, limit, 256).unwrap())
        };
        let (local, inbound) = (pool(Direction::Local), pool(Direction::Inbound));
        let topic = Arc::new(Topic::create(3, "test", &settings).unwrap());
        Self::with_parts(node_segment, participants, me, topic, local, inbound)
    }

    fn with_parts(
        node_segment: Segment,
        participants: Arc<ParticipantTable<MappedWords>>,
        me: Participant,
        topic: Arc<Topic>,
        local: Arc<Pool>,
        inbound: Arc<Pool>,
    ) -> Self {
        let service = FakeService {
            me,
            participants,
            pools: vec![Arc::clone(&local), Arc::clone(&inbound)],
            topic: Arc::downgrade(&topic),
            changes: AtomicU64::new(0),
            publisher_blocked: AtomicU64::new(0),
            is_closed: AtomicBool::new(false),
            attempts: Attempts::default(),
            open_topics: Endpoints::default(),
            publish_doorbell: Arc::clone(
                NodeSegment::create(NodeId([1; 16])).unwrap().publish_doorbell(),
            ),
        };
        Self { node_segment, service: Arc::new(service), topic, local, inbound }
    }

    fn caller(&self) -> Caller<'_> {
        Caller::new(self.service.me, &*self.service.participants)
    }

    fn context_of(&self, me: Participant) -> TopicContext {
        let node = NodeContext {
            me,
            participants: Arc::clone(&self.service.participants),
            service: Arc::clone(&self.service) as Arc<dyn ServiceClient>,
            fork_generation: ForkGeneration::current(),
            publish_doorbell: Arc::clone(&self.service.publish_doorbell),
            waiting: WaitStrategy::default(),
            interruptible: false,
            watch: DoorbellWatcher::new(),
        };
        let (local, inbound) = (Arc::clone(&self.local), Arc::clone(&self.inbound));
        TopicContext::new(&Arc::new(node), Arc::clone(&self.topic), local, inbound).unwrap()
    }

    fn context(&self) -> TopicContext {
        self.context_of(self.service.me)
    }

    fn publisher(&self) -> Publisher {
        Publisher::new(self.context()).unwrap()
    }

    fn subscriber(&self) -> Subscriber {
        Subscriber::new(self.context()).unwrap()
    }

    fn blocks_allocated(&self) -> u64 {
        let taken = |pool: &Pool| pool.statistics(&self.caller()).unwrap().blocks_allocated;
        taken(&self.local) + taken(&self.inbound)
    }

    /// Repeats operations that failed for a held lock; returns how many are left.
    fn retry(&self) -> usize {
        let mut attempts = self.service.attempts.0.lock().unwrap();
        let caller = Caller { timeout: SHORT_TIMEOUT, ..self.caller() };
        attempts.retain_mut(|attempt| !attempt(&caller));
        attempts.len()
    }

    fn close(&self) {
        self.service.is_closed.store(true, Release);
    }

    fn open(&self) {
        self.service.is_closed.store(false, Release);
    }

    /// The number of publishers that wait at this moment.
    fn waiting(&self) -> usize {
        let publishers = self.topic.publishers();
        publishers.into_iter().filter(|seen| seen.waits_since.is_some()).count()
    }
}
