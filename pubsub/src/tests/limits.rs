//! Limits: no room, no memory, or a closed node.

use ipc::Block;

use super::*;
use crate::Event;
use crate::pool::GRANULE;
use crate::topic::Entry;

#[test]
fn reliable_publisher_waits_for_room() {
    let node = TestNode::new(&TopicSettings { depth: 2, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    for _ in 0..2 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
    }
    assert_eq!(
        publisher.push(b"x", SHORT_TIMEOUT).unwrap_err().kind(),
        ErrorKind::DeadlineExceeded
    );
    // A refused publisher counts as waiting, and succeeds later.
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
fn best_effort_topics_drop_and_count_messages() {
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
fn idle_subscriber_of_a_best_effort_topic_delays_no_other() {
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
        // Messages that only the idle subscriber had not read were dropped.
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
fn subscriber_with_too_many_samples_delays_no_other() {
    for reliability in BEST_EFFORT {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let (mut holder, mut reader, publisher) =
            (node.subscriber(), node.subscriber(), node.publisher());
        let (mut samples, mut refused) = (Vec::new(), 0);
        for number in 1..=400_u64 {
            publisher.push(&number.to_ne_bytes(), TEST_TIMEOUT).unwrap();
            match holder.try_pull() {
                Ok(sample) => samples.extend(sample),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::TooManySamples, "{error}");
                    refused += 1;
                }
            }
            assert_eq!(reader.try_pull().unwrap().unwrap().sequence(), number, "{reliability}");
        }
        assert_eq!((samples.len(), refused, reader.missed()), (4, 396, 0), "{reliability}");
        for (sample, number) in samples.iter().zip(1_u64..) {
            assert_eq!(sample.to_vec().unwrap(), number.to_ne_bytes());
        }
        samples.pop();
        let sample = holder.try_pull().unwrap().unwrap();
        assert_eq!((sample.sequence(), holder.missed()), (397, 392));
    }
}

#[test]
fn holders_of_all_messages_of_a_best_effort_topic_are_evicted() {
    for reliability in BEST_EFFORT {
        let node = TestNode::new(&TopicSettings { reliability, ..settings() });
        let publisher = node.publisher();
        let mut holders = Vec::new();
        for _ in 0..2 {
            let mut holder = node.subscriber();
            let samples: Vec<_> = (0..4)
                .map(|_| {
                    publisher.push(b"x", TEST_TIMEOUT).unwrap();
                    holder.pull(TEST_TIMEOUT).unwrap()
                })
                .collect();
            holders.push((holder, samples));
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
        // The service gets a report, and then measures the time.
        assert!(node.topic.backpressure().is_some());
        assert_eq!(node.service.publisher_blocked.load(Relaxed), 1);
        let (position, subscription_ids) =
            node.topic.blocking_subscribers(Direction::Local).unwrap();
        assert_eq!((position, subscription_ids.len()), (0, 1), "{reliability}: the first holder");
        let subscription_id = (Direction::Local, subscription_ids[0]);
        node.topic
            .evict_in(&node.caller(), subscription_id, SHORT_TIMEOUT, node.controls())
            .unwrap();
        assert!(!publisher.push(b"z", TEST_TIMEOUT).unwrap().is_dropped);
        assert_eq!(reader.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"z");
        let error = holders[0].0.try_pull().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Evicted);
        // It keeps what it holds.
        assert!(holders.iter().flat_map(|(_, samples)| samples).all(|sample| sample.is_valid()));
        assert_eq!(node.topic.blocking_subscribers(Direction::Local), None);
    }
}

#[test]
fn pool_grows_on_demand_and_publishers_wait_at_its_limit() {
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
            let blocked = scope.spawn(|| {
                publisher.loan(largest, TEST_TIMEOUT).unwrap().publish(TEST_TIMEOUT).unwrap();
            });
            while node.topic.backpressure().is_none() {
                std::thread::yield_now();
            }
            drop(subscriber.pull(TEST_TIMEOUT).unwrap());
            blocked.join().unwrap();
        });
    }
}

