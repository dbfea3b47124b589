//! Rings in device memory, over a provider inside of this process that can lie about device memory.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fabric::emulated::{Fault, offer};
use pubsub::replication::{
    Command, OutgoingMessage, PayloadLocation, Source, TopicKey, TopicOptions, WorkerOptions,
};
use transfer::path::DeviceFabric;

use super::support::{
    Lengths, MemoryKind, Nodes, PublishedLog, TIMEOUT, TestSource, bytes_of, header_of, node, topic,
};
use super::{KEY, MIB, disconnect_in_turns, lengths, receive, send};

const DEVICE: MemoryKind = MemoryKind::Emulated;
const HOST: MemoryKind = MemoryKind::Host;

static SIZES: [usize; 13] =
    [0, 1, 64, 200, 4096, 4097, 70_000, MIB, 0, 9 * MIB + 3, 5, 600_000, 64];

fn with(fault: Fault, device_fabric: DeviceFabric) -> WorkerOptions {
    let offer = Some(offer(fault).unwrap());
    WorkerOptions { offer, device_fabric, ..WorkerOptions::default() }
}

/// What nodes say about the path of a topic: whether its ring lies in device memory at writer and
/// reader, and why it does not.
type Report = (bool, bool, Option<String>);

fn report(nodes: &Nodes) -> Report {
    let (sent, received) = (nodes.counters(0), nodes.counters(1));
    let staged = received.staged.first().map(|(_, _, cause)| cause.clone());
    (sent.sent[0].2.is_direct, received.received[0].2.is_direct, staged)
}

/// All messages from one node to another.
fn pass(nodes: &mut Nodes, from: MemoryKind, to: MemoryKind) -> Report {
    let count = SIZES.len() as u64;
    let log = PublishedLog::default();
    receive(nodes, KEY, 1, to, &log);
    let source = TestSource::new(&lengths(&SIZES), from, 0, count);
    let is_done = send(nodes, KEY, source, &[1]);
    nodes.until("all messages", |_| is_done());
    log.check(count);
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
    report(nodes)
}

fn pass_with(fault: Fault, from: MemoryKind, to: MemoryKind) -> Report {
    pass(&mut Nodes::start(2, &with(fault, DeviceFabric::Probe)), from, to)
}

#[test]
fn messages_go_directly_to_device_memory() {
    for (from, lanes) in [(DEVICE, 1), (HOST, 1), (DEVICE, 2)] {
        let options = WorkerOptions { lanes, ..with(Fault::None, DeviceFabric::Probe) };
        let mut nodes = Nodes::start(2, &options);
        assert_eq!(pass(&mut nodes, from, DEVICE), (true, true, None));
        assert!(nodes.lost.is_empty(), "{:?}", nodes.reasons);
    }
    // The reader has host memory.
    assert_eq!(pass_with(Fault::None, DEVICE, HOST), (false, false, None));
}

#[test]
fn every_fault_of_a_provider_is_found_and_messages_are_staged() {
    // Later than any look, also on a busy machine.
    let late = Fault::EarlyCompletions(Duration::from_millis(500));
    for (fault, expected) in [
        (late, "emulated failed the probe: a chunk of 8 bytes was incomplete"),
        (Fault::CutsTransfers(4096), "emulated failed the probe: a chunk of 65536 bytes was"),
        (Fault::RefusesRegistration, "fi_mr_regattr"),
        (Fault::RefusesPeerToPeer, "FI_HMEM_P2P"),
    ] {
        for from in [DEVICE, HOST] {
            let (sent, received, cause) = pass_with(fault, from, DEVICE);
            let cause = cause.unwrap_or_default();
            assert!(cause.contains(expected), "{fault:?} {from:?}: {cause} {sent} {received}");
            assert_eq!((sent, received), (false, false), "{fault:?}");
        }
    }
}

