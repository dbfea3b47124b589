//! Workers of replication, over real providers on the loopback address. Device memory is on the
//! device that `TEST_DEVICE` names, or on an emulated one.
#![allow(missing_docs)]

mod connect_request;
mod device_rings;
mod forged;
mod idle;
mod lanes;
mod processes;
mod renewal;
mod support;

use pubsub::replication::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pubsub::ErrorKind;
use pubsub::replication::{
    ConnectionMessage, NodeId, OutgoingMessage, Side, Source, TopicKey, TopicOptions, Worker,
    WorkerOptions, Workers,
};
use support::{
    LOCAL, Lengths, MemoryKind, Nodes, PublishedLog, TIMEOUT, TestSource, node, options, topic,
};

const PROVIDERS: [&str; 2] = ["=net", "=tcp;ofi_rxm"];
const KEY: TopicKey = TopicKey(1);
const MIB: usize = 1 << 20;

fn lengths(lengths: &'static [usize]) -> Lengths {
    Arc::new(move |position| lengths[position as usize % lengths.len()])
}

/// Reports the peer as lost at writer and reader in turns, while messages flow.
fn disconnect_in_turns(
    nodes: &mut Nodes,
    log: &PublishedLog,
    count: u64,
    is_done: impl Fn() -> bool,
) {
    for (round, at) in [(1, 0), (2, 1), (3, 0), (4, 1)] {
        let so_far = round * count as usize / 6;
        nodes.until("some messages", |_| log.len() >= so_far || is_done());
        nodes.of(at).send(Command::NodeLost(node(1 - at))).unwrap();
        let before = nodes.lost.len();
        nodes.until("a disconnect", |nodes| nodes.lost.len() > before || is_done());
        if at == 1 {
            // Only the writer connects.
            nodes.of(0).send(Command::NodeLost(node(1))).unwrap();
        }
    }
}

/// Sends a topic from node 0 to other nodes. The result tells whether all messages are released.
fn send(nodes: &Nodes, key: TopicKey, source: TestSource, to: &[u8]) -> impl Fn() -> bool + use<> {
    let is_done = source.is_done();
    let device = (source.memory != MemoryKind::Host).then(|| source.memory.device());
    let options = TopicOptions { device, ..topic(1 << 30) };
    let announcer = nodes.of(0).send_topic(key, options, Box::new(source)).unwrap();
    for number in to {
        nodes.of(0).send(Command::AddDestination(key, node(*number))).unwrap();
    }
    announcer.announce_waiter();
    is_done
}

fn receive(nodes: &Nodes, key: TopicKey, at: u8, memory: MemoryKind, log: &PublishedLog) {
    let device = (memory != MemoryKind::Host).then(|| memory.device());
    nodes.of(at).receive_topic(key, node(0), 0, device, Box::new(log.sink(memory))).unwrap();
}

#[test]
fn messages_of_all_sizes_arrive_over_each_provider() {
    static SIZES: [usize; 14] =
        [0, 1, 64, 200, 4096, 4097, 70_000, MIB, 0, 9 * MIB + 3, 64 * MIB, 5, 600_000, 64];
    let lengths = lengths(&SIZES);
    for provider in PROVIDERS {
        for (from, to) in [
            (MemoryKind::Host, MemoryKind::Host),
            (MemoryKind::Device, MemoryKind::Device),
            (MemoryKind::Host, MemoryKind::Device),
        ] {
            let mut nodes = Nodes::start(2, &options(provider));
            let log = PublishedLog::default();
            receive(&nodes, KEY, 1, to, &log);
            let source = TestSource::new(&lengths, from, 0, SIZES.len() as u64);
            let is_done = send(&nodes, KEY, source, &[1]);
            nodes.until("all messages", |_| is_done());
            log.check(SIZES.len() as u64);
            assert!(nodes.failed.is_empty() && nodes.lost.is_empty(), "{:?}", nodes.failed);
            let counters = nodes.counters(0);
            assert_eq!(counters.sent[0].2.delivered, SIZES.len() as u64);
        }
    }
}

