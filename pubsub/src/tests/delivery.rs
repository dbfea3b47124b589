//! Published messages are delivered to all subscribers, once, in place.

use super::*;
use crate::pool::Stage;
use crate::topic::{Delivery, Entry};
use crate::{Attempt, DeliveryPath, MemoryLocation};

#[test]
fn all_subscribers_read_one_copy_with_its_sample_info() {
    let node = TestNode::new(&settings());
    let (mut first, mut second) = (node.subscriber(), node.subscriber());
    let publisher = node.publisher();
    assert_eq!(publisher.subscribers(), 2);
    let mut loan = publisher.loan(5, TEST_TIMEOUT).unwrap();
    assert_eq!((loan.length(), loan.device()), (5, None));
    loan.write(0, b"he").unwrap();
    loan.write(2, b"llo").unwrap();
    assert!(loan.write(3, b"llo").is_err());
    loan.set_metadata(b"about it").unwrap();
    assert!(loan.set_metadata(&[0; 257]).is_err());
    let address = loan.address();
    let sent = loan.publish(TEST_TIMEOUT).unwrap();
    assert_eq!((sent.position, sent.subscribers, sent.is_dropped), (Some(0), 2, false));
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
            (sample.origin(), sample.path(), sample.position()),
            (None, DeliveryPath::SharedMemory, 0)
        );
        let times = sample.times();
        assert!(times.allocated <= times.filled && times.filled <= times.published);
        assert_eq!(times.published, sample.published_at());
        assert_eq!((times.wire, times.copied, sample.place()), (0, 0, MemoryLocation::Host));
        assert!(subscriber.try_pull().unwrap().is_none());
    }
    assert_eq!(node.blocks_allocated(), 0);
    let counters = publisher.counters();
    assert_eq!((counters.messages, counters.bytes, counters.dropped), (1, 5, 0));
    let changes = node.service.changes.load(Relaxed);
    drop((publisher, first, second));
    assert_eq!(node.service.changes.load(Relaxed), changes + 3);
    assert!(node.topic.publishers().is_empty());
    assert!(node.topic.subscribers().is_empty());
}

#[test]
#[allow(unsafe_code)]
fn host_memory_is_accessed_in_place() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let mut loan = publisher.loan(3, TEST_TIMEOUT).unwrap();
    // SAFETY: no other process accesses the node.
    unsafe { loan.bytes_mut() }.unwrap().copy_from_slice(b"abc");
    loan.publish(TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    // SAFETY: no process writes.
    assert_eq!(unsafe { sample.bytes() }.unwrap(), b"abc");
}

#[test]
fn message_without_subscribers_is_freed_at_once() {
    let node = TestNode::new(&settings());
    let publisher = node.publisher();
    for sequence in 1..10 {
        let sent = publisher.push(b"unread", TEST_TIMEOUT).unwrap();
        assert_eq!((sent.position, sent.subscribers, sent.is_dropped), (None, 0, false));
        assert_eq!(publisher.counters().messages, sequence);
    }
    assert_eq!(node.blocks_allocated(), 0);
    assert_eq!(publisher.counters().messages, 9);
}

#[test]
fn empty_message_is_delivered() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(&[], TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!((sample.length(), sample.to_vec().unwrap()), (0, vec![]));
}