/// Sends messages of these lengths, of a topic whose longest message is given.
fn begin_topic(nodes: &Nodes, key: u64, largest: usize, count: u64) -> impl Fn() -> bool + use<> {
    let key = TopicKey(key);
    receive(nodes, key, 1, DEVICE, &PublishedLog::default());
    let of = move |position: u64| if position.is_multiple_of(2) { largest } else { 64 };
    let source = TestSource::new(&(Arc::new(of) as Lengths), DEVICE, 0, count);
    let is_done = source.is_done();
    let options = TopicOptions { device: Some(DEVICE.device()), ..topic(largest as u64) };
    let announcer = nodes.of(0).send_topic(key, options, Box::new(source)).unwrap();
    nodes.of(0).send(Command::AddDestination(key, node(1))).unwrap();
    announcer.announce_waiter();
    is_done
}

/// A small ring says nothing about the lengths of a large one.
#[test]
fn larger_rings_are_probed_again() {
    let mut nodes = Nodes::start(2, &with(Fault::CutsTransfers(20_000), DeviceFabric::Probe));
    let is_done = begin_topic(&nodes, 1, 64, 6);
    nodes.until("small messages", |_| is_done());
    assert_eq!(report(&nodes), (true, true, None));
    let is_done = begin_topic(&nodes, 2, 2 * MIB, 6);
    nodes.until("large messages", |_| is_done());
    // The provider was wrong: small messages are staged, too.
    nodes.until("rings in host memory", |nodes| {
        let counters = nodes.counters(1);
        counters.staged.len() == 2 && counters.received.iter().all(|(.., it)| !it.is_direct)
    });
    let cause = "emulated failed the probe: a chunk of ";
    assert!(nodes.counters(1).staged.iter().all(|(.., found)| found.starts_with(cause)));
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn many_topics_begin_at_once() {
    let mut nodes = Nodes::start(2, &with(Fault::None, DeviceFabric::Probe));
    let topics: Vec<_> = (1..=8).map(|key| begin_topic(&nodes, key, 70_000, 10)).collect();
    nodes.until("all messages", |_| topics.iter().all(|is_done| is_done()));
    let counters = nodes.counters(1);
    assert!(counters.staged.is_empty(), "{:?}", counters.staged);
    assert!(counters.received.len() == 8 && counters.received.iter().all(|it| it.2.is_direct));
    assert!(nodes.lost.is_empty() && nodes.failed.is_empty(), "{:?}", nodes.reasons);
}

/// Probes that never end are begun three times.
#[test]
fn writes_that_never_complete_are_given_up() {
    let options = with(Fault::NeverCompletes, DeviceFabric::Probe);
    let options = WorkerOptions { timeout: Duration::from_secs(1), ..options };
    let mut nodes = Nodes::start(2, &options);
    let (sent, received, cause) = pass(&mut nodes, DEVICE, DEVICE);
    assert_eq!((sent, received), (false, false));
    let cause = cause.unwrap();
    assert_eq!(cause, "3 rings in device memory ended before a message arrived");
}

#[test]
fn settings_of_both_nodes_decide() {
    let (off, probe, on) = (DeviceFabric::Off, DeviceFabric::Probe, DeviceFabric::On);
    // Without a probe the bytes are not found late.
    let late = Fault::EarlyCompletions(Duration::from_nanos(1));
    for (writer, reader, fault, expected) in [
        (off, probe, Fault::None, (false, false, Some("the writer cannot write to device memory"))),
        (probe, off, Fault::None, (false, false, Some("FABRICAST_DEVICE_FABRIC is off"))),
        (on, on, late, (true, true, None)),
        (on, probe, Fault::None, (true, true, None)),
    ] {
        let mut nodes = Nodes::start(0, &with(fault, probe));
        let shared = with(fault, probe);
        nodes.add(0, &WorkerOptions { device_fabric: writer, ..shared.clone() });
        nodes.add(1, &WorkerOptions { device_fabric: reader, ..shared });
        let (sent, received, cause) = pass(&mut nodes, DEVICE, DEVICE);
        assert_eq!((sent, received, cause.as_deref()), expected, "{writer} {reader}");
    }
}

/// The verdict is kept until the node is lost.
#[test]
fn topics_after_the_first_one_begin_without_a_probe() {
    let mut nodes = Nodes::start(2, &with(Fault::None, DeviceFabric::Probe));
    assert_eq!(pass(&mut nodes, DEVICE, DEVICE), (true, true, None));
    let log = PublishedLog::default();
    let key = TopicKey(2);
    receive(&nodes, key, 1, DEVICE, &log);
    let source = TestSource::new(&lengths(&[64]), DEVICE, 0, 5);
    let is_done = send(&nodes, key, source, &[1]);
    nodes.until("all messages", |_| is_done());
    log.check(5);
    assert!(nodes.lost.is_empty());
}

#[test]
fn broken_connections_lose_no_message() {
    const COUNT: u64 = 120;
    let mut nodes = Nodes::start(2, &with(Fault::None, DeviceFabric::Probe));
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, DEVICE, &log);
    let source = TestSource::new(&lengths(&[64, 100_000, 3 * MIB, 0]), DEVICE, 0, COUNT);
    let is_done = send(&nodes, KEY, source, &[1]);
    disconnect_in_turns(&mut nodes, &log, COUNT, &is_done);
    nodes.until("all messages", |_| is_done());
    log.check(COUNT);
    assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
    let (sent, received, cause) = report(&nodes);
    assert_eq!((sent, received), (true, true), "{cause:?}");
    nodes.of(0).send(Command::NodeLost(node(1))).unwrap();
}

