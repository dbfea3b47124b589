//! The bridge between nodes, over real providers on the loopback address. What lies in device
//! memory lies on the emulated, or on the device that `FABRICAST_TEST_DEVICE` names.
#![allow(missing_docs)]

mod connect_request;
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
    LOCAL, Lengths, MemoryKind, Nodes, Published, PublishedLog, TIMEOUT, facts, node, options,
};

const PROVIDERS: [&str; 2] = ["=net", "=tcp;ofi_rxm"];
const KEY: TopicKey = TopicKey(1);
const MIB: usize = 1 << 20;

fn lengths(all: &'static [usize]) -> Lengths {
    Arc::new(move |position| all[position as usize % all.len()])
}

/// In the middle of it one takes the other for lost, in turns.
fn disconnect_in_turns(
    nodes: &mut Nodes,
    log: &PublishedLog,
    count: u64,
    is_done: impl Fn() -> bool,
) {
    for (round, at) in [(1, 0), (2, 1), (3, 0), (4, 1)] {
        let so_far = round * count as usize / 6;
        nodes.until("some are there", |_| log.len() >= so_far || is_done());
        nodes.of(at).tell(Command::NodeLost(node(1 - at))).unwrap();
        let heard = nodes.lost.len();
        nodes.until("it is noticed", |nodes| nodes.lost.len() > heard || is_done());
        if at == 1 {
            // Who reads does not connect: whoever carries the letters tells the writer.
            nodes.of(0).tell(Command::NodeLost(node(1))).unwrap();
        }
    }
}

/// Sends a topic from node 0 to these, and says when all of it is released.
fn send(nodes: &Nodes, key: TopicKey, source: Published, to: &[u8]) -> impl Fn() -> bool + use<> {
    let is_done = source.is_done();
    let announcer = nodes.of(0).send_topic(key, facts(1 << 30), Box::new(source)).unwrap();
    for number in to {
        nodes.of(0).tell(Command::AddDestination(key, node(*number))).unwrap();
    }
    announcer.announce_waiter();
    is_done
}

fn receive(nodes: &Nodes, key: TopicKey, at: u8, place: MemoryKind, log: &PublishedLog) {
    let device = (place == MemoryKind::Device).then(|| place.device());
    nodes.of(at).receive_topic(key, node(0), 0, device, Box::new(log.sink(place))).unwrap();
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
            let source = Published::new(&lengths, from, 0, SIZES.len() as u64);
            let is_done = send(&nodes, KEY, source, &[1]);
            nodes.until("all are delivered", |_| is_done());
            log.check(SIZES.len() as u64);
            assert!(nodes.failed.is_empty() && nodes.lost.is_empty(), "{:?}", nodes.failed);
            let counted = nodes.counters(0);
            assert_eq!(counted.sent[0].2.delivered, SIZES.len() as u64);
        }
    }
}

