//! Processes that allocate, publish, read and free are killed at random, a thousand times:
//! nothing is lost, and no block has two owners.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Release;
use std::time::{Duration, Instant};

use ipc::{
    Allocator, AllocatorError, Block, Caller, Layout, Liveness, MappedWords, OverflowPolicy, Owner,
    Participant, ParticipantTable, PidFd, Queue, QueueError, QueueSetup, Segment, WaitStrategy,
    WordRange, Words,
};
use testkit::children::ForkedChild;

const LAYOUT: Layout = Layout::new("random kills", 1);
const KILLS: usize = 1000;
const WORKERS: usize = 4;
const GRANULE: u64 = 64;
const MAX_BLOCKS: u32 = 512;
const MEMORY: u64 = 1 << 20;
/// A word for each granule: the participant that claims it.
const CLAIMS: usize = (MEMORY / GRANULE) as usize;

struct Fixture {
    participants: ParticipantTable<WordRange<MappedWords>>,
    allocator: Allocator<WordRange<MappedWords>>,
    queue: Queue<WordRange<MappedWords>, 2>,
    claims: WordRange<MappedWords>,
    parts: [WordRange<MappedWords>; 2],
}

fn delivered() -> Owner {
    Owner::other(1).unwrap()
}

impl Fixture {
    fn new(overflow_policy: OverflowPolicy) -> Self {
        let setup = QueueSetup { depth: 8, max_held: 8, overflow_policy };
        let allocator = Allocator::<MappedWords>::required_words(MAX_BLOCKS);
        let queue = Queue::<MappedWords, 2>::required_words(setup);
        let all = Segment::create(LAYOUT, (256 + allocator + queue + CLAIMS) * 8).unwrap().words();
        let mut next = 0;
        let mut part = |count| {
            next += count;
            WordRange::new(all.clone(), next - count, count).unwrap()
        };
        let participants = ParticipantTable::new(part(256)).unwrap();
        let parts = [part(allocator), part(queue)];
        let allocator = Allocator::format(parts[0].clone(), MAX_BLOCKS, GRANULE).unwrap();
        let queue = Queue::format(parts[1].clone(), setup).unwrap();
        Self { participants, allocator, queue, claims: part(CLAIMS), parts }
    }

    /// A forked child must not use its copies, which belong to its parent, so this drops them
    /// first.
    fn attach_again(&mut self) {
        let me = Participant::new(0, 1).unwrap();
        let caller = Caller::new(me, &self.participants);
        assert_eq!(self.allocator.statistics(&caller), Err(AllocatorError::Forked));
        assert!(matches!(self.queue.subscribe(&caller), Err(QueueError::Forked)));
        self.allocator = Allocator::attach(self.parts[0].clone()).unwrap();
        self.queue = Queue::attach(self.parts[1].clone()).unwrap();
    }

