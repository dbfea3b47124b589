//! Subscribers polled by their descriptors, on a node of several processes.

use std::collections::HashSet;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use pubsub::{Event, Subscriber};

use crate::support::{ChildProcess, TIMEOUT, TestDir, message, number_of, settings};

/// Waits for readable subscribers and returns some of them.
fn readable(epoll: &Epoll) -> Vec<usize> {
    let mut events = [EpollEvent::empty(); 32];
    let timeout = EpollTimeout::try_from(TIMEOUT).unwrap();
    let count = epoll.wait(&mut events, timeout).unwrap();
    assert!(count > 0, "no descriptor became readable");
    events[..count].iter().map(|event| usize::try_from(event.data()).unwrap()).collect()
}

fn watch(subscribers: &[Subscriber], flags: EpollFlags) -> Epoll {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    for (subscriber, number) in subscribers.iter().zip(0..) {
        epoll
            .add(
                subscriber.descriptor().unwrap(),
                EpollEvent::new(EpollFlags::EPOLLIN | flags, number),
            )
            .unwrap();
    }
    epoll
}

#[test]
fn one_thread_reads_what_several_processes_publish() {
    const MESSAGES: u64 = 2000;
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let names = ["one", "two", "three"];
    let subscriber = |name: &&str| {
        let topic = node.topic(name, &settings()).unwrap();
        topic.subscriber().unwrap()
    };
    let mut subscribers: Vec<_> = names.iter().map(subscriber).collect();
    let epoll = watch(&subscribers, EpollFlags::EPOLLET);
    let mut others: Vec<_> = names
        .iter()
        .map(|name| ChildProcess::start(&format!("publishes {name} {MESSAGES}"), test_dir.path()))
        .collect();
    let mut expected = [0; 3];
    while expected != [MESSAGES; 3] {
        for index in readable(&epoll) {
            while let Some(sample) = subscribers[index].try_pull().unwrap() {
                assert_eq!(number_of(&sample), expected[index]);
                expected[index] += 1;
            }
        }
    }
    others.iter_mut().for_each(ChildProcess::finish);
}

#[test]
fn poll_descriptor_reports_a_killed_publisher() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscribers = [topic.subscriber().unwrap()];
    let epoll = watch(&subscribers, EpollFlags::EPOLLET);
    let mut other = ChildProcess::start("publishes-forever numbers", test_dir.path());
    let mut expected = 0;
    // A wake-up may find no message and no event: then wait again.
    let event = loop {
        readable(&epoll);
        while let Some(sample) = subscribers[0].try_pull().unwrap() {
            assert_eq!(number_of(&sample), expected);
            expected += 1;
            if expected == 1000 {
                other.kill();
            }
        }
        if let Some(event) = subscribers[0].poll_event() {
            break event;
        }
    };
    assert!(matches!(event, Event::PublisherLost { .. }));
    assert!(expected >= 1000);
}

#[test]
fn of_many_topics_only_readable_ones_are_reported() {
    // More topics than one call of epoll_wait returns.
    const TOPICS: usize = 140;
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topics: Vec<_> =
        (0..TOPICS).map(|i| node.topic(&format!("topic {i}"), &settings()).unwrap()).collect();
    let mut subscribers: Vec<_> = topics.iter().map(|topic| topic.subscriber().unwrap()).collect();
    let epoll = watch(&subscribers, EpollFlags::empty());
    for round in 0..3 {
        let mut missing = HashSet::new();
        for index in (round..TOPICS).step_by(3) {
            let number = index as u64;
            topics[index].publisher().unwrap().push(&message(number), TIMEOUT).unwrap();
            missing.insert(index);
        }
        while !missing.is_empty() {
            for index in readable(&epoll) {
                while let Some(sample) = subscribers[index].try_pull().unwrap() {
                    assert_eq!(number_of(&sample), index as u64);
                    assert!(missing.remove(&index), "topic {index} has an unexpected message");
                }
            }
        }
    }
}
