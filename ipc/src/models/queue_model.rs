//! The queue: no entry is lost or torn, and no wake-up is lost.

use super::*;
use crate::doorbell::WaitStrategy;
use crate::queue::{OverflowPolicy, Queue, QueueError, QueueSetup, Subscriber};

type ModelQueue = Queue<ModelWords, 2>;

/// Words that are slept on: the lock, and both doorbells.
const SLEEPABLE: [usize; 3] = [8, 16, 24];

/// A queue, and the words by which other threads attach to it.
fn queue(depth: u32, overflow_policy: OverflowPolicy) -> (ModelQueue, ModelWords) {
    let setup = QueueSetup { depth, max_held: depth, overflow_policy };
    // One more word, for the payload of an entry.
    let values = LocalWords::zeroed(ModelQueue::required_words(setup) + 1);
    Queue::<_, 2>::format(&values, setup).unwrap();
    let words = ModelWords::new(&values, &SLEEPABLE, Waiting::Sleeping);
    (attach(&words), words)
}

fn attach(words: &ModelWords) -> ModelQueue {
    Queue::attach(words.clone()).unwrap()
}

/// An entry whose parts fit no other entry.
fn entry(value: u64) -> [u64; 2] {
    [value, !value]
}

fn value(entry: [u64; 2]) -> u64 {
    assert_eq!(entry[1], !entry[0], "torn");
    entry[0]
}

fn subscribe(queue: &ModelQueue, index: u32) -> Subscriber {
    let mut subscriber = queue.subscribe(&caller(index)).unwrap();
    subscriber.set_wait_strategy(WaitStrategy::Block);
    subscriber
}

/// Publishes, and waits for space; disposed entries are ignored.
fn publish(queue: &ModelQueue, words: &ModelWords, index: u32, value: u64) {
    let mut spin = WaitStrategy::Block;
    queue
        .publish_until(&caller(index), entry(value), &mut spin, words.never(), |old| {
            self::value(old);
        })
        .unwrap();
}

fn read(queue: &ModelQueue, words: &ModelWords, subscriber: &mut Subscriber) -> u64 {
    let taken = queue.take_until(subscriber, words.never()).unwrap();
    if queue.release(subscriber, taken.position).is_some() {
        queue.mark_disposed(taken.position);
    }
    value(taken.entry)
}

#[test]
fn entries_arrive_in_order_through_one_slot() {
    check(|| {
        let (queue, words) = queue(1, OverflowPolicy::Reject);
        let mut subscriber = subscribe(&queue, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            (0..2).for_each(|value| publish(&queue, &other, 1, value));
        });
        (0..2).for_each(|value| assert_eq!(read(&queue, &words, &mut subscriber), value));
        publisher.join().unwrap();
    });
}

#[test]
fn non_claiming_reader_misses_nothing() {
    check_with(3, || {
        let (queue, words) = queue(2, OverflowPolicy::Reject);
        let mut subscriber = subscribe(&queue, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            let publish = |value| queue.publish(&caller(1), entry(value), |_| {});
            (0..3)
                .filter(|value| match publish(*value) {
                    Ok(_) => true,
                    Err(QueueError::Full) => false,
                    Err(error) => panic!("{error}"),
                })
                .collect::<Vec<_>>()
        });
        let mut seen = Vec::new();
        let mut take = |seen: &mut Vec<u64>| {
            if let Some(taken) = queue.take(&mut subscriber) {
                seen.push(value(taken.entry));
                if queue.release(&subscriber, taken.position).is_some() {
                    queue.mark_disposed(taken.position);
                }
            }
        };
        (0..2).for_each(|_| take(&mut seen));
        let published = publisher.join().unwrap();
        (0..3).for_each(|_| take(&mut seen));
        assert_eq!(seen, published);
    });
}

#[test]
fn dropped_entries_are_reported() {
    check(|| {
        let (queue, words) = queue(1, OverflowPolicy::DropOldest);
        let mut subscriber = subscribe(&queue, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            (0..2).for_each(|value| publish(&queue, &other, 1, value));
        });
        let (mut seen, mut last) = (0, None);
        let mut take = || {
            if let Some(taken) = queue.take(&mut subscriber) {
                let value = value(taken.entry);
                assert!(last < Some(value));
                last = Some(value);
                seen += 1 + taken.missed;
                if queue.release(&subscriber, taken.position).is_some() {
                    queue.mark_disposed(taken.position);
                }
            }
        };
        (0..2).for_each(|_| take());
        publisher.join().unwrap();
        (0..2).for_each(|_| take());
        assert_eq!((seen, last), (2, Some(1)));
    });
}

