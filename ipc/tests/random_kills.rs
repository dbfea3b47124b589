//! Processes that allocate, publish, read and free, and are killed at random, a
//! thousand times over: nothing is lost, nothing belongs to two.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use ipc::{
    Allocator, AllocatorError, Block, Caller, Fate, Layout, Life, MappedWords, Owner, Part,
    Participant, Queue, QueueError, QueueSetup, Roster, Segment, Spin, WhenFull, Words,
};
use testkit::children::ForkedChild;

const LAYOUT: Layout = Layout::new("random kills", 1);
const KILLS: usize = 1000;
const WORKERS: usize = 4;
const GRANULE: u64 = 64;
const MOST_BLOCKS: u32 = 512;
const MEMORY: u64 = 1 << 20;
/// A word for each granule: who thinks that it is theirs.
const CLAIMS: usize = (MEMORY / GRANULE) as usize;

struct World {
    roster: Roster<Part<MappedWords>>,
    books: Allocator<Part<MappedWords>>,
    queue: Queue<Part<MappedWords>, 2>,
    claims: Part<MappedWords>,
    parts: [Part<MappedWords>; 2],
}

fn delivered() -> Owner {
    Owner::other(1).unwrap()
}

impl World {
    fn new(when_full: WhenFull) -> Self {
        let setup = QueueSetup { depth: 8, when_full };
        let books = Allocator::<MappedWords>::words_needed(MOST_BLOCKS);
        let queue = Queue::<MappedWords, 2>::words_needed(setup);
        let all = Segment::create(LAYOUT, (256 + books + queue + CLAIMS) * 8).unwrap().words();
        let mut next = 0;
        let mut part = |count| {
            next += count;
            Part::new(all.clone(), next - count, count).unwrap()
        };
        let roster = Roster::new(part(256)).unwrap();
        let parts = [part(books), part(queue)];
        let books = Allocator::format(parts[0].clone(), MOST_BLOCKS, GRANULE).unwrap();
        let queue = Queue::format(parts[1].clone(), setup).unwrap();
        Self { roster, books, queue, claims: part(CLAIMS), parts }
    }

    /// What a forked child does with its copies first of all: those are its parent's.
    fn attach_again(&mut self) {
        let me = Participant::new(0, 1).unwrap();
        let caller = Caller::new(me, &self.roster);
        assert_eq!(self.books.statistics(&caller), Err(AllocatorError::Forked));
        assert!(matches!(self.queue.subscribe(&caller), Err(QueueError::Forked)));
        self.books = Allocator::attach(self.parts[0].clone()).unwrap();
        self.queue = Queue::attach(self.parts[1].clone()).unwrap();
    }

