//! What the victim does until it is killed.

use super::*;

/// Prepares, as the survivor; what it gives the victim then does, until it is killed.
pub(super) type Scenario = fn(&World) -> Box<dyn FnOnce(&World)>;

pub(super) fn scenarios() -> Vec<(&'static str, Scenario)> {
    vec![
        ("become a publisher, publish, and leave", |world| {
            world.subscribe(world.survivor);
            Box::new(|world| {
                let topic = world.topic();
                let id = topic.claim(world.victim).unwrap();
                assert!(topic.publisher(id).promise(world.victim));
                for sequence in 1..=4 {
                    world.publish(world.victim, id, sequence);
                }
                topic.publisher(id).give_back();
            })
        }),
        ("publish to a role, which goes on", |world| {
            let caller = world.caller(world.survivor);
            world.topic().here().subscribe_as(&caller, role()).unwrap();
            Box::new(|world| {
                let id = world.topic().claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
            })
        }),
        ("borrow and give back, while somebody waits for memory", |world| {
            let ledger = world.ledger(Direction::Here);
            let end = std::time::Instant::now() + Duration::from_millis(1);
            // It leaves the sign of a sleeper behind.
            assert!(ledger.wait(&mut ipc::Spin::Never, end, || None::<()>).is_none());
            Box::new(|world| {
                let entry = world.entry(world.victim, Direction::Here, 1);
                let owner = Owner::participant(world.victim);
                let ledger = world.ledger(Direction::Here);
                ledger.free(&world.caller(world.victim), entry.block, owner).unwrap();
            })
        }),
        ("subscribe, read, hold, and leave", |_| {
            Box::new(|world| {
                let mut subscribers = world.subscribe(world.victim);
                let (topic, caller) = (world.topic(), world.caller(world.victim));
                let id = topic.claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
                world.read(world.victim, Direction::Here, &mut subscribers[0]);
                world.publish(world.victim, id, 2);
                let held = topic.here().take(&mut subscribers[0]).unwrap();
                topic.says_missed(subscribers[0].seat(), 1);
                world.publish(world.victim, id, 3);
                let ledger = world.ledger(Direction::Here);
                let dispose = |words| {
                    topic.dispose(&caller, &ledger, words);
                };
                topic.here().stop(&caller, &mut subscribers[0], dispose).unwrap();
                let seat = subscribers[0].seat();
                topic.release_in(&caller, (Direction::Here, seat), held.position, &ledger);
                topic.here().unseat(&caller, seat, dispose).unwrap();
            })
        }),
        ("deliver what comes from another node", |_| {
            Box::new(|world| {
                for number in 0..3 {
                    world.deliver(world.victim, number);
                    assert!(!matches!(
                        world.deliver(world.victim, number),
                        Some(Delivery::Delivered(_))
                    ));
                }
            })
        }),
        ("deliver after another, that died, and after some that nobody wanted", |world| {
            world.deliver(world.survivor, 0);
            Box::new(|world| {
                world.deliver(world.victim, 1);
                let ledger = world.ledger(Direction::Arrivals);
                let caller = world.caller(world.victim);
                let topic = world.topic();
                topic.pass_over_in(&caller, (&ORIGIN, PASSED_OVER), &ledger).unwrap();
                let other = OriginId { topic: 2, ..ORIGIN };
                topic.pass_over_in(&caller, (&other, 2), &ledger).unwrap();
                topic.forget_origin(&other);
            })
        }),
        ("evict one who is in the way", |world| {
            let id = world.topic().claim(world.survivor).unwrap();
            let mut subscribers = world.subscribe(world.survivor);
            world.publish(world.survivor, id, 1);
            world.deliver(world.survivor, 0);
            world.topic().here().take(&mut subscribers[0]).unwrap();
            *world.slow.borrow_mut() = Some(subscribers);
            Box::new(|world| {
                let topic = world.topic();
                let ledgers = Direction::BOTH.map(|way| world.ledger(way));
                let caller = world.caller(world.victim);
                let held_for = Duration::from_secs(1);
                let ledgers = [&ledgers[0], &ledgers[1]];
                let seat = world.slow.borrow().as_ref().unwrap()[0].seat();
                topic.evict_in(&caller, (Direction::Here, seat), held_for, ledgers).unwrap();
            })
        }),
        ("evict one, and find a lock held", |world| {
            let subscribers = world.subscribe(world.survivor);
            *world.slow.borrow_mut() = Some(subscribers);
            Box::new(|world| {
                let topic = world.topic();
                let ledgers = Direction::BOTH.map(|way| world.ledger(way));
                let caller = world.caller(world.victim);
                let impatient = Caller { patience: Duration::from_millis(1), ..caller };
                let seat = world.slow.borrow().as_ref().unwrap()[0].seat();
                let at = (Direction::Here, seat);
                let each = |_| {
                    let ledgers = [&ledgers[0], &ledgers[1]];
                    topic.evict_in(&impatient, at, Duration::from_secs(1), ledgers).unwrap_err();
                };
                // Something is there: it is looked through under the lock.
                let id = topic.claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
                topic.here().find_entries(&caller, each).unwrap();
            })
        }),
        ("publish in the order of a stream", |world| {
            world.subscribe(world.survivor);
            // Dropped, where messages are, while its stream lives.
            let id = world.topic().claim(world.survivor).unwrap();
            world.publish_in_order(world.survivor, id, 1).unwrap();
            Box::new(|world| {
                let ledger = world.ledger(Direction::Here);
                let id = world.topic().claim(world.victim).unwrap();
                for sequence in 1..=4 {
                    let published = world.publish_in_order(world.victim, id, sequence);
                    match published {
                        // One that nobody can tell of, and others of which their stream does.
                        Some((block, turn)) if sequence == 3 => ledger.poison_and_keep(block, turn),
                        Some((block, turn)) if sequence > 1 => ledger.end_turn(block, turn),
                        _ => {}
                    }
                }
            })
        }),
        ("let go of what a stream still writes", |world| {
            let (topic, caller) = (world.topic(), world.caller(world.survivor));
            let ledgers = Direction::BOTH.map(|way| world.ledger(way));
            for seat in topic.here().seats() {
                let at = (Direction::Here, seat);
                let ledgers = [&ledgers[0], &ledgers[1]];
                topic.evict_in(&caller, at, Duration::from_secs(1), ledgers).unwrap();
            }
            Box::new(|world| {
                let ledger = world.ledger(Direction::Here);
                let mut subscribers = world.subscribe(world.victim);
                let id = world.topic().claim(world.victim).unwrap();
                let turns = [1, 2].map(|at| world.publish_in_order(world.victim, id, at).unwrap());
                world.read_in_order(world.victim, &mut subscribers[0]);
                for (block, turn) in turns {
                    ledger.end_turn(block, turn);
                }
                world.read_in_order(world.victim, &mut subscribers[0]);
                assert_eq!(ledger.collect(&world.caller(world.victim)).unwrap(), 1);
            })
        }),
        ("give up nodes", |world| {
            let (topic, caller) = (world.topic(), world.caller(world.survivor));
            topic.here().subscribe_as(&caller, role()).unwrap();
            for _ in 0..2 {
                let id = topic.claim(world.survivor).unwrap();
                assert!(world.publish(world.survivor, id, 1));
            }
            NODES.iter().for_each(|node| assert!(topic.note_destination(node)));
            topic.set_carried(true);
            Box::new(|world| {
                let (topic, caller) = (world.topic(), world.caller(world.victim));
                topic.give_up(&NODES[0], role(), 0);
                // One that comes, and does not want it after all.
                assert!(topic.note_destination(&[9; 16]));
                topic.forget_destination(&[9; 16]);
                topic.here().halt(&caller, role()).unwrap();
                topic.give_up(&NODES[1], role(), 0);
                topic.set_carried(false);
            })
        }),
        ("hear of publishers that died elsewhere", |_| {
            Box::new(|world| {
                let topic = world.topic();
                for publisher in 1..=20 {
                    topic.is_lost(Direction::Arrivals, lost(publisher));
                }
                topic.set_losses_told(1);
            })
        }),
        ("hear what was published elsewhere", |_| {
            Box::new(|world| {
                for last in 1..=3 {
                    world.topic().note_published_elsewhere(&published(last, last));
                }
                world.topic().note_published_elsewhere(&published(1, 9));
            })
        }),
        ("admit a piece", |_| {
            Box::new(|world| {
                let ledger = world.ledger(Direction::Here);
                let admitted = ledger.admitted();
                ledger.admit(&world.caller(world.victim), admitted, 4096, 2).unwrap();
            })
        }),
    ]
}