#[test]
fn blocking_subscriber_is_evicted_with_an_event() {
    let node = TestNode::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let mut other = node.subscriber();
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    drop(other.pull(TEST_TIMEOUT).unwrap());
    // It does not count as unread; this one does.
    publisher.push(b"unread", TEST_TIMEOUT).unwrap();
    drop(other.pull(TEST_TIMEOUT).unwrap());
    std::thread::scope(|scope| {
        let pushed = scope.spawn(|| publisher.push(b"y", TEST_TIMEOUT));
        while node.topic.backpressure().is_none() {
            std::thread::yield_now();
        }
        let (position, subscription_ids) =
            node.topic.blocking_subscribers(Direction::Local).unwrap();
        assert_eq!((position, subscription_ids.len()), (1, 1));
        let held_for = Duration::from_millis(7);
        let subscription_id = (Direction::Local, subscription_ids[0]);
        node.topic.evict_in(&node.caller(), subscription_id, held_for, node.controls()).unwrap();
        assert_eq!(pushed.join().unwrap().unwrap().subscribers, 1);
    });
    assert!(held.is_valid());
    assert_eq!(held.to_vec().unwrap(), b"x");
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap_err().kind(), ErrorKind::Evicted);
    let held_for = Some(Duration::from_millis(7));
    assert_eq!(subscriber.poll_event(), Some(Event::Evicted { held_for }));
    // It misses the other messages.
    assert_eq!(subscriber.poll_event(), Some(Event::Gap { missed: 2 }));
    assert_eq!((subscriber.poll_event(), subscriber.missed()), (None, 2));
    drop(subscriber);
    assert_eq!((held.is_valid(), node.blocks_allocated()), (true, 2));
    drop(held);
    assert_eq!(other.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"y");
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn repeated_attempts_count_as_a_wait() {
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
    // One of two threads times out, and the other continues to wait.
    publisher.set_wait_strategy(WaitStrategy::Block);
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| publisher.push(b"z", TEST_TIMEOUT));
        while node.waiting() == 0 {
            std::thread::yield_now();
        }
        assert!(publisher.push(b"z", SHORT_TIMEOUT).is_err());
        assert_eq!(node.waiting(), 1);
        drop(subscriber.pull(TEST_TIMEOUT).unwrap());
        blocked.join().unwrap().unwrap();
    });
    assert_eq!(node.topic.backpressure(), None);
}

#[test]
fn subscribers_block_only_a_full_topic() {
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
        // Memory is exhausted, but the holder of some messages need not be the cause.
        assert!(publisher.try_loan(largest).unwrap().is_none());
        assert!(node.topic.backpressure().is_some());
        assert_eq!(node.topic.blocking_subscribers(Direction::Local), None);
        drop(held);
        drop(publisher.loan(largest, TEST_TIMEOUT).unwrap());
    }
}

