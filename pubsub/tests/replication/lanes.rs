//! Large messages over several lanes.

use pubsub::replication::Command;
use std::time::Duration;

use pubsub::replication::{ConnectionMessage, TopicKey, TopicParameters, WorkerOptions};

use super::support::{MemoryKind, Nodes, PublishedLog, TestSource, cpu_time, node, options, topic};
use super::{KEY, MIB, PROVIDERS, disconnect_in_turns, lengths, receive, send};

/// Two lanes, or one on a machine with one core.
pub(crate) fn two() -> u64 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get().min(2) as u64)
}

fn with_lanes(lanes: usize, provider: &str) -> WorkerOptions {
    WorkerOptions { lanes, ..options(provider) }
}

static SIZES: [usize; 16] = [
    0,
    1,
    9 * MIB + 3,
    64,
    4097,
    MIB - 1,
    MIB,
    MIB + 1,
    70_000,
    24 * MIB,
    5,
    600_000,
    3 * MIB + 511,
    0,
    2 * MIB,
    64,
];

/// Some providers drop messages from an address that was not inserted. So a worker inserts all
/// addresses of a request, and refuses it if one is invalid.
#[test]
fn connect_request_with_invalid_addresses_is_refused() {
    for provider in PROVIDERS {
        let mut nodes = Nodes::start(2, &with_lanes(2, provider));
        receive(&nodes, KEY, 1, MemoryKind::Host, &PublishedLog::default());
        let parameters = TopicParameters { number: 1, largest: 2 * MIB as u64, depth: 16 };
        let from = nodes.of(0).address().to_vec();
        let invalid = || vec![1; 3];
        let mut requests = vec![(invalid(), Vec::new())];
        if two() > 1 {
            requests.push((from, vec![invalid()]));
        }
        for (connection, (from, lane_addresses)) in (1..).zip(requests) {
            nodes.failed.clear();
            let request = ConnectionMessage::ConnectRequest {
                connection,
                parameters,
                from,
                lane_addresses,
                direct: None,
            };
            nodes.of(1).send(Command::ControlMessage(KEY, node(0), request)).unwrap();
            nodes.until("a refusal", |nodes| !nodes.failed.is_empty());
        }
    }
}

#[test]
fn messages_of_all_sizes_arrive_over_one_and_two_lanes() {
    let lengths = lengths(&SIZES);
    let count = SIZES.len() as u64;
    for provider in PROVIDERS {
        for (from, to) in [
            (MemoryKind::Host, MemoryKind::Host),
            (MemoryKind::Device, MemoryKind::Device),
            (MemoryKind::Host, MemoryKind::Device),
            (MemoryKind::Device, MemoryKind::Host),
        ] {
            for lanes in [2, 1] {
                let mut nodes = Nodes::start(2, &with_lanes(lanes, provider));
                let log = PublishedLog::default();
                receive(&nodes, KEY, 1, to, &log);
                let is_done = send(&nodes, KEY, TestSource::new(&lengths, from, 0, count), &[1]);
                nodes.until("all messages", |_| is_done());
                log.check(count);
                assert!(nodes.failed.is_empty() && nodes.lost.is_empty(), "{:?}", nodes.failed);
                let (sent, received) =
                    (nodes.counters(0).sent[0].2, nodes.counters(1).received[0].2);
                assert_eq!((sent.delivered, received.messages), (count, count));
                let expected = (lanes as u64).min(two());
                assert_eq!((sent.lanes, received.lanes), (expected, expected), "{provider}");
            }
        }
    }
}

#[test]
fn lower_number_of_lanes_of_both_nodes_is_used() {
    let lengths = lengths(&[MIB + 17, 64, 4 * MIB]);
    for (writer, reader) in [(2, 1), (1, 2)] {
        let mut nodes = Nodes::start(0, &options("=net"));
        for (number, lanes) in [(0, writer), (1, reader)] {
            nodes.add(number, &with_lanes(lanes, "=net"));
        }
        let log = PublishedLog::default();
        receive(&nodes, KEY, 1, MemoryKind::Host, &log);
        let is_done = send(&nodes, KEY, TestSource::new(&lengths, MemoryKind::Host, 0, 12), &[1]);
        nodes.until("all messages", |_| is_done());
        log.check(12);
        assert_eq!(nodes.counters(0).sent[0].2.lanes, 1);
        assert_eq!(nodes.counters(1).received[0].2.lanes, 1);
        assert!(nodes.failed.is_empty() && nodes.lost.is_empty(), "{:?}", nodes.failed);
    }
}

#[test]
fn topics_without_large_messages_have_one_lane() {
    let mut nodes = Nodes::start(2, &with_lanes(2, "=net"));
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    let source = TestSource::new(&lengths(&[64, 70_000]), MemoryKind::Host, 0, 20);
    let is_done = source.is_done();
    let announcer = nodes.of(0).send_topic(KEY, topic(100_000), Box::new(source)).unwrap();
    nodes.of(0).send(Command::AddDestination(KEY, node(1))).unwrap();
    announcer.announce_waiter();
    nodes.until("all messages", |_| is_done());
    log.check(20);
    assert_eq!(nodes.counters(0).sent[0].2.lanes, 1);
}

