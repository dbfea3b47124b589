//! Kills a process before and after every store to shared memory. The survivors must find
//! everything consistent, and lose nothing.
//!
//! The structures access shared memory through a trait, so that these words can count the
//! stores and end the process at a given one. At the end every store in the source must have
//! been reached, or the test fails: a store without a kill is an untested case.

mod crashing;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use crashing::{SOURCES, Scenario, fork, scenarios};
use ipc::crash_test::{Crash, CrashingWords};
use ipc::{
    Allocator, AllocatorError, Block, Caller, Layout, Liveness, MappedWords, OverflowPolicy, Owner,
    Participant, ParticipantTable, PidFd, Queue, QueueSetup, Segment, WordRange,
};
use testkit::children::ForkedChild;

const LAYOUT: Layout = Layout::new("crash points", 1);
const GRANULE: u64 = 64;
const MAX_BLOCKS: u32 = 64;
const MEMORY: u64 = 1 << 16;
const SETUP: [QueueSetup; 3] = [
    QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::Reject },
    QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::DropOldest },
    QueueSetup { depth: 2, max_held: 2, overflow_policy: OverflowPolicy::DropNewest },
];

/// The queue word that has a bit for each waiter of its lock.
const QUEUE_LINE: usize = 9;

type SharedAllocator<'a> = Allocator<CrashingWords<'a>>;
type Line<'a> = Queue<CrashingWords<'a>, 2>;

/// The shared state of two processes.
struct Fixture {
    words: MappedWords,
    crash: Crash,
    participants: ParticipantTable<WordRange<MappedWords>>,
    survivor: Participant,
    victim: Participant,
    setup: QueueSetup,
    /// Children other than the victim.
    others: RefCell<Vec<ForkedChild>>,
    /// A subscriber that is about to be evicted, and holds the first entry.
    slow: RefCell<Option<ipc::Subscriber>>,
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(1)
}

/// The owner of blocks that are in flight to readers.
fn delivered() -> Owner {
    Owner::other(1).unwrap()
}

/// The role for tasks that one process after the other does.
fn replication() -> Participant {
    Participant::role(0).unwrap()
}

impl Fixture {
    fn new(setup: QueueSetup) -> Self {
        let allocator = Allocator::<MappedWords>::required_words(MAX_BLOCKS);
        let queue = Queue::<MappedWords, 2>::required_words(setup);
        let count = 256 + allocator + queue;
        let segment = Segment::create(LAYOUT, count * 8).unwrap();
        let words = segment.words();
        let participants =
            ParticipantTable::new(WordRange::new(words.clone(), 0, 256).unwrap()).unwrap();
        let survivor = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        // Its pidfd is added when it is started.
        let victim = participants.admit(PidFd::of_this_process().unwrap()).unwrap();
        let (crash, others, slow) = (Crash::new(&SOURCES), RefCell::default(), RefCell::default());
        let fixture = Self { words, crash, participants, survivor, victim, setup, others, slow };
        let caller = fixture.caller(survivor);
        let allocator = Allocator::format(fixture.books_words(), MAX_BLOCKS, GRANULE).unwrap();
        allocator.extend(&caller, 0, MEMORY).unwrap();
        Line::format(fixture.queue_words(), setup).unwrap();
        fixture
    }

