//! Poll descriptors of subscribers.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use ipc::DoorbellListener;
use testkit::children::ForkedChild;

use super::deaths::pidfd_of;
use super::stream_order::{Gate, node_with, on_a_device};
use super::*;
use crate::Event;
use crate::topic::{Delivery, Entry, OriginId};

fn polled(descriptor: BorrowedFd<'_>, longest: Duration) -> bool {
    let mut entry = [PollFd::new(descriptor, PollFlags::POLLIN)];
    poll(&mut entry, PollTimeout::try_from(longest).unwrap()).unwrap() == 1
}

#[track_caller]
fn wait_for(subscriber: &Subscriber) {
    assert!(
        polled(subscriber.descriptor().unwrap(), TEST_TIMEOUT),
        "the descriptor is not readable"
    );
}

fn is_readable(subscriber: &Subscriber) -> bool {
    polled(subscriber.descriptor().unwrap(), Duration::ZERO)
}

/// The next message, as a poller pulls it.
#[track_caller]
fn next(subscriber: &mut Subscriber) -> Vec<u8> {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        wait_for(subscriber);
        if let Some(sample) = subscriber.try_pull().unwrap() {
            return sample.to_vec().unwrap();
        }
        assert!(Instant::now() < end, "the descriptor is readable, but there is no message");
    }
}

/// No message is left, and the descriptor becomes unreadable. It may first signal messages that
/// were pulled already.
#[track_caller]
fn assert_drained(subscriber: &mut Subscriber) {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        assert!(subscriber.try_pull().unwrap().is_none());
        if !polled(subscriber.descriptor().unwrap(), SHORT_TIMEOUT) {
            return;
        }
        assert!(Instant::now() < end, "the descriptor stays readable");
    }
}

impl TestNode {
    /// Delivers a message of another node with this number.
    fn deliver_inbound(&self, number: u64, bytes: &[u8]) {
        self.service.grow(self.inbound.id(), 1 << 20);
        let (caller, length) = (self.caller(), bytes.len() as u64);
        let (block, place) = self.inbound.allocate(&caller, length).unwrap();
        let slice = self.inbound.slice(place, length).unwrap();
        self.inbound.write(&slice, bytes, TEST_TIMEOUT).unwrap();
        let entry = Entry {
            block,
            offset: place.offset,
            length,
            publisher: 300,
            sequence: number + 1,
            published_at: 10,
            metadata: 0,
            has_origin: true,
            sync_point: None,
        };
        let origin = OriginId { node: [7; 16], topic: 1 };
        let delivered =
            self.topic.deliver_in(&caller, (&origin, number), entry, self.inbound.control());
        assert!(matches!(delivered, Ok(Delivery::Delivered(_))));
    }
}

fn epoll() -> Epoll {
    Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap()
}

const LEVEL: EpollFlags = EpollFlags::EPOLLIN;
const EDGE: EpollFlags = EpollFlags::EPOLLIN.union(EpollFlags::EPOLLET);

/// The ready entries within this time.
fn ready(loops: &Epoll, longest: Duration) -> Vec<u64> {
    let mut events = [EpollEvent::empty(); 16];
    let count = loops.wait(&mut events, EpollTimeout::try_from(longest).unwrap()).unwrap();
    events[..count].iter().map(EpollEvent::data).collect()
}

#[test]
fn descriptor_is_readable_until_no_message_is_found() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert!(!is_readable(&subscriber));
    assert_drained(&mut subscriber);
    publisher.push(b"one", TEST_TIMEOUT).unwrap();
    publisher.push(b"two", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    // One pull for each wake-up is enough.
    assert_eq!(subscriber.try_pull().unwrap().unwrap().to_vec().unwrap(), b"one");
    assert!(is_readable(&subscriber));
    assert_eq!(subscriber.try_pull().unwrap().unwrap().to_vec().unwrap(), b"two");
    assert!(is_readable(&subscriber), "the reader has not found the topic empty yet");
    assert_drained(&mut subscriber);
    // The same with a pull that waits.
    publisher.push(b"three", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"three");
    assert_eq!(subscriber.pull(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_drained(&mut subscriber);
    publisher.push(b"four", TEST_TIMEOUT).unwrap();
    assert_eq!(next(&mut subscriber), b"four");
}

#[test]
fn descriptor_is_readable_for_earlier_messages() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"early", TEST_TIMEOUT).unwrap();
    assert!(is_readable(&subscriber));
    assert_eq!(next(&mut subscriber), b"early");
    assert_drained(&mut subscriber);
}

