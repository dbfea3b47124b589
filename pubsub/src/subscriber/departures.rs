//! Messages that are released when a stream has come to a point.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use gpu::Point;
use ipc::{Block, Caller, MappedWords, Participant, Roster, Seat};

use super::Subscription;
use crate::house::Desk;
use crate::lock::lock;
use crate::pool::{Direction, Pool, Rest, Tended};
use crate::topic::Topic;

/// How long a subscription that ends waits for streams to release what they hold.
const FAREWELL: Duration = Duration::from_secs(10);
/// Between two looks at streams that take longer.
const LATER: Duration = Duration::from_millis(20);

/// A message that a stream holds.
#[derive(Debug)]
pub(crate) struct Departure {
    pub(crate) direction: Direction,
    pub(crate) position: u64,
    pub(crate) block: Block,
    /// All that reads it is before this; None if nobody can tell what is.
    pub(crate) read: Option<Point>,
}

/// All of a subscription. They do not keep this process at its node: whoever looks after them may
/// be the thread that has to end when it leaves.
#[derive(Debug)]
pub(super) struct Departures {
    topic: Arc<Topic>,
    me: Participant,
    roster: Arc<Roster<MappedWords>>,
    here: Seat,
    arrivals: Seat,
    count: AtomicUsize,
    all: Mutex<Vec<Departure>>,
}

impl Departures {
    pub(super) fn new(desk: &Desk, here: Seat, arrivals: Seat) -> Self {
        Self {
            topic: Arc::clone(&desk.topic),
            me: desk.house.me,
            roster: Arc::clone(&desk.house.roster),
            here,
            arrivals,
            count: AtomicUsize::new(0),
            all: Mutex::default(),
        }
    }

    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    fn seat(&self, direction: Direction) -> Seat {
        match direction {
            Direction::Here => self.here,
            Direction::Arrivals => self.arrivals,
        }
    }

    fn is_released(&self, departure: &Departure, pool: &Pool) -> bool {
        let is_read = match departure.read.as_ref().map(Point::is_done) {
            Some(Ok(is_read)) => is_read,
            // The device does nothing any more.
            Some(Err(error)) => error.kind() == gpu::ErrorKind::DeviceFailed,
            None => false,
        };
        if is_read {
            let caller = Caller::new(self.me, &*self.roster);
            let seat = (departure.direction, self.seat(departure.direction));
            pool.ledger().has_passed(departure.block, seat.1.place());
            self.topic.release_in(&caller, seat, departure.position, pool.ledger());
            // It was left to the stream, if this one was removed meanwhile.
            pool.ledger().free_if_left(&caller, departure.block);
        }
        is_read
    }
}

impl Tended for Departures {
    fn tend(&self, pool: &Pool) -> bool {
        if !self.has_any() {
            return false;
        }
        let direction = pool.id().direction;
        let mut all = lock(&self.all);
        all.retain(|it| it.direction != direction || !self.is_released(it, pool));
        self.count.store(all.len(), Ordering::Relaxed);
        all.iter().any(|departure| departure.direction == direction)
    }
}

impl Subscription {
    /// The message is held until a stream has come to a point.
    pub(crate) fn departs(&self, departure: Departure) {
        let pool = self.desk.pool(departure.direction);
        let mut all = lock(&self.departures.all);
        all.push(departure);
        self.departures.count.store(all.len(), Ordering::Relaxed);
        drop(all);
        let departures = Arc::downgrade(&self.departures);
        pool.look_after(departures as Weak<dyn Tended>);
        self.desk.house.office.tend();
    }

    /// No stream of this one has to pass a message, which it holds no longer.
    pub(crate) fn has_passed(&self, direction: Direction, block: Block) {
        let ledger = self.desk.pool(direction).ledger();
        ledger.has_passed(block, self.seat(direction).place());
        ledger.free_if_left(&self.desk.house.caller(), block);
    }

    /// Releases what streams have come past. True if they hold something still.
    pub(super) fn tend(&self) -> bool {
        for direction in Direction::BOTH {
            self.departures.tend(self.desk.pool(direction));
        }
        self.departures.has_any()
    }

    /// Waits for streams, at the end. If they take too long, a thread waits for them and ends the
    /// subscription; until then the process stays at its node: somebody may read those messages.
    pub(super) fn has_nothing_more_to_release(&self) -> bool {
        let (mut rest, deadline) = (Rest::NEW, Instant::now() + FAREWELL);
        while self.departures.has_any() && self.tend() {
            let now = Instant::now();
            if now >= deadline {
                self.leave_to_streams();
                return false;
            }
            std::thread::sleep(rest.next(deadline).saturating_duration_since(now));
        }
        true
    }

    /// Ends the subscription when streams have released all that they hold, however long that takes.
    fn leave_to_streams(&self) {
        let topic = self.desk.topic.name();
        tracing::warn!(topic, "a stream holds messages, and keeps this process at its node");
        let (desk, departures) = (self.desk.clone(), Arc::clone(&self.departures));
        let seats = [self.here, self.arrivals];
        let wait = move || {
            while departures.has_any() {
                std::thread::sleep(LATER);
                for direction in Direction::BOTH {
                    departures.tend(desk.pool(direction));
                }
            }
            super::end(&desk, seats);
        };
        let waiting = std::thread::Builder::new().name("fabricast-streams".into()).spawn(wait);
        if let Err(error) = waiting {
            tracing::error!(%error, topic, "no thread waits for streams: messages stay held");
            // Streams may still read them.
            std::mem::forget(self.desk.clone());
        }
    }
}