#[test]
fn failed_flush_reports_nothing_as_flushed() {
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
        // The node is closed before all messages are released.
        node.close();
        node.topic.local().room().ring();
        assert_eq!(flushed.join().unwrap().unwrap_err().kind(), ErrorKind::Closed);
    });
    node.open();
    assert_eq!(publisher.flush(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    drop(held);
    publisher.flush(TEST_TIMEOUT).unwrap();
}

#[test]
fn stale_sample_has_no_info_of_a_later_message() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let mut loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    loan.set_metadata(b"its own").unwrap();
    loan.publish(TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(&*held.metadata(), b"its own");
    let subscription_id = node.topic.local().subscription_ids().next().unwrap();
    // As for a process that is taken for dead.
    let caller = node.caller();
    let dispose = |words| _ = node.topic.dispose(&caller, node.controls()[0], words);
    node.topic.local().end_subscription(&caller, subscription_id, dispose).unwrap();
    let mut loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    loan.set_metadata(b"another").unwrap();
    assert_eq!(loan.address(), held.address(), "the block is reused");
    assert!(held.metadata().is_empty() && !held.is_valid());
    assert_eq!(held.times(), crate::Times::default());
}

#[test]
fn eviction_wakes_a_sleeping_subscriber() {
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
fn closed_node_delivers_only_queued_messages() {
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
fn publisher_marked_dead_does_not_use_a_reused_slot() {
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
    assert_eq!(node.topic.publishers().len(), 1, "the slot is reused");
    next.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn invalid_entries_are_rejected_and_released() {
    // One message is held all the time, so later ones keep their positions.
    let node = TestNode::new(&TopicSettings { depth: 128, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    // Before and after memory is admitted.
    let invalid = [u64::MAX; 6];
    let refused = |subscriber: &mut Subscriber, words| {
        node.topic.local().publish(&node.caller(), words, |_| {}).unwrap();
        let kind = subscriber.try_pull().map(|sample| sample.map(|it| it.length()));
        assert_eq!(kind.unwrap_err().kind(), ErrorKind::Malformed, "{words:x?}");
        assert!(subscriber.try_pull().unwrap().is_none());
    };
    refused(&mut subscriber, invalid);
    publisher.push(b"a message", TEST_TIMEOUT).unwrap();
    let held = subscriber.pull(TEST_TIMEOUT).unwrap();
    let end = node.local.length();
    assert!(end > 0 && end.is_multiple_of(GRANULE));
    let entry = |offset: u64, length: u64| {
        // An invalid block, or it would be released.
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
        // Only the upper bits of the offset.
        (0xff << 32, 1),
        (far, 1),
        (far, longest),
    ] {
        let words = entry(offset, length);
        refused(&mut subscriber, words);
        // With all flags and arbitrary neighbouring bits, but without a sync point.
        let flags = [words[5] | 0xffff, words[5] | 1 << 16 | 0xffff, words[5] | 0xfe << 16];
        for flags in flags {
            let [_, place, ..] = words;
            refused(&mut subscriber, [u64::MAX, place, u64::MAX, 0, u64::MAX, flags & !(1 << 17)]);
        }
        // Arbitrary bits in place of a sync point, and arbitrary publishers and sequences.
        let beside = u64::from(u32::MAX) << 32;
        refused(&mut subscriber, [words[0], words[1], 0, 0, 0, words[5] | beside]);
        for (publisher, sequence) in [(1 << 20, u64::MAX), (u64::MAX, 0), (1 << 20, 1)] {
            refused(&mut subscriber, [words[0], words[1], publisher, sequence, 0, words[5]]);
        }
    }
    refused(&mut subscriber, invalid);
    assert_eq!(held.to_vec().unwrap(), b"a message");
    assert_eq!(node.blocks_allocated(), 1);
    drop(held);
    publisher.push(b"another", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"another");
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn handles_are_send_and_sync() {
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
fn wait_of_publishers_is_reported_once() {
    let node = TestNode::new(&TopicSettings { depth: 2, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    // The first publish had to wait for memory.
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert!(node.topic.clear_if_unblocked());
    let before = node.service.publisher_blocked.load(Relaxed);
    let reports = || node.service.publisher_blocked.load(Relaxed) - before;
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    // There was room, so no wait is reported.
    assert_eq!(reports(), 0);
    for _ in 0..3 {
        assert!(publisher.try_push(b"x").unwrap().is_none());
        publisher.push(b"x", SHORT_TIMEOUT).unwrap_err();
        publisher.flush(SHORT_TIMEOUT).unwrap_err();
    }
    assert_eq!(reports(), 1);
    assert!(!node.topic.clear_if_unblocked(), "a refused publisher may try again");
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    assert_eq!(reports(), 1);
    assert!(node.topic.clear_if_unblocked());
    publisher.flush(SHORT_TIMEOUT).unwrap_err();
    assert_eq!(reports(), 2);
    assert!(!node.topic.clear_if_unblocked());
    // Topics that drop messages report no wait.
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
fn wait_in_slices_is_reported_as_one() {
    let release_deadline = Duration::from_secs(3600);
    let node = TestNode::new(&TopicSettings { depth: 1, release_deadline, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.set_wait_strategy(WaitStrategy::Block);
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    let slice = Duration::from_millis(5);
    let since = || {
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| publisher.push(b"z", slice).is_err());
            let mut since = None;
            while !blocked.is_finished() {
                since = node.topic.publisher(publisher.id().as_u64()).seen().unwrap().waits_since;
                if since.is_some() {
                    break;
                }
            }
            assert!(blocked.join().unwrap());
            since
        })
    };
    let first = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    let again = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    assert_eq!(again, first);
    // Room ends the wait.
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    std::thread::sleep(slice);
    let other = std::iter::repeat_with(since).find_map(|since| since).unwrap();
    assert!(other > first);
}
