//! What the victim does, and what the survivor prepares for it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ipc::{Caller, Owner, Participant, Queue, Spin, WhenFull, Words};
use testkit::children::ForkedChild;

use super::{fork, half_evicted};
use crate::{MEMORY, QUEUE_LINE, World, carrier, soon};

/// Points of what is left half done that are tried, at least.
const HALF_DONE: u64 = 60;

/// Prepares, as the survivor; what it gives the victim then does, until it is killed.
pub(crate) type Scenario = Box<dyn Fn(&World) -> Box<dyn FnOnce(&World)>>;
type Prepare = fn(&World) -> Box<dyn FnOnce(&World)>;

pub(crate) fn scenarios() -> Vec<(String, Scenario)> {
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
            let holder = ForkedChild::new(|| {
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
            let other = ForkedChild::new(|| {
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
                if world.setup.when_full != WhenFull::DropOldest {
                    return;
                }
                let mut subscriber = queue.subscribe(&caller).unwrap();
                queue.publish(&caller, [0, 0], |_| {}).unwrap();
                let other = Queue::<_, 2>::attach(world.plain_queue_words()).unwrap();
                let me = world.survivor;
                world.crash.at_next_exchange_in("ipc/src/queue/subscribe.rs", move || {
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
                queue.stop(&caller, &mut subscriber, dispose).unwrap();
                world.release(world.victim, &subscriber, held.position);
            })
        }),
        ("evict one who is slow", |world| {
            world.be_slow();
            Box::new(|world| world.evict_the_slow(world.victim))
        }),
        ("go on with a role that held what is out of reach", |world| {
            if world.setup.when_full != WhenFull::DropOldest {
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
                if world.setup.when_full != WhenFull::DropOldest {
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
    let repairs = (0..HALF_DONE).map(|point| {
        let scenario = move |world: &World| -> Box<dyn FnOnce(&World)> {
            let dead = Participant::new(200, 1).unwrap();
            world.queue().subscribe(&world.caller(world.survivor)).unwrap();
            let was_killed = fork(&world.crash, point, || world.half_done(dead)).was_killed();
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
