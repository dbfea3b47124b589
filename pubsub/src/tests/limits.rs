//! What happens when there is no room, no memory, or no node any more.

use ipc::Block;

use super::*;
use crate::Event;
use crate::pool::GRANULE;
use crate::topic::Entry;

#[test]
fn a_reliable_publisher_waits_until_there_is_room() {
    let node = TestNode::new(&TopicSettings { depth: 2, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    for _ in 0..2 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
    }
    assert_eq!(
        publisher.push(b"x", SHORT_TIMEOUT).unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
    // It may come again, and does so.
    assert!(publisher.counters().messages == 2 && node.topic.backpressure().is_some());
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(node.topic.backpressure(), None);
    for spin in [WaitStrategy::Block, WaitStrategy::default(), WaitStrategy::Busy] {
        publisher.set_wait_strategy(spin);
        std::thread::scope(|scope| {
            let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT));
            while node.topic.backpressure().is_none() {
                std::thread::yield_now();
            }
            drop(subscriber.pull(TEST_TIMEOUT).unwrap());
            pushed.join().unwrap().unwrap();
        });
        assert_eq!(node.topic.backpressure(), None);
    }
}

#[test]
fn others_drop_the_newest_or_the_oldest_and_count() {
    for (reliability, first) in [(Reliability::DropNewest, 1), (Reliability::DropOldest, 7)] {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
        let sent: Vec<_> = (0..10).map(|_| publisher.push(b"x", TEST_TIMEOUT).unwrap()).collect();
        let dropped = sent.iter().filter(|sent| sent.is_dropped).count() as u64;
        let mut sequences = Vec::new();
        while let Some(sample) = subscriber.try_pull().unwrap() {
            sequences.push(sample.sequence());
        }
        assert_eq!(sequences, (first..first + 4).collect::<Vec<_>>());
        if reliability == Reliability::DropNewest {
            assert_eq!((dropped, publisher.counters().dropped), (6, 6));
        } else {
            assert_eq!((dropped, publisher.counters().dropped), (0, 0));
        }
        assert_eq!(subscriber.missed(), 6);
        assert_eq!(subscriber.poll_event(), Some(Event::Gap { missed: 6 }));
        assert_eq!((subscriber.poll_event(), subscriber.missed()), (None, 6));
        assert_eq!(node.blocks_allocated(), 0);
    }
}

const BEST_EFFORT: [Reliability; 2] = [Reliability::DropOldest, Reliability::DropNewest];

#[test]
fn idle_subscriber_costs_others_nothing_where_messages_are_dropped() {
    for reliability in BEST_EFFORT {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let (mut idle, mut reader, publisher) =
            (node.subscriber(), node.subscriber(), node.publisher());
        for number in 1..=400 {
            assert!(!publisher.push(b"x", TEST_TIMEOUT).unwrap().is_dropped, "{reliability}");
            let sample = reader.try_pull().unwrap().expect("the reader misses nothing");
            assert_eq!(sample.sequence(), number, "{reliability}");
        }
        assert_eq!((reader.missed(), reader.poll_event()), (0, None));
        // What only the idle one had still to read has made room.
        assert_eq!(node.blocks_allocated(), 4, "{reliability}");
        let mut read = 0;
        while idle.try_pull().unwrap().is_some() {
            read += 1;
        }
        assert_eq!((read, idle.missed()), (4, 396), "{reliability}");
        assert_eq!(idle.poll_event(), Some(Event::Gap { missed: 396 }));
        assert_eq!(node.blocks_allocated(), 0);
    }
}