/// A subscriber that does not read costs another one nothing, whenever that reads; and no entry
/// is rejected that any subscriber has space for.
#[test]
fn slow_subscriber_does_not_affect_others() {
    check_with(2, || {
        let (queue, words) = queue(1, OverflowPolicy::DropNewest);
        let mut lags = subscribe(&queue, 0);
        let mut reads = subscribe(&queue, 2);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            let publish = |value| queue.publish(&caller(1), entry(value), |_| {}).is_ok();
            [publish(0), publish(1)]
        });
        let mut seen = Vec::new();
        let mut take = |seen: &mut Vec<u64>| {
            if let Some(taken) = queue.take(&mut reads) {
                assert_eq!(taken.missed, 0);
                seen.push(value(taken.entry));
                if queue.release(&reads, taken.position).is_some() {
                    queue.mark_disposed(taken.position);
                }
            }
        };
        (0..2).for_each(|_| take(&mut seen));
        let is_published = publisher.join().unwrap();
        (0..2).for_each(|_| take(&mut seen));
        let published: Vec<_> = (0..2).filter(|value| is_published[*value as usize]).collect();
        assert!(is_published[0]);
        assert_eq!(seen, published);
        let last = queue.take(&mut lags).unwrap();
        assert_eq!((value(last.entry), last.missed + 1), (seen[seen.len() - 1], seen.len() as u64));
    });
}

#[test]
fn new_subscriber_gets_all_later_entries() {
    check(|| {
        let (queue, words) = queue(4, OverflowPolicy::Reject);
        let _reader = subscribe(&queue, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            (0..2).for_each(|value| publish(&queue, &other, 1, value));
        });
        let mut late = subscribe(&queue, 2);
        let first = late.position();
        for value in first..2 {
            assert_eq!(read(&queue, &words, &mut late), value);
        }
        publisher.join().unwrap();
        assert!(queue.take(&mut late).is_none());
    });
}

#[test]
fn two_publishers_lose_nothing() {
    check(|| {
        let (queue, words) = queue(2, OverflowPolicy::Reject);
        let mut subscriber = subscribe(&queue, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || publish(&attach(&other), &other, 1, 1));
        publish(&queue, &words, 2, 2);
        let seen = [(); 2].map(|()| read(&queue, &words, &mut subscriber));
        assert!(seen == [1, 2] || seen == [2, 1], "{seen:?}");
        publisher.join().unwrap();
    });
}