    fn books_words(&self) -> CrashingWords<'_> {
        let count = Allocator::<MappedWords>::required_words(MAX_BLOCKS);
        CrashingWords::new(WordRange::new(self.words.clone(), 256, count).unwrap(), &self.crash)
    }

    fn queue_words(&self) -> CrashingWords<'_> {
        CrashingWords::new(self.plain_queue_words(), &self.crash)
    }

    fn plain_queue_words(&self) -> WordRange<MappedWords> {
        let first = 256 + Allocator::<MappedWords>::required_words(MAX_BLOCKS);
        let count = Queue::<MappedWords, 2>::required_words(self.setup);
        WordRange::new(self.words.clone(), first, count).unwrap()
    }

    fn allocator(&self) -> SharedAllocator<'_> {
        Allocator::attach(self.books_words()).unwrap()
    }

    fn queue(&self) -> Line<'_> {
        Queue::attach(self.queue_words()).unwrap()
    }

    fn caller(&self, me: Participant) -> Caller<'_> {
        Caller { timeout: Duration::from_secs(20), ..Caller::new(me, &self.participants) }
    }

    fn allocate(&self, me: Participant, bytes: u64, alignment: u64) -> Block {
        let owner = Owner::participant(me);
        self.allocator().allocate(&self.caller(me), owner, bytes, alignment).unwrap().0
    }

    /// Coalesces free blocks, and empties the free cache.
    fn list_all(&self) {
        self.allocator().statistics(&self.caller(self.survivor)).unwrap();
    }

    /// Frees the block of an entry, even if another process has already done so.
    fn dispose(&self, me: Participant, entry: [u64; 2]) {
        let _ = self.allocator().free(&self.caller(me), Block::from_bits(entry[0]), delivered());
    }

    /// The steps of every sender of a block.
    fn publish(&self, me: Participant, block: Block) -> Result<(), ipc::QueueError> {
        let hand_over = |_| {
            self.allocator().transfer(block, Owner::participant(me), delivered()).unwrap();
        };
        self.queue()
            .publish_with(&self.caller(me), [block.to_bits(), 0], hand_over, |entry| {
                self.dispose(me, entry);
            })
            .map(drop)
    }

    fn release(&self, me: Participant, subscriber: &ipc::Subscriber, position: u64) {
        let queue = self.queue();
        if let Some(entry) = queue.release(subscriber, position) {
            self.dispose(me, entry);
            queue.mark_disposed(position);
        }
    }

    /// The recovery after a death, by a survivor.
    fn clean_up_after(&self, me: Participant, dead: Participant) {
        let (allocator, queue, caller) = (self.allocator(), self.queue(), self.caller(me));
        queue.remove_participant(&caller, dead, |entry| self.dispose(me, entry)).unwrap();
        // A block that was handed over and not delivered has no owner; no process publishes
        // meanwhile.
        let mut referred_to = BTreeSet::new();
        queue.find_entries(&caller, |entry| referred_to.extend([entry[0]])).unwrap();
        allocator
            .reclaim(&caller, delivered(), |block| referred_to.contains(&block.to_bits()))
            .unwrap();
        allocator.reclaim(&caller, Owner::participant(dead), |_| false).unwrap();
    }

    /// Checks the final state, when only the survivor is left.
    fn check(&self, what: &str) {
        let (allocator, queue) = (self.allocator(), self.queue());
        let caller = self.caller(self.survivor);
        allocator.audit(&caller).unwrap().unwrap_or_else(|flaw| panic!("{what}: {flaw}"));
        let mut referred_to = BTreeSet::new();
        queue.find_entries(&caller, |entry| referred_to.extend([entry[0]])).unwrap();
        // The next owner completes the tasks of the role.
        if let Some(mut next) = queue.resume(&caller, replication(), |_| {}).unwrap() {
            // Except for entries that it held, and that can no longer be reached.
            let may_miss = u64::from(what.contains("out of reach"));
            while let Some(taken) = queue.take(&mut next) {
                assert!(taken.missed <= may_miss, "{what}: {taken:?}");
                self.release(self.survivor, &next, taken.position);
            }
            assert_eq!(queue.oldest_unreleased(next.subscription_id()), queue.position(), "{what}");
        }
        for listed in allocator.blocks(&caller).unwrap() {
            match listed.owner {
                None => {}
                Some(owner) if owner == Owner::participant(self.survivor) => {}
                Some(owner) if owner == delivered() => assert!(
                    referred_to.contains(&listed.block.to_bits()),
                    "{what}: {listed:?} was not delivered"
                ),
                Some(owner) => panic!("{what}: {listed:?} still belongs to {owner:?}"),
            }
        }
    }
}

