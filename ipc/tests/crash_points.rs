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
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crashing::{Crash, Crashing, Fork, half_evicted, places_that_store};
use ipc::{
    Allocator, AllocatorError, Block, Caller, Fate, Layout, Life, MappedWords, Owner, Part,
    Participant, Queue, QueueSetup, Roster, Segment, Spin, WhenFull, Words,
};

const LAYOUT: Layout = Layout::new("crash points", 1);
const GRANULE: u64 = 64;
const MOST_BLOCKS: u32 = 64;
const MEMORY: u64 = 1 << 16;
const SETUP: [QueueSetup; 2] = [
    QueueSetup { depth: 2, when_full: WhenFull::Refuse },
    QueueSetup { depth: 2, when_full: WhenFull::DropOldest },
];

/// The word of the queue that has a bit for each that stands in line for its lock.
const QUEUE_LINE: usize = 9;

type Books<'a> = Allocator<Crashing<'a>>;
type Line<'a> = Queue<Crashing<'a>, 2>;

/// Everything that two processes share.
struct World {
    words: MappedWords,
    crash: Crash,
    roster: Roster<Part<MappedWords>>,
    survivor: Participant,
    victim: Participant,
    setup: QueueSetup,
    /// Children that are not the victim.
    others: RefCell<Vec<Fork>>,
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
        let (crash, others, slow) = (Crash::new(), RefCell::default(), RefCell::default());
        let world = Self { words, crash, roster, survivor, victim, setup, others, slow };
        let caller = world.caller(survivor);
        let books = Allocator::format(world.books_words(), MOST_BLOCKS, GRANULE).unwrap();
        books.extend(&caller, 0, MEMORY).unwrap();
        Line::format(world.queue_words(), setup).unwrap();
        world
    }

    fn books_words(&self) -> Crashing<'_> {
        let count = Allocator::<MappedWords>::words_needed(MOST_BLOCKS);
        Crashing::new(Part::new(self.words.clone(), 256, count).unwrap(), &self.crash)
    }

    fn queue_words(&self) -> Crashing<'_> {
        Crashing::new(self.plain_queue_words(), &self.crash)
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

/// Points of what is left half done that are tried, at least.
const HALF_DONE: u64 = 60;

/// Prepares, as the survivor; what it gives the victim then does, until it is killed.
type Scenario = Box<dyn Fn(&World) -> Box<dyn FnOnce(&World)>>;
type Prepare = fn(&World) -> Box<dyn FnOnce(&World)>;

