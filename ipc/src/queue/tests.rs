//! The queue in one process: which entries are delivered, rejected, dropped, counted.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::doorbell::WaitStrategy;
use crate::participant::{AlwaysAlive, Caller};
use crate::words::LocalWords;

type Short = Queue<LocalWords, 1>;

fn queue(depth: u32, overflow_policy: OverflowPolicy) -> Short {
    queue_holding(depth, depth, overflow_policy)
}

fn queue_holding(depth: u32, max_held: u32, overflow_policy: OverflowPolicy) -> Short {
    let setup = QueueSetup { depth, max_held, overflow_policy };
    Queue::format(LocalWords::zeroed(Short::required_words(setup)), setup).unwrap()
}

fn caller(index: u32) -> Caller<'static> {
    Caller::new(Participant::new(index, 1).unwrap(), &AlwaysAlive)
}

#[test]
fn all_subscribers_get_every_entry_and_the_last_disposes() {
    let queue = queue(2, OverflowPolicy::Reject);
    let me = caller(0);
    assert_eq!(queue.publish(&me, [1], |_| {}), Err(QueueError::NoSubscribers));
    let (mut a, mut b) = (queue.subscribe(&me).unwrap(), queue.subscribe(&me).unwrap());
    for value in [10, 11] {
        assert_eq!(queue.publish(&me, [value], |_| {}).unwrap().readers, 2);
    }
    assert_eq!(queue.publish(&me, [12], |_| {}), Err(QueueError::Full));
    let first = queue.take(&mut a).unwrap();
    assert_eq!((first.entry, first.position, first.missed), ([10], 0, 0));
    assert_eq!(queue.release(&a, 0), None, "b has still to read it");
    assert_eq!(queue.release(&a, 0), None, "once is enough");
    assert_eq!(queue.publish(&me, [12], |_| {}), Err(QueueError::Full));
    assert_eq!(queue.take(&mut b).unwrap().entry, [10]);
    assert_eq!(queue.release(&b, 0), Some([10]));
    queue.mark_disposed(0);
    assert_eq!(queue.publish(&me, [12], |entry| panic!("{entry:?}")).unwrap().position, 2);
    // An entry may be held while others are taken.
    assert_eq!(queue.take(&mut a).unwrap().entry, [11]);
    assert_eq!(queue.take(&mut a).unwrap().entry, [12]);
    assert!(queue.take(&mut a).is_none());
    assert_eq!(queue.release(&a, 2), None);
    assert_eq!(queue.release(&a, 1), None);
}

#[test]
fn wrongly_cleared_mark_costs_one_entry_only() {
    let (me, other) = (caller(0), caller(1));
    let dead = queue(4, OverflowPolicy::Reject);
    dead.subscribe(&other).unwrap();
    assert_eq!(dead.remove_participant(&me, other.me, |_| {}), Ok(1));
    let reader = dead.subscribe(&me).unwrap();
    a_mark_is_taken_off(&dead, reader);

    let followed = queue(4, OverflowPolicy::Reject);
    let role = Participant::role(0).unwrap();
    followed.subscribe_as(&other, role).unwrap();
    let reader = followed.resume(&me, role, |_| {}).unwrap().unwrap();
    a_mark_is_taken_off(&followed, reader);
}

fn a_mark_is_taken_off(queue: &Short, mut reader: Subscriber) {
    let me = caller(0);
    for value in [1, 2, 3] {
        queue.publish(&me, [value], |_| {}).unwrap();
    }
    // As a previous owner of the slot would, when it resumes in the middle of `release`.
    let mark = layout::unread_bit(reader.index());
    for position in [0, 1] {
        queue.words.fetch_and(queue.slot(position) + Short::READERS, !mark);
    }
    let taken = queue.take(&mut reader).unwrap();
    assert_eq!((taken.entry, taken.position, taken.missed), ([3], 2, 2));
    assert_eq!(reader.missed(), 2);
    assert_eq!(queue.release(&reader, 2), Some([3]));
    assert_eq!(queue.take(&mut reader), None);
    // Reported with the next entry, however late that is.
    queue.publish(&me, [4], |_| {}).unwrap();
    queue.words.fetch_and(queue.slot(3) + Short::READERS, !mark);
    assert_eq!(queue.take(&mut reader), None);
    queue.publish(&me, [5], |_| {}).unwrap();
    assert_eq!(queue.take(&mut reader).map(|taken| taken.missed), Some(1));
}

/// Any process may have written what the queue has in shared memory.
#[test]
fn publishing_ends_if_the_number_of_used_spares_is_wrong() {
    let queue = queue(2, OverflowPolicy::DropOldest);
    let me = caller(0);
    let mut reader = queue.subscribe(&me).unwrap();
    for value in 0..4 {
        queue.publish(&me, [value], |_| {}).unwrap();
        assert_eq!(queue.take(&mut reader).map(|taken| taken.entry), Some([value]));
    }
    queue.words.store(layout::SPARES_USED, 0, Relaxed);
    assert_eq!(queue.publish(&me, [4], |_| {}), Err(QueueError::Full));
}