#[test]
fn subscriber_that_keeps_samples_is_told_and_costs_others_nothing() {
    for reliability in BEST_EFFORT {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let (mut keeps, mut reader, publisher) =
            (node.subscriber(), node.subscriber(), node.publisher());
        let (mut kept, mut refused) = (Vec::new(), 0);
        for number in 1..=400_u64 {
            publisher.push(&number.to_ne_bytes(), TEST_TIMEOUT).unwrap();
            match keeps.try_pull() {
                Ok(sample) => kept.extend(sample),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::TooManySamples, "{error}");
                    refused += 1;
                }
            }
            assert_eq!(reader.try_pull().unwrap().unwrap().sequence(), number, "{reliability}");
        }
        assert_eq!((kept.len(), refused, reader.missed()), (20, 380, 0), "{reliability}");
        for (sample, number) in kept.iter().zip(1_u64..) {
            assert_eq!(sample.to_vec().unwrap(), number.to_ne_bytes());
        }
        kept.pop();
        let sample = keeps.try_pull().unwrap().unwrap();
        assert_eq!((sample.sequence(), keeps.missed()), (397, 376));
    }
}

#[test]
fn subscribers_that_keep_all_messages_of_a_best_effort_topic_are_evicted() {
    for reliability in BEST_EFFORT {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let publisher = node.publisher();
        let mut keepers = Vec::new();
        for _ in 0..2 {
            let mut keeper = node.subscriber();
            let samples: Vec<_> = (0..20)
                .map(|_| {
                    publisher.push(b"x", TEST_TIMEOUT).unwrap();
                    keeper.pull(TEST_TIMEOUT).unwrap()
                })
                .collect();
            keepers.push((keeper, samples));
        }
        assert_eq!(
            (node.topic.backpressure(), node.service.publisher_blocked.load(Relaxed)),
            (None, 0)
        );
        let mut reader = node.subscriber();
        assert!(
            publisher.push(b"y", TEST_TIMEOUT).unwrap().is_dropped,
            "{reliability}: there is no room"
        );
        // The service is told, and finds out for how long that goes on.
        assert!(node.topic.backpressure().is_some());
        assert_eq!(node.service.publisher_blocked.load(Relaxed), 1);
        let (position, subscription_ids) =
            node.topic.blocking_subscribers(Direction::Local).unwrap();
        assert_eq!(
            (position, subscription_ids.len()),
            (0, 1),
            "{reliability}: the first of the two"
        );
        let subscription_id = (Direction::Local, subscription_ids[0]);
        node.topic
            .evict_in(&node.caller(), subscription_id, SHORT_TIMEOUT, node.controls())
            .unwrap();
        assert!(!publisher.push(b"z", TEST_TIMEOUT).unwrap().is_dropped);
        assert_eq!(reader.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"z");
        let error = keepers[0].0.try_pull().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Evicted);
        assert!(!keepers[0].1[0].is_valid() && keepers[1].1[0].is_valid());
        assert_eq!(node.topic.blocking_subscribers(Direction::Local), None);
    }
}