#[test]
fn samples_and_loans_outlive_their_handles() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"kept", TEST_TIMEOUT).unwrap();
    publisher.push(b"never read", TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    drop(subscriber);
    assert_eq!((publisher.subscribers(), node.blocks_allocated()), (0, 1));
    assert_eq!(sample.to_vec().unwrap(), b"kept");

    let mut other = node.subscriber();
    let mut loan = publisher.loan(4, TEST_TIMEOUT).unwrap();
    let (id, sequence) = (publisher.id(), publisher.counters().messages);
    drop(publisher);
    assert_eq!(node.topic.publishers().len(), 1);
    loan.write(0, b"late").unwrap();
    loan.publish(TEST_TIMEOUT).unwrap();
    assert!(node.topic.publishers().is_empty());
    let late = other.pull(TEST_TIMEOUT).unwrap();
    assert_eq!((late.publisher(), late.sequence()), (id, sequence + 1));
    // Dropped by other threads.
    std::thread::spawn(move || drop((late, sample))).join().unwrap();
    assert_eq!(node.blocks_allocated(), 0);
    drop(node.publisher().loan(10, TEST_TIMEOUT).unwrap());
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn subscriber_alternates_between_local_and_inbound() {
    let node = TestNode::new(&TopicSettings { max_held: 8, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let caller = node.caller();
    let deliver = |number: u64| {
        node.service.grow(node.inbound.id(), 1 << 20);
        let (block, place) = node.inbound.allocate(&caller, 3).unwrap();
        let bytes = node.inbound.slice(place, 3).unwrap();
        node.inbound.write(&bytes, b"far", TEST_TIMEOUT).unwrap();
        let sample_info = node.inbound.control().sample_info(block);
        sample_info.set_origin(&[7; 16]);
        sample_info.set_path(DeliveryPath::Ring);
        sample_info.stamp(Stage::Wire, 11);
        sample_info.stamp(Stage::Copied, 12);
        let entry = Entry {
            block,
            offset: place.offset,
            length: 3,
            publisher: 300,
            sequence: number + 1,
            published_at: 10,
            metadata: 0,
            has_origin: true,
            sync_point: None,
        };
        let origin = crate::topic::OriginId { node: [7; 16], topic: 1 };
        node.topic.deliver_in(&caller, (&origin, number), entry, node.inbound.control()).unwrap()
    };
    for number in 0..3 {
        assert!(matches!(deliver(number), Delivery::Delivered(_)));
        publisher.push(b"near", TEST_TIMEOUT).unwrap();
    }
    let pulled: Vec<_> = std::iter::from_fn(|| subscriber.try_pull().unwrap()).collect();
    let origins: Vec<_> = pulled.iter().map(|sample| sample.origin().is_some()).collect();
    assert_eq!(origins, [false, true, false, true, false, true]);
    let far = &pulled[1];
    assert_eq!((far.origin(), far.path()), (Some([7; 16]), DeliveryPath::Ring));
    assert_eq!((far.times().wire, far.times().copied, far.published_at()), (11, 12, 10));
    assert_eq!(far.to_vec().unwrap(), b"far");
    drop(pulled);
    assert_eq!(node.blocks_allocated(), 0);
    // A sleeping subscriber is woken by either.
    subscriber.set_wait_strategy(WaitStrategy::Block);
    for number in 3..6 {
        std::thread::scope(|scope| {
            let pulled = scope.spawn(|| subscriber.pull(TEST_TIMEOUT).unwrap().origin());
            std::thread::yield_now();
            deliver(number);
            assert_eq!(pulled.join().unwrap(), Some([7; 16]));
        });
    }
}

#[test]
fn device_copies_messages_in_and_out() {
    let memory = MemoryLocation::Device("emulated:1".parse().unwrap());
    let node = TestNode::new(&TopicSettings { memory, ..settings() });
    assert!(matches!(node.local.id().place, SharedLocation::Device(_)));
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"by upload", TEST_TIMEOUT).unwrap();
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!((sample.place(), sample.to_vec().unwrap()), (memory, b"by upload".to_vec()));
    // From one message into another.
    publisher.push_slice(sample.slice(), TEST_TIMEOUT).unwrap();
    let copied = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(copied.to_vec().unwrap(), b"by upload");
    assert_ne!(copied.address(), sample.address());
    // The same without waiting for room; the call waits for the copy.
    assert_eq!(publisher.try_push_slice(copied.slice()).unwrap().unwrap().subscribers, 1);
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"by upload");
    while publisher.try_push_slice(copied.slice()).unwrap().is_some() {}
    let loan = publisher.loan(10, TEST_TIMEOUT).unwrap();
    assert_eq!(loan.slice().memory().device(), sample.slice().memory().device());
}

#[test]
fn device_memory_is_published_to_a_host_topic() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let device = gpu::Device::open("emulated:1".parse().unwrap()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&memory.whole(), 5).unwrap();
    stream.synchronize(TEST_TIMEOUT).unwrap();
    publisher.push_slice(&memory.slice(0, 1000).unwrap(), TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), [5; 1000]);
}