    fn caller(&self, me: Participant) -> Caller<'_> {
        Caller { timeout: Duration::from_secs(30), ..Caller::new(me, &self.participants) }
    }

    /// Writes its name into every granule of a new block, and checks for the name of a living
    /// owner: two owners of the same bytes would be detected here.
    fn claim(&self, block: Block, me: Participant) {
        let block_range = self.allocator.find(block).unwrap();
        for at in block_range.offset / GRANULE..(block_range.offset + block_range.length) / GRANULE
        {
            let was = self.claims.swap(at as usize, me.number().into());
            let owner = Participant::from_number(was as u32);
            assert!(
                was == 0 || self.participants.is_dead(owner) || owner == Some(me),
                "{block:?} belongs to {me} and to {owner:?}"
            );
            assert!(was == 0 || owner != Some(me), "{me} got the block twice");
        }
    }

    fn unclaim(&self, block: Block) {
        if let Ok(block_range) = self.allocator.find(block) {
            for at in
                block_range.offset / GRANULE..(block_range.offset + block_range.length) / GRANULE
            {
                self.claims.store(at as usize, 0, Release);
            }
        }
    }

    fn dispose(&self, me: Participant, entry: [u64; 2]) {
        let _ = self.allocator.free(&self.caller(me), Block::from_bits(entry[0]), delivered());
    }

    /// The work loop of a child, until it is killed.
    fn work(&self, me: Participant, mut random: u64) {
        let (caller, owner) = (self.caller(me), Owner::participant(me));
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut subscriber = self.queue.subscribe(&caller).unwrap();
        let (mut own_blocks, mut held) = (Vec::new(), Vec::new());
        loop {
            match next() % 8 {
                0..=2 if own_blocks.len() < 8 => {
                    match self.allocator.allocate(
                        &caller,
                        owner,
                        next() % 5000 + 1,
                        1 << (next() % 9),
                    ) {
                        Ok((block, _)) => {
                            self.claim(block, me);
                            own_blocks.push(block);
                        }
                        Err(
                            AllocatorError::OutOfMemory { .. } | AllocatorError::OutOfBlocks { .. },
                        ) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                3 if !own_blocks.is_empty() => {
                    let block = own_blocks.swap_remove(next() as usize % own_blocks.len());
                    self.unclaim(block);
                    self.allocator.free(&caller, block, owner).unwrap();
                }
                4 | 5 if !own_blocks.is_empty() => {
                    let block = own_blocks.pop().unwrap();
                    self.unclaim(block);
                    let check = block.to_bits() ^ 0x5555;
                    let hand_over = |_| self.allocator.transfer(block, owner, delivered()).unwrap();
                    let entry = [block.to_bits(), check];
                    match self
                        .queue
                        .publish_with(&caller, entry, hand_over, |old| self.dispose(me, old))
                    {
                        Ok(_) => {}
                        Err(QueueError::Full) => {
                            self.allocator.free(&caller, block, owner).unwrap()
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                6 => {
                    let soon = Instant::now() + Duration::from_micros(50);
                    subscriber.set_wait_strategy(if next() % 2 == 0 {
                        WaitStrategy::Block
                    } else {
                        WaitStrategy::default()
                    });
                    if let Some(taken) = self.queue.take_until(&mut subscriber, soon) {
                        assert_eq!(taken.entry[1], taken.entry[0] ^ 0x5555, "a torn entry");
                        // The payload of a held entry must not change.
                        let block = Block::from_bits(taken.entry[0]);
                        assert_eq!(self.allocator.owner(block), Ok(delivered()));
                        held.push(taken.position);
                    }
                }
                _ if !held.is_empty() => {
                    let position = held.swap_remove(next() as usize % held.len());
                    if let Some(entry) = self.queue.release(&subscriber, position) {
                        self.dispose(me, entry);
                        self.queue.mark_disposed(position);
                    }
                }
                _ => {}
            }
            assert!(self.queue.is_subscribed(&subscriber), "{me} was taken for dead");
        }
    }

    fn clean_up_after(&self, me: Participant, dead: Participant) {
        let caller = self.caller(me);
        self.queue.remove_participant(&caller, dead, |entry| self.dispose(me, entry)).unwrap();
        self.allocator.reclaim(&caller, Owner::participant(dead), |_| false).unwrap();
        self.sweep(me);
        // Granules that it had claimed now belong to others, or are free.
        for at in 0..CLAIMS {
            let _ = self.claims.compare_exchange(at, dead.number().into(), 0);
        }
        assert!(self.participants.free_slot(dead));
    }

    /// A block that a dead process handed over but did not deliver has no owner. It is searched
    /// twice, since another process may be handing over a block now.
    fn sweep(&self, me: Participant) {
        let caller = self.caller(me);
        let orphans = || {
            let mut owned: BTreeSet<_> = self
                .allocator
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
        // Found before its delivery, or after all had read it. The second search tells: a block
        // delivered in between is not in it.
        let (first, second) = (orphans(), orphans());
        for bits in first.intersection(&second) {
            let _ = self.allocator.free(&caller, Block::from_bits(*bits), delivered());
        }
    }
}

struct Worker {
    child: ForkedChild,
    me: Participant,
}

fn start(fixture: &mut Fixture, random: u64) -> Worker {
    // Its pidfd is added after it was started; until then its slot is protected by that of this
    // process.
    let me = fixture.participants.admit(PidFd::of_this_process().unwrap()).unwrap();
    let child = ForkedChild::new(|| {
        fixture.attach_again();
        fixture.work(me, random);
    });
    fixture.participants.add_pidfd(me, PidFd::from_fd(child.pidfd()).unwrap());
    Worker { child, me }
}

fn kill(fixture: &Fixture, worker: Worker) -> Participant {
    worker.child.kill();
    assert!(worker.child.was_killed());
    assert!(fixture.participants.is_dead(Some(worker.me)));
    worker.me
}

fn thousand_kills(overflow_policy: OverflowPolicy, kills: usize) {
    let mut fixture = Fixture::new(overflow_policy);
    let me = fixture.participants.admit(PidFd::of_this_process().unwrap()).unwrap();
    fixture.allocator.extend(&fixture.caller(me), 0, MEMORY).unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        random >> 33 | 1
    };
    let mut workers: Vec<_> = (0..WORKERS).map(|_| start(&mut fixture, next())).collect();
    for round in 0..kills {
        std::thread::sleep(Duration::from_micros(next() % 3000));
        let at = next() as usize % WORKERS;
        let dead = kill(&fixture, workers.swap_remove(at));
        fixture.clean_up_after(me, dead);
        workers.push(start(&mut fixture, next()));
        if round % 20 == 0 {
            let flaw = fixture.allocator.audit(&fixture.caller(me)).unwrap();
            assert_eq!(flaw, Ok(()), "after {round} kills");
        }
    }
    let dead: Vec<_> = workers.into_iter().map(|worker| kill(&fixture, worker)).collect();
    for dead in dead {
        fixture.clean_up_after(me, dead);
    }
    let caller = fixture.caller(me);
    assert_eq!(fixture.allocator.audit(&caller).unwrap(), Ok(()));
    let statistics = fixture.allocator.statistics(&caller).unwrap();
    println!(
        "{overflow_policy:?}: {kills} kills, {} repairs, {} entries",
        statistics.repairs,
        fixture.queue.position()
    );
    assert_eq!(statistics.free, MEMORY, "{:?}", fixture.allocator.blocks(&caller));
    assert_eq!(statistics.largest_free, MEMORY);
    assert_eq!(fixture.queue.subscribers(), 0);
}

#[test]
fn thousand_random_kills_lose_nothing() {
    thousand_kills(OverflowPolicy::Reject, KILLS / 2);
    thousand_kills(OverflowPolicy::DropOldest, KILLS / 2);
    thousand_kills(OverflowPolicy::DropNewest, KILLS / 4);
}