fn scenarios() -> Vec<(String, Scenario)> {
    let fixed: Vec<(&str, Prepare)> = vec![
        ("allocate from one large block", |_| {
            Box::new(|world| {
                world.allocate(world.victim, 1000, 1);
            })
        }),
        ("allocate what is left, whole", |world| {
            let rest = MEMORY - 1024;
            world.allocate(world.survivor, rest, 1);
            Box::new(|world| {
                world.allocate(world.victim, 1024, 1);
            })
        }),
        ("allocate aligned, with something left on both sides", |world| {
            world.allocate(world.survivor, 64, 1);
            Box::new(|world| {
                world.allocate(world.victim, 1000, 4096);
            })
        }),
        ("allocate at a place that was used before", |world| {
            let owner = Owner::participant(world.survivor);
            let caller = world.caller(world.survivor);
            let blocks: Vec<_> = (0..6).map(|_| world.allocate(world.survivor, 640, 1)).collect();
            for block in [&blocks[1], &blocks[2], &blocks[4]] {
                world.books().free(&caller, *block, owner).unwrap();
            }
            world.list_all();
            Box::new(|world| {
                world.allocate(world.victim, 320, 1);
                world.allocate(world.victim, 320, 512);
                world.allocate(world.victim, 640, 1);
            })
        }),
        ("allocate what is at hand, and what is at hand in pieces", |world| {
            let owner = Owner::participant(world.survivor);
            let caller = world.caller(world.survivor);
            let blocks: Vec<_> =
                (1..=6).map(|times| world.allocate(world.survivor, 64 * times, 1)).collect();
            let rest = MEMORY - 64 * (1..=6).sum::<u64>();
            world.allocate(world.survivor, rest, 1);
            for block in &blocks {
                world.books().free(&caller, *block, owner).unwrap();
            }
            Box::new(|world| {
                world.allocate(world.victim, 64 * 6, 1);
                world.allocate(world.victim, 64 * 8, 1);
            })
        }),
        ("free between taken and free neighbours, every way", |world| {
            let blocks: Vec<_> = (0..8).map(|_| world.allocate(world.victim, 256, 1)).collect();
            Box::new(move |world| {
                let caller = world.caller(world.victim);
                // Alone; before a free one; after a free one; between two.
                for at in [1, 4, 3, 5, 0, 7, 6, 2] {
                    let owner = Owner::participant(world.victim);
                    world.books().free(&caller, blocks[at], owner).unwrap();
                }
                world.books().statistics(&caller).unwrap();
            })
        }),
        ("free more than is kept at hand", |world| {
            let blocks: Vec<_> = (0..12).map(|_| world.allocate(world.victim, 256, 1)).collect();
            Box::new(move |world| {
                let caller = world.caller(world.victim);
                for at in [1, 4, 3, 5, 0, 7, 6, 2, 8, 9, 10, 11] {
                    let owner = Owner::participant(world.victim);
                    world.books().free(&caller, blocks[at], owner).unwrap();
                }
            })
        }),
        ("free beside a free one that is not the first of its list", |world| {
            let blocks: Vec<_> = (0..8).map(|_| world.allocate(world.victim, 256, 1)).collect();
            let (caller, owner) = (world.caller(world.victim), Owner::participant(world.victim));
            world.books().free(&caller, blocks[1], owner).unwrap();
            world.books().free(&caller, blocks[4], owner).unwrap();
            world.list_all();
            Box::new(move |world| {
                let caller = world.caller(world.victim);
                let owner = Owner::participant(world.victim);
                world.books().free(&caller, blocks[2], owner).unwrap();
                world.books().statistics(&caller).unwrap();
            })
        }),
        ("publish, and release, while somebody sleeps", |world| {
            let (queue, caller) = (world.queue(), world.caller(world.survivor));
            let mut subscriber = queue.subscribe(&caller).unwrap();
            subscriber.set_spin(Spin::Never);
            // It leaves the sign of a sleeper behind, as one does who is killed asleep.
            assert!(queue.take_until(&mut subscriber, soon()).is_none());
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                let block = world.allocate(world.victim, 64, 1);
                world.publish(world.victim, block).unwrap();
                queue.take(&mut subscriber).unwrap();
                world.release(world.victim, &subscriber, 0);
            })
        }),
        ("sleep until there is an entry, or room", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                subscriber.set_spin(Spin::Never);
                assert!(queue.take_until(&mut subscriber, soon()).is_none());
                let dispose = |entry| world.dispose(world.victim, entry);
                for _ in 0..3 {
                    let mut spin = Spin::Never;
                    let _ = queue.publish_until(&caller, [0, 0], &mut spin, soon(), dispose);
                }
            })
        }),
        ("wait for locks that others hold", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            let holder = Fork::new(&Crash::new(), u64::MAX, || {
                let hold = |_| std::thread::sleep(Duration::from_millis(15));
                let caller = world.caller(world.survivor);
                world.queue().publish_with(&caller, [0, 0], hold, |_| {}).unwrap();
            });
            world.others.borrow_mut().push(holder);
            std::thread::sleep(Duration::from_millis(5));
            Box::new(|world| {
                world.queue().subscribe(&world.caller(world.victim)).unwrap();
            })
        }),
        ("let go of a lock for which dead ones stand in line", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            world.plain_queue_words().fetch_or(QUEUE_LINE, 1 << 7 | 1 << 20);
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                // Kept for the dead each time, and taken after a moment.
                for _ in 0..3 {
                    queue.subscribe(&caller).unwrap();
                }
                assert_eq!(world.plain_queue_words().load(QUEUE_LINE, Relaxed), 0);
            })
        }),
        ("hand a lock to one who stands in line, and stand in line", |world| {
            let other = Fork::new(&Crash::new(), u64::MAX, || {
                let caller = world.caller(world.survivor);
                let queue = world.queue();
                for _ in 0..4 {
                    let subscriber = queue.subscribe(&caller).unwrap();
                    queue.unsubscribe(&caller, &subscriber, |_| {}).unwrap();
                }
            });
            world.others.borrow_mut().push(other);
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                let hold = |_| {
                    // Until the other one stands in line, if it comes.
                    let end = Instant::now() + Duration::from_millis(3);
                    let words = world.plain_queue_words();
                    while words.load(QUEUE_LINE, Relaxed) == 0 && Instant::now() < end {
                        std::thread::sleep(Duration::from_micros(20));
                    }
                };
                queue.publish_with(&caller, [0, 0], hold, |_| {}).unwrap();
                queue.unsubscribe(&caller, &subscriber, |_| {}).unwrap();
            })
        }),
        ("claim an entry that is dropped at this very moment", |_| {
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                if world.setup.when_full == WhenFull::Refuse {
                    return;
                }
                let mut subscriber = queue.subscribe(&caller).unwrap();
                queue.publish(&caller, [0, 0], |_| {}).unwrap();
                let other = Queue::<_, 2>::attach(world.plain_queue_words()).unwrap();
                let me = world.survivor;
                world.crash.at_next_exchange_in("src/queue/subscribe.rs", move || {
                    let caller = Caller::new(me, &ipc::Immortal);
                    for _ in 0..36 {
                        other.publish(&caller, [0, 0], |_| {}).unwrap();
                    }
                });
                assert!(queue.take(&mut subscriber).unwrap().position > 0);
            })
        }),
        ("give the allocator more memory", |_| {
            Box::new(|world| {
                let caller = world.caller(world.victim);
                world.books().extend(&caller, MEMORY * 2, 4096).unwrap();
            })
        }),
        ("subscribe, and leave", |_| {
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                queue.unsubscribe(&caller, &subscriber, |_| {}).unwrap();
            })
        }),
        ("go on with what another began in the name of a role", |world| {
            let (queue, caller) = (world.queue(), world.caller(world.survivor));
            let mut before = queue.subscribe_as(&caller, carrier()).unwrap();
            for _ in 0..2 {
                let block = world.allocate(world.survivor, 100, 1);
                world.publish(world.survivor, block).unwrap();
                queue.take(&mut before).unwrap();
            }
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut after = queue.resume(&caller, carrier(), |_| {}).unwrap().unwrap();
                for position in 0..2 {
                    assert_eq!(queue.take(&mut after).unwrap().position, position);
                    world.release(world.victim, &after, position);
                }
            })
        }),
        ("stop, and go on holding", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..2 {
                    let block = world.allocate(world.victim, 500, 1);
                    world.publish(world.victim, block).unwrap();
                }
                let held = queue.take(&mut subscriber).unwrap();
                let dispose = |entry| world.dispose(world.victim, entry);
                queue.stop(&caller, &subscriber, dispose).unwrap();
                world.release(world.victim, &subscriber, held.position);
            })
        }),
        ("evict one who is slow", |world| {
            world.be_slow();
            Box::new(|world| world.evict_the_slow(world.victim))
        }),
        ("go on with a role that held what is out of reach", |world| {
            if world.setup.when_full == WhenFull::Refuse {
                return Box::new(|_| {});
            }
            world.hold_what_gets_out_of_reach(carrier());
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let dispose = |entry| world.dispose(world.victim, entry);
                queue.resume(&caller, carrier(), dispose).unwrap().unwrap();
            })
        }),
        ("subscribe in the name of a role", |_| {
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                queue.subscribe_as(&caller, carrier()).unwrap();
            })
        }),
        ("publish", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            Box::new(|world| {
                for _ in 0..5 {
                    let block = world.allocate(world.victim, 500, 1);
                    // Full, at the end, where nothing is dropped.
                    if world.publish(world.victim, block).is_err() {
                        return;
                    }
                }
            })
        }),
        ("read, alone", |_| {
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..4 {
                    let block = world.allocate(world.victim, 500, 1);
                    world.publish(world.victim, block).unwrap();
                    let taken = queue.take(&mut subscriber).unwrap();
                    world.release(world.victim, &subscriber, taken.position);
                }
            })
        }),
        ("read beside others, and leave what is unread", |world| {
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..2 {
                    let block = world.allocate(world.victim, 500, 1);
                    world.publish(world.victim, block).unwrap();
                }
                let taken = queue.take(&mut subscriber).unwrap();
                world.release(world.victim, &subscriber, taken.position);
                queue.take(&mut subscriber).unwrap();
                queue
                    .unsubscribe(&caller, &subscriber, |entry| world.dispose(world.victim, entry))
                    .unwrap();
            })
        }),
        ("hold an entry while others are dropped", |_| {
            Box::new(|world| {
                let (queue, caller) = (world.queue(), world.caller(world.victim));
                if world.setup.when_full == WhenFull::Refuse {
                    return;
                }
                let mut subscriber = queue.subscribe(&caller).unwrap();
                let mut held = None;
                for _ in 0..80 {
                    let block = world.allocate(world.victim, 64, 1);
                    world.publish(world.victim, block).unwrap();
                    held = held.or_else(|| queue.take(&mut subscriber));
                }
                world.release(world.victim, &subscriber, held.unwrap().position);
            })
        }),
        ("clean up after another that died", |world| {
            // Dead is who is not in the roster: this one never was.
            let dead = Participant::new(200, 1).unwrap();
            let caller = Caller::new(dead, &world.roster);
            let queue = world.queue();
            let mut subscriber = queue.subscribe(&caller).unwrap();
            for _ in 0..2 {
                let block = world.allocate(dead, 500, 1);
                world.publish(dead, block).unwrap();
            }
            queue.take(&mut subscriber).unwrap();
            world.allocate(dead, 100, 1);
            // It died holding both locks, with something half done.
            Box::new(move |world| world.clean_up_after(world.victim, dead))
        }),
    ];
    let fixed =
        fixed.into_iter().map(|(name, scenario)| (name.to_owned(), Box::new(scenario) as Scenario));
    // One that died in the middle of something leaves the locks, and what they protect,
    // to the victim, which dies repairing.
    let repairs = (0..HALF_DONE).step_by(2).map(|point| {
        let scenario = move |world: &World| -> Box<dyn FnOnce(&World)> {
            let dead = Participant::new(200, 1).unwrap();
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            let was_killed = Fork::new(&world.crash, point, || world.half_done(dead)).wait();
            assert!(was_killed, "there are no {point} points to be left half done at");
            Box::new(move |world| world.clean_up_after(world.victim, dead))
        };
        (format!("repair what was left half done at point {point}"), Box::new(scenario) as Scenario)
    });
    fixed.chain(repairs).chain(half_evicted()).collect()
}