/// Two publish, and one reads at the same time: at most one preemption, or the model would take
/// too long.
#[test]
fn two_publishers_and_a_reader() {
    check_with(1, || {
        let (queue, words) = queue(2, OverflowPolicy::Reject);
        let mut subscriber = subscribe(&queue, 0);
        let publishers = [1, 2].map(|index| {
            let words = words.clone();
            loom::thread::spawn(move || publish(&attach(&words), &words, index, index.into()))
        });
        let seen = [(); 2].map(|()| read(&queue, &words, &mut subscriber));
        assert!(seen == [1, 2] || seen == [2, 1], "{seen:?}");
        publishers.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A living subscriber that was taken for dead reads; another takes its slot.
#[test]
fn removed_subscriber_sees_no_torn_entry() {
    check_within(Preemptions { usual: 2, deep: 3 }, || {
        let (queue, words) = queue(1, OverflowPolicy::Reject);
        let mut removed = subscribe(&queue, 0);
        publish(&queue, &words, 2, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            let dispose = |old| assert_eq!(value(old), 0);
            queue.remove_participant(&caller(2), caller(0).me, dispose).unwrap();
            assert_eq!(subscribe(&queue, 3).index(), 0);
            queue.publish(&caller(2), entry(1), dispose).unwrap();
        });
        if let Some(taken) = queue.take(&mut removed) {
            assert_eq!(value(taken.entry), 0);
        }
        publisher.join().unwrap();
    });
}

/// A subscription that holds its entries after the read of a payload proves that the payload was
/// intact: a removal overwrites what it disposes of at once.
#[test]
fn removed_subscriber_detects_overwritten_payloads() {
    check_with(3, || {
        let (queue, words) = queue(1, OverflowPolicy::Reject);
        let named = words.count() - 1;
        let mut slow = subscribe(&queue, 0);
        words.store(named, 1, Ordering::Relaxed);
        publish(&queue, &words, 2, 0);
        let subscription_id = queue.take(&mut slow).map(|_| slow.subscription_id()).unwrap();
        let other = words.clone();
        let evictor = loom::thread::spawn(move || {
            // There is a lock between the disposal of an entry and its next writer.
            let overwrite = |_| other.store(named, 2, Ordering::Release);
            attach(&other).end_subscription(&caller(2), subscription_id, overwrite).unwrap();
        });
        let read = words.load(named, Ordering::Relaxed);
        if queue.held_entries(subscription_id) {
            assert_eq!(read, 1);
        }
        evictor.join().unwrap();
    });
}

/// What an evicted subscriber has taken stays, also if it takes it at that moment; what it has not
/// taken is given up, and its space is used.
#[test]
fn evicted_subscriber_keeps_what_it_takes() {
    for overflow_policy in [OverflowPolicy::Reject, OverflowPolicy::DropOldest] {
        check_with(3, move || {
            let (queue, words) = queue(1, overflow_policy);
            let named = words.count() - 1;
            let mut slow = subscribe(&queue, 0);
            words.store(named, 1, Ordering::Relaxed);
            publish(&queue, &words, 2, 0);
            let (other, subscription_id) = (words.clone(), slow.subscription_id());
            let evictor = loom::thread::spawn(move || {
                let queue = attach(&other);
                let overwrite = |old| {
                    assert_eq!(value(old), 0);
                    other.store(named, 2, Ordering::Release);
                };
                queue.evict(&caller(2), subscription_id, overwrite).unwrap();
                let mut next = subscribe(&queue, 3);
                queue.publish(&caller(2), entry(1), overwrite).unwrap();
                assert_eq!(queue.take(&mut next).map(|taken| value(taken.entry)), Some(1));
            });
            if let Some(taken) = queue.take(&mut slow) {
                assert_eq!((value(taken.entry), words.load(named, Ordering::Relaxed)), (0, 1));
                evictor.join().unwrap();
                assert_eq!(words.load(named, Ordering::Relaxed), 1, "it is still held");
                assert!(queue.release(&slow, taken.position).is_some());
            } else {
                evictor.join().unwrap();
                assert_eq!(queue.take(&mut slow), None);
            }
        });
    }
}

/// A reader releases an entry at the moment when its slot of the ring gets another.
#[test]
fn entry_released_while_its_slot_is_replaced_is_disposed_of_once() {
    for overflow_policy in [OverflowPolicy::Reject, OverflowPolicy::DropOldest] {
        check_with(3, move || {
            let (queue, words) = queue(1, overflow_policy);
            let mut reader = subscribe(&queue, 0);
            publish(&queue, &words, 2, 0);
            let subscription_id =
                queue.take(&mut reader).map(|_| reader.subscription_id()).unwrap();
            let other = words.clone();
            let releaser = loom::thread::spawn(move || {
                let queue = attach(&other);
                let released = queue.release_by(subscription_id, 0).map(value);
                queue.mark_disposed(0);
                released
            });
            let mut disposed = Vec::new();
            queue.publish(&caller(2), entry(1), |old| disposed.push(value(old))).unwrap();
            assert_eq!(releaser.join().unwrap(), Some(0));
            // Perhaps a second time, if the publisher was faster than `mark_disposed`.
            assert!(disposed.iter().all(|old| *old == 0));
            assert_eq!(queue.take(&mut reader).map(|taken| value(taken.entry)), Some(1));
            queue.publish(&caller(2), entry(2), |old| assert_eq!(value(old), 0)).unwrap();
            assert_eq!(queue.take(&mut reader).map(|taken| value(taken.entry)), Some(2));
        });
    }
}

/// The slot of the next entry is replaced, since the reader holds the last one there, while the
/// reader looks for it.
#[test]
fn reader_misses_no_entry_whose_slot_is_replaced() {
    for overflow_policy in [OverflowPolicy::DropOldest, OverflowPolicy::DropNewest] {
        check_with(3, move || {
            let (queue, words) = queue(1, overflow_policy);
            let mut reader = subscribe(&queue, 0);
            publish(&queue, &words, 2, 0);
            assert!(queue.take(&mut reader).is_some());
            let other = words.clone();
            let publisher = loom::thread::spawn(move || publish(&attach(&other), &other, 2, 1));
            let found = queue.take(&mut reader);
            publisher.join().unwrap();
            let found = found.or_else(|| queue.take(&mut reader));
            assert_eq!(found.map(|taken| value(taken.entry)), Some(1));
        });
    }
}

/// A reader that claims the next entry of a slot by mistake, while that slot is replaced, reads that
/// entry in its turn, or is told that it missed it.
#[test]
fn entry_claimed_by_mistake_is_read_or_missed() {
    check_within(Preemptions { usual: 2, deep: 3 }, || {
        let (queue, words) = queue(1, OverflowPolicy::DropOldest);
        let mut reader = subscribe(&queue, 0);
        publish(&queue, &words, 2, 0);
        let other = words.clone();
        let publisher = loom::thread::spawn(move || {
            let queue = attach(&other);
            let publish = |value| queue.publish(&caller(2), entry(value), |_| {});
            (1..3).filter(|value| publish(*value).is_ok()).collect::<Vec<_>>()
        });
        let (mut read, mut missed, mut last) = (0, 0, None);
        let mut take = || {
            let Some(taken) = queue.take(&mut reader) else { return false };
            assert!(last < Some(taken.position));
            last = Some(taken.position);
            (read, missed) = (read + 1, missed + taken.missed);
            if queue.release(&reader, taken.position).is_some() {
                queue.mark_disposed(taken.position);
            }
            true
        };
        take();
        let published = publisher.join().unwrap();
        while take() {}
        assert_eq!((read + missed, last), (queue.position(), Some(queue.position() - 1)));
        assert_eq!(published.len() as u64, queue.position() - 1);
        assert_eq!(queue.find_unreleased(0, |_| true), None);
    });
}

/// A subscriber stores a word about an entry that it holds, and holds it afterwards: the
/// process that disposes of the entry must see the word, whether it is the one that removes it, or
/// a later reader that releases it last.
#[test]
fn store_before_removal_is_seen_by_the_disposer() {
    check_with(2, || {
        let (queue, words) = queue(1, OverflowPolicy::Reject);
        let payload = words.count() - 1;
        let readers = [0, 1].map(|index| subscribe(&queue, index));
        publish(&queue, &words, 2, 0);
        let [(slow, _), (last, position)] = readers.map(|mut reader| {
            let taken = queue.take(&mut reader).unwrap();
            (reader.subscription_id(), taken.position)
        });
        let others = [words.clone(), words.clone()];
        let [evicting, releasing] = others;
        let evictor = loom::thread::spawn(move || {
            let mut observed = None;
            let dispose = |_| observed = Some(evicting.load(payload, Ordering::Relaxed));
            attach(&evicting).end_subscription(&caller(2), slow, dispose).unwrap();
            observed
        });
        let releaser = loom::thread::spawn(move || {
            let released = attach(&releasing).release_by(last, position);
            released.map(|_| releasing.load(payload, Ordering::Relaxed))
        });
        words.store(payload, 1, Ordering::Relaxed);
        words.fence();
        let held_entries = queue.held_entries(slow);
        let observed = [evictor.join().unwrap(), releaser.join().unwrap()];
        assert!(observed.iter().any(Option::is_some), "the entry was not disposed of");
        if held_entries {
            assert!(observed.into_iter().flatten().all(|payload| payload == 1));
        }
    });
}

/// An entry that an evicted subscriber releases at this moment belongs to no other, though the next
/// entry may get its slot.
#[test]
fn evicted_subscriber_clears_no_mark_of_its_successor() {
    check_with(3, || {
        let (queue, words) = queue(1, OverflowPolicy::Reject);
        let mut slow = subscribe(&queue, 0);
        publish(&queue, &words, 2, 0);
        let subscription_id = queue.take(&mut slow).map(|_| slow.subscription_id()).unwrap();
        let other = words.clone();
        let evictor = loom::thread::spawn(move || {
            let queue = attach(&other);
            queue.evict(&caller(2), subscription_id, |_| {}).unwrap();
            let mut next = subscribe(&queue, 3);
            // The slow subscriber may have released the entry, and still be in that call.
            publish(&queue, &other, 2, 1);
            assert_eq!(queue.take(&mut next).map(|taken| value(taken.entry)), Some(1));
        });
        if queue.release_by(subscription_id, 0).is_some() {
            queue.mark_disposed(0);
        }
        evictor.join().unwrap();
    });
}