#[test]
fn late_subscriber_gets_later_entries_only() {
    let queue = queue(4, OverflowPolicy::Reject);
    let me = caller(0);
    let mut early = queue.subscribe(&me).unwrap();
    queue.publish(&me, [1], |_| {}).unwrap();
    let mut late = queue.subscribe(&me).unwrap();
    queue.publish(&me, [2], |_| {}).unwrap();
    assert_eq!(queue.take(&mut early).unwrap().entry, [1]);
    assert_eq!(queue.take(&mut late).unwrap().entry, [2]);
    assert_eq!(queue.release(&early, 0), Some([1]));
}

#[test]
fn oldest_entry_is_dropped_and_the_gap_reported() {
    let queue = queue(3, OverflowPolicy::DropOldest);
    let me = caller(0);
    let mut reader = queue.subscribe(&me).unwrap();
    let mut disposed = Vec::new();
    for value in 0..10 {
        queue.publish(&me, [value], |entry| disposed.push(entry[0])).unwrap();
    }
    assert_eq!(disposed, (0..7).collect::<Vec<_>>());
    assert_eq!(queue.dropped(), 7);
    let taken = queue.take(&mut reader).unwrap();
    assert_eq!((taken.entry, taken.position, taken.missed), ([7], 7, 7));
    assert_eq!(reader.missed(), 7);
    // Held entries stay, however many follow.
    for value in 10..50 {
        queue.publish(&me, [value], |entry| assert_ne!(entry, [7])).unwrap();
    }
    assert_eq!(queue.release(&reader, 7), Some([7]));
    queue.mark_disposed(7);
    let taken = queue.take(&mut reader).unwrap();
    assert_eq!(taken.entry[0], taken.entry[0].max(47));
}

#[test]
fn slow_subscriber_costs_others_no_entries() {
    for overflow_policy in [OverflowPolicy::DropOldest, OverflowPolicy::DropNewest] {
        let queue = queue(4, overflow_policy);
        let me = caller(0);
        let (mut keeps_up, mut lags) =
            (queue.subscribe(&me).unwrap(), queue.subscribe(&me).unwrap());
        let mut disposed = Vec::new();
        for value in 0..400 {
            let dispose = |entry: [u64; 1]| disposed.push(entry[0]);
            assert_eq!(queue.publish(&me, [value], dispose).unwrap().readers, 2);
            // It is up to three entries behind at times, and never more.
            if value % 4 == 3 {
                for expected in value - 3..=value {
                    let taken = queue.take(&mut keeps_up).unwrap();
                    assert_eq!((taken.entry, taken.missed), ([expected], 0), "{overflow_policy:?}");
                    assert_eq!(queue.release(&keeps_up, taken.position), None);
                }
            }
        }
        // Entries that only the other subscriber had not read are taken back.
        assert_eq!(disposed, (0..396).collect::<Vec<_>>());
        let taken = queue.take(&mut lags).unwrap();
        assert_eq!((taken.entry, taken.missed), ([396], 396));
    }
}

#[test]
fn held_entries_do_not_reduce_the_depth_of_others() {
    for overflow_policy in [OverflowPolicy::DropOldest, OverflowPolicy::DropNewest] {
        let queue = queue_holding(16, 20, overflow_policy);
        let me = caller(0);
        let (mut keeps_up, mut holds) =
            (queue.subscribe(&me).unwrap(), queue.subscribe(&me).unwrap());
        let mut read = 0;
        for value in 0..400 {
            queue.publish(&me, [value], |_| {}).unwrap();
            if value < 20 {
                queue.take(&mut holds).unwrap();
            }
            // Far behind, but not too far.
            if value >= read + 15 {
                let taken = queue.take(&mut keeps_up).unwrap();
                assert_eq!((taken.entry, taken.missed), ([read], 0), "{overflow_policy:?}");
                queue.release(&keeps_up, taken.position);
                read += 1;
            }
        }
        assert_eq!(queue.backlog_of(holds.subscription_id()).1, 20);
        for held in 0..20 {
            assert!(queue.release(&holds, held).is_some(), "{held} must still be held");
        }
    }
}

