//! What is published is read, by all, once, where it lies.

use super::*;
use crate::pool::Stage;
use crate::topic::{Delivery, Entry};
use crate::{Attempt, MemoryPlace, Way};

#[test]
fn all_read_one_copy_with_all_that_belongs_to_it() {
    let home = Home::new(&settings());
    let (mut first, mut second) = (home.subscriber(), home.subscriber());
    let publisher = home.publisher();
    assert_eq!(publisher.subscribers(), 2);
    let mut loan = publisher.loan(5, FAR).unwrap();
    assert_eq!((loan.length(), loan.device()), (5, None));
    loan.write(0, b"he").unwrap();
    loan.write(2, b"llo").unwrap();
    assert!(loan.write(3, b"llo").is_err());
    loan.set_metadata(b"about it").unwrap();
    assert!(loan.set_metadata(&[0; 257]).is_err());
    let address = loan.address();
    let sent = loan.publish(FAR).unwrap();
    assert_eq!((sent.position, sent.readers, sent.is_dropped), (Some(0), 2, false));
    for subscriber in [&mut first, &mut second] {
        let sample = subscriber.try_pull().unwrap().unwrap();
        assert_eq!((sample.address(), sample.length()), (address, 5));
        assert_eq!(sample.to_vec().unwrap(), b"hello");
        let mut part = [0; 3];
        sample.read(1, &mut part).unwrap();
        assert_eq!(&part, b"ell");
        assert!(sample.read(3, &mut part).is_err());
        assert_eq!(&*sample.metadata(), b"about it");
        assert_eq!((sample.publisher(), sample.sequence()), (publisher.id(), 1));
        assert_eq!(
            (sample.origin(), sample.way(), sample.position()),
            (None, Way::SharedMemory, 0)
        );
        let times = sample.times();
        assert!(times.allocated <= times.filled && times.filled <= times.published);
        assert_eq!(times.published, sample.published_at());
        assert_eq!((times.wire, times.copied, sample.place()), (0, 0, MemoryPlace::Host));
        assert!(subscriber.try_pull().unwrap().is_none());
    }
    assert_eq!(home.blocks_taken(), 0);
    let counters = publisher.counters();
    assert_eq!((counters.messages, counters.bytes, counters.dropped), (1, 5, 0));
    let changes = home.clerk.changes.load(Relaxed);
    drop((publisher, first, second));
    assert_eq!(home.clerk.changes.load(Relaxed), changes + 3);
    assert!(home.topic.census().publishers.is_empty());
    assert!(home.topic.census().subscribers.is_empty());
}

#[test]
#[allow(unsafe_code)]
fn bytes_of_the_host_are_reached_in_place() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    let mut loan = publisher.loan(3, FAR).unwrap();
    // SAFETY: nobody else is here.
    unsafe { loan.bytes_mut() }.unwrap().copy_from_slice(b"abc");
    loan.publish(FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    // SAFETY: nobody writes.
    assert_eq!(unsafe { sample.bytes() }.unwrap(), b"abc");
}

#[test]
fn without_subscribers_a_message_goes_nowhere() {
    let home = Home::new(&settings());
    let publisher = home.publisher();
    for sequence in 1..10 {
        let sent = publisher.push(b"anybody?", FAR).unwrap();
        assert_eq!((sent.position, sent.readers, sent.is_dropped), (None, 0, false));
        assert_eq!(publisher.counters().messages, sequence);
    }
    assert_eq!(home.blocks_taken(), 0);
    assert_eq!(publisher.counters().messages, 9);
}

#[test]
fn a_message_of_no_bytes_is_one() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    publisher.push(&[], FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    assert_eq!((sample.length(), sample.to_vec().unwrap()), (0, vec![]));
}

