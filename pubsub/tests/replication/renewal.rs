//! Renewal of endpoints.

use pubsub::replication::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pubsub::Result;
use pubsub::replication::{
    ConnectionMessage, OutgoingMessage, Side, Source, TopicKey, TopicParameters, WorkerOptions,
};

use super::support::{MemoryKind, Nodes, PublishedLog, TestSource, node, options, topic};
use super::{KEY, lengths, receive};

const RING: u64 = 64 << 10;
const OTHER: TopicKey = TopicKey(2);

/// A source of which a limited number of messages can be taken. Tests raise the limit.
struct LimitedSource {
    source: TestSource,
    given: u64,
    limit: Arc<AtomicU64>,
}

impl Source for LimitedSource {
    fn next(&mut self) -> Result<Option<OutgoingMessage>> {
        if self.given >= self.limit.load(Ordering::SeqCst) {
            return Ok(None);
        }
        let next = self.source.next()?;
        self.given += u64::from(next.is_some());
        Ok(next)
    }

    fn release(&mut self, through: u64) {
        self.source.release(through);
    }

    fn release_one(&mut self, position: u64) {
        self.source.release_one(position);
    }
}

#[test]
fn repeated_connect_requests_use_bounded_memory() {
    for (provider, lanes) in super::PROVIDERS.into_iter().zip([1, 2]) {
        let options = WorkerOptions { ring: RING, lanes, ..options(provider) };
        let mut nodes = Nodes::start(3, &options);
        let lanes = super::lanes::two().min(lanes as u64);
        let (log, hostile) = (PublishedLog::default(), PublishedLog::default());
        receive(&nodes, KEY, 1, MemoryKind::Host, &log);
        let sink = Box::new(hostile.sink(MemoryKind::Host));
        nodes.of(1).receive_topic(OTHER, node(2), 0, None, sink).unwrap();
        let source = TestSource::new(&lengths(&[64, 5000, 100_000]), MemoryKind::Host, 0, 60);
        let (limit, is_done) = (Arc::new(AtomicU64::new(20)), source.is_done());
        let source = LimitedSource { source, given: 0, limit: Arc::clone(&limit) };
        let announcer = nodes.of(0).send_topic(KEY, topic(1 << 30), Box::new(source)).unwrap();
        nodes.of(0).send(Command::AddDestination(KEY, node(1))).unwrap();
        announcer.announce_waiter();
        nodes.until("the first messages", |_| log.len() == 20);
        let parameters = TopicParameters { number: 1, largest: 1 << 20, depth: 16 };
        let from = nodes.of(2).address().to_vec();
        let mut max = 0;
        for connection in 0..300 {
            let lane_addresses = vec![from.clone(); lanes as usize - 1];
            let request = ConnectionMessage::ConnectRequest {
                connection,
                parameters,
                from: from.clone(),
                lane_addresses,
                direct: None,
            };
            nodes.of(1).send(Command::ControlMessage(OTHER, node(2), request)).unwrap();
            nodes.process_events();
            max = max.max(nodes.counters(1).quarantined_bytes);
        }
        assert!(max > RING && max <= 8 * RING * lanes, "{max} bytes quarantined");
        let renewals = |nodes: &Nodes| nodes.counters(1).renewals;
        nodes.until("another endpoint", |nodes| renewals(nodes) > 0);
        assert_eq!(nodes.counters(1).quarantined_bytes, 0);
        limit.store(60, Ordering::SeqCst);
        announcer.announce_waiter();
        nodes.until("all messages", |_| is_done());
        log.check(60);
        assert_eq!(hostile.len(), 0);
        // The node that the requests name as writer does not have the topic.
        let is_unknown_topic =
            |failed: &String| failed.contains("the worker does not have the topic");
        assert!(nodes.failed.iter().all(is_unknown_topic), "{:?}", nodes.failed);
    }
}

/// Nodes 0 and 2 write endlessly to node 1, each in a topic of its own.
struct TwoWriters {
    nodes: Nodes,
    log: PublishedLog,
    limits: [Arc<AtomicU64>; 2],
    announcers: [pubsub::replication::Announcer; 2],
}

impl TwoWriters {
    fn start(provider: &str) -> Self {
        let mut nodes = Nodes::start(3, &WorkerOptions { lanes: 1, ..options(provider) });
        let (log, other) = (PublishedLog::default(), PublishedLog::default());
        let limits: [Arc<AtomicU64>; 2] = Default::default();
        let topics = [(KEY, 0, &log), (OTHER, 2, &other)];
        let mut at = 0;
        let announcers = topics.map(|(key, from, log)| {
            let sink = Box::new(log.sink(MemoryKind::Host));
            nodes.of(1).receive_topic(key, node(from), 0, None, sink).unwrap();
            let source = TestSource::new(&lengths(&[64, 5000]), MemoryKind::Host, 0, 1 << 40);
            let source = LimitedSource { source, given: 0, limit: Arc::clone(&limits[at]) };
            at += 1;
            let worker = nodes.of(from);
            let announcer = worker.send_topic(key, topic(1 << 20), Box::new(source)).unwrap();
            worker.send(Command::AddDestination(key, node(1))).unwrap();
            announcer
        });
        nodes.until("all connections", |nodes| nodes.connected == 4);
        Self { nodes, log, limits, announcers }
    }