#[test]
fn three_nodes_have_the_same() {
    let lengths = lengths(&[64, 100_000, 3 * MIB, 1000]);
    let mut nodes = Nodes::start(3, &options(""));
    assert_eq!(nodes.of(0).provider(), nodes.of(1).provider());
    let (count, places) = (60, [MemoryKind::Host, MemoryKind::Device]);
    let mut logs = Vec::new();
    let mut are_done: Vec<Box<dyn Fn() -> bool>> = Vec::new();
    for (key, place) in (10..).map(TopicKey).zip(places) {
        for at in [1, 2] {
            logs.push(PublishedLog::default());
            receive(&nodes, key, at, place, logs.last().unwrap());
        }
        let source = Published::new(&lengths, place, 0, count);
        are_done.push(Box::new(send(&nodes, key, source, &[1, 2])));
    }
    // And the other way round at the same time.
    let back = PublishedLog::default();
    nodes
        .of(0)
        .receive_topic(KEY, node(1), 0, None, Box::new(back.sink(MemoryKind::Host)))
        .unwrap();
    let source = Published::new(&lengths, MemoryKind::Host, 0, count);
    are_done.push(Box::new(source.is_done()));
    let announcer = nodes.of(1).send_topic(KEY, facts(1 << 30), Box::new(source)).unwrap();
    nodes.of(1).tell(Command::AddDestination(KEY, node(0))).unwrap();
    announcer.announce_waiter();
    nodes.until("all are delivered", |_| are_done.iter().all(|is_done| is_done()));
    logs.iter().chain([&back]).for_each(|log| log.check(count));
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn what_is_refused_is_asked_again_and_nothing_is_lost_with_a_ring() {
    let lengths = lengths(&[64, 64, 64, 20_000, 300_000]);
    for provider in PROVIDERS {
        let mut nodes = Nodes::start(2, &options(provider));
        let log = PublishedLog::default();
        let mut sink = log.sink(MemoryKind::Host);
        sink.refuse = 7;
        nodes.of(1).receive_topic(KEY, node(0), 0, None, Box::new(sink)).unwrap();
        let count = 400;
        let is_done = send(&nodes, KEY, Published::new(&lengths, MemoryKind::Host, 0, count), &[1]);
        disconnect_in_turns(&mut nodes, &log, count, &is_done);
        nodes.until("all are delivered", |_| is_done());
        log.check(count);
        assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
        let counted = nodes.counters(1).received[0].2;
        assert_eq!(counted.messages, count);
        assert!(counted.waited_for_memory > 0, "{counted:?}");
    }
}

#[test]
fn a_reader_that_stops_leaves_the_others_alone() {
    let lengths = lengths(&[64, 5000]);
    let mut nodes = Nodes::start(3, &options(""));
    let (log, other) = (PublishedLog::default(), PublishedLog::default());
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    receive(&nodes, KEY, 2, MemoryKind::Host, &other);
    let count = 3000;
    let is_done = send(&nodes, KEY, Published::new(&lengths, MemoryKind::Host, 0, count), &[1, 2]);
    nodes.until("some are there", |_| other.len() > 100);
    nodes.gone.push(node(2));
    nodes.of(2).tell(Command::StopInbound(KEY, node(0))).unwrap();
    let is_lost = |nodes: &Nodes| nodes.lost.contains(&(KEY, node(0), node(2), Side::Writer));
    nodes.until("the writer notices", |nodes| is_lost(nodes) || is_done());
    nodes.of(0).tell(Command::RemoveDestination(KEY, node(2))).unwrap();
    nodes.until("all are delivered", |_| is_done());
    log.check(count);
    // And a writer that stops is heard of.
    nodes.of(0).tell(Command::StopOutbound(KEY)).unwrap();
    let is_over = |nodes: &Nodes| nodes.lost.contains(&(KEY, node(1), node(0), Side::Reader));
    nodes.until("the reader notices", is_over);
}

#[test]
fn letters_about_topics_that_are_not_there_are_no_failures() {
    let mut nodes = Nodes::start(2, &options(""));
    let source = Published::new(&lengths(&[64]), MemoryKind::Host, 0, 10);
    let is_done = send(&nodes, KEY, source, &[1]);
    // Nobody receives it yet: the writer hears that at once, not when it has waited long enough.
    nodes.until("the writer is told", |nodes| !nodes.lost.is_empty());
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    nodes.until("all are delivered", |_| is_done());
    log.check(10);
    // It goes at both ends, with letters about it still to come.
    nodes.gone.push(node(1));
    nodes.of(1).tell(Command::StopInbound(KEY, node(0))).unwrap();
    nodes.of(0).tell(Command::StopOutbound(KEY)).unwrap();
    nodes.of(0).tell(Command::AddDestination(KEY, node(1))).unwrap();
    for letter in [
        ConnectionMessage::Refused { connection: 1, reason: String::new() },
        ConnectionMessage::Restart { connection: 1, reason: String::new() },
    ] {
        nodes.of(0).tell(Command::ControlMessage(KEY, node(1), letter)).unwrap();
    }
    // What comes behind them is heard: they were, too.
    nodes.counters(0);
    nodes.carry();
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
}

/// A source that hangs for as long as somebody wants it to.
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
fn a_worker_that_hangs_does_not_hold_up_who_tells_it_something() {
    let nodes = Nodes::start(1, &options(""));
    let (goes_on, hangs) = std::sync::mpsc::channel();
    // Not all is kept, so that messages are taken though nobody is there.
    let topic = TopicOptions { max_retained: Some(1), ..facts(64) };
    let announcer = nodes.of(0).send_topic(KEY, topic, Box::new(HangingSource(hangs))).unwrap();
    nodes.of(0).tell(Command::AddDestination(KEY, node(1))).unwrap();
    announcer.announce_waiter();
    let start = Instant::now();
    (0..1100).for_each(|_| nodes.of(0).tell(Command::NodeLost(node(2))).unwrap());
    // What it may miss is not kept beyond that.
    let again = || ConnectionMessage::Restart { connection: 1, reason: String::new() };
    let told = (0..1100).map(|_| {
        nodes.of(0).tell(Command::ControlMessage(KEY, node(1), again())).unwrap_err().kind()
    });
    assert!(told.into_iter().all(|kind| kind == ErrorKind::TooMany));
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    drop(goes_on);
    let end = Instant::now() + TIMEOUT;
    while nodes.of(0).tell(Command::ControlMessage(KEY, node(1), again())).is_err() {
        assert!(Instant::now() < end, "it does not go on");
    }
    nodes.counters(0);
}

#[test]
fn what_never_leaves_the_machine_connects_no_nodes() {
    let reaches = |worker: &Worker| worker.provider().name.clone();
    assert_ne!(reaches(&Worker::start(options(""), LOCAL).unwrap()), "shm");
    assert_ne!(reaches(&Worker::start(options("shm"), LOCAL).unwrap()), "shm");
    let error = Worker::start(options("=shm"), LOCAL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoProvider);
    assert!(error.to_string().contains("shm never leaves a machine"), "{error}");
    let error = Worker::start(options("=no-such-provider"), LOCAL).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoProvider);
    assert!(error.to_string().contains("no-such-provider"), "{error}");
}

#[test]
fn topics_have_their_place_among_several_workers() {
    let mut workers = Workers::start(2, &options(""), LOCAL).unwrap();
    let places: Vec<_> = workers.all().map(|worker| worker.address().to_vec()).collect();
    assert!((1..=2).contains(&places.len()));
    let of = |workers: &Workers, key| workers.of(TopicKey(key)).address().to_vec();
    for key in 0..4 {
        assert_eq!(of(&workers, key), places[key as usize % places.len()]);
    }
    // Those with large messages are where the lanes are, and the number of one may be another's later.
    workers.assign(TopicKey(3), 1 << 20);
    assert_eq!(of(&workers, 3), places[0]);
    workers.assign(TopicKey(3), (1 << 20) - 1);
    assert_eq!(of(&workers, 3), places[3 % places.len()]);
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
