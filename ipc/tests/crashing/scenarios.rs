//! The victim's operations, and the survivor's preparations.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ipc::{Caller, OverflowPolicy, Owner, Participant, Queue, WaitStrategy, Words};
use testkit::children::ForkedChild;

use super::{fork, half_ended, half_evicted};
use crate::{Fixture, MEMORY, QUEUE_LINE, replication, soon};

/// The number of points at which an operation is left incomplete: some lie past the commit of its
/// message with each policy.
const HALF_DONE: u64 = 66;

/// The number of points at which a publish is left incomplete that replaces a slot.
const HALF_PUBLISHED: u64 = 26;

/// Prepares the state as the survivor; returns what the victim does until it is killed.
pub(crate) type Scenario = Box<dyn Fn(&Fixture) -> Box<dyn FnOnce(&Fixture)>>;
type Prepare = fn(&Fixture) -> Box<dyn FnOnce(&Fixture)>;

pub(crate) fn scenarios() -> Vec<(String, Scenario)> {
    let fixed: Vec<(&str, Prepare)> = vec![
        ("allocate from one large block", |_| {
            Box::new(|fixture| {
                fixture.allocate(fixture.victim, 1000, 1);
            })
        }),
        ("allocate the whole remaining block", |fixture| {
            let rest = MEMORY - 1024;
            fixture.allocate(fixture.survivor, rest, 1);
            Box::new(|fixture| {
                fixture.allocate(fixture.victim, 1024, 1);
            })
        }),
        ("allocate aligned, with a rest on both sides", |fixture| {
            fixture.allocate(fixture.survivor, 64, 1);
            Box::new(|fixture| {
                fixture.allocate(fixture.victim, 1000, 4096);
            })
        }),
        ("allocate at an offset that was used before", |fixture| {
            let owner = Owner::participant(fixture.survivor);
            let caller = fixture.caller(fixture.survivor);
            let blocks: Vec<_> =
                (0..6).map(|_| fixture.allocate(fixture.survivor, 640, 1)).collect();
            for block in [&blocks[1], &blocks[2], &blocks[4]] {
                fixture.allocator().free(&caller, *block, owner).unwrap();
            }
            fixture.list_all();
            Box::new(|fixture| {
                fixture.allocate(fixture.victim, 320, 1);
                fixture.allocate(fixture.victim, 320, 512);
                fixture.allocate(fixture.victim, 640, 1);
            })
        }),
        ("allocate a cached block, and several coalesced cached blocks", |fixture| {
            let owner = Owner::participant(fixture.survivor);
            let caller = fixture.caller(fixture.survivor);
            let blocks: Vec<_> =
                (1..=6).map(|times| fixture.allocate(fixture.survivor, 64 * times, 1)).collect();
            let rest = MEMORY - 64 * (1..=6).sum::<u64>();
            fixture.allocate(fixture.survivor, rest, 1);
            for block in &blocks {
                fixture.allocator().free(&caller, *block, owner).unwrap();
            }
            Box::new(|fixture| {
                fixture.allocate(fixture.victim, 64 * 6, 1);
                fixture.allocate(fixture.victim, 64 * 8, 1);
            })
        }),
        ("free between allocated and free neighbours, in every combination", |fixture| {
            let blocks: Vec<_> = (0..8).map(|_| fixture.allocate(fixture.victim, 256, 1)).collect();
            Box::new(move |fixture| {
                let caller = fixture.caller(fixture.victim);
                // Alone; before a free block; after a free block; between two.
                for at in [1, 4, 3, 5, 0, 7, 6, 2] {
                    let owner = Owner::participant(fixture.victim);
                    fixture.allocator().free(&caller, blocks[at], owner).unwrap();
                }
                fixture.allocator().statistics(&caller).unwrap();
            })
        }),
        ("free more blocks than the free cache holds", |fixture| {
            let blocks: Vec<_> =
                (0..12).map(|_| fixture.allocate(fixture.victim, 256, 1)).collect();
            Box::new(move |fixture| {
                let caller = fixture.caller(fixture.victim);
                for at in [1, 4, 3, 5, 0, 7, 6, 2, 8, 9, 10, 11] {
                    let owner = Owner::participant(fixture.victim);
                    fixture.allocator().free(&caller, blocks[at], owner).unwrap();
                }
            })
        }),
        ("free next to a free block that is not the first of its list", |fixture| {
            let blocks: Vec<_> = (0..8).map(|_| fixture.allocate(fixture.victim, 256, 1)).collect();
            let (caller, owner) =
                (fixture.caller(fixture.victim), Owner::participant(fixture.victim));
            fixture.allocator().free(&caller, blocks[1], owner).unwrap();
            fixture.allocator().free(&caller, blocks[4], owner).unwrap();
            fixture.list_all();
            Box::new(move |fixture| {
                let caller = fixture.caller(fixture.victim);
                let owner = Owner::participant(fixture.victim);
                fixture.allocator().free(&caller, blocks[2], owner).unwrap();
                fixture.allocator().statistics(&caller).unwrap();
            })
        }),
        ("publish, and release, while a reader sleeps", |fixture| {
            let (queue, caller) = (fixture.queue(), fixture.caller(fixture.survivor));
            let mut subscriber = queue.subscribe(&caller).unwrap();
            subscriber.set_wait_strategy(WaitStrategy::Block);
            // It leaves the sleepers flag behind, like a process that is killed asleep.
            assert!(queue.take_until(&mut subscriber, soon()).is_none());
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                let block = fixture.allocate(fixture.victim, 64, 1);
                fixture.publish(fixture.victim, block).unwrap();
                queue.take(&mut subscriber).unwrap();
                fixture.release(fixture.victim, &subscriber, 0);
            })
        }),
        ("sleep until there is an entry, or space", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                subscriber.set_wait_strategy(WaitStrategy::Block);
                assert!(queue.take_until(&mut subscriber, soon()).is_none());
                let dispose = |entry| fixture.dispose(fixture.victim, entry);
                for _ in 0..3 {
                    let mut spin = WaitStrategy::Block;
                    let _ = queue.publish_until(&caller, [0, 0], &mut spin, soon(), dispose);
                }
            })
        }),
        ("hold entries while others read later ones", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.victim)).unwrap();
            let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
            let id = queue.subscription_ids().next().unwrap();
            queue.end_subscription(&caller, id, |_| {}).unwrap();
            Box::new(|fixture| fixture.hold_while_others_read(fixture.victim))
        }),
        ("wait for locks that others hold", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            let holder = ForkedChild::new(|| {
                let hold = |_| std::thread::sleep(Duration::from_millis(15));
                let caller = fixture.caller(fixture.survivor);
                fixture.queue().publish_with(&caller, [0, 0], hold, |_| {}).unwrap();
            });
            fixture.others.borrow_mut().push(holder);
            std::thread::sleep(Duration::from_millis(5));
            Box::new(|fixture| {
                fixture.queue().subscribe(&fixture.caller(fixture.victim)).unwrap();
            })
        }),
        ("release a lock that has dead waiters", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            fixture.plain_queue_words().fetch_or(QUEUE_LINE, 1 << 7 | 1 << 20);
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                // Reserved for the dead waiter each time, and taken after a moment.
                for _ in 0..3 {
                    queue.subscribe(&caller).unwrap();
                }
                assert_eq!(fixture.plain_queue_words().load(QUEUE_LINE, Relaxed), 0);
            })
        }),
        ("reserve a lock for a waiter, and become a waiter", |fixture| {
            let other = ForkedChild::new(|| {
                let caller = fixture.caller(fixture.survivor);
                let queue = fixture.queue();
                for _ in 0..4 {
                    let subscriber = queue.subscribe(&caller).unwrap();
                    queue.end_subscription(&caller, subscriber.subscription_id(), |_| {}).unwrap();
                }
            });
            fixture.others.borrow_mut().push(other);
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                let hold = |_| {
                    // Until the other process becomes a waiter, if it gets that far.
                    let end = Instant::now() + Duration::from_millis(3);
                    let words = fixture.plain_queue_words();
                    while words.load(QUEUE_LINE, Relaxed) == 0 && Instant::now() < end {
                        std::thread::sleep(Duration::from_micros(20));
                    }
                };
                queue.publish_with(&caller, [0, 0], hold, |_| {}).unwrap();
                queue.end_subscription(&caller, subscriber.subscription_id(), |_| {}).unwrap();
            })
        }),
        ("claim an entry that is being dropped", |_| {
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                if fixture.setup.overflow_policy != OverflowPolicy::DropOldest {
                    return;
                }
                let mut subscriber = queue.subscribe(&caller).unwrap();
                queue.publish(&caller, [0, 0], |_| {}).unwrap();
                let other = Queue::<_, 2>::attach(fixture.plain_queue_words()).unwrap();
                let me = fixture.survivor;
                fixture.crash.at_next_exchange_in("ipc/src/queue/subscriber.rs", move || {
                    let caller = Caller::new(me, &ipc::AlwaysAlive);
                    for _ in 0..36 {
                        other.publish(&caller, [0, 0], |_| {}).unwrap();
                    }
                });
                assert!(queue.take(&mut subscriber).unwrap().position > 0);
            })
        }),
        ("add an extent to the allocator", |_| {
            Box::new(|fixture| {
                let caller = fixture.caller(fixture.victim);
                fixture.allocator().extend(&caller, MEMORY * 2, 4096).unwrap();
            })
        }),
        ("subscribe and unsubscribe", |_| {
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let subscriber = queue.subscribe(&caller).unwrap();
                queue.end_subscription(&caller, subscriber.subscription_id(), |_| {}).unwrap();
            })
        }),
        ("resume the subscription of a role", |fixture| {
            let (queue, caller) = (fixture.queue(), fixture.caller(fixture.survivor));
            let mut before = queue.subscribe_as(&caller, replication()).unwrap();
            for _ in 0..2 {
                let block = fixture.allocate(fixture.survivor, 100, 1);
                fixture.publish(fixture.survivor, block).unwrap();
                queue.take(&mut before).unwrap();
            }
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut after = queue.resume(&caller, replication(), |_| {}).unwrap().unwrap();
                for position in 0..2 {
                    assert_eq!(queue.take(&mut after).unwrap().position, position);
                    fixture.release(fixture.victim, &after, position);
                }
            })
        }),
        ("stop, and keep the held entries", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..2 {
                    let block = fixture.allocate(fixture.victim, 500, 1);
                    fixture.publish(fixture.victim, block).unwrap();
                }
                let held = queue.take(&mut subscriber).unwrap();
                let dispose = |entry| fixture.dispose(fixture.victim, entry);
                queue.stop(&caller, &mut subscriber, dispose).unwrap();
                fixture.release(fixture.victim, &subscriber, held.position);
            })
        }),
        ("evict a slow subscriber", |fixture| {
            fixture.hold_one_entry();
            Box::new(|fixture| fixture.evict_slow_subscriber(fixture.victim))
        }),
        ("resume a role whose held entry is out of reach", |fixture| {
            if fixture.setup.overflow_policy != OverflowPolicy::DropOldest {
                return Box::new(|_| {});
            }
            fixture.hold_until_out_of_reach(replication());
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let dispose = |entry| fixture.dispose(fixture.victim, entry);
                queue.resume(&caller, replication(), dispose).unwrap().unwrap();
            })
        }),
        ("subscribe as a role", |_| {
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                queue.subscribe_as(&caller, replication()).unwrap();
            })
        }),
        ("publish", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            Box::new(|fixture| {
                for _ in 0..5 {
                    let block = fixture.allocate(fixture.victim, 500, 1);
                    // Full, at the end, if the policy drops nothing.
                    if fixture.publish(fixture.victim, block).is_err() {
                        return;
                    }
                }
            })
        }),
        ("read, alone", |_| {
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..4 {
                    let block = fixture.allocate(fixture.victim, 500, 1);
                    fixture.publish(fixture.victim, block).unwrap();
                    let taken = queue.take(&mut subscriber).unwrap();
                    fixture.release(fixture.victim, &subscriber, taken.position);
                }
            })
        }),
        ("read with other readers, and leave entries unread", |fixture| {
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                let mut subscriber = queue.subscribe(&caller).unwrap();
                for _ in 0..2 {
                    let block = fixture.allocate(fixture.victim, 500, 1);
                    fixture.publish(fixture.victim, block).unwrap();
                }
                let taken = queue.take(&mut subscriber).unwrap();
                fixture.release(fixture.victim, &subscriber, taken.position);
                queue.take(&mut subscriber).unwrap();
                queue
                    .end_subscription(&caller, subscriber.subscription_id(), |entry| {
                        fixture.dispose(fixture.victim, entry)
                    })
                    .unwrap();
            })
        }),
        ("hold an entry while others are dropped", |_| {
            Box::new(|fixture| {
                let (queue, caller) = (fixture.queue(), fixture.caller(fixture.victim));
                if fixture.setup.overflow_policy != OverflowPolicy::DropOldest {
                    return;
                }
                let mut subscriber = queue.subscribe(&caller).unwrap();
                let mut held = None;
                for _ in 0..80 {
                    let block = fixture.allocate(fixture.victim, 64, 1);
                    fixture.publish(fixture.victim, block).unwrap();
                    held = held.or_else(|| queue.take(&mut subscriber));
                }
                fixture.release(fixture.victim, &subscriber, held.unwrap().position);
            })
        }),
        ("reclaim another dead process", |fixture| {
            // A process that is not in the participant table counts as dead: this one never
            // was.
            let dead = Participant::new(200, 1).unwrap();
            let caller = Caller::new(dead, &fixture.participants);
            let queue = fixture.queue();
            let mut subscriber = queue.subscribe(&caller).unwrap();
            for _ in 0..2 {
                let block = fixture.allocate(dead, 500, 1);
                fixture.publish(dead, block).unwrap();
            }
            queue.take(&mut subscriber).unwrap();
            fixture.allocate(dead, 100, 1);
            // It died while it held both locks, with incomplete operations.
            Box::new(move |fixture| fixture.clean_up_after(fixture.victim, dead))
        }),
    ];
    let fixed =
        fixed.into_iter().map(|(name, scenario)| (name.to_owned(), Box::new(scenario) as Scenario));
    // A process that died during an operation leaves the locks, and the state that they
    // protect, to the victim, which dies while it repairs.
    let repairs = (0..HALF_DONE).map(|point| {
        let scenario = move |fixture: &Fixture| -> Box<dyn FnOnce(&Fixture)> {
            let dead = Participant::new(200, 1).unwrap();
            fixture.queue().subscribe(&fixture.caller(fixture.survivor)).unwrap();
            let was_killed = fork(&fixture.crash, point, || fixture.half_done(dead)).was_killed();
            assert!(was_killed, "the operation has fewer than {point} points");
            Box::new(move |fixture| fixture.clean_up_after(fixture.victim, dead))
        };
        (
            format!("repair an operation left incomplete at point {point}"),
            Box::new(scenario) as Scenario,
        )
    });
    // It may have replaced a slot of the ring, whose entry the survivor holds.
    let replacements = (0..HALF_PUBLISHED).map(|point| {
        let scenario = move |fixture: &Fixture| -> Box<dyn FnOnce(&Fixture)> {
            let dead = Participant::new(200, 1).unwrap();
            fixture.hold_all(fixture.survivor);
            let block = fixture.allocate(dead, 100, 1);
            let publish = || _ = fixture.publish(dead, block);
            let was_killed = fork(&fixture.crash, point, publish).was_killed();
            assert!(was_killed, "the operation has fewer than {point} points");
            Box::new(move |fixture| fixture.clean_up_after(fixture.victim, dead))
        };
        (
            format!("repair a replaced slot, left incomplete at point {point}"),
            Box::new(scenario) as Scenario,
        )
    });
    fixed.chain(repairs).chain(replacements).chain(half_evicted()).chain(half_ended()).collect()
}

impl Fixture {
    /// The operation during which another child dies.
    fn half_done(&self, dead: Participant) {
        let block = self.allocate(dead, 100, 1);
        let _ = self.publish(dead, block);
        self.allocate(dead, 300, 512);
    }
}