#[test]
fn samples_outlive_their_subscriber_and_loans_their_publisher() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    publisher.push(b"kept", FAR).unwrap();
    publisher.push(b"never read", FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    drop(subscriber);
    assert_eq!((publisher.subscribers(), home.blocks_taken()), (0, 1));
    assert_eq!(sample.to_vec().unwrap(), b"kept");

    let mut other = home.subscriber();
    let mut loan = publisher.loan(4, FAR).unwrap();
    let (id, sequence) = (publisher.id(), publisher.counters().messages);
    drop(publisher);
    assert_eq!(home.topic.census().publishers.len(), 1);
    loan.write(0, b"late").unwrap();
    loan.publish(FAR).unwrap();
    assert!(home.topic.census().publishers.is_empty());
    let late = other.pull(FAR).unwrap();
    assert_eq!((late.publisher(), late.sequence()), (id, sequence + 1));
    // Dropped by other threads.
    std::thread::spawn(move || drop((late, sample))).join().unwrap();
    assert_eq!(home.blocks_taken(), 0);
    drop(home.publisher().loan(10, FAR).unwrap());
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn what_comes_from_other_nodes_comes_in_turn_with_what_is_published_here() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    let caller = home.caller();
    let deliver = |number: u64| {
        home.clerk.grow(home.arrivals.id(), 1 << 20);
        let (block, place) = home.arrivals.allocate(&caller, 3).unwrap();
        let bytes = home.arrivals.slice(place, 3).unwrap();
        home.arrivals.write(&bytes, b"far", FAR).unwrap();
        let note = home.arrivals.ledger().note(block);
        note.set_origin(&[7; 16]);
        note.set_way(Way::Ring);
        note.stamp(Stage::Wire, 11);
        note.stamp(Stage::Copied, 12);
        let entry = Entry {
            block,
            offset: place.offset,
            length: 3,
            publisher: 300,
            sequence: number + 1,
            published_at: 10,
            metadata: 0,
            has_origin: true,
            turn: None,
        };
        let origin = crate::topic::OriginId { node: [7; 16], topic: 1 };
        home.topic.deliver_in(&caller, (&origin, number), entry, home.arrivals.ledger()).unwrap()
    };
    for number in 0..3 {
        assert!(matches!(deliver(number), Delivery::Delivered(_)));
        publisher.push(b"near", FAR).unwrap();
    }
    let pulled: Vec<_> = std::iter::from_fn(|| subscriber.try_pull().unwrap()).collect();
    let origins: Vec<_> = pulled.iter().map(|sample| sample.origin().is_some()).collect();
    assert_eq!(origins, [false, true, false, true, false, true]);
    let far = &pulled[1];
    assert_eq!((far.origin(), far.way()), (Some([7; 16]), Way::Ring));
    assert_eq!((far.times().wire, far.times().copied, far.published_at()), (11, 12, 10));
    assert_eq!(far.to_vec().unwrap(), b"far");
    drop(pulled);
    assert_eq!(home.blocks_taken(), 0);
    // One who sleeps is woken by either.
    subscriber.set_spin(Spin::Never);
    for number in 3..6 {
        std::thread::scope(|scope| {
            let pulled = scope.spawn(|| subscriber.pull(FAR).unwrap().origin());
            std::thread::yield_now();
            deliver(number);
            assert_eq!(pulled.join().unwrap(), Some([7; 16]));
        });
    }
}

#[test]
fn on_a_device_bytes_are_copied_in_and_out_by_it() {
    let memory = MemoryPlace::Device("stand-in:1".parse().unwrap());
    let home = Home::new(&TopicSettings { memory, ..settings() });
    assert!(matches!(home.here.id().place, SharedPlace::Device(_)));
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    publisher.push(b"by upload", FAR).unwrap();
    let sample = subscriber.pull(FAR).unwrap();
    assert_eq!((sample.place(), sample.to_vec().unwrap()), (memory, b"by upload".to_vec()));
    // From a message into another one.
    publisher.push_slice(sample.slice(), FAR).unwrap();
    let copied = subscriber.pull(FAR).unwrap();
    assert_eq!(copied.to_vec().unwrap(), b"by upload");
    assert_ne!(copied.address(), sample.address());
    // The same without waiting for room; the copy is waited for.
    assert_eq!(publisher.try_push_slice(copied.slice()).unwrap().unwrap().readers, 1);
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), b"by upload");
    while publisher.try_push_slice(copied.slice()).unwrap().is_some() {}
    let loan = publisher.loan(10, FAR).unwrap();
    assert_eq!(loan.slice().memory().device(), sample.slice().memory().device());
}

#[test]
fn from_a_device_to_the_host() {
    let home = Home::new(&settings());
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    let device = gpu::Device::open("stand-in:1".parse().unwrap()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&memory.whole(), 5).unwrap();
    stream.synchronize(FAR).unwrap();
    publisher.push_slice(&memory.slice(0, 1000).unwrap(), FAR).unwrap();
    assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), [5; 1000]);
}