#[test]
fn held_entries_and_an_idle_reader_block_no_others() {
    for overflow_policy in [OverflowPolicy::DropOldest, OverflowPolicy::DropNewest] {
        let queue = queue_holding(16, 56, overflow_policy);
        let me = caller(0);
        let [mut keeps_up, mut first, mut second, mut idle] =
            [(); 4].map(|()| queue.subscribe(&me).unwrap());
        let mut value = 0;
        let mut publish = |keeps_up: &mut _| {
            queue.publish(&me, [value], |_| {}).unwrap();
            let taken = queue.take(keeps_up).unwrap();
            assert_eq!((taken.entry, taken.missed), ([value], 0), "{overflow_policy:?}");
            queue.release(keeps_up, taken.position);
            value += 1;
        };
        // Together they hold the maximum.
        for holder in [&mut first, &mut second] {
            for _ in 0..30 {
                publish(&mut keeps_up);
                while let Some(taken) = queue.take(holder) {
                    if taken.entry[0] % 30 >= 28 {
                        queue.release(holder, taken.position);
                    }
                }
            }
        }
        for _ in 0..200 {
            publish(&mut keeps_up);
        }
        let taken = queue.take(&mut idle).unwrap();
        assert!(taken.missed > 200, "{} were missed", taken.missed);
    }
}

#[test]
fn newest_is_rejected_only_if_no_subscriber_has_space() {
    let queue = queue(3, OverflowPolicy::DropNewest);
    let me = caller(0);
    let (mut first, mut second) = (queue.subscribe(&me).unwrap(), queue.subscribe(&me).unwrap());
    for value in 0..3 {
        queue.publish(&me, [value], |_| {}).unwrap();
    }
    assert_eq!(queue.publish(&me, [3], |_| {}), Err(QueueError::Full));
    assert!(queue.has_room(), "nothing is held");
    let held = queue.take(&mut first).unwrap();
    assert_eq!((held.entry, queue.publish(&me, [4], |_| {}).unwrap().readers), ([0], 2));
    assert_eq!(queue.publish(&me, [5], |_| {}), Err(QueueError::Full));
    // The other subscriber has missed one.
    let taken = queue.take(&mut second).unwrap();
    assert_eq!((taken.entry, taken.missed), ([1], 1));
    let taken = queue.take(&mut first).unwrap();
    assert_eq!((taken.entry, taken.missed), ([1], 0));
    assert_eq!(queue.release(&first, held.position), Some([0]));
}

#[test]
fn unsubscribing_disposes_of_entries_without_other_readers() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(4, overflow_policy);
        let (me, other) = (caller(0), caller(1));
        let (mut stays, mut goes) =
            (queue.subscribe(&me).unwrap(), queue.subscribe(&other).unwrap());
        for value in 0..3 {
            queue.publish(&me, [value], |_| {}).unwrap();
        }
        queue.take(&mut stays).unwrap();
        assert_eq!(queue.release(&stays, 0), None);
        queue.take(&mut goes).unwrap();
        let mut disposed = Vec::new();
        assert_eq!(queue.remove_participant(&me, other.me, |entry| disposed.push(entry[0])), Ok(1));
        assert_eq!(disposed, [0], "the other entries are unread");
        assert_eq!(queue.remove_participant(&me, other.me, |_| panic!("twice")), Ok(0));
        assert!(!queue.is_subscribed(&goes));
        assert!(queue.take(&mut goes).is_none());
        assert_eq!(queue.release(&goes, 1), None);
        // The next subscriber in the same slot is another subscription.
        let again = queue.subscribe(&other).unwrap();
        assert_eq!(again.index(), goes.index());
        assert!(!queue.is_subscribed(&goes));
        assert_eq!(
            queue.end_subscription(&other, goes.subscription_id(), |_| {}),
            Err(QueueError::NotSubscribed)
        );
        queue.end_subscription(&other, again.subscription_id(), |_| {}).unwrap();
        assert_eq!(queue.subscribers(), 1);
    }
}

#[test]
fn resumed_role_misses_nothing() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(4, overflow_policy);
        let role = Participant::role(0).unwrap();
        let (first, second) = (caller(0), caller(1));
        assert!(queue.resume(&first, role, |_| {}).unwrap().is_none());
        let mut before = queue.subscribe_as(&first, role).unwrap();
        let bystander = queue.subscribe(&caller(2)).unwrap();
        for value in 0..4 {
            queue.publish(&caller(2), [value], |_| {}).unwrap();
            let _ = queue.release(&bystander, value);
        }
        // It releases the second, and holds the first and the third.
        (0..3).for_each(|value| assert_eq!(queue.take(&mut before).unwrap().entry, [value]));
        assert_eq!(queue.release(&before, 1), Some([1]));
        queue.mark_disposed(1);
        assert_eq!(queue.oldest_unreleased(before.subscription_id()), 0);
        assert_eq!(queue.backlog_of(before.subscription_id()), (1, 2));
        assert_eq!(queue.remove_participant(&second, first.me, |entry| panic!("{entry:?}")), Ok(0));

        let mut after = queue.resume(&second, role, |_| {}).unwrap().unwrap();
        assert_eq!((after.index(), after.position()), (before.index(), 0));
        assert!(
            after.subscription_id().participant() == Some(role)
                && after.subscription_id() != before.subscription_id()
        );
        assert!(!queue.is_subscribed(&before) && queue.take(&mut before).is_none());
        assert_eq!(queue.release(&before, 0), None, "the entry belongs to the successor");
        let mut seen = Vec::new();
        while let Some(taken) = queue.take(&mut after) {
            seen.push(taken.entry[0]);
            assert_eq!(queue.oldest_unreleased(after.subscription_id()), taken.position);
            assert_eq!(
                queue.release_by(after.subscription_id(), taken.position),
                Some(taken.entry)
            );
            queue.mark_disposed(taken.position);
        }
        assert_eq!(seen, [0, 2, 3]);
        assert_eq!(queue.oldest_unreleased(after.subscription_id()), 4);
        assert_eq!(
            queue.subscription_ids().collect::<Vec<_>>(),
            [bystander.subscription_id(), after.subscription_id()]
        );
        queue
            .end_subscription(&first, after.subscription_id(), |entry| panic!("{entry:?}"))
            .unwrap();
        let again = queue.end_subscription(&first, after.subscription_id(), |_| {});
        assert_eq!(again, Err(QueueError::NotSubscribed));
        assert!(queue.resume(&first, role, |_| {}).unwrap().is_none());
    }
}