    /// Waits for ten more messages of node 0.
    fn wait_for_messages(&mut self) {
        let expected = self.limits[0].fetch_add(10, Ordering::SeqCst) + 10;
        self.announcers[0].announce_waiter();
        self.nodes.until("messages of node 0", |_| self.log.len() as u64 == expected);
    }

    /// The number of lost connections of a topic.
    fn lost(&self, key: TopicKey) -> usize {
        self.nodes.lost.iter().filter(|(lost, ..)| *lost == key).count()
    }

    fn renewals(&self) -> u64 {
        self.nodes.counters(1).renewals
    }
}

#[test]
fn node_that_returns_repeatedly_disturbs_no_others() {
    for provider in super::PROVIDERS {
        let mut all = TwoWriters::start(provider);
        for times in 1..=10 {
            all.nodes.of(1).send(Command::NodeReturned(node(2))).unwrap();
            // Both ends of its own connection are opened again.
            all.nodes.until("a reconnect", |nodes| nodes.connected >= 4 + 2 * times);
            all.wait_for_messages();
        }
        assert!(all.lost(OTHER) >= 10, "{:?}", all.nodes.reasons);
        assert_eq!((all.lost(KEY), all.renewals()), (0, 0), "{:?}", all.nodes.reasons);
        assert!(all.nodes.failed.is_empty(), "{:?}", all.nodes.failed);
    }
}

#[test]
fn node_with_false_stall_checks_disturbs_others_once() {
    let mut all = TwoWriters::start("=net");
    let mut disturbed = Vec::new();
    let at_its_reader = (OTHER, node(1), node(2), Side::Reader);
    for _ in 0..3 {
        // The reader opens the connection again each time.
        let lost =
            |all: &TwoWriters| all.nodes.lost.iter().filter(|lost| **lost == at_its_reader).count();
        let before = lost(&all);
        let mut last = Instant::now();
        while lost(&all) == before {
            all.wait_for_messages();
            // The interval of stall checks of a genuine writer.
            if last.elapsed() > Duration::from_millis(600) {
                last = Instant::now();
                let connection = all.nodes.last_request[&(OTHER, node(2))];
                let check = ConnectionMessage::StallCheck { connection, chunks: 1 << 30, read: 0 };
                all.nodes.of(1).send(Command::ControlMessage(OTHER, node(2), check)).unwrap();
            }
        }
        all.wait_for_messages();
        disturbed.push((all.lost(KEY) > 0, all.renewals()));
    }
    // First its own connection only. Since that has no effect, then all, but not again so soon.
    assert_eq!(disturbed, [(false, 0), (true, 1), (true, 1)], "{:?}", all.nodes.reasons);
}

/// Sends topics from nodes 0 and 2 to node 1, one more than the limit of rings.
fn exceed_ring_limit(writer_of: impl Fn(TopicKey) -> u8) {
    /// Limit of a port in each direction.
    const RINGS: u64 = 1024;
    let mut nodes = Nodes::start(3, &options("=tcp;ofi_rxm"));
    let log = PublishedLog::default();
    for key in (0..=RINGS).map(TopicKey) {
        let writer = writer_of(key);
        let source = TestSource::new(&lengths(&[64]), MemoryKind::Host, 0, 1);
        let announcer = nodes.of(writer).send_topic(key, topic(64), Box::new(source)).unwrap();
        let sink = Box::new(log.sink(MemoryKind::Host));
        nodes.of(1).receive_topic(key, node(writer), 0, None, sink).unwrap();
        nodes.of(writer).send(Command::AddDestination(key, node(1))).unwrap();
        announcer.announce_waiter();
        // Limits the control messages in the queue of a worker.
        if key.0 % 64 == 63 {
            nodes.until("some messages", |_| log.len() as u64 > key.0);
        }
    }
    nodes.until("a refusal of the last topic", |nodes| {
        log.len() as u64 == RINGS && !nodes.lost.is_empty()
    });
    assert_eq!(nodes.failed, Vec::<String>::new());
    let refused = nodes.lost[0].0;
    let stopped = (0..).map(TopicKey).find(|key| *key != refused).unwrap();
    nodes.of(1).send(Command::StopInbound(stopped, node(writer_of(stopped)))).unwrap();
    nodes.until("the last message", |_| log.len() as u64 == RINGS + 1);
}

#[test]
fn topic_beyond_the_rings_of_its_writer_connects_later() {
    exceed_ring_limit(|_| 0);
}

#[test]
fn topic_beyond_the_rings_of_its_reader_connects_later() {
    exceed_ring_limit(|key| if key.0.is_multiple_of(2) { 0 } else { 2 });
}
