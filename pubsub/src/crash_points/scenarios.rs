//! What the victim does until it is killed.

use super::*;

/// Prepares as the survivor, and returns what the victim executes until it is killed.
pub(super) type Scenario = fn(&World) -> Box<dyn FnOnce(&World)>;

pub(super) fn scenarios() -> Vec<(&'static str, Scenario)> {
    vec![
        ("become a publisher, publish, and leave", |world| {
            world.subscribe(world.survivor);
            Box::new(|world| {
                let topic = world.topic();
                let id = topic.claim(world.victim).unwrap();
                assert!(topic.publisher(id).reserve(world.victim));
                for sequence in 1..=4 {
                    world.publish(world.victim, id, sequence);
                }
                topic.publisher(id).give_back();
                let refused = topic.claim(world.victim).unwrap();
                topic.publisher(refused).abandon();
            })
        }),
        ("publish to a role that outlives the process", |world| {
            let caller = world.caller(world.survivor);
            world.topic().local().subscribe_as(&caller, role()).unwrap();
            Box::new(|world| {
                let id = world.topic().claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
            })
        }),
        ("loan and free, while a publisher waits for memory", |world| {
            let control = world.control(Direction::Local);
            let end = std::time::Instant::now() + Duration::from_millis(1);
            // It leaves the mark of a sleeping waiter behind.
            assert!(control.wait(&mut ipc::WaitStrategy::Block, end, || None::<()>).is_none());
            Box::new(|world| {
                let entry = world.entry(world.victim, Direction::Local, 1);
                let owner = Owner::participant(world.victim);
                let control = world.control(Direction::Local);
                control.free(&world.caller(world.victim), entry.block, owner).unwrap();
            })
        }),
        ("subscribe, read, hold, and leave", |_| {
            Box::new(|world| {
                let mut subscribers = world.subscribe(world.victim);
                let (topic, caller) = (world.topic(), world.caller(world.victim));
                let id = topic.claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
                world.read(world.victim, Direction::Local, &mut subscribers[0]);
                world.publish(world.victim, id, 2);
                let held = topic.local().take(&mut subscribers[0]).unwrap();
                topic.report_missed(subscribers[0].subscription_id(), 1);
                world.publish(world.victim, id, 3);
                let control = world.control(Direction::Local);
                let dispose = |words| {
                    topic.dispose(&caller, &control, words);
                };
                topic.local().stop(&caller, &mut subscribers[0], dispose).unwrap();
                let subscription_id = subscribers[0].subscription_id();
                topic.release_in(
                    &caller,
                    (Direction::Local, subscription_id),
                    held.position,
                    &control,
                );
                topic.local().end_subscription(&caller, subscription_id, dispose).unwrap();
            })
        }),
        ("deliver messages of another node", |_| {
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
        ("deliver after a dead process, and after messages without subscribers", |world| {
            world.deliver(world.survivor, 0);
            Box::new(|world| {
                world.deliver(world.victim, 1);
                let control = world.control(Direction::Inbound);
                let caller = world.caller(world.victim);
                let topic = world.topic();
                topic.skip_in(&caller, (&ORIGIN, SKIPPED), &control).unwrap();
                let other = OriginId { topic: 2, ..ORIGIN };
                topic.skip_in(&caller, (&other, 2), &control).unwrap();
                topic.remove_origin(&other);
            })
        }),
        ("evict a blocking subscriber", |world| {
            let id = world.topic().claim(world.survivor).unwrap();
            let mut subscribers = world.subscribe(world.survivor);
            world.publish(world.survivor, id, 1);
            world.deliver(world.survivor, 0);
            world.topic().local().take(&mut subscribers[0]).unwrap();
            *world.slow.borrow_mut() = Some(subscribers);
            Box::new(|world| {
                let topic = world.topic();
                let controls = Direction::BOTH.map(|direction| world.control(direction));
                let caller = world.caller(world.victim);
                let held_for = Duration::from_secs(1);
                let controls = [&controls[0], &controls[1]];
                let subscription_id = world.slow.borrow().as_ref().unwrap()[0].subscription_id();
                topic
                    .evict_in(&caller, (Direction::Local, subscription_id), held_for, controls)
                    .unwrap();
            })
        }),
        ("evict a subscriber while a lock is held", |world| {
            let subscribers = world.subscribe(world.survivor);
            *world.slow.borrow_mut() = Some(subscribers);
            Box::new(|world| {
                let topic = world.topic();
                let controls = Direction::BOTH.map(|direction| world.control(direction));
                let caller = world.caller(world.victim);
                let impatient = Caller { timeout: Duration::from_millis(1), ..caller };
                let subscription_id = world.slow.borrow().as_ref().unwrap()[0].subscription_id();
                let at = (Direction::Local, subscription_id);
                let each = |_| {
                    let controls = [&controls[0], &controls[1]];
                    topic.evict_in(&impatient, at, Duration::from_secs(1), controls).unwrap_err();
                };
                // One entry is searched under the lock.
                let id = topic.claim(world.victim).unwrap();
                world.publish(world.victim, id, 1);
                topic.local().find_entries(&caller, each).unwrap();
            })
        }),
        ("publish in stream order", |world| {
            world.subscribe(world.survivor);
            // Where messages are dropped, it is dropped while its stream lives.
            let id = world.topic().claim(world.survivor).unwrap();
            world.publish_in_order(world.survivor, id, 1).unwrap();
            Box::new(|world| {
                let control = world.control(Direction::Local);
                let id = world.topic().claim(world.victim).unwrap();
                for sequence in 1..=4 {
                    let published = world.publish_in_order(world.victim, id, sequence);
                    match published {
                        // One whose stream cannot report, and others whose stream does.
                        Some((block, sync_point)) if sequence == 3 => {
                            control.poison_and_retain(block, sync_point)
                        }
                        Some((block, sync_point)) if sequence > 1 => {
                            control.end_write(block, sync_point)
                        }
                        _ => {}
                    }
                }
            })
        }),
        ("release messages that a stream still writes", |world| {
            let (topic, caller) = (world.topic(), world.caller(world.survivor));
            let controls = Direction::BOTH.map(|direction| world.control(direction));
            for subscription_id in topic.local().subscription_ids() {
                let at = (Direction::Local, subscription_id);
                let controls = [&controls[0], &controls[1]];
                topic.evict_in(&caller, at, Duration::from_secs(1), controls).unwrap();
            }
            Box::new(|world| {
                let control = world.control(Direction::Local);
                let mut subscribers = world.subscribe(world.victim);
                let id = world.topic().claim(world.victim).unwrap();
                let sync_points =
                    [1, 2].map(|at| world.publish_in_order(world.victim, id, at).unwrap());
                world.read_in_order(world.victim, &mut subscribers[0]);
                for (block, sync_point) in sync_points {
                    control.end_write(block, sync_point);
                }
                world.read_in_order(world.victim, &mut subscribers[0]);
                assert_eq!(control.collect(&world.caller(world.victim)).unwrap(), 1);
            })
        }),
        ("drop destinations", |world| {
            let (topic, caller) = (world.topic(), world.caller(world.survivor));
            topic.local().subscribe_as(&caller, role()).unwrap();
            for _ in 0..2 {
                let id = topic.claim(world.survivor).unwrap();
                assert!(world.publish(world.survivor, id, 1));
            }
            NODES.iter().for_each(|node| assert!(topic.add_destination(node)));
            topic.set_replicated(true);
            Box::new(|world| {
                let (topic, caller) = (world.topic(), world.caller(world.victim));
                topic.give_up(&NODES[0], role(), 0);
                // A destination that joins and is removed again.
                assert!(topic.add_destination(&[9; 16]));
                topic.remove_destination(&[9; 16]);
                topic.local().halt(&caller, role()).unwrap();
                topic.give_up(&NODES[1], role(), 0);
                topic.set_replicated(false);
            })
        }),
        ("record publishers lost on other nodes", |_| {
            Box::new(|world| {
                let topic = world.topic();
                for publisher in 1..=20 {
                    topic.record_loss(Direction::Inbound, lost(publisher));
                }
                topic.set_losses_sent(1);
            })
        }),
        ("record last sequences of other nodes", |_| {
            Box::new(|world| {
                for last in 1..=3 {
                    world.topic().record_remote_last_sequence(&published(last, last));
                }
                world.topic().record_remote_last_sequence(&published(1, 9));
            })
        }),
        ("tell which publishers there are", |_| {
            Box::new(|world| {
                let topic = world.topic();
                let id = topic.claim(world.victim).unwrap();
                topic.name_publisher(id, 7, "victim");
                assert!(topic.publisher(id).reserve(world.victim));
                topic.set_publishing_nodes(&[publishing(0, true), publishing(1, true)]);
                topic.set_publishing_nodes(&[publishing(1, false)]);
            })
        }),
        ("keep accounts of other nodes", |_| {
            Box::new(|world| {
                let (topic, mut slot) = (world.topic(), 0);
                topic.begin_accounts(&NODES[0], &account_start());
                topic.note_arrival(&mut slot, later(), 1, 0);
                topic.note_passed(&mut slot, later(), 1);
                topic.note_arrival(&mut slot, later(), 5, 1);
                topic.end_accounts();
            })
        }),
        ("replace the longest unused account of other nodes", |world| {
            let publisher = |number: u64| RemotePublisher::new(NODES[0], LATER + (number << 8));
            world.topic().begin_accounts(&NODES[0], &account_start());
            for number in 0..256 {
                world.topic().note_arrival(&mut 0, publisher(number), 1, 0);
            }
            Box::new(move |world| {
                world.topic().note_arrival(&mut 0, publisher(256), 1, 0);
            })
        }),
        ("take memory over from another topic", |world| {
            let range = BlockRange { offset: 0, length: 4096 };
            assert!(!world.control(Direction::Local).may_show_others(range, 1));
            Box::new(move |world| {
                let control = world.control(Direction::Local);
                assert!(control.may_show_others(range, 2));
                control.pass_to(range, 2, true);
                let unused = BlockRange { offset: 1 << 18, length: 1 << 17 };
                assert!(!control.may_show_others(unused, 2) && control.may_show_others(unused, 1));
            })
        }),
        ("store what blocks publishers", |_| {
            Box::new(|world| {
                for seconds in 1..=2 {
                    let held_for = Duration::from_secs(seconds);
                    world.topic().record_blocking(Direction::Local, 7, held_for);
                }
            })
        }),
        ("admit a piece", |_| {
            Box::new(|world| {
                let control = world.control(Direction::Local);
                let admitted = control.admitted();
                control.admit(&world.caller(world.victim), admitted, 4096, 2).unwrap();
            })
        }),
    ]
}