#[test]
fn evicted_subscriber_keeps_what_it_holds() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(3, overflow_policy);
        let (me, other) = (caller(0), caller(1));
        let mut slow = queue.subscribe(&other).unwrap();
        for value in 0..3 {
            queue.publish(&me, [value], |_| {}).unwrap();
        }
        (0..2).for_each(|value| assert_eq!(queue.take(&mut slow).unwrap().entry, [value]));
        assert!(queue.held_entries(slow.subscription_id()));
        let mut disposed = Vec::new();
        let dispose = |entry: [u64; 1]| {
            assert!(
                !queue.is_subscribed(&slow),
                "the subscription is inactive before entries are disposed of"
            );
            disposed.push(entry[0]);
        };
        queue.evict(&me, slow.subscription_id(), dispose).unwrap();
        assert_eq!(disposed, [2], "its unread entry is given up");
        assert!(!queue.is_subscribed(&slow) && queue.take(&mut slow).is_none());
        assert!(queue.held_entries(slow.subscription_id()));
        assert_eq!((queue.subscribers(), queue.backlog_of(slow.subscription_id())), (0, (0, 2)));
        assert_eq!(queue.evicted_holders(), [(slow.subscription_id(), 2)]);
        assert_eq!(
            queue.find_subscription(slow.subscription_id().to_bits()),
            Some(slow.subscription_id())
        );
        queue.evict(&me, slow.subscription_id(), |entry| panic!("{entry:?} twice")).unwrap();
        // Later entries have other slots, however many follow.
        let mut next = queue.subscribe(&me).unwrap();
        assert_ne!(next.index(), slow.index());
        for value in 3..30 {
            queue.publish(&me, [value], |entry| panic!("{entry:?} is held")).unwrap();
            let taken = queue.take(&mut next).unwrap();
            assert_eq!(taken.entry, [value]);
            assert_eq!(queue.release(&next, taken.position), Some([value]));
            queue.mark_disposed(taken.position);
        }
        assert_eq!(queue.release(&slow, 0), Some([0]));
        queue.mark_disposed(0);
        assert_eq!(queue.release(&slow, 0), None);
        (2..30).for_each(|position| assert_eq!(queue.release(&slow, position), None));
        // The subscription ends by itself, or with its process.
        let mut disposed = Vec::new();
        queue
            .end_subscription(&other, slow.subscription_id(), |entry| disposed.push(entry[0]))
            .unwrap();
        assert_eq!((disposed, queue.evicted_holders()), (vec![1], vec![]));
        assert!(!queue.held_entries(slow.subscription_id()));
        assert_eq!(queue.find_subscription(slow.subscription_id().to_bits()), None);
        let again = queue.end_subscription(&other, slow.subscription_id(), |_| {});
        assert_eq!(again, Err(QueueError::NotSubscribed));
        assert_eq!(
            queue.evict(&me, slow.subscription_id(), |_| {}),
            Err(QueueError::NotSubscribed)
        );
        let slow = queue.subscribe(&other).unwrap();
        queue.evict(&me, slow.subscription_id(), |_| {}).unwrap();
        assert_eq!(queue.remove_participant(&me, other.me, |_| {}), Ok(1));
        assert_eq!(queue.subscribe(&me).unwrap().index(), slow.index());
    }
}