    fn caller(&self, me: Participant) -> Caller<'_> {
        Caller { patience: Duration::from_secs(30), ..Caller::new(me, &self.roster) }
    }

    /// Writes its name all over a block that it was given, and looks whether anybody
    /// living has written there: two that own the same bytes would meet here.
    fn claim(&self, block: Block, me: Participant) {
        let place = self.books.find(block).unwrap();
        for at in place.offset / GRANULE..(place.offset + place.length) / GRANULE {
            let was = self.claims.swap(at as usize, me.number().into());
            let owner = Participant::from_number(was as u32);
            assert!(
                was == 0 || self.roster.is_dead(owner) || owner == Some(me),
                "{block:?} is {me}'s, and {owner:?}'s too"
            );
            assert!(was == 0 || owner != Some(me), "{me} was given it twice");
        }
    }

    fn unclaim(&self, block: Block) {
        if let Ok(place) = self.books.find(block) {
            for at in place.offset / GRANULE..(place.offset + place.length) / GRANULE {
                self.claims.store(at as usize, 0, Release);
            }
        }
    }

    fn dispose(&self, me: Participant, entry: [u64; 2]) {
        let _ = self.books.free(&self.caller(me), Block::from_bits(entry[0]), delivered());
    }

    /// A life of work, until it is killed.
    fn work(&self, me: Participant, mut random: u64) {
        let (caller, owner) = (self.caller(me), Owner::participant(me));
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut subscriber = self.queue.subscribe(&caller).unwrap();
        let (mut mine, mut held) = (Vec::new(), Vec::new());
        loop {
            match next() % 8 {
                0..=2 if mine.len() < 8 => {
                    match self.books.allocate(&caller, owner, next() % 5000 + 1, 1 << (next() % 9))
                    {
                        Ok((block, _)) => {
                            self.claim(block, me);
                            mine.push(block);
                        }
                        Err(
                            AllocatorError::OutOfMemory { .. } | AllocatorError::OutOfBlocks { .. },
                        ) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                3 if !mine.is_empty() => {
                    let block = mine.swap_remove(next() as usize % mine.len());
                    self.unclaim(block);
                    self.books.free(&caller, block, owner).unwrap();
                }
                4 | 5 if !mine.is_empty() => {
                    let block = mine.pop().unwrap();
                    self.unclaim(block);
                    let check = block.to_bits() ^ 0x5555;
                    let hand_over = |_| self.books.transfer(block, owner, delivered()).unwrap();
                    let entry = [block.to_bits(), check];
                    match self
                        .queue
                        .publish_with(&caller, entry, hand_over, |old| self.dispose(me, old))
                    {
                        Ok(_) => {}
                        Err(QueueError::Full) => self.books.free(&caller, block, owner).unwrap(),
                        Err(error) => panic!("{error}"),
                    }
                }
                6 => {
                    let soon = Instant::now() + Duration::from_micros(50);
                    subscriber.set_spin(if next() % 2 == 0 {
                        Spin::Never
                    } else {
                        Spin::default()
                    });
                    if let Some(taken) = self.queue.take_until(&mut subscriber, soon) {
                        assert_eq!(taken.entry[1], taken.entry[0] ^ 0x5555, "a torn entry");
                        // While it is held it stays what it is.
                        let block = Block::from_bits(taken.entry[0]);
                        assert_eq!(self.books.owner(block), Ok(delivered()));
                        held.push(taken.position);
                    }
                }
                _ if !held.is_empty() => {
                    let position = held.swap_remove(next() as usize % held.len());
                    if let Some(entry) = self.queue.release(&subscriber, position) {
                        self.dispose(me, entry);
                        self.queue.settle(position);
                    }
                }
                _ => {}
            }
            assert!(self.queue.is_subscribed(&subscriber), "{me} was taken for dead");
        }
    }

    fn clean_up_after(&self, me: Participant, dead: Participant) {
        let caller = self.caller(me);
        self.queue.expel(&caller, dead, |entry| self.dispose(me, entry)).unwrap();
        self.books.reclaim(&caller, Owner::participant(dead), |_| false).unwrap();
        self.sweep(me);
        // Granules that it had claimed are others' by now, or nobody's.
        for at in 0..CLAIMS {
            let _ = self.claims.compare_exchange(at, dead.number().into(), 0);
        }
        assert!(self.roster.strike_off(dead));
    }

    /// What was handed over by one that died before it was delivered belongs to nobody.
    /// It is looked for twice, since somebody may be handing over just now.
    fn sweep(&self, me: Participant) {
        let caller = self.caller(me);
        let orphans = || {
            let mut owned: BTreeSet<_> = self
                .books
                .blocks(&caller)
                .unwrap()
                .into_iter()
                .filter(|listed| listed.owner == Some(delivered()))
                .map(|listed| listed.block.to_bits())
                .collect();
            self.queue
                .find_entries(&caller, |entry| {
                    owned.remove(&entry[0]);
                })
                .unwrap();
            owned
        };
        // Found before any of them was delivered, or after it was read by all: the
        // second look tells, because what is delivered between is not in it.
        let (first, second) = (orphans(), orphans());
        for bits in first.intersection(&second) {
            let _ = self.books.free(&caller, Block::from_bits(*bits), delivered());
        }
    }
}

struct Worker {
    child: ForkedChild,
    me: Participant,
}

fn start(world: &mut World, random: u64) -> Worker {
    // Its life is learnt once it has one; its place is kept by ours until then.
    let me = world.roster.admit(Life::of_this_process().unwrap()).unwrap();
    let child = ForkedChild::new(|| {
        world.attach_again();
        world.work(me, random);
    });
    world.roster.learn(me, Life::from_fd(child.pidfd()).unwrap());
    Worker { child, me }
}

fn kill(world: &World, worker: Worker) -> Participant {
    worker.child.kill();
    assert!(worker.child.was_killed());
    assert!(world.roster.is_dead(Some(worker.me)));
    worker.me
}

fn thousand_kills(when_full: WhenFull, kills: usize) {
    let mut world = World::new(when_full);
    let me = world.roster.admit(Life::of_this_process().unwrap()).unwrap();
    world.books.extend(&world.caller(me), 0, MEMORY).unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 33 | 1
    };
    let mut workers: Vec<_> = (0..WORKERS).map(|_| start(&mut world, next())).collect();
    for round in 0..kills {
        std::thread::sleep(Duration::from_micros(next() % 3000));
        let at = next() as usize % WORKERS;
        let dead = kill(&world, workers.swap_remove(at));
        world.clean_up_after(me, dead);
        workers.push(start(&mut world, next()));
        if round % 20 == 0 {
            let flaw = world.books.audit(&world.caller(me)).unwrap();
            assert_eq!(flaw, Ok(()), "after {round} kills");
        }
    }
    let dead: Vec<_> = workers.into_iter().map(|worker| kill(&world, worker)).collect();
    for dead in dead {
        world.clean_up_after(me, dead);
    }
    let caller = world.caller(me);
    assert_eq!(world.books.audit(&caller).unwrap(), Ok(()));
    let statistics = world.books.statistics(&caller).unwrap();
    println!(
        "{when_full:?}: {kills} kills, {} repairs, {} entries",
        statistics.repairs,
        world.queue.position()
    );
    assert_eq!(statistics.free, MEMORY, "{:?}", world.books.blocks(&caller));
    assert_eq!(statistics.largest_free, MEMORY);
    assert_eq!(world.queue.subscribers(), 0);
}

#[test]
fn a_thousand_kills_lose_nothing() {
    thousand_kills(WhenFull::Refuse, KILLS / 2);
    thousand_kills(WhenFull::DropOldest, KILLS / 2);
    thousand_kills(WhenFull::DropNewest, KILLS / 4);
}