#[test]
fn several_threads_publish_by_one_and_by_several_lines() {
    const EACH: u64 = 500;
    let home = Home::new(&settings());
    let mut subscribers = [home.subscriber(), home.subscriber()];
    let publishers = [home.publisher(), home.publisher()];
    std::thread::scope(|scope| {
        for publisher in &publishers {
            for _ in 0..2 {
                scope.spawn(move || {
                    for number in 0..EACH {
                        publisher.push(&number.to_le_bytes(), FAR).unwrap();
                    }
                });
            }
        }
        for subscriber in &mut subscribers {
            let ids = [publishers[0].id(), publishers[1].id()];
            scope.spawn(move || {
                let mut last = [0, 0];
                for _ in 0..4 * EACH {
                    let sample = subscriber.pull(FAR).unwrap();
                    let which = usize::from(sample.publisher() == ids[1]);
                    assert_eq!(sample.sequence(), last[which] + 1);
                    last[which] += 1;
                }
                assert_eq!(last, [2 * EACH; 2]);
            });
        }
    });
    assert_eq!(home.blocks_taken(), 0);
}

#[test]
fn flushing_waits_for_all_that_was_published_and_for_nothing_else() {
    let home = Home::new(&settings());
    let mut subscriber = home.subscriber();
    let (publisher, other) = (home.publisher(), home.publisher());
    publisher.flush(FAR).unwrap();
    other.push(b"of another", FAR).unwrap();
    publisher.flush(FAR).unwrap();
    publisher.push(b"mine", FAR).unwrap();
    assert_eq!(publisher.flush(SOON).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let of_another = subscriber.pull(FAR).unwrap();
    let mine = subscriber.pull(FAR).unwrap();
    assert_eq!(publisher.flush(SOON).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| publisher.flush(FAR));
        std::thread::yield_now();
        drop(mine);
        flushed.join().unwrap().unwrap();
    });
    assert!(other.flush(SOON).is_err());
    drop(of_another);
    other.flush(FAR).unwrap();
}

#[test]
fn an_attempt_gives_the_loan_back() {
    let home = Home::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (home.subscriber(), home.publisher());
    assert!(
        publisher.try_push(b"1").unwrap().is_some() || {
            // The first finds no memory, and asks for some.
            publisher.try_push(b"1").unwrap().is_some()
        }
    );
    assert!(publisher.try_push(b"2").unwrap().is_none());
    let loan = publisher.loan(1, FAR).unwrap();
    let Attempt::Full(mut loan) = loan.try_publish().unwrap() else { panic!("no room was there") };
    loan.write(0, b"3").unwrap();
    drop(subscriber.pull(FAR).unwrap());
    assert!(matches!(loan.try_publish().unwrap(), Attempt::Sent(_)));
    let sample = subscriber.pull(FAR).unwrap();
    assert_eq!((sample.to_vec().unwrap(), sample.sequence()), (b"3".to_vec(), 2));
}

/// One who was stopped while a pool grew: it has the notice before it has the memory.
#[test]
fn a_message_in_memory_that_is_still_to_come_is_waited_for() {
    let home = Home::new(&settings());
    let publisher = home.publisher();
    drop(publisher.loan(1, FAR).unwrap());
    let late = home.joined(home.clerk.me);
    // As the service gives it: nothing yet.
    let pool = Arc::new(Pool::open(home.here.books().try_clone_to_owned().unwrap()).unwrap());
    let late = Home { here: Arc::clone(&pool), ..late };
    let (mut subscriber, other) = (late.subscriber(), late.publisher());
    publisher.push(b"early", FAR).unwrap();
    publisher.push(b"later", FAR).unwrap();
    for _ in 0..3 {
        assert!(subscriber.try_pull().unwrap().is_none());
        assert!(other.try_push(b"mine").unwrap().is_none());
    }
    assert_eq!(subscriber.pull(SOON).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(other.push(b"mine", SOON).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    pool.follow_piece(0, home.here.piece(0).unwrap().unwrap()).unwrap();
    other.push(b"mine", FAR).unwrap();
    for expected in [&b"early"[..], b"later", b"mine"] {
        assert_eq!(subscriber.pull(FAR).unwrap().to_vec().unwrap(), expected);
    }
    assert_eq!(subscriber.poll_event(), None);
    assert_eq!(home.blocks_taken(), 0);
    // One that goes meanwhile lets go.
    drop(subscriber);
    let late = Home {
        here: Arc::new(Pool::open(home.here.books().try_clone_to_owned().unwrap()).unwrap()),
        ..late
    };
    let mut subscriber = late.subscriber();
    publisher.push(b"never read", FAR).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    drop(subscriber);
    assert_eq!(home.blocks_taken(), 0);
}