/// A reader holds entries, and the others get all later ones: depth counts unread entries only.
#[test]
fn held_entries_leave_the_whole_depth() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        for depth in [1, 8] {
            let queue = queue_holding(depth, 4, overflow_policy);
            let me = caller(0);
            let mut reader = queue.subscribe(&me).unwrap();
            let publish =
                |value| queue.publish(&me, [value], |entry| assert!(entry[0] > 3)).map(drop);
            for value in 0..4 {
                publish(value).unwrap();
                assert_eq!(queue.take(&mut reader).unwrap().entry, [value]);
            }
            for round in 1..10 {
                let values = round * 100..round * 100 + u64::from(depth);
                values.clone().for_each(|value| publish(value).unwrap());
                let is_full = publish(0) == Err(QueueError::Full);
                assert_eq!(is_full, overflow_policy != OverflowPolicy::DropOldest);
                while let Some(taken) = queue.take(&mut reader) {
                    assert!(queue.release(&reader, taken.position).is_some());
                    queue.mark_disposed(taken.position);
                }
            }
            let held = (0..4).map(|held| queue.release(&reader, held));
            assert_eq!(held.collect::<Vec<_>>(), [0, 1, 2, 3].map(|value| Some([value])));
        }
    }
}

/// Those that hold the maximum block the others, then evicted ones that do.
#[test]
fn holders_of_the_maximum_are_named() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue_holding(2, 3, overflow_policy);
        let me = caller(0);
        let mut value = 0;
        let mut hold = |readers: &mut [Subscriber], which: usize, count| {
            for _ in 0..count {
                queue.publish(&me, [value], |_| {}).unwrap();
                for (number, reader) in readers.iter_mut().enumerate() {
                    match queue.take(reader) {
                        Some(taken) if number != which => {
                            queue.release(reader, taken.position);
                        }
                        taken => assert_eq!(taken.is_some(), queue.is_subscribed(reader)),
                    }
                }
                value += 1;
            }
        };
        let mut readers = [(); 3].map(|()| queue.subscribe(&me).unwrap());
        hold(&mut readers, 0, 3);
        hold(&mut readers, 1, 2);
        assert_eq!(queue.publish(&me, [9], |_| {}), Err(QueueError::Full), "{overflow_policy:?}");
        let [first, second, _] = readers.each_ref().map(Subscriber::subscription_id);
        assert_eq!(queue.blocking(), [(first, 0), (second, 3)]);
        queue.evict(&me, first, |_| panic!("nothing is unread")).unwrap();
        // As many are left for the others.
        assert!(queue.has_room() && queue.blocking().is_empty());
        queue.evict(&me, second, |_| panic!("nothing is unread")).unwrap();
        assert_eq!(queue.publish(&me, [9], |_| {}), Err(QueueError::Full), "{overflow_policy:?}");
        assert_eq!(queue.blocking(), []);
        assert_eq!(queue.evicted_holders(), [(first, 3), (second, 2)]);
        assert!(queue.release(&readers[0], 0).is_some());
        queue.mark_disposed(0);
        assert!(queue.has_room());
    }
}

#[test]
fn entries_held_too_long_are_missed_after_resume() {
    let queue = queue(2, OverflowPolicy::DropOldest);
    let role = Participant::role(0).unwrap();
    let me = caller(0);
    let mut before = queue.subscribe_as(&me, role).unwrap();
    queue.publish(&me, [0], |_| {}).unwrap();
    queue.take(&mut before).unwrap();
    for value in 1..=200 {
        queue.publish(&me, [value], |entry| assert_ne!(entry, [0])).unwrap();
    }
    let mut disposed = Vec::new();
    let after = queue.resume(&me, role, |entry| disposed.push(entry[0])).unwrap();
    let mut after = after.unwrap();
    assert_eq!(disposed, [0]);
    let taken = queue.take(&mut after).unwrap();
    assert_eq!((taken.entry, after.missed()), ([199], 199));
    queue.release(&after, taken.position);
    queue.remove_participant(&me, role, |_| {}).unwrap();
    assert!(queue.entries_with(u64::MAX).next().is_none());
}

#[test]
fn entry_reverted_too_late_is_dropped() {
    let queue = queue(2, OverflowPolicy::DropOldest);
    let me = caller(0);
    let [mut holds, other] = [(); 2].map(|()| queue.subscribe(&me).unwrap());
    queue.publish(&me, [0], |_| {}).unwrap();
    queue.take(&mut holds).unwrap();
    let publish = |value, disposed: &mut Vec<u64>| {
        queue.publish(&me, [value], |entry| disposed.push(entry[0])).unwrap();
    };
    let mut disposed = Vec::new();
    (1..10).for_each(|value| publish(value, &mut disposed));
    // Another reader claimed it by mistake, and reverted that after the moment to drop it had
    // passed.
    let slot = queue.find_slot(0).unwrap();
    queue.words.store(slot + Short::READERS, layout::unread_bit(other.index()), Release);
    // The next held entry gets its slot.
    queue.take(&mut holds).unwrap();
    (10..20).for_each(|value| publish(value, &mut disposed));
    assert_eq!(disposed.iter().filter(|value| **value == 0).count(), 1);
    assert_eq!(queue.words.load(layout::SPARES_USED, Relaxed), 1);
}