#[test]
fn descriptor_is_readable_for_messages_of_other_nodes() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    assert!(!is_readable(&subscriber));
    for number in 1..=3 {
        node.deliver_inbound(number, b"from afar");
        assert_eq!(next(&mut subscriber), b"from afar");
        assert_drained(&mut subscriber);
    }
}

#[test]
fn each_message_after_an_empty_pull_gives_an_edge() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    let publisher = node.publisher();
    let loops = epoll();
    loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(EDGE, 7)).unwrap();
    for number in 0..500_u32 {
        publisher.push(&number.to_le_bytes(), TEST_TIMEOUT).unwrap();
        if number % 3 == 0 {
            publisher.push(&number.to_be_bytes(), TEST_TIMEOUT).unwrap();
        }
        let mut found = Vec::new();
        while found.len() < 1 + usize::from(number % 3 == 0) {
            assert_eq!(ready(&loops, TEST_TIMEOUT), [7], "before message {number}");
            while let Some(sample) = subscriber.try_pull().unwrap() {
                found.push(sample.to_vec().unwrap());
            }
        }
        assert_eq!(found[0], number.to_le_bytes());
    }
    // Messages that were signalled and not pulled give no further edge.
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    while subscriber.try_pull().unwrap().is_none() {
        assert_eq!(ready(&loops, TEST_TIMEOUT), [7]);
    }
}

#[test]
fn epoll_reports_only_subscribers_with_messages() {
    let nodes: Vec<_> = (0..3).map(|_| TestNode::new(&settings())).collect();
    let publishers: Vec<_> = nodes.iter().map(TestNode::publisher).collect();
    let loops = epoll();
    // Two subscribers of each topic.
    let mut subscribers: Vec<Subscriber> = nodes
        .iter()
        .map(TestNode::context)
        .flat_map(|context| [context.clone(), context])
        .map(|context| Subscriber::new(context).unwrap())
        .collect();
    for (subscriber, number) in subscribers.iter().zip(0..) {
        loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(LEVEL, number)).unwrap();
    }
    assert!(ready(&loops, SHORT_TIMEOUT).is_empty());
    for topic in [1, 0, 2, 2, 1] {
        publishers[topic].push(&[topic as u8], TEST_TIMEOUT).unwrap();
        let mut missing = vec![2 * topic, 2 * topic + 1];
        while !missing.is_empty() {
            for number in ready(&loops, TEST_TIMEOUT) {
                let number = usize::try_from(number).unwrap();
                while let Some(sample) = subscribers[number].try_pull().unwrap() {
                    assert_eq!(sample.to_vec().unwrap(), [topic as u8]);
                    missing.retain(|expected| *expected != number);
                }
            }
        }
    }
    subscribers.iter_mut().for_each(|subscriber| assert_drained(subscriber));
    assert!(ready(&loops, SHORT_TIMEOUT).is_empty());
    // A dropped subscriber leaves the epoll, even with unread messages.
    publishers[0].push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscribers[1]);
    wait_for(&subscribers[0]);
    drop(subscribers.drain(..2));
    assert!(ready(&loops, SHORT_TIMEOUT).is_empty());
}

/// Counts how often the listener was woken.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl DoorbellListener for Counter {
    fn rung(&self) {
        self.0.fetch_add(1, Relaxed);
    }
    fn check(&self) {}
}

