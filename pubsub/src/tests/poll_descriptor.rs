//! Subscribers that are waited for by their descriptors.
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
        "nobody says that there is something"
    );
}

fn is_readable(subscriber: &Subscriber) -> bool {
    polled(subscriber.descriptor().unwrap(), Duration::ZERO)
}

/// The next message, as one who polls gets it.
#[track_caller]
fn next(subscriber: &mut Subscriber) -> Vec<u8> {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        wait_for(subscriber);
        if let Some(sample) = subscriber.try_pull().unwrap() {
            return sample.to_vec().unwrap();
        }
        assert!(Instant::now() < end, "it is readable, and there is nothing");
    }
}

/// Nothing is left, and the descriptor says so. It may be told of what was pulled already.
#[track_caller]
fn assert_drained(subscriber: &mut Subscriber) {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        assert!(subscriber.try_pull().unwrap().is_none());
        if !polled(subscriber.descriptor().unwrap(), SHORT_TIMEOUT) {
            return;
        }
        assert!(Instant::now() < end, "it stays readable");
    }
}

impl TestNode {
    /// A message of another node, with this number there.
    fn arrive(&self, number: u64, bytes: &[u8]) {
        self.service.request_growth(self.inbound.id(), 1 << 20);
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

/// Which of those in it are told of within this time.
fn told(loops: &Epoll, longest: Duration) -> Vec<u64> {
    let mut events = [EpollEvent::empty(); 16];
    let count = loops.wait(&mut events, EpollTimeout::try_from(longest).unwrap()).unwrap();
    events[..count].iter().map(EpollEvent::data).collect()
}

#[test]
fn it_is_readable_from_a_message_on_until_none_is_found() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert!(!is_readable(&subscriber));
    assert_drained(&mut subscriber);
    publisher.push(b"one", TEST_TIMEOUT).unwrap();
    publisher.push(b"two", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    // One each time is enough.
    assert_eq!(subscriber.try_pull().unwrap().unwrap().to_vec().unwrap(), b"one");
    assert!(is_readable(&subscriber));
    assert_eq!(subscriber.try_pull().unwrap().unwrap().to_vec().unwrap(), b"two");
    assert!(is_readable(&subscriber), "that nothing is left was not found yet");
    assert_drained(&mut subscriber);
    // Pulled by waiting it is the same.
    publisher.push(b"three", TEST_TIMEOUT).unwrap();
    assert_eq!(subscriber.pull(TEST_TIMEOUT).unwrap().to_vec().unwrap(), b"three");
    assert_eq!(subscriber.pull(SHORT_TIMEOUT).unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_drained(&mut subscriber);
    publisher.push(b"four", TEST_TIMEOUT).unwrap();
    assert_eq!(next(&mut subscriber), b"four");
}

#[test]
fn what_was_there_before_is_told_of() {
    let node = TestNode::new(&settings());
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"early", TEST_TIMEOUT).unwrap();
    assert!(is_readable(&subscriber));
    assert_eq!(next(&mut subscriber), b"early");
    assert_drained(&mut subscriber);
}

#[test]
fn messages_of_other_nodes_are_told_of() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    assert!(!is_readable(&subscriber));
    for number in 1..=3 {
        node.arrive(number, b"from afar");
        assert_eq!(next(&mut subscriber), b"from afar");
        assert_drained(&mut subscriber);
    }
}

#[test]
fn with_edge_triggering_each_message_after_none_is_told_of() {
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
            assert_eq!(told(&loops, TEST_TIMEOUT), [7], "before message {number}");
            while let Some(sample) = subscriber.try_pull().unwrap() {
                found.push(sample.to_vec().unwrap());
            }
        }
        assert_eq!(found[0], number.to_le_bytes());
    }
    // One that was told of and is not pulled is not told of again.
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    while subscriber.try_pull().unwrap().is_none() {
        assert_eq!(told(&loops, TEST_TIMEOUT), [7]);
    }
}