#[test]
fn three_nodes_receive_the_same_messages() {
    let lengths = lengths(&[64, 100_000, 3 * MIB, 1000]);
    let mut nodes = Nodes::start(3, &options(""));
    assert_eq!(nodes.of(0).provider(), nodes.of(1).provider());
    let (count, memories) = (60, [MemoryKind::Host, MemoryKind::Device]);
    let mut logs = Vec::new();
    let mut are_done: Vec<Box<dyn Fn() -> bool>> = Vec::new();
    for (key, memory) in (10..).map(TopicKey).zip(memories) {
        for at in [1, 2] {
            logs.push(PublishedLog::default());
            receive(&nodes, key, at, memory, logs.last().unwrap());
        }
        let source = TestSource::new(&lengths, memory, 0, count);
        are_done.push(Box::new(send(&nodes, key, source, &[1, 2])));
    }
    // A topic in the opposite direction at the same time.
    let back = PublishedLog::default();
    nodes
        .of(0)
        .receive_topic(KEY, node(1), 0, None, Box::new(back.sink(MemoryKind::Host)))
        .unwrap();
    let source = TestSource::new(&lengths, MemoryKind::Host, 0, count);
    are_done.push(Box::new(source.is_done()));
    let announcer = nodes.of(1).send_topic(KEY, topic(1 << 30), Box::new(source)).unwrap();
    nodes.of(1).send(Command::AddDestination(KEY, node(0))).unwrap();
    announcer.announce_waiter();
    nodes.until("all messages", |_| are_done.iter().all(|is_done| is_done()));
    logs.iter().chain([&back]).for_each(|log| log.check(count));
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn full_sinks_and_lost_rings_lose_no_messages() {
    let lengths = lengths(&[64, 64, 64, 20_000, 300_000]);
    for provider in PROVIDERS {
        let mut nodes = Nodes::start(2, &options(provider));
        let log = PublishedLog::default();
        let mut sink = log.sink(MemoryKind::Host);
        sink.refuse = 7;
        nodes.of(1).receive_topic(KEY, node(0), 0, None, Box::new(sink)).unwrap();
        let count = 400;
        let is_done =
            send(&nodes, KEY, TestSource::new(&lengths, MemoryKind::Host, 0, count), &[1]);
        disconnect_in_turns(&mut nodes, &log, count, &is_done);
        nodes.until("all messages", |_| is_done());
        log.check(count);
        assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
        let counters = nodes.counters(1).received[0].2;
        assert_eq!(counters.messages, count);
        assert!(counters.waited_for_memory > 0, "{counters:?}");
    }
}

#[test]
fn reader_that_stops_does_not_affect_other_readers() {
    let lengths = lengths(&[64, 5000]);
    let mut nodes = Nodes::start(3, &options(""));
    let (log, other) = (PublishedLog::default(), PublishedLog::default());
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    receive(&nodes, KEY, 2, MemoryKind::Host, &other);
    let count = 3000;
    let is_done = send(&nodes, KEY, TestSource::new(&lengths, MemoryKind::Host, 0, count), &[1, 2]);
    nodes.until("some messages", |_| other.len() > 100);
    nodes.removed.push(node(2));
    nodes.of(2).send(Command::StopInbound(KEY, node(0))).unwrap();
    let is_lost = |nodes: &Nodes| nodes.lost.contains(&(KEY, node(0), node(2), Side::Writer));
    nodes.until("a disconnect at the writer", |nodes| is_lost(nodes) || is_done());
    nodes.of(0).send(Command::RemoveDestination(KEY, node(2))).unwrap();
    nodes.until("all messages", |_| is_done());
    log.check(count);
    // The reader is notified of a writer that stops.
    nodes.of(0).send(Command::StopOutbound(KEY)).unwrap();
    let is_over = |nodes: &Nodes| nodes.lost.contains(&(KEY, node(1), node(0), Side::Reader));
    nodes.until("a disconnect at the reader", is_over);
}

#[test]
fn control_messages_for_unknown_topics_are_no_failures() {
    let mut nodes = Nodes::start(2, &options(""));
    let source = TestSource::new(&lengths(&[64]), MemoryKind::Host, 0, 10);
    let is_done = send(&nodes, KEY, source, &[1]);
    // No node receives the topic yet: the writer gets a refusal, not a timeout.
    nodes.until("a refusal", |nodes| !nodes.lost.is_empty());
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    nodes.until("all messages", |_| is_done());
    log.check(10);
    // Both ends stop the topic, and control messages for it follow.
    nodes.removed.push(node(1));
    nodes.of(1).send(Command::StopInbound(KEY, node(0))).unwrap();
    nodes.of(0).send(Command::StopOutbound(KEY)).unwrap();
    nodes.of(0).send(Command::AddDestination(KEY, node(1))).unwrap();
    for message in [
        ConnectionMessage::Refused { connection: 1, reason: String::new() },
        ConnectionMessage::Restart { connection: 1, reason: String::new() },
    ] {
        nodes.of(0).send(Command::ControlMessage(KEY, node(1), message)).unwrap();
    }
    // Commands are processed in order: after this the messages are, too.
    nodes.counters(0);
    nodes.process_events();
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
}

/// A source that blocks until its channel is closed.
struct HangingSource(std::sync::mpsc::Receiver<()>);

impl Source for HangingSource {
    fn next(&mut self) -> pubsub::Result<Option<OutgoingMessage>> {
        let _ = self.0.recv();
        Ok(None)
    }

    fn release(&mut self, _: u64) {}

    fn release_one(&mut self, _: u64) {}
}

#[test]
fn hung_worker_does_not_block_senders_of_commands() {
    let nodes = Nodes::start(1, &options(""));
    let (release, blocked) = std::sync::mpsc::channel();
    // Retention is limited, so that messages are taken although no reader is connected.
    let topic = TopicOptions { max_retained: Some(1), ..topic(64) };
    let announcer = nodes.of(0).send_topic(KEY, topic, Box::new(HangingSource(blocked))).unwrap();
    nodes.of(0).send(Command::AddDestination(KEY, node(1))).unwrap();
    announcer.announce_waiter();
    let start = Instant::now();
    (0..1100).for_each(|_| nodes.of(0).send(Command::NodeLost(node(2))).unwrap());
    // Control messages beyond that are refused.
    let restart = || ConnectionMessage::Restart { connection: 1, reason: String::new() };
    let mut errors = (0..1100).map(|_| {
        nodes.of(0).send(Command::ControlMessage(KEY, node(1), restart())).unwrap_err().kind()
    });
    assert!(errors.all(|kind| kind == ErrorKind::TooMany));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    drop(release);
    let end = Instant::now() + TIMEOUT;
    while nodes.of(0).send(Command::ControlMessage(KEY, node(1), restart())).is_err() {
        assert!(Instant::now() < end, "timeout: the worker accepts no command");
    }
    nodes.counters(0);
}

#[test]
fn providers_within_one_machine_are_refused() {
    let provider = |worker: &Worker| worker.provider().name.clone();
    assert_ne!(provider(&Worker::start(options(""), LOCAL).unwrap()), "shm");
    assert_ne!(provider(&Worker::start(options("shm"), LOCAL).unwrap()), "shm");
    let error = Worker::start(options("=shm"), LOCAL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoProvider);
    assert!(error.to_string().contains("shm never leaves a machine"), "{error}");
    let error = Worker::start(options("=no-such-provider"), LOCAL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoProvider);
    assert!(error.to_string().contains("no-such-provider"), "{error}");
}

#[test]
fn topics_are_assigned_to_workers_by_key_and_size() {
    let mut workers = Workers::start(2, &options(""), LOCAL).unwrap();
    let addresses: Vec<_> = workers.all().map(|worker| worker.address().to_vec()).collect();
    assert!((1..=2).contains(&addresses.len()));
    let of = |workers: &Workers, key| workers.of(TopicKey(key)).address().to_vec();
    for key in 0..4 {
        assert_eq!(of(&workers, key), addresses[key as usize % addresses.len()]);
    }
    // The first worker has the lanes, and gets topics with large messages. A key may be reused.
    workers.assign(TopicKey(3), 1 << 20);
    assert_eq!(of(&workers, 3), addresses[0]);
    workers.assign(TopicKey(3), (1 << 20) - 1);
    assert_eq!(of(&workers, 3), addresses[3 % addresses.len()]);
    let _: NodeId = node(3);
}

#[test]
fn rings_and_slots_grow_with_lanes_and_workers_with_cores() {
    let options = WorkerOptions::default();
    assert_eq!((options.slots_for(1), options.slots_for(3)), (options.slots, options.slots + 16));
    assert_eq!(options.ring_size_for(1, 64 << 20, 4), 8 << 20);
    assert_eq!(options.ring_size_for(3, 64 << 20, 4), 16 << 20);
    assert_eq!(options.ring_size_for(3, 64, 4), 64 << 10);
    assert_eq!([1, 8, 16, 32, 128].map(Workers::default_count), [1, 1, 2, 4, 4]);
}