#[test]
fn memory_is_asked_for_when_it_is_needed_and_waited_for_when_there_is_no_more() {
    let largest = 2 << 20;
    let node = TestNode::with_limit(&TopicSettings { largest, depth: 64, ..settings() }, 4 << 20);
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert_eq!(node.local.length(), 0);
    assert_eq!(publisher.loan(largest + 1, TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::TooLong);
    for _ in 0..2 {
        publisher.loan(largest, TEST_TIMEOUT).unwrap().publish(TEST_TIMEOUT).unwrap();
    }
    assert_eq!(node.local.length(), node.local.limit());
    let error = publisher.loan(largest, SHORT_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(publisher.try_loan(largest).unwrap().is_none());
    for spin in [WaitStrategy::Block, WaitStrategy::Busy] {
        publisher.set_wait_strategy(spin);
        std::thread::scope(|scope| {
            let publisher_blocked = scope.spawn(|| {
                publisher.loan(largest, TEST_TIMEOUT).unwrap().publish(TEST_TIMEOUT).unwrap();
            });
            while node.topic.backpressure().is_none() {
                std::thread::yield_now();
            }
            drop(subscriber.pull(TEST_TIMEOUT).unwrap());
            publisher_blocked.join().unwrap();
        });
    }
}

#[test]
fn who_holds_what_is_in_the_way_is_evicted_and_told() {
    let node = TestNode::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let mut other = node.subscriber();
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    drop(other.pull(TEST_TIMEOUT).unwrap());
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT));
        while node.topic.backpressure().is_none() {
            std::thread::yield_now();
        }
        let (position, subscription_ids) =
            node.topic.blocking_subscribers(Direction::Local).unwrap();
        assert_eq!((position, subscription_ids.len()), (0, 1));
        let held_for = Duration::from_millis(7);
        let subscription_id = (Direction::Local, subscription_ids[0]);
        node.topic.evict_in(&node.caller(), subscription_id, held_for, node.controls()).unwrap();
        assert_eq!(pushed.join().unwrap().unwrap().subscribers, 1);
    });
    assert!(!held.is_valid());
    assert_eq!(held.to_vec().unwrap_err().kind(), ErrorKind::Evicted);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
    let held_for = Some(Duration::from_millis(7));
    assert_eq!(subscriber.poll_event(), Some(Event::Evicted { held_for }));
    // The other message it does not get.
    assert_eq!(subscriber.poll_event(), Some(Event::Gap { missed: 1 }));
    assert_eq!((subscriber.poll_event(), subscriber.missed()), (None, 1));
    // What it lets go of is not its own any more.
    drop((held, subscriber));
    assert_eq!(other.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"y");
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn who_tries_again_and_again_waits_as_much_as_who_waits() {
    let release_deadline = Duration::from_secs(3600);
    let node = TestNode::new(&TopicSettings { depth: 1, release_deadline, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(
        (node.topic.backpressure(), node.topic.blocking_subscribers(Direction::Local).is_some()),
        (None, true)
    );
    assert_eq!(publisher.try_push(b"y").unwrap(), None);
    assert!(node.topic.backpressure().is_some());
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    assert_eq!(node.topic.blocking_subscribers(Direction::Local), None);
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    assert_eq!(node.topic.backpressure(), None);
    // One of two threads gives up, and the other one waits on.
    publisher.set_wait_strategy(WaitStrategy::Block);
    std::thread::scope(|scope| {
        let publisher_blocked = scope.spawn(|| publisher.push(b"z", TEST_TIMEOUT));
        while node.waiting() == 0 {
            std::thread::yield_now();
        }
        assert!(publisher.push(b"z", SHORT_TIMEOUT).is_err());
        assert_eq!(node.waiting(), 1);
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
        publisher_blocked.join().unwrap().unwrap();
    });
    assert_eq!(node.topic.backpressure(), None);
}

#[test]
fn only_of_a_full_reliable_topic_somebody_is_in_the_way() {
    for reliability in [Reliability::Reliable, Reliability::DropOldest, Reliability::DropNewest] {
        let largest = 2 << 20;
        let settings = TopicSettings { largest, depth: 64, reliability, ..settings() };
        let node = TestNode::with_limit(&settings, 4 << 20);
        let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
        let held: Vec<_> = (0..2)
            .map(|_| {
                publisher.loan(largest, TEST_TIMEOUT).unwrap().publish(TEST_TIMEOUT).unwrap();
                subscriber.pull(TEST_TIMEOUT).unwrap()
            })
            .collect();
        // There is no memory; but that need not be the fault of who holds some of it.
        assert!(publisher.try_loan(largest).unwrap().is_none());
        assert!(node.topic.backpressure().is_some());
        assert_eq!(node.topic.blocking_subscribers(Direction::Local), None);
        drop(held);
        drop(publisher.loan(largest, TEST_TIMEOUT).unwrap());
    }
}

#[test]
fn a_flush_that_fails_is_no_flush() {
    let node = TestNode::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(publisher.flush(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| publisher.flush(TEST_TIMEOUT));
        while node.waiting() == 0 {
            std::thread::yield_now();
        }
        assert!(node.topic.blocking_subscribers(Direction::Local).is_some());
        // Closed meanwhile, it has not seen that all is released.
        node.close();
        node.topic.local().ring_room();
        assert_eq!(flushed.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    node.open();
    assert_eq!(publisher.flush(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    drop(held);
    publisher.flush(TEST_TIMEOUT).unwrap();
}

#[test]
fn what_is_noted_of_another_message_is_not_told_of_one_that_is_gone() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let mut loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    loan.set_metadata(b"its own").unwrap();
    loan.publish(TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(&*held.metadata(), b"its own");
    let subscription_id = node.topic.local().subscription_ids().next().unwrap();
    let at = (Direction::Local, subscription_id);
    node.topic.evict_in(&node.caller(), at, Duration::ZERO, node.controls()).unwrap();
    let mut loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    loan.set_metadata(b"another").unwrap();
    assert_eq!(loan.address(), held.address(), "another comes to its place");
    assert!(held.metadata().is_empty() && !held.is_valid());
    assert_eq!(held.times(), crate::Times::default());
}

#[test]
fn one_who_sleeps_hears_that_it_is_evicted() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    subscriber.set_wait_strategy(WaitStrategy::Block);
    std::thread::scope(|scope| {
        let pulled = scope.spawn(|| subscriber.pull(TEST_TIMEOUT).unwrap_err().kind());
        std::thread::yield_now();
        let subscription_id = node.topic.inbound().subscription_ids().next().unwrap();
        let subscription_id = (Direction::Inbound, subscription_id);
        let held_for = Duration::from_millis(7);
        node.topic.evict_in(&node.caller(), subscription_id, held_for, node.controls()).unwrap();
        assert_eq!(pulled.join().unwrap(), ErrorKind::Evicted);
    });
}

#[test]
fn a_closed_node_delivers_what_it_has_and_no_more() {
    let node = TestNode::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"last", TEST_TIMEOUT).unwrap();
    node.close();
    let kind = publisher.push(b"x", TEST_TIMEOUT).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::Closed);
    assert_eq!(publisher.flush(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"last");
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(Publisher::new(node.context()).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(Subscriber::new(node.context()).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn one_taken_for_dead_publishes_nothing_in_anothers_name() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    node.topic
        .reclaim_in(&node.caller(), node.service.me, node.local.control(), node.inbound.control())
        .unwrap();
    node.local.reclaim(&node.caller(), node.service.me).unwrap();
    assert_eq!(loan.publish(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(publisher.push(b"x", TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    let next = node.publisher();
    drop(publisher);
    assert_eq!(node.topic.participants().publishers.len(), 1, "the line is another's");
    next.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn entries_of_nonsense_are_refused_and_let_go() {
    // One is held all the time, and those after it keep their places.
    let node = TestNode::new(&TopicSettings { depth: 128, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    // Before there is any memory, and as soon as there is.
    let whatever = [u64::MAX; 6];
    let refused = |subscriber: &mut Subscriber, words| {
        node.topic.local().publish(&node.caller(), words, |_| {}).unwrap();
        let kind = subscriber.try_pull().map(|sample| sample.map(|it| it.length()));
        assert_eq!(kind.unwrap_err().kind(), ErrorKind::Malformed, "{words:x?}");
        assert!(subscriber.try_pull().unwrap().is_none());
    };
    refused(&mut subscriber, whatever);
    publisher.push(b"a message", TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    let end = node.local.length();
    assert!(end > 0 && end.is_multiple_of(GRANULE));
    let entry = |offset: u64, length: u64| {
        // A block that there cannot be yet, or it would be let go of.
        let (block, publisher, sequence) = (Block::from_bits(1 << 40), 0, 0);
        let (published_at, metadata, has_origin) = (0, 0, false);
        let sync_point = None;
        let entry = Entry {
            block,
            offset,
            length,
            publisher,
            sequence,
            published_at,
            metadata,
            has_origin,
            sync_point,
        };
        assert_eq!(Entry::from_words(entry.to_words()), entry);
        entry.to_words()
    };
    let longest = (1 << 40) - 1;
    let far = u64::from(u32::MAX) * GRANULE;
    for (offset, length) in [
        (0, end + 1),
        (GRANULE, end - GRANULE + 1),
        (end - GRANULE, GRANULE + 1),
        (end, 1),
        (end + GRANULE, 0),
        (0, longest),
        (end - GRANULE, longest),
        // Only the upper bits of the place.
        (0xff << 32, 1),
        (far, 1),
        (far, longest),
    ] {
        let words = entry(offset, length);
        refused(&mut subscriber, words);
        // With all flags and whatever stands beside them, but for the turn of a stream.
        let flags = [words[5] | 0xffff, words[5] | 1 << 16 | 0xffff, words[5] | 0xfe << 16];
        for flags in flags {
            let [_, place, ..] = words;
            refused(&mut subscriber, [u64::MAX, place, u64::MAX, 0, u64::MAX, flags & !(1 << 17)]);
        }
        // Whatever stands where the turn of a stream would, and whichever of its publisher's it says
        // that it is.
        let beside = u64::from(u32::MAX) << 32;
        refused(&mut subscriber, [words[0], words[1], 0, 0, 0, words[5] | beside]);
        for (publisher, sequence) in [(1 << 20, u64::MAX), (u64::MAX, 0), (1 << 20, 1)] {
            refused(&mut subscriber, [words[0], words[1], publisher, sequence, 0, words[5]]);
        }
    }
    refused(&mut subscriber, whatever);
    assert_eq!(held.to_vec().unwrap(), b"a message");
    assert_eq!(node.blocks_allocated(), 1);
    drop(held);
    publisher.push(b"another", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"another");
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn handles_go_where_they_are_needed() {
    fn moves<T: Send>() {}
    fn is_shared<T: Sync>() {}
    moves::<Publisher>();
    is_shared::<Publisher>();
    moves::<crate::Loan>();
    moves::<Subscriber>();
    moves::<crate::Sample>();
    is_shared::<crate::Sample>();
}

#[test]
fn the_service_is_told_once_that_somebody_waits_until_nobody_does() {
    let node = TestNode::new(&TopicSettings { depth: 2, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    // The first of all had to wait for memory.
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert!(node.topic.clear_if_unblocked());
    let before = node.service.publisher_blocked.load(Relaxed);
    let told = || node.service.publisher_blocked.load(Relaxed) - before;
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    // There was room, and nobody said anything.
    assert_eq!(told(), 0);
    for _ in 0..3 {
        assert!(publisher.try_push(b"x").unwrap().is_none());
        publisher.push(b"x", SHORT_TIMEOUT).unwrap_err();
        publisher.flush(SHORT_TIMEOUT).unwrap_err();
    }
    assert_eq!(told(), 1);
    assert!(!node.topic.clear_if_unblocked(), "one that was refused may come again");
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(told(), 1);
    assert!(node.topic.clear_if_unblocked());
    publisher.flush(SHORT_TIMEOUT).unwrap_err();
    assert_eq!(told(), 2);
    assert!(!node.topic.clear_if_unblocked());
    // Where messages are dropped nobody is in anybody's way.
    let node = TestNode::new(&TopicSettings {
        depth: 2,
        reliability: Reliability::DropNewest,
        ..settings()
    });
    let (_subscriber, publisher) = (node.subscriber(), node.publisher());
    for _ in 0..5 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
    }
    publisher.flush(SHORT_TIMEOUT).unwrap_err();
    assert_eq!(node.service.publisher_blocked.load(Relaxed), 0);
}

#[test]
fn a_wait_in_slices_is_told_as_a_whole() {
    let release_deadline = Duration::from_secs(3600);
    let node = TestNode::new(&TopicSettings { depth: 1, release_deadline, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.set_wait_strategy(WaitStrategy::Block);
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let slice = Duration::from_millis(5);
    let since = || {
        std::thread::scope(|scope| {
            let publisher_blocked = scope.spawn(|| publisher.push(b"z", slice).is_err());
            let mut since = None;
            while !publisher_blocked.is_finished() {
                since = node.topic.publisher(publisher.id().as_u64()).seen().unwrap().waits_since;
                if since.is_some() {
                    break;
                }
            }
            assert!(publisher_blocked.join().unwrap());
            since
        })
    };
    let first = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    let again = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    assert_eq!(again, first);
    // Room ends it.
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    std::thread::sleep(slice);
    let other = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    assert!(other > first);
}
