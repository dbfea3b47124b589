//! Subscribers that are waited for by their descriptors, at a node of several processes.

use std::collections::HashSet;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use pubsub::{Event, Subscriber};

use crate::support::{ChildProcess, TIMEOUT, TestDir, message, number_of, settings};

/// Some of those that have something.
fn told(loops: &Epoll) -> Vec<usize> {
    let mut events = [EpollEvent::empty(); 32];
    let longest = EpollTimeout::try_from(TIMEOUT).unwrap();
    let count = loops.wait(&mut events, longest).unwrap();
    assert!(count > 0, "nobody says that there is something");
    events[..count].iter().map(|event| usize::try_from(event.data()).unwrap()).collect()
}

fn watched(subscribers: &[Subscriber], how: EpollFlags) -> Epoll {
    let loops = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    for (subscriber, number) in subscribers.iter().zip(0..) {
        loops
            .add(
                subscriber.descriptor().unwrap(),
                EpollEvent::new(EpollFlags::EPOLLIN | how, number),
            )
            .unwrap();
    }
    loops
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
    let loops = watched(&subscribers, EpollFlags::EPOLLET);
    let mut others: Vec<_> = names
        .iter()
        .map(|name| ChildProcess::start(&format!("publishes {name} {MESSAGES}"), test_dir.path()))
        .collect();
    let mut expected = [0; 3];
    while expected != [MESSAGES; 3] {
        for at in told(&loops) {
            while let Some(sample) = subscribers[at].try_pull().unwrap() {
                assert_eq!(number_of(&sample), expected[at]);
                expected[at] += 1;
            }
        }
    }
    others.iter_mut().for_each(ChildProcess::finish);
}

#[test]
fn one_who_polls_hears_that_a_publisher_was_killed() {
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topic = node.topic("numbers", &settings()).unwrap();
    let mut subscribers = [topic.subscriber().unwrap()];
    let loops = watched(&subscribers, EpollFlags::EPOLLET);
    let mut other = ChildProcess::start("publishes-for-ever numbers", test_dir.path());
    let mut expected = 0;
    // It may be told of, and not be there any more: then it asks again.
    let event = loop {
        told(&loops);
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
fn of_very_many_topics_those_are_told_of_that_have_something() {
    // More than the kernel waits for at once.
    const TOPICS: usize = 140;
    let test_dir = TestDir::new();
    let node = test_dir.join();
    let topics: Vec<_> =
        (0..TOPICS).map(|at| node.topic(&format!("topic {at}"), &settings()).unwrap()).collect();
    let mut subscribers: Vec<_> = topics.iter().map(|topic| topic.subscriber().unwrap()).collect();
    let loops = watched(&subscribers, EpollFlags::empty());
    for round in 0..3 {
        let mut missing = HashSet::new();
        for at in (round..TOPICS).step_by(3) {
            let number = at as u64;
            topics[at].publisher().unwrap().push(&message(number), TIMEOUT).unwrap();
            missing.insert(at);
        }
        while !missing.is_empty() {
            for at in told(&loops) {
                while let Some(sample) = subscribers[at].try_pull().unwrap() {
                    assert_eq!(number_of(&sample), at as u64);
                    assert!(missing.remove(&at), "nothing was published there");
                }
            }
        }
    }
}