#[test]
fn several_threads_publish_with_shared_publishers() {
    const EACH: u64 = 500;
    let node = TestNode::new(&settings());
    let mut subscribers = [node.subscriber(), node.subscriber()];
    let publishers = [node.publisher(), node.publisher()];
    std::thread::scope(|scope| {
        for publisher in &publishers {
            for _ in 0..2 {
                scope.spawn(move || {
                    for number in 0..EACH {
                        publisher.push(&number.to_le_bytes(), TEST_TIMEOUT).unwrap();
                    }
                });
            }
        }
        for subscriber in &mut subscribers {
            let ids = [publishers[0].id(), publishers[1].id()];
            scope.spawn(move || {
                let mut last = [0, 0];
                for _ in 0..4 * EACH {
                    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
                    let which = usize::from(sample.publisher() == ids[1]);
                    assert_eq!(sample.sequence(), last[which] + 1);
                    last[which] += 1;
                }
                assert_eq!(last, [2 * EACH; 2]);
            });
        }
    });
    assert_eq!(node.blocks_allocated(), 0);
}

#[test]
fn flush_waits_only_for_messages_of_its_publisher() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    let (publisher, other) = (node.publisher(), node.publisher());
    publisher.flush(TEST_TIMEOUT).unwrap();
    other.push(b"of another", TEST_TIMEOUT).unwrap();
    publisher.flush(TEST_TIMEOUT).unwrap();
    publisher.push(b"own", TEST_TIMEOUT).unwrap();
    assert_eq!(publisher.flush(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let of_another = subscriber.pull(TEST_TIMEOUT).unwrap();
    let own = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!(publisher.flush(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    std::thread::scope(|scope| {
        let flushed = scope.spawn(|| publisher.flush(TEST_TIMEOUT));
        std::thread::yield_now();
        drop(own);
        flushed.join().unwrap().unwrap();
    });
    assert!(other.flush(SHORT_TIMEOUT).is_err());
    drop(of_another);
    other.flush(TEST_TIMEOUT).unwrap();
}

#[test]
fn full_topic_returns_the_loan() {
    let node = TestNode::new(&TopicSettings { depth: 1, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert!(
        publisher.try_push(b"1").unwrap().is_some() || {
            // The first attempt finds no memory, and requests growth.
            publisher.try_push(b"1").unwrap().is_some()
        }
    );
    assert!(publisher.try_push(b"2").unwrap().is_none());
    let loan = publisher.loan(1, TEST_TIMEOUT).unwrap();
    let Attempt::Full(mut loan) = loan.try_publish().unwrap() else { panic!("there was room") };
    loan.write(0, b"3").unwrap();
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    assert!(matches!(loan.try_publish().unwrap(), Attempt::Sent(_)));
    let sample = subscriber.pull(TEST_TIMEOUT).unwrap();
    assert_eq!((sample.to_vec().unwrap(), sample.sequence()), (b"3".to_vec(), 2));
}

/// A process that was stopped while a pool grew has the notification before the memory.
#[test]
fn pull_waits_for_memory_that_was_not_received_yet() {
    let node = TestNode::new(&settings());
    let publisher = node.publisher();
    drop(publisher.loan(1, TEST_TIMEOUT).unwrap());
    let late = node.joined(node.service.me);
    // The service has sent no piece yet.
    let pool =
        Arc::new(Pool::open(node.local.control_segment().try_clone_to_owned().unwrap()).unwrap());
    let late = TestNode { local: Arc::clone(&pool), ..late };
    let (mut subscriber, other) = (late.subscriber(), late.publisher());
    publisher.push(b"early", TEST_TIMEOUT).unwrap();
    publisher.push(b"later", TEST_TIMEOUT).unwrap();
    for _ in 0..3 {
        assert!(subscriber.try_pull().unwrap().is_none());
        assert!(other.try_push(b"own").unwrap().is_none());
    }
    assert_eq!(subscriber.pull(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(other.push(b"own", SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    pool.adopt_piece(0, node.local.piece(0).unwrap().unwrap()).unwrap();
    other.push(b"own", TEST_TIMEOUT).unwrap();
    for expected in [&b"early"[..], b"later", b"own"] {
        assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), expected);
    }
    assert_eq!(subscriber.poll_event(), None);
    assert_eq!(node.blocks_allocated(), 0);
    // A subscriber that is dropped in the meantime releases its messages.
    drop(subscriber);
    let late = TestNode {
        local: Arc::new(
            Pool::open(node.local.control_segment().try_clone_to_owned().unwrap()).unwrap(),
        ),
        ..late
    };
    let mut subscriber = late.subscriber();
    publisher.push(b"never read", TEST_TIMEOUT).unwrap();
    assert!(subscriber.try_pull().unwrap().is_none());
    drop(subscriber);
    assert_eq!(node.blocks_allocated(), 0);
}
