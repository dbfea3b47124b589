//! Once topics are set up, messages cost no allocations: neither in publisher and subscriber, nor
//! in the threads of the service and of replication.
//!
//! The allocator of this program counts by thread name. Allocations of C libraries are not counted.
#![allow(missing_docs, unreachable_pub)]

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use pubsub::{
    MemoryLocation, NetworkOptions, Node, NodeOptions, Publisher, Row, Subscriber, TopicSettings,
};
use testkit::addresses::unused_listen_address;
use testkit::allocations::{CountingAllocator, MAX_NAMES, by_thread_name, thread_names};

#[path = "node/support.rs"]
#[allow(dead_code)]
mod support;

use support::{TIMEOUT, TestDir, options, until};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::with_thread_names();

/// Messages of a round.
const MESSAGES: u64 = 2000;
/// Threads that do periodic work, whether messages flow or not, with the allocations that each may
/// make at once and in a second. The last one looks each second for publishers that became idle.
const PERIODIC: [(&str, u64, f64); 4] = [
    ("fabricast-node", 50, 500.0),
    ("fabricast-peers", 50, 500.0),
    ("fabricast-link", 50, 500.0),
    ("fabricast-pubs", 2, 4.0),
];

fn settings(memory: MemoryLocation) -> TopicSettings {
    TopicSettings { memory, depth: 8, largest: 100_000, ..TopicSettings::default() }
}

/// Publishes and reads messages in every way that the API offers.
fn pass(publisher: &Publisher, subscriber: &mut Subscriber, bytes: &mut [u8]) {
    let mut found = [0; 8];
    for number in 0..MESSAGES {
        let length = [8, 64, 4000, 0, 100_000, 900][number as usize % 6];
        if number % 2 == 0 {
            publisher.push(&bytes[..length], TIMEOUT).unwrap();
        } else {
            let mut loan = publisher.loan(length as u64, TIMEOUT).unwrap();
            loan.write(0, &bytes[..length]).unwrap();
            loan.set_metadata(&number.to_le_bytes()).unwrap();
            loan.publish(TIMEOUT).unwrap();
        }
        let sample = subscriber.pull(TIMEOUT).unwrap();
        assert_eq!(sample.length(), length as u64);
        if length > 0 {
            sample.read(0, &mut found).unwrap();
        }
        if number % 2 == 1 {
            found.copy_from_slice(&sample.metadata());
            assert_eq!(u64::from_le_bytes(found), number);
        }
        assert!(sample.times().published > 0 && sample.is_valid());
        assert_eq!(subscriber.poll_event(), None);
    }
}

/// Checks the minimum of several rounds: on a busy machine a single round may need more memory at
/// once than any round before.
fn check(case: &str, publisher: &Publisher, subscriber: &mut Subscriber) {
    let mut bytes = vec![7; 100_000];
    pass(publisher, subscriber, &mut bytes);
    let (mut min, mut longest) = ([u64::MAX; MAX_NAMES], Duration::ZERO);
    for _ in 0..5 {
        let (before, start) = (by_thread_name(), Instant::now());
        pass(publisher, subscriber, &mut bytes);
        let (after, took) = (by_thread_name(), start.elapsed());
        for (min, (before, after)) in min.iter_mut().zip(before.into_iter().zip(after)) {
            *min = (after - before).min(*min);
        }
        longest = longest.max(took);
    }
    for (name, count) in thread_names().into_iter().zip(min).filter(|(name, _)| !name.is_empty()) {
        println!("{case}: {name} allocated {count} times in {longest:?}");
        let periodic = PERIODIC.into_iter().find(|(thread, ..)| *thread == name);
        let limit = periodic.map_or(0, |(_, at_once, per_second)| {
            at_once + (longest.as_secs_f64() * per_second) as u64
        });
        assert!(count <= limit, "{case}: {name} allocated {count} times in {MESSAGES} messages");
    }
}

fn network(directory: &Path, listen: SocketAddr, peer: SocketAddr) -> Node {
    let network = NetworkOptions {
        listen: Some(listen),
        peers: vec![peer.to_string()],
        insecure: true,
        ..NetworkOptions::default()
    };
    Node::join(NodeOptions { network: Some(network), ..options(directory) }).unwrap()
}

/// The only test of this program, since the allocator would count other tests, too.
#[test]
fn nothing_is_allocated_per_message() {
    let (test_dirs, addresses) =
        ([TestDir::new(), TestDir::new()], [unused_listen_address(), unused_listen_address()]);
    let first = network(test_dirs[0].path(), addresses[0], addresses[1]);
    let second = network(test_dirs[1].path(), addresses[1], addresses[0]);
    for memory in ["host", "emulated:0"] {
        let settings = settings(memory.parse().unwrap());
        let topic = first.topic(&format!("within {memory}"), &settings).unwrap();
        let mut subscriber = topic.subscriber().unwrap();
        check(&format!("on one node, {memory}"), &topic.publisher().unwrap(), &mut subscriber);

        let name = format!("between {memory}");
        let reading = second.topic(&name, &settings).unwrap();
        let mut subscriber = reading.subscriber().unwrap();
        let topic = first.topic(&name, &settings).unwrap();
        let publisher = topic.publisher().unwrap();
        until("a subscriber on the other node", || {
            let rows = first.report().unwrap();
            rows.iter().any(|row| matches!(row, Row::Sent { topic, .. } if *topic == name))
        });
        check(&format!("between nodes, {memory}"), &publisher, &mut subscriber);
    }
}