#[test]
fn of_several_in_one_epoll_those_are_told_of_that_have_something() {
    let homes: Vec<_> = (0..3).map(|_| TestNode::new(&settings())).collect();
    let publishers: Vec<_> = homes.iter().map(TestNode::publisher).collect();
    let loops = epoll();
    // Two of each topic, at one desk.
    let mut subscribers: Vec<Subscriber> = homes
        .iter()
        .map(TestNode::context)
        .flat_map(|context| [context.clone(), context])
        .map(|context| Subscriber::new(context).unwrap())
        .collect();
    for (subscriber, number) in subscribers.iter().zip(0..) {
        loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(LEVEL, number)).unwrap();
    }
    assert!(told(&loops, SHORT_TIMEOUT).is_empty());
    for topic in [1, 0, 2, 2, 1] {
        publishers[topic].push(&[topic as u8], TEST_TIMEOUT).unwrap();
        let mut missing = vec![2 * topic, 2 * topic + 1];
        while !missing.is_empty() {
            for number in told(&loops, TEST_TIMEOUT) {
                let number = usize::try_from(number).unwrap();
                while let Some(sample) = subscribers[number].try_pull().unwrap() {
                    assert_eq!(sample.to_vec().unwrap(), [topic as u8]);
                    missing.retain(|waited_for| *waited_for != number);
                }
            }
        }
    }
    subscribers.iter_mut().for_each(|subscriber| assert_drained(subscriber));
    assert!(told(&loops, SHORT_TIMEOUT).is_empty());
    // One that is dropped leaves by itself, whatever it had.
    publishers[0].push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscribers[1]);
    wait_for(&subscribers[0]);
    drop(subscribers.drain(..2));
    assert!(told(&loops, SHORT_TIMEOUT).is_empty());
}

/// Counts the times that somebody was woken.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl DoorbellListener for Counter {
    fn rung(&self) {
        self.0.fetch_add(1, Relaxed);
    }
    fn look(&self) {}
}