#[test]
fn publisher_wakes_only_waiting_subscribers() {
    let node = TestNode::new(&TopicSettings { depth: 100, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let (watch, wakes) = (DoorbellWatcher::new(), Arc::new(Counter::default()));
    let _listening =
        watch.listen(node.topic.local().message_doorbell(), Arc::clone(&wakes) as _).unwrap();
    let until = |count| {
        let end = Instant::now() + TEST_TIMEOUT;
        while wakes.0.load(Relaxed) < count {
            assert!(Instant::now() < end, "the listener is not woken");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(wakes.0.load(Relaxed), count);
    };
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    drop(subscriber.pull(TEST_TIMEOUT).unwrap());
    assert!(!is_readable(&subscriber));
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    until(1);
    // The descriptor is readable already.
    for _ in 0..50 {
        publisher.push(b"x", TEST_TIMEOUT).unwrap();
    }
    std::thread::sleep(SHORT_TIMEOUT);
    until(1);
    while subscriber.try_pull().unwrap().is_some() {}
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    until(2);
}

#[test]
fn watcher_thread_exists_while_there_is_a_descriptor() {
    let node = TestNode::new(&settings());
    let context = node.context();
    let watch = &context.node.watch;
    let subscribers: Vec<_> = (0..3).map(|_| Subscriber::new(context.clone()).unwrap()).collect();
    assert_eq!(watch.threads(), 0);
    let _ = subscribers[1].descriptor().unwrap();
    let _ = subscribers[1].descriptor().unwrap();
    assert_eq!(watch.threads(), 1);
    let _ = subscribers[0].descriptor().unwrap();
    drop(subscribers);
    assert_eq!(watch.threads(), 0);
    assert_eq!(node.topic.subscribers().len(), 0);
}

#[test]
fn descriptor_stays_readable_after_an_eviction() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    assert!(!is_readable(&subscriber));
    let subscription_id = node.topic.local().subscription_ids().next().unwrap();
    let (at, held_for) = ((Direction::Local, subscription_id), Duration::from_millis(7));
    node.topic.evict_in(&node.caller(), at, held_for, node.controls()).unwrap();
    wait_for(&subscriber);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    assert_eq!(subscriber.poll_event(), Some(Event::Evicted { held_for: Some(held_for) }));
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Evicted);
    assert!(is_readable(&subscriber), "like an ended connection");
}

#[test]
fn descriptor_is_readable_once_the_node_is_closed() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    assert!(!is_readable(&subscriber));
    node.close();
    wait_for(&subscriber);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Closed);
    assert!(is_readable(&subscriber));
    // A descriptor that is created afterwards is readable at once.
    node.open();
    let late = node.subscriber();
    node.close();
    assert!(is_readable(&late));
}

#[test]
fn gap_makes_the_descriptor_readable_once() {
    let settings = TopicSettings { reliability: Reliability::DropOldest, ..settings() };
    let node = TestNode::new(&settings);
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert!(!is_readable(&subscriber));
    for polls_event in [true, false, true] {
        for _ in 0..10 {
            publisher.push(b"x", TEST_TIMEOUT).unwrap();
        }
        wait_for(&subscriber);
        assert_eq!(subscriber.poll_event(), None, "the gap is not detected yet");
        while subscriber.try_pull().unwrap().is_some() {}
        assert!(is_readable(&subscriber), "there is an unread event");
        if polls_event {
            assert!(matches!(subscriber.poll_event(), Some(Event::Gap { .. })));
        }
        assert_drained(&mut subscriber);
        let _ = subscriber.poll_event();
    }
}

#[test]
fn death_of_a_publisher_makes_the_descriptor_readable() {
    let node = TestNode::new(&settings());
    node.service.grow(node.local.id(), 1 << 20);
    let participant = node.admit();
    let mut subscriber = node.subscriber();
    let loops = epoll();
    loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(EDGE, 1)).unwrap();
    let child = ForkedChild::new(|| {
        let node = node.joined(participant);
        let publisher = node.publisher();
        publisher.push(b"its last", TEST_TIMEOUT).unwrap();
        std::thread::sleep(TEST_TIMEOUT);
    });
    node.service.participants.add_pidfd(participant, pidfd_of(&child));
    assert_eq!(next(&mut subscriber), b"its last");
    assert_drained(&mut subscriber);
    assert!(ready(&loops, SHORT_TIMEOUT).len() < 2);
    child.kill();
    assert!(child.was_killed());
    node.reclaim(participant);
    assert_eq!(ready(&loops, TEST_TIMEOUT), [1]);
    // The event is unread, so an empty pull gives another edge.
    assert!(subscriber.try_pull().unwrap().is_none());
    assert_eq!(ready(&loops, TEST_TIMEOUT), [1]);
    assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    assert_drained(&mut subscriber);
}

#[test]
fn forked_child_does_not_change_the_parents_descriptor() {
    let node = TestNode::new(&settings());
    let (subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    let number = subscriber.descriptor().unwrap().as_raw_fd();
    let mut handles = Some(subscriber);
    let child = ForkedChild::new(|| {
        let mut subscriber = handles.take().unwrap();
        assert_eq!(subscriber.descriptor().unwrap_err().kind(), ErrorKind::Forked);
        // SAFETY: open as long as the subscriber exists.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        // The child can poll it, and nothing else.
        assert!(polled(descriptor, Duration::ZERO));
        assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Forked);
        drop(subscriber);
        // SAFETY: queries a number that may be no descriptor.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        assert_eq!(flags, -1, "it is closed with the child's subscriber");
    });
    assert!(child.wait().success());
    let mut subscriber = handles.take().unwrap();
    assert!(is_readable(&subscriber), "the child changed the parent's descriptor");
    assert_eq!(next(&mut subscriber), b"x");
    assert_drained(&mut subscriber);
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    assert_eq!(next(&mut subscriber), b"y");
}