#[test]
fn stopped_subscriber_keeps_its_held_entries() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(3, overflow_policy);
        let me = caller(0);
        let mut reader = queue.subscribe(&me).unwrap();
        for value in 0..3 {
            queue.publish(&me, [value], |_| {}).unwrap();
        }
        queue.take(&mut reader).unwrap();
        let mut disposed = Vec::new();
        queue.stop(&me, &mut reader, |entry| disposed.push(entry[0])).unwrap();
        assert_eq!(disposed, [1, 2]);
        assert!(queue.take(&mut reader).is_none());
        assert_eq!(queue.publish(&me, [3], |_| {}), Err(QueueError::NoSubscribers));
        assert_ne!(queue.subscribe(&me).unwrap().index(), reader.index());
        assert_eq!(queue.release_by(reader.subscription_id(), 0), Some([0]));
        queue
            .end_subscription(&me, reader.subscription_id(), |entry| assert_eq!(entry, [0]))
            .unwrap();
        assert_eq!(queue.subscribe(&me).unwrap().index(), reader.index());
    }
}

#[test]
fn has_room_does_not_take_an_entry() {
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(1, overflow_policy);
        let me = caller(0);
        let mut reader = queue.subscribe(&me).unwrap();
        assert!(queue.has_room());
        let mut held = Vec::new();
        while queue.publish(&me, [7], |_| {}).is_ok() {
            held.push(queue.take(&mut reader).unwrap().position);
        }
        assert!(!queue.has_room(), "{overflow_policy:?}");
        assert!(queue.release(&reader, held[0]).is_some());
        assert!(queue.has_room());
    }
}

#[test]
fn death_during_a_ring_leaves_no_sleeper() {
    use std::time::{Duration, Instant};
    let queue = queue(1, OverflowPolicy::Reject);
    let me = caller(0);
    let mut reader = queue.subscribe(&me).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            reader.set_wait_strategy(WaitStrategy::Block);
            let far = Instant::now() + Duration::from_secs(60);
            queue.take_until(&mut reader, far).unwrap().entry
        });
        while queue.words.load(layout::MESSAGES + 1, Acquire) == 0 {
            std::thread::yield_now();
        }
        // The sleepers flag is cleared, but no sleeper was woken.
        queue.words.swap(layout::MESSAGES + 1, 0);
        queue.publish(&me, [3], |_| {}).unwrap();
        queue.remove_participant(&me, caller(1).me, |_| {}).unwrap();
        assert_eq!(sleeper.join().unwrap(), [3]);
    });
}

#[test]
fn subscriber_slots_are_limited() {
    let queue = queue(1, OverflowPolicy::Reject);
    let mut subscribers: Vec<_> =
        (0..MAX_PROCESS_SUBSCRIBERS).map(|_| queue.subscribe(&caller(0)).unwrap()).collect();
    assert_eq!(queue.subscribe(&caller(0)).unwrap_err(), QueueError::TooManySubscribers);
    // A role still gets its reserved slot.
    let role = |number| Participant::role(number).unwrap();
    subscribers.push(queue.subscribe_as(&caller(0), role(0)).unwrap());
    let refused = queue.subscribe_as(&caller(0), role(1)).unwrap_err();
    assert_eq!(refused, QueueError::TooManySubscribers);
    queue.publish(&caller(0), [5], |_| {}).unwrap();
    for (number, mut subscriber) in subscribers.into_iter().enumerate() {
        assert_eq!(queue.take(&mut subscriber).unwrap().entry, [5]);
        let last = number + 1 == MAX_SUBSCRIBERS as usize;
        assert_eq!(queue.release(&subscriber, 0).is_some(), last);
    }
}

#[test]
fn waits_end_with_an_entry_space_or_the_deadline() {
    use std::time::{Duration, Instant};
    let queue = queue(1, OverflowPolicy::Reject);
    let me = caller(0);
    let mut reader = queue.subscribe(&me).unwrap();
    let soon = || Instant::now() + Duration::from_millis(20);
    let start = Instant::now();
    assert!(queue.take_until(&mut reader, soon()).is_none());
    assert!(start.elapsed() >= Duration::from_millis(20));
    queue.publish(&me, [1], |_| {}).unwrap();
    let full = queue.publish_until(&me, [2], &mut WaitStrategy::default(), soon(), |_| {});
    assert_eq!(full, Err(QueueError::Full));
    let far = Instant::now() + Duration::from_secs(30);
    for spin in [WaitStrategy::Block, WaitStrategy::default()] {
        std::thread::scope(|scope| {
            let published = scope.spawn(|| {
                let mut spin = spin;
                for value in 2..200 {
                    queue.publish_until(&caller(1), [value], &mut spin, far, |_| {}).unwrap();
                }
            });
            for _ in 2..200 {
                let taken = queue.take_until(&mut reader, far).unwrap();
                assert!(queue.release(&reader, taken.position).is_some());
                queue.mark_disposed(taken.position);
            }
            published.join().unwrap();
        });
    }
    assert!(Instant::now() < far);
}