#[test]
fn a_publisher_pays_only_for_one_that_waits() {
    let node = TestNode::new(&TopicSettings { depth: 100, ..settings() });
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    let (watch, wakes) = (DoorbellWatcher::new(), Arc::new(Counter::default()));
    let _listening =
        watch.listen(node.topic.local().message_doorbell(), Arc::clone(&wakes) as _).unwrap();
    let until = |count| {
        let end = Instant::now() + TEST_TIMEOUT;
        while wakes.0.load(Relaxed) < count {
            assert!(Instant::now() < end, "nobody is woken");
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
    // It is readable already.
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
fn the_thread_is_there_for_as_long_as_somebody_has_a_descriptor() {
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
    assert_eq!(node.topic.participants().subscribers.len(), 0);
}

#[test]
fn eviction_is_told_of_and_stays() {
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
    assert!(is_readable(&subscriber), "as a connection that has ended");
}

#[test]
fn that_the_node_is_closed_is_told_of() {
    let node = TestNode::new(&settings());
    let mut subscriber = node.subscriber();
    assert!(!is_readable(&subscriber));
    node.close();
    wait_for(&subscriber);
    assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Closed);
    assert!(is_readable(&subscriber));
    // One that is asked for afterwards is so at once.
    node.open();
    let late = node.subscriber();
    node.close();
    assert!(is_readable(&late));
}

#[test]
fn a_gap_is_told_of_once_whether_it_is_asked_for_or_not() {
    let settings = TopicSettings { reliability: Reliability::DropOldest, ..settings() };
    let node = TestNode::new(&settings);
    let (mut subscriber, publisher) = (node.subscriber(), node.publisher());
    assert!(!is_readable(&subscriber));
    for asked in [true, false, true] {
        for _ in 0..10 {
            publisher.push(b"x", TEST_TIMEOUT).unwrap();
        }
        wait_for(&subscriber);
        assert_eq!(subscriber.poll_event(), None, "it is not known yet");
        while subscriber.try_pull().unwrap().is_some() {}
        assert!(is_readable(&subscriber), "there is something to be asked for");
        if asked {
            assert!(matches!(subscriber.poll_event(), Some(Event::Gap { .. })));
        }
        assert_drained(&mut subscriber);
        let _ = subscriber.poll_event();
    }
}

#[test]
fn the_death_of_a_publisher_is_told_of() {
    let node = TestNode::new(&settings());
    node.service.request_growth(node.local.id(), 1 << 20);
    let who = node.admit();
    let mut subscriber = node.subscriber();
    let loops = epoll();
    loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(EDGE, 1)).unwrap();
    let child = ForkedChild::new(|| {
        let node = node.joined(who);
        let publisher = node.publisher();
        publisher.push(b"its last", TEST_TIMEOUT).unwrap();
        std::thread::sleep(TEST_TIMEOUT);
    });
    node.service.roster.add_pidfd(who, pidfd_of(&child));
    assert_eq!(next(&mut subscriber), b"its last");
    assert_drained(&mut subscriber);
    assert!(told(&loops, SHORT_TIMEOUT).len() < 2);
    child.kill();
    assert!(child.was_killed());
    node.reclaim(who);
    assert_eq!(told(&loops, TEST_TIMEOUT), [1]);
    // One who asks first, and then finds nothing to pull, is told once more.
    assert!(subscriber.try_pull().unwrap().is_none());
    assert_eq!(told(&loops, TEST_TIMEOUT), [1]);
    assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    assert_drained(&mut subscriber);
}

#[test]
fn a_forked_child_is_told_so_and_does_not_touch_its_parents() {
    let node = TestNode::new(&settings());
    let (subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    let number = subscriber.descriptor().unwrap().as_raw_fd();
    let mut handles = Some(subscriber);
    let child = ForkedChild::new(|| {
        let mut subscriber = handles.take().unwrap();
        assert_eq!(subscriber.descriptor().unwrap_err().kind(), ErrorKind::Forked);
        // SAFETY: it is open as long as the subscriber is there.
        let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
        // It can be polled, and says no more than that.
        assert!(polled(descriptor, Duration::ZERO));
        assert_eq!(subscriber.try_pull().unwrap_err().kind(), ErrorKind::Forked);
        drop(subscriber);
        // SAFETY: asks about a number that may be no descriptor.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        assert_eq!(flags, -1, "it is closed with the child's subscriber");
    });
    assert!(child.wait().success());
    let mut subscriber = handles.take().unwrap();
    assert!(is_readable(&subscriber), "it was not the child's to change");
    assert_eq!(next(&mut subscriber), b"x");
    assert_drained(&mut subscriber);
    publisher.push(b"y", TEST_TIMEOUT).unwrap();
    assert_eq!(next(&mut subscriber), b"y");
}

#[test]
fn one_that_is_dropped_is_not_readable_for_pollers_that_a_child_keeps() {
    let node = TestNode::new(&settings());
    let (subscriber, publisher) = (node.subscriber(), node.publisher());
    publisher.push(b"x", TEST_TIMEOUT).unwrap();
    wait_for(&subscriber);
    let loops = epoll();
    let copy = subscriber.descriptor().unwrap().try_clone_to_owned().unwrap();
    loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(LEVEL, 1)).unwrap();
    assert_eq!(told(&loops, TEST_TIMEOUT), [1]);
    drop(subscriber);
    assert!(told(&loops, SHORT_TIMEOUT).is_empty());
    drop(copy);
}

/// Messages of `who` from `first` on, each with bytes that follow from its number.
fn message(who: u64, number: u64) -> Vec<u8> {
    let length = 16 + (number * 37 % 1000) as usize;
    let mut bytes = who.to_le_bytes().to_vec();
    bytes.extend(number.to_le_bytes());
    bytes.extend((16..length).map(|at| (at as u64 ^ number ^ who) as u8));
    bytes
}

fn origin_of(bytes: &[u8]) -> (u64, u64) {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let (who, number) = (word(0), word(8));
    assert_eq!(bytes, message(who, number), "other bytes than were published");
    (who, number)
}

#[test]
fn all_messages_of_several_processes_are_told_of_while_some_are_killed() {
    const MESSAGES: u64 = 4000;
    let node = TestNode::new(&settings());
    node.service.request_growth(node.local.id(), 8 << 20);
    let names = [node.admit(), node.admit(), node.admit()];
    let loops = epoll();
    let context = node.context();
    // One is waited for by level, one by edge, and one pulls a single message each time.
    let mut subscribers: Vec<_> = [EDGE, LEVEL, LEVEL]
        .into_iter()
        .zip(0..)
        .map(|(how, number)| {
            let subscriber = Subscriber::new(context.clone()).unwrap();
            loops.add(subscriber.descriptor().unwrap(), EpollEvent::new(how, number)).unwrap();
            subscriber
        })
        .collect();
    let mut children: Vec<_> = names
        .iter()
        .zip(0_u64..)
        .map(|(name, who)| {
            Some(ForkedChild::new(|| {
                let node = node.joined(*name);
                let publisher = node.publisher();
                // The last one goes on until it is killed.
                let last = if who == 2 { u64::MAX } else { MESSAGES };
                for at in 0..last {
                    publisher.push(&message(who, at), TEST_TIMEOUT).unwrap();
                }
                publisher.flush(TEST_TIMEOUT).unwrap();
            }))
        })
        .collect();
    for (name, child) in names.iter().zip(&children) {
        node.service.roster.add_pidfd(*name, pidfd_of(child.as_ref().unwrap()));
    }
    let mut expected = [[0; 3]; 3];
    let is_done = |expected: &[[u64; 3]; 3]| {
        expected.iter().all(|counts| counts[0] == MESSAGES && counts[1] == MESSAGES)
    };
    while !is_done(&expected) {
        let events = told(&loops, TEST_TIMEOUT);
        assert!(!events.is_empty(), "nothing is told of after {expected:?}");
        for number in events {
            let number = usize::try_from(number).unwrap();
            while let Some(sample) = subscribers[number].try_pull().unwrap() {
                let (who, at) = origin_of(&sample.to_vec().unwrap());
                let expected = &mut expected[number][who as usize];
                assert_eq!(at, *expected, "of {who} for {number}");
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
            node.reclaim(names[2]);
        }
    }
    for (name, child) in names.iter().zip(children) {
        if let Some(child) = child {
            for subscriber in &mut subscribers {
                while subscriber.try_pull().unwrap().is_some() {}
            }
            if *name == names[2] {
                child.kill();
            }
            child.wait();
            node.reclaim(*name);
        }
    }
    for subscriber in &mut subscribers {
        while subscriber.try_pull().unwrap().is_some() {}
        assert!(matches!(subscriber.poll_event(), Some(Event::PublisherLost { .. })));
    }
    drop(subscribers);
    assert_eq!(node.blocks_allocated(), 0);
}

/// What a stream does rings no bell: it is looked for until it is done.
#[test]
fn who_polls_gets_what_a_stream_writes() {
    let (node, device) = node_with(&on_a_device());
    let (publisher, mut subscriber) = (node.publisher(), node.subscriber());
    let (stream, gate) = (device.stream().unwrap(), Gate::new(&device));
    let from = device.allocate(4096).unwrap();
    assert_drained(&mut subscriber);
    gate.stop(&stream);
    publisher.push_on(&stream, &from.whole(), TEST_TIMEOUT).unwrap();
    for _ in 0..3 {
        wait_for(&subscriber);
        assert!(subscriber.try_pull().unwrap().is_none(), "it is not written yet");
    }
    gate.open();
    assert_eq!(next(&mut subscriber).len(), 4096);
    assert_drained(&mut subscriber);
}