#[test]
fn dropped_descriptor_is_unreadable_for_remaining_pollers() {
    let node = TestNode::new(&settings());
    let (subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    let loops = epoll();
    let copy = subscriber.descriptor().unwrap().try_clone_to_owned().unwrap();
    loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(LEVEL, 1)).unwrap();
    assert_eq!(ready(&loops, TEST_TIMEOUT), [1]);
    drop(subscriber);
    assert!(ready(&loops, SHORT_TIMEOUT).is_empty());
    drop(copy);
}

/// Message `number` of `process`, with bytes that depend on both.
fn message(process: u64, number: u64) -> Vec<u8> {
    let length = 16 + (number * 37 % 1000) as usize;
    let mut bytes = process.to_le_bytes().to_vec();
    bytes.extend(number.to_le_bytes());
    bytes.extend((16..length).map(|at| (at as u64 ^ number ^ process) as u8));
    bytes
}

fn origin_of(bytes: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let (process, number) = (word(0), word(8));
    assert_eq!(bytes, message(process, number), "other bytes than were published");
    (process, number)
}

#[test]
fn messages_of_killed_processes_are_all_signalled() {
    const MESSAGES: u64 = 4000;
    let node = TestNode::new(&settings());
    node.service.grow(node.local.id(), 8 << 20);
    let participants = [node.admit(), node.admit(), node.admit()];
    let loops = epoll();
    let context = node.context();
    // One subscriber is edge-triggered, one level-triggered, and one pulls a single message each
    // time.
    let mut subscribers: Vec<_> = [EDGE, LEVEL, LEVEL]
        .into_iter()
        .zip(0..)
        .map(|(how, number)| {
            let subscriber = Subscriber::new(context.clone()).unwrap();
            loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(how, number)).unwrap();
            subscriber
        })
        .collect();
    let mut children: Vec<_> = participants
        .iter()
        .zip(0_u64..)
        .map(|(participant, process)| {
            Some(ForkedChild::new(|| {
                let node = node.joined(*participant);
                let publisher = node.publisher();
                // The last one continues until it is killed.
                let last = if process == 2 { u64::MAX } else { MESSAGES };
                for at in 0..last {
                    publisher.push(&message(process, at), TEST_TIMEOUT).unwrap();
                }
                publisher.flush(TEST_TIMEOUT).unwrap();
            }))
        })
        .collect();
    for (participant, child) in participants.iter().zip(&children) {
        node.service.participants.add_pidfd(*participant, pidfd_of(child.as_ref().unwrap()));
    }
    let mut expected = [[0; 3]; 3];
    let is_done = |expected: &[[u64; 3]; 3]| {
        expected.iter().all(|counts| counts[0] == MESSAGES && counts[1] == MESSAGES)
    };
    while !is_done(&expected) {
        let events = ready(&loops, TEST_TIMEOUT);
        assert!(!events.is_empty(), "no event after {expected:?}");
        for number in events {
            let number = usize::try_from(number).unwrap();
            while let Some(sample) = subscribers[number].try_pull().unwrap() {
                let (process, at) = origin_of(&sample.to_vec().unwrap());
                let expected = &mut expected[number][process as usize];
                assert_eq!(at, *expected, "of {process} for {number}");
                *expected += 1;
                if number == 2 {
                    break;
                }
            }
        }
        if expected[0][2] > 500
            && let Some(child) = children[2].take()
        {
            child.kill();
            assert!(child.was_killed());
            node.reclaim(participants[2]);
        }
    }
    for (participant, child) in participants.iter().zip(children) {
        if let Some(child) = child {
            for subscriber in &mut subscribers {
                while subscriber.try_pull().unwrap().is_some() {}
            }
            let is_last = *participant == participants[2];
            if is_last {
                child.kill();
            }
            assert_eq!(child.was_killed(), is_last);
            node.reclaim(*participant);
        }
    }
    for subscriber in &mut subscribers {
        while subscriber.try_pull().unwrap().is_some() {}
        assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    }
    drop(subscribers);
    assert_eq!(node.blocks_allocated(), 0);
}

/// Streams ring no doorbell: the reader polls until the write is done.
#[test]
fn descriptor_stays_readable_while_a_stream_writes() {
    let (node, device) = node_with(&on_a_device());
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    let from = device.allocate(4096).unwrap();
    assert_drained(&mut subscriber);
    gate.stop(&stream);
    publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    for _ in 0..3 {
        wait_for(&subscriber);
        assert!(subscriber.try_pull().unwrap().is_none(), "the message is not written yet");
    }
    gate.open();
    assert_eq!(next(&mut subscriber).len(), 4096);
    assert_drained(&mut subscriber);
}