#[test]
fn lost_rings_of_two_lanes_lose_no_messages() {
    let lengths = lengths(&[64, 3 * MIB, 64, 20_000, MIB + 5]);
    for provider in PROVIDERS {
        let mut nodes = Nodes::start(2, &with_lanes(2, provider));
        let log = PublishedLog::default();
        let mut sink = log.sink(MemoryKind::Device);
        sink.refuse = 7;
        let device = Some(MemoryKind::Device.device());
        nodes.of(1).receive_topic(KEY, node(0), 0, device, Box::new(sink)).unwrap();
        let count = 60;
        let is_done =
            send(&nodes, KEY, TestSource::new(&lengths, MemoryKind::Device, 0, count), &[1]);
        disconnect_in_turns(&mut nodes, &log, count, &is_done);
        nodes.until("all messages", |_| is_done());
        log.check(count);
        assert!(nodes.failed.is_empty(), "{:?}", nodes.failed);
        assert_eq!(nodes.counters(0).renewals, 0);
    }
}

/// Not over tcp;ofi_rxm: closing an endpoint in the middle of large writes may crash there (see
/// docs/reference/providers.md).
#[test]
fn reader_that_disappears_blocks_no_other_reader() {
    let provider = "=net";
    let lengths = lengths(&[5 * MIB, 300, MIB]);
    let mut nodes = Nodes::start(3, &with_lanes(2, provider));
    let (log, other) = (PublishedLog::default(), PublishedLog::default());
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    receive(&nodes, KEY, 2, MemoryKind::Device, &other);
    let count = 40;
    let is_done = send(&nodes, KEY, TestSource::new(&lengths, MemoryKind::Host, 0, count), &[1, 2]);
    nodes.until("some messages", |_| other.len() > 4);
    // Closes the endpoints of the reader while messages arrive. The header of a long message is
    // injected, and net reports a lost injected write without its peer. Then the ring to the other
    // reader is opened again, too, and its messages are sent again.
    nodes.removed.push(node(2));
    drop(nodes.workers.remove(&node(2)));
    nodes.of(0).send(Command::NodeLost(node(2))).unwrap();
    nodes.of(0).send(Command::RemoveDestination(KEY, node(2))).unwrap();
    nodes.until("all messages", |_| is_done());
    log.check(count);
    nodes.removed.clear();
    nodes.add(2, &with_lanes(2, provider));
    let third = TopicKey(3);
    let new = PublishedLog::default();
    receive(&nodes, third, 2, MemoryKind::Device, &new);
    let is_done = send(&nodes, third, TestSource::new(&lengths, MemoryKind::Host, 0, 6), &[2]);
    nodes.until("all messages of the new reader", |_| is_done());
    new.check(6);
}

#[test]
fn large_and_small_messages_of_many_topics_go_both_ways() {
    let mut nodes = Nodes::start(2, &with_lanes(2, "=net"));
    let (count, mut logs) = (12, Vec::new());
    let mut are_done: Vec<Box<dyn Fn() -> bool>> = Vec::new();
    for number in 0..6 {
        let (key, from) = (TopicKey(100 + number), (number % 2) as u8);
        let lengths = lengths(&[2 * MIB + 1, 64, 300_000, 7 * MIB]);
        let log = PublishedLog::default();
        let memory = if number < 3 { MemoryKind::Host } else { MemoryKind::Device };
        let device = (memory == MemoryKind::Device).then(|| memory.device());
        let sink = Box::new(log.sink(memory));
        nodes.of(1 - from).receive_topic(key, node(from), 0, device, sink).unwrap();
        let source = TestSource::new(&lengths, memory, 0, count);
        are_done.push(Box::new(source.is_done()));
        let announcer = nodes.of(from).send_topic(key, topic(1 << 30), Box::new(source)).unwrap();
        nodes.of(from).send(Command::AddDestination(key, node(1 - from))).unwrap();
        announcer.announce_waiter();
        logs.push(log);
    }
    nodes.until("all messages", |_| are_done.iter().all(|is_done| is_done()));
    logs.iter().for_each(|log| log.check(count));
    assert!(nodes.failed.is_empty() && nodes.lost.is_empty(), "{:?}", nodes.failed);
}

#[test]
fn idle_lanes_use_no_processor_time() {
    let mut nodes = Nodes::start(2, &with_lanes(2, "=net"));
    let log = PublishedLog::default();
    receive(&nodes, KEY, 1, MemoryKind::Host, &log);
    let source = TestSource::new(&lengths(&[4 * MIB]), MemoryKind::Host, 0, 3);
    let is_done = send(&nodes, KEY, source, &[1]);
    nodes.until("all messages", |_| is_done());
    std::thread::sleep(Duration::from_millis(200));
    let before = cpu_time("ring lane");
    std::thread::sleep(Duration::from_secs(2));
    let took = cpu_time("ring lane").saturating_sub(before);
    println!("{took:?} of processor time for two lanes' threads in two seconds");
    let is_alone = std::env::var_os("NEXTEST").is_some();
    assert!(!is_alone || took < Duration::from_millis(40), "{took:?}");
    drop(nodes);
}
