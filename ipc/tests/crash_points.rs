//! Kills a process before and after every single store to shared memory, and looks
//! whether those that live on find everything whole, and lose nothing.
//!
//! The structures reach shared memory through a trait, so the words that they are
//! given here count the stores and end the process at the one that is asked for. At
//! the end every place in the source that stores must have been reached, or the test
//! fails: a store that no test kills at has not been thought about.

mod crashing;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use crashing::{SOURCES, Scenario, fork, scenarios};
use ipc::crash_test::{Crash, CrashingWords};
use ipc::{
    Allocator, AllocatorError, Block, Caller, Fate, Layout, Life, MappedWords, Owner, Part,
    Participant, Queue, QueueSetup, Roster, Segment, WhenFull,
};
use testkit::children::ForkedChild;

const LAYOUT: Layout = Layout::new("crash points", 1);
const GRANULE: u64 = 64;
const MOST_BLOCKS: u32 = 64;
const MEMORY: u64 = 1 << 16;
const SETUP: [QueueSetup; 3] = [
    QueueSetup { depth: 2, when_full: WhenFull::Refuse },
    QueueSetup { depth: 2, when_full: WhenFull::DropOldest },
    QueueSetup { depth: 2, when_full: WhenFull::DropNewest },
];

/// The word of the queue that has a bit for each that stands in line for its lock.
const QUEUE_LINE: usize = 9;

type Books<'a> = Allocator<CrashingWords<'a>>;
type Line<'a> = Queue<CrashingWords<'a>, 2>;

/// Everything that two processes share.
struct World {
    words: MappedWords,
    crash: Crash,
    roster: Roster<Part<MappedWords>>,
    survivor: Participant,
    victim: Participant,
    setup: QueueSetup,
    /// Children that are not the victim.
    others: RefCell<Vec<ForkedChild>>,
    /// One that is about to be evicted, and holds the first entry.
    slow: RefCell<Option<ipc::Subscriber>>,
}

fn soon() -> Instant {
    Instant::now() + Duration::from_millis(1)
}

/// What blocks belong to that are on their way to readers.
fn delivered() -> Owner {
    Owner::other(1).unwrap()
}

/// In whose name what one process after the other does.
fn carrier() -> Participant {
    Participant::role(0).unwrap()
}

impl World {
    fn new(setup: QueueSetup) -> Self {
        let books = Allocator::<MappedWords>::words_needed(MOST_BLOCKS);
        let queue = Queue::<MappedWords, 2>::words_needed(setup);
        let count = 256 + books + queue;
        let segment = Segment::create(LAYOUT, count * 8).unwrap();
        let words = segment.words();
        let roster = Roster::new(Part::new(words.clone(), 0, 256).unwrap()).unwrap();
        let survivor = roster.admit(Life::of_this_process().unwrap()).unwrap();
        // Its life is learnt when it is born.
        let victim = roster.admit(Life::of_this_process().unwrap()).unwrap();
        let (crash, others, slow) = (Crash::new(&SOURCES), RefCell::default(), RefCell::default());
        let world = Self { words, crash, roster, survivor, victim, setup, others, slow };
        let caller = world.caller(survivor);
        let books = Allocator::format(world.books_words(), MOST_BLOCKS, GRANULE).unwrap();
        books.extend(&caller, 0, MEMORY).unwrap();
        Line::format(world.queue_words(), setup).unwrap();
        world
    }

    fn books_words(&self) -> CrashingWords<'_> {
        let count = Allocator::<MappedWords>::words_needed(MOST_BLOCKS);
        CrashingWords::new(Part::new(self.words.clone(), 256, count).unwrap(), &self.crash)
    }

    fn queue_words(&self) -> CrashingWords<'_> {
        CrashingWords::new(self.plain_queue_words(), &self.crash)
    }

    fn plain_queue_words(&self) -> Part<MappedWords> {
        let first = 256 + Allocator::<MappedWords>::words_needed(MOST_BLOCKS);
        let count = Queue::<MappedWords, 2>::words_needed(self.setup);
        Part::new(self.words.clone(), first, count).unwrap()
    }

    fn books(&self) -> Books<'_> {
        Allocator::attach(self.books_words()).unwrap()
    }

    fn queue(&self) -> Line<'_> {
        Queue::attach(self.queue_words()).unwrap()
    }

    fn caller(&self, me: Participant) -> Caller<'_> {
        Caller { patience: Duration::from_secs(20), ..Caller::new(me, &self.roster) }
    }

    fn allocate(&self, me: Participant, bytes: u64, alignment: u64) -> Block {
        let owner = Owner::participant(me);
        self.books().allocate(&self.caller(me), owner, bytes, alignment).unwrap().0
    }

    /// What is free is joined, and nothing is at hand.
    fn list_all(&self) {
        self.books().statistics(&self.caller(self.survivor)).unwrap();
    }

    /// Frees what an entry names, whoever did so before.
    fn dispose(&self, me: Participant, entry: [u64; 2]) {
        let _ = self.books().free(&self.caller(me), Block::from_bits(entry[0]), delivered());
    }

    /// What everybody does who sends a block along.
    fn publish(&self, me: Participant, block: Block) -> Result<(), ipc::QueueError> {
        let hand_over = |_| {
            self.books().transfer(block, Owner::participant(me), delivered()).unwrap();
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
            queue.settle(position);
        }
    }

    /// What is done after a death, by one who lives.
    fn clean_up_after(&self, me: Participant, dead: Participant) {
        let (books, queue, caller) = (self.books(), self.queue(), self.caller(me));
        queue.expel(&caller, dead, |entry| self.dispose(me, entry)).unwrap();
        // What was handed over and not delivered is nobody's; nobody publishes meanwhile.
        let mut referred_to = BTreeSet::new();
        queue.find_entries(&caller, |entry| referred_to.extend([entry[0]])).unwrap();
        books
            .reclaim(&caller, delivered(), |block| referred_to.contains(&block.to_bits()))
            .unwrap();
        books.reclaim(&caller, Owner::participant(dead), |_| false).unwrap();
    }

    /// Is everything as it must be, when nobody but the survivor is left?
    fn check(&self, what: &str) {
        let (books, queue) = (self.books(), self.queue());
        let caller = self.caller(self.survivor);
        books.audit(&caller).unwrap().unwrap_or_else(|flaw| panic!("{what}: {flaw}"));
        let mut referred_to = BTreeSet::new();
        queue.find_entries(&caller, |entry| referred_to.extend([entry[0]])).unwrap();
        // What a role has still to do is done by the next.
        if let Some(mut next) = queue.resume(&caller, carrier(), |_| {}).unwrap() {
            // But for what it held, and cannot come by any more.
            let may_miss = u64::from(what.contains("out of reach"));
            while let Some(taken) = queue.take(&mut next) {
                assert!(taken.missed <= may_miss, "{what}: {taken:?}");
                self.release(self.survivor, &next, taken.position);
            }
            assert_eq!(queue.oldest_unreleased(next.seat()), queue.position(), "{what}");
        }
        for listed in books.blocks(&caller).unwrap() {
            match listed.owner {
                None => {}
                Some(owner) if owner == Owner::participant(self.survivor) => {}
                Some(owner) if owner == delivered() => assert!(
                    referred_to.contains(&listed.block.to_bits()),
                    "{what}: {listed:?} is delivered to nobody"
                ),
                Some(owner) => panic!("{what}: {listed:?} belongs to {owner:?}"),
            }
        }
    }
}