#[test]
fn concurrent_publishers_and_readers_lose_nothing() {
    use std::time::{Duration, Instant};
    const EACH: u64 = 2000;
    for overflow_policy in
        [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest]
    {
        let queue = queue(8, overflow_policy);
        let far = Instant::now() + Duration::from_secs(60);
        let mut readers: Vec<_> = (0..3).map(|at| queue.subscribe(&caller(at)).unwrap()).collect();
        let disposed: Vec<_> = std::thread::scope(|scope| {
            let publishers: Vec<_> = (0..2)
                .map(|number| {
                    let queue = &queue;
                    scope.spawn(move || {
                        let me = caller(10 + number);
                        let mut disposed = Vec::new();
                        for value in 0..EACH {
                            let entry = [u64::from(number) << 32 | value];
                            let keep = |entry: [u64; 1]| disposed.push(entry[0]);
                            queue
                                .publish_until(&me, entry, &mut WaitStrategy::default(), far, keep)
                                .unwrap();
                        }
                        disposed
                    })
                })
                .collect();
            let readers: Vec<_> = readers
                .iter_mut()
                .map(|reader| {
                    let queue = &queue;
                    scope.spawn(move || {
                        let (mut seen, mut next) = (0, [0, 0]);
                        let mut disposed = Vec::new();
                        while seen + reader.missed() < 2 * EACH {
                            let Some(taken) = queue.take_until(reader, far) else {
                                panic!("{seen} and {} missed", reader.missed());
                            };
                            seen += 1;
                            let (publisher, value) =
                                (taken.entry[0] >> 32, taken.entry[0] & 0xffff_ffff);
                            // In order, for each publisher.
                            assert!(value >= next[publisher as usize], "{value} from {publisher}");
                            next[publisher as usize] = value + 1;
                            if let Some(entry) = queue.release(reader, taken.position) {
                                disposed.push(entry[0]);
                                queue.mark_disposed(taken.position);
                            }
                        }
                        disposed
                    })
                })
                .collect();
            publishers
                .into_iter()
                .chain(readers)
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        let all: BTreeSet<_> = disposed.iter().copied().collect();
        // Some twice, if a publisher was faster than the last reader's `mark_disposed`.
        assert_eq!(all.len() as u64, 2 * EACH, "{overflow_policy:?}: all are disposed of");
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Publish,
    Take(usize),
    Release(usize, usize),
    Subscribe,
    Leave(usize),
    Evict(usize),
    /// For evicted subscribers: release an entry, and end.
    Let(usize, usize),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => Just(Step::Publish),
        6 => (0..4_usize).prop_map(Step::Take),
        5 => (0..4_usize, any::<usize>()).prop_map(|(index, which)| Step::Release(index, which)),
        1 => Just(Step::Subscribe),
        1 => (0..4_usize).prop_map(Step::Leave),
        1 => (0..4_usize).prop_map(Step::Evict),
        2 => (0..4_usize, any::<usize>()).prop_map(|(index, which)| Step::Let(index, which)),
        1 => any::<usize>().prop_map(Step::End),
    ];
    prop::collection::vec(step, 1..150)
}

proptest! {
    /// Every subscriber gets the entries that were published while it was subscribed, in order,
    /// except dropped ones. Every entry is disposed of once, when it is not needed any more. An
    /// evicted subscriber keeps what it holds, and gets nothing more. A full queue has a reason.
    #[test]
    fn queue_matches_the_model(
        steps in steps(), depth in 1..6_u32, max_held in 1..5_u32, overflow_policy in 0..3_usize,
    ) {
        let all = [OverflowPolicy::Reject, OverflowPolicy::DropOldest, OverflowPolicy::DropNewest];
        let overflow_policy = all[overflow_policy];
        let drops = overflow_policy.drops();
        let queue = queue_holding(depth, max_held, overflow_policy);
        let me = caller(0);
        // For each subscriber: its unread and its held entries.
        let mut readers: Vec<(Subscriber, VecDeque<u64>, Vec<u64>)> = Vec::new();
        let mut evicted: Vec<(Subscriber, Vec<u64>)> = Vec::new();
        let distinct = |held: &mut dyn Iterator<Item = &u64>| held.collect::<BTreeSet<_>>().len();
        let mut alive = BTreeSet::new();
        let mut next = 0;
        for step in steps {
            let mut disposed = Vec::new();
            match step {
                Step::Publish => {
                    let value = next;
                    match queue.publish(&me, [value], |entry| disposed.push(entry[0])) {
                        Ok(published) => {
                            prop_assert_eq!(published.readers as usize, readers.len());
                            let mut unread = readers.iter().map(|(_, unread, _)| unread.len());
                            prop_assert!(drops || unread.all(|it| it < depth as usize));
                            next += 1;
                            alive.insert(value);
                            readers.iter_mut().for_each(|(_, unread, _)| unread.push_back(value));
                        }
                        Err(QueueError::NoSubscribers) => prop_assert!(readers.is_empty()),
                        Err(QueueError::Full) => {
                            let all_held = [
                                distinct(&mut readers.iter().flat_map(|(_, _, held)| held)),
                                distinct(&mut evicted.iter().flat_map(|(_, held)| held)),
                            ];
                            let holds_all = all_held.iter().any(|held| *held >= max_held as usize);
                            let mut unread = readers.iter().map(|(_, unread, _)| unread.len());
                            let is_full = match overflow_policy {
                                OverflowPolicy::Reject => unread.any(|it| it >= depth as usize),
                                OverflowPolicy::DropOldest => false,
                                OverflowPolicy::DropNewest => unread.all(|it| it >= depth as usize),
                            };
                            prop_assert!(holds_all || is_full);
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Step::Take(index) => {
                    if let Some((subscriber, unread, held)) = readers.get_mut(index) {
                        match queue.take(subscriber) {
                            Some(taken) => {
                                let mut missed = 0;
                                while unread.front().is_some_and(|value| *value != taken.entry[0]) {
                                    unread.pop_front();
                                    missed += 1;
                                }
                                prop_assert_eq!(unread.pop_front(), Some(taken.entry[0]));
                                prop_assert!(drops || missed == 0);
                                prop_assert_eq!(missed, taken.missed);
                                held.push(taken.position);
                            }
                            // All were dropped: the next entry reports how many.
                            None if drops => {}
                            None => prop_assert!(unread.is_empty()),
                        }
                    }
                }
                Step::Release(index, which) => {
                    if let Some((subscriber, _, held)) = readers.get_mut(index)
                        && !held.is_empty()
                    {
                        let position = held.swap_remove(which % held.len());
                        if let Some(entry) = queue.release(subscriber, position) {
                            disposed.push(entry[0]);
                            queue.mark_disposed(position);
                        }
                    }
                }
                Step::Let(index, which) => {
                    if let Some((subscriber, held)) = evicted.get_mut(index)
                        && !held.is_empty()
                    {
                        let position = held.swap_remove(which % held.len());
                        if let Some(entry) = queue.release(subscriber, position) {
                            disposed.push(entry[0]);
                            queue.mark_disposed(position);
                        }
                    }
                }
                Step::Subscribe if readers.len() < 4 && evicted.len() < 20 => {
                    let subscriber = queue.subscribe(&me).unwrap();
                    let mut evicted_slots = evicted.iter().map(|(evicted, _)| evicted.index());
                    prop_assert!(!evicted_slots.any(|index| index == subscriber.index()));
                    readers.push((subscriber, VecDeque::new(), Vec::new()));
                }
                Step::Evict(index) if index < readers.len() => {
                    let (subscriber, _, held) = readers.remove(index);
                    let subscription_id = subscriber.subscription_id();
                    queue.evict(&me, subscription_id, |entry| disposed.push(entry[0])).unwrap();
                    evicted.push((subscriber, held));
                }
                Step::End(index) if !evicted.is_empty() => {
                    let (subscriber, _) = evicted.swap_remove(index % evicted.len());
                    let id = subscriber.subscription_id();
                    queue.end_subscription(&me, id, |entry| disposed.push(entry[0])).unwrap();
                }
                Step::Leave(index) if index < readers.len() => {
                    let (subscriber, _, _) = readers.remove(index);
                    let id = subscriber.subscription_id();
                    queue.end_subscription(&me, id, |entry| disposed.push(entry[0])).unwrap();
                }
                Step::Subscribe | Step::Leave(_) | Step::Evict(_) | Step::End(_) => {}
            }
            for (subscriber, held) in &mut evicted {
                prop_assert_eq!(queue.take(subscriber), None);
                prop_assert!(held.is_empty() || queue.held_entries(subscriber.subscription_id()));
            }
            let held = readers.iter().flat_map(|(_, _, held)| held);
            for position in held.chain(evicted.iter().flat_map(|(_, held)| held)) {
                prop_assert!(!disposed.contains(position), "{position} was disposed of while held");
            }
            for value in disposed {
                prop_assert!(alive.remove(&value), "{value} was disposed of twice");
            }
        }
        let mut rest = Vec::new();
        let evicted = evicted.into_iter().map(|(subscriber, _)| subscriber);
        for subscriber in readers.into_iter().map(|(subscriber, _, _)| subscriber).chain(evicted) {
            let id = subscriber.subscription_id();
            queue.end_subscription(&me, id, |entry| rest.push(entry[0])).unwrap();
        }
        for value in rest {
            prop_assert!(alive.remove(&value), "{value} was disposed of twice");
        }
        prop_assert!(alive.is_empty(), "never disposed of: {alive:?}");
    }
}