/// Messages in memory that grows with each of them, as a pool does.
struct GrowingSource {
    importer: gpu::Importer,
    stream: gpu::Stream,
    next: u64,
    released: Arc<AtomicU64>,
}

const PIECE: u64 = 2 << 20;

impl Source for GrowingSource {
    fn next(&mut self) -> pubsub::Result<Option<OutgoingMessage>> {
        if self.next == 6 {
            return Ok(None);
        }
        let piece = DEVICE.device().allocate_shared(PIECE, &[]).unwrap();
        let (file, length) = piece.export_piece(0).unwrap();
        self.importer.add(file.as_fd(), length).unwrap();
        let (position, bytes) = (self.next, bytes_of(self.next, 100_000));
        // Across two pieces, from the second message on.
        let begin = (position * PIECE).saturating_sub(50_000);
        let slice = self.importer.memory().slice(begin, bytes.len() as u64).unwrap();
        self.stream.upload(&slice, &bytes, TIMEOUT).unwrap();
        self.next += 1;
        let header = header_of(position, bytes.len() as u64);
        Ok(Some(OutgoingMessage { header, place: PayloadLocation::Device(slice) }))
    }

    fn release(&mut self, through: u64) {
        self.released.store(through + 1, Ordering::Release);
    }

    fn release_one(&mut self, _: u64) {}
}

#[test]
fn memory_that_grows_is_written_directly() {
    let mut nodes = Nodes::start(2, &with(Fault::None, DeviceFabric::Probe));
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, DEVICE, &log);
    let device = DEVICE.device();
    let released = Arc::new(AtomicU64::new(0));
    let source = GrowingSource {
        importer: device.importer(64 << 20).unwrap(),
        stream: device.stream().unwrap(),
        next: 0,
        released: Arc::clone(&released),
    };
    let options = TopicOptions { device: Some(device), ..topic(1 << 20) };
    let announcer = nodes.of(0).send_topic(KEY, options, Box::new(source)).unwrap();
    nodes.of(0).send(Command::AddDestination(KEY, node(1))).unwrap();
    announcer.announce_waiter();
    nodes.until("all messages", |_| released.load(Ordering::Acquire) == 6);
    log.check(6);
    assert_eq!(report(&nodes), (true, true, None));
    assert!(nodes.lost.is_empty(), "{:?}", nodes.reasons);
}