/// Runs the scenario with the victim killed at its `point`th point; false if it came
/// to its end.
fn run(name: &str, scenario: &Scenario, setup: QueueSetup, point: u64) -> bool {
    let world = World::new(setup);
    let act = scenario(&world);
    let child = fork(&world.crash, point, || act(&world));
    world.roster.learn(world.victim, Life::from_fd(child.pidfd()).unwrap());
    let was_killed = child.was_killed();
    // Noted for those, too, that were born before the victim, and do not know its life.
    assert!(world.roster.is_dead(Some(world.victim)));
    world.others.take().into_iter().for_each(|other| assert!(!other.was_killed()));
    let what = format!("{name}, {:?}, killed at point {point}", setup.when_full);
    // Whatever others do next finds a lock held by the dead, or not.
    let owner = Owner::participant(world.survivor);
    match world.books().allocate(&world.caller(world.survivor), owner, 100, 1) {
        Ok(_) | Err(AllocatorError::OutOfMemory { .. }) => {}
        Err(error) => panic!("{what}: {error}"),
    }
    if point.is_multiple_of(2) {
        let _ = world.queue().subscribe(&world.caller(world.survivor)).unwrap();
    }
    world.clean_up_after(world.survivor, world.victim);
    world.clean_up_after(world.survivor, Participant::new(200, 1).unwrap());
    world.check_the_slow(&what);
    world.check(&what);
    was_killed
}

/// What is not made to its end is not there.
fn deaths_while_making() {
    let setup = SETUP[0];
    let scratch = 256;
    let books = Allocator::<MappedWords>::words_needed(1);
    let queue = Queue::<MappedWords, 2>::words_needed(setup);
    for point in 0.. {
        let words = Segment::create(LAYOUT, (scratch + books + queue) * 8).unwrap().words();
        let crash = Crash::new(&SOURCES);
        let part = |first, count| {
            CrashingWords::new(Part::new(words.clone(), first, count).unwrap(), &crash)
        };
        let was_killed = fork(&crash, point, || {
            Allocator::format(part(0, books), 1, GRANULE).unwrap();
            Line::format(part(books, queue), setup).unwrap();
        })
        .was_killed();
        // Refused, or whole.
        let survivor = Participant::new(0, 1).unwrap();
        if let Ok(books) = Allocator::attach(part(0, books)) {
            books.audit(&Caller::new(survivor, &ipc::Immortal)).unwrap().unwrap();
        }
        if let Ok(queue) = Line::attach(part(books, queue)) {
            queue.subscribe(&Caller::new(survivor, &ipc::Immortal)).unwrap();
        }
        if !was_killed {
            assert!(Line::attach(part(books, queue)).is_ok());
            return;
        }
    }
}

#[test]
fn a_death_at_any_store_loses_nothing() {
    deaths_while_making();
    let mut points = 0;
    for setup in SETUP {
        for (name, scenario) in scenarios() {
            let mut point = 0;
            loop {
                let was_killed = run(&name, &scenario, setup, point);
                if !was_killed {
                    break;
                }
                point += 1;
                assert!(point < 5000, "{name} does not come to its end");
            }
            println!("{name}, {:?}: killed at {point} points", setup.when_full);
            points += point;
        }
    }
    let reached = SOURCES.reached();
    println!("{points} deaths at {} places in the source", reached.len());
    for place in &reached {
        println!("  {place}");
    }
    let missed = SOURCES.missed(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert!(missed.is_empty(), "nobody died at: {missed:#?}");
}