/// Runs the scenario with the victim killed at its `point`th point; false if it ran to its end.
fn run(name: &str, scenario: &Scenario, setup: QueueSetup, point: u64) -> bool {
    let fixture = Fixture::new(setup);
    let act = scenario(&fixture);
    let child = fork(&fixture.crash, point, || act(&fixture));
    fixture.participants.add_pidfd(fixture.victim, PidFd::from_fd(child.pidfd()).unwrap());
    let was_killed = child.was_killed();
    // Recorded also for processes that were started before the victim, and do not have its
    // pidfd.
    assert!(fixture.participants.is_dead(Some(fixture.victim)));
    fixture.others.take().into_iter().for_each(|other| assert!(!other.was_killed()));
    let what = format!("{name}, {:?}, killed at point {point}", setup.overflow_policy);
    // The others' next operation finds a lock held by the dead process, or not.
    let owner = Owner::participant(fixture.survivor);
    match fixture.allocator().allocate(&fixture.caller(fixture.survivor), owner, 100, 1) {
        Ok(_) | Err(AllocatorError::OutOfMemory { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
    }
    if point.is_multiple_of(2) {
        let _ = fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
    }
    fixture.clean_up_after(fixture.survivor, fixture.victim);
    fixture.clean_up_after(fixture.survivor, Participant::new(200, 1).unwrap());
    fixture.check_slow_subscriber(&what);
    fixture.check(&what);
    was_killed
}

/// Structures that are not fully initialised must not be found.
fn deaths_while_making() {
    let setup = SETUP[0];
    let scratch = 256;
    let allocator = Allocator::<MappedWords>::required_words(1);
    let queue = Queue::<MappedWords, 2>::required_words(setup);
    for point in 0.. {
        let words = Segment::create(LAYOUT, (scratch + allocator + queue) * 8).unwrap().words();
        let crash = Crash::new(&SOURCES);
        let part = |first, count| {
            CrashingWords::new(WordRange::new(words.clone(), first, count).unwrap(), &crash)
        };
        let was_killed = fork(&crash, point, || {
            Allocator::format(part(0, allocator), 1, GRANULE).unwrap();
            Line::format(part(allocator, queue), setup).unwrap();
        })
        .was_killed();
        // Refused, or complete.
        let survivor = Participant::new(0, 1).unwrap();
        if let Ok(allocator) = Allocator::attach(part(0, allocator)) {
            allocator.audit(&Caller::new(survivor, &ipc::AlwaysAlive)).unwrap().unwrap();
        }
        if let Ok(queue) = Line::attach(part(allocator, queue)) {
            queue.subscribe(&Caller::new(survivor, &ipc::AlwaysAlive)).unwrap();
        }
        if !was_killed {
            assert!(Line::attach(part(allocator, queue)).is_ok());
            return;
        }
    }
}

/// A scenario is over once its victim finished at this many successive points: with several
/// processes, it makes a few stores more or fewer in each run.
const RUNS_TO_THE_END: u64 = 4;

#[test]
fn kill_at_any_store_loses_nothing() {
    deaths_while_making();
    let mut points = 0;
    for setup in SETUP {
        for (name, scenario) in scenarios() {
            let (mut killed, mut finished) = (0, 0);
            for point in 0.. {
                match run(&name, &scenario, setup, point) {
                    true => (killed, finished) = (killed + 1, 0),
                    false => finished += 1,
                }
                if finished == RUNS_TO_THE_END {
                    break;
                }
                assert!(point < 5000, "{name} does not finish");
            }
            println!("{name}, {:?}: killed at {killed} points", setup.overflow_policy);
            points += killed;
        }
    }
    let reached = SOURCES.reached();
    println!("{points} kills at {} stores in the source", reached.len());
    for store in &reached {
        println!("  {store}");
    }
    let missed = SOURCES.missed(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert!(missed.is_empty(), "no process was killed at: {missed:#?}");
}