impl World {
    /// What another child dies in the middle of.
    fn half_done(&self, dead: Participant) {
        let block = self.allocate(dead, 100, 1);
        let _ = self.publish(dead, block);
        self.allocate(dead, 300, 512);
    }
}

/// Runs the scenario with the victim killed at its `point`th point; false if it came
/// to its end.
fn run(name: &str, scenario: &Scenario, setup: QueueSetup, point: u64) -> bool {
    let world = World::new(setup);
    let act = scenario(&world);
    let child = Fork::new(&world.crash, point, || act(&world));
    world.roster.learn(world.victim, child.life());
    let was_killed = child.wait();
    // Noted for those, too, that were born before the victim, and do not know its life.
    assert!(world.roster.is_dead(Some(world.victim)));
    world.others.take().into_iter().for_each(|other| assert!(!other.wait()));
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
        let crash = Crash::new();
        let part =
            |first, count| Crashing::new(Part::new(words.clone(), first, count).unwrap(), &crash);
        let was_killed = Fork::new(&crash, point, || {
            Allocator::format(part(0, books), 1, GRANULE).unwrap();
            Line::format(part(books, queue), setup).unwrap();
        })
        .wait();
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
    let mut reached = BTreeSet::new();
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
    reached.extend(crashing::reached());
    let places = places_that_store();
    println!("{points} deaths at {} places in the source", reached.len());
    for place in &reached {
        println!("  {place}");
    }
    let missed: Vec<_> = places.difference(&reached).collect();
    assert!(!places.is_empty() && missed.is_empty(), "nobody died at: {missed:#?}");
}
