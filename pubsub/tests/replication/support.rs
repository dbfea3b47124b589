//! Topics whose messages follow from their positions, and nodes in this process that exchange
//! control messages.

use pubsub::replication::Command;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpu::{Device, Slice};
use pubsub::Result;
use pubsub::replication::{
    ConnectionMessage, Counters, FinishOutcome, MessageHeader, Metadata, NodeId, OutgoingMessage,
    PayloadLocation, Side, Sink, Source, StageDurations, TopicKey, TopicOptions, TopicParameters,
    Worker, WorkerEvent, WorkerOptions,
};

/// Reached only by a test that fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The memory of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    Host,
    Device,
    /// On an emulated device, also where the others are on a real one.
    Emulated,
}

impl MemoryKind {
    pub(crate) fn device(self) -> Device {
        let named = std::env::var("TEST_DEVICE").ok();
        let name = match (self, &named) {
            (Self::Host, _) => "emulated:0",
            (Self::Device, None) | (Self::Emulated, _) => "emulated:1",
            (Self::Device, Some(named)) => named.as_str(),
        };
        Device::open(name.parse().unwrap()).unwrap()
    }

    fn location(self, slice: Slice) -> PayloadLocation {
        match self {
            Self::Host => PayloadLocation::Host(slice),
            Self::Device | Self::Emulated => PayloadLocation::Device(slice),
        }
    }
}

pub(crate) fn bytes_of(position: u64, length: usize) -> Vec<u8> {
    testkit::bytes::pattern(length, position)
}

pub(crate) fn header_of(position: u64, length: u64) -> MessageHeader {
    MessageHeader {
        position,
        length,
        publisher: 7,
        sequence: position + 1,
        published: position * 1000,
        posted: 0,
        metadata: Metadata::new(&bytes_of(position, (position % 300).min(256) as usize)).unwrap(),
    }
}

/// The length of a message by its position.
pub(crate) type Lengths = Arc<dyn Fn(u64) -> usize + Send + Sync>;

/// The next position, and the retained messages.
type RetainedMessages = (u64, VecDeque<(u64, Slice)>);
/// Called for a message before it counts as published.
pub(crate) type PublishedCallback = Box<dyn FnMut(&MessageHeader, &StageDurations) + Send>;

/// A topic with `count` messages, at most `depth` of them unreleased.
pub(crate) struct TestSource {
    pub(crate) lengths: Lengths,
    pub(crate) memory: MemoryKind,
    pub(crate) count: u64,
    pub(crate) depth: u64,
    state: Arc<Mutex<RetainedMessages>>,
    stream: Option<gpu::Stream>,
    /// Called with the position up to which messages are released.
    pub(crate) released: Box<dyn FnMut(u64) + Send>,
}

impl TestSource {
    pub(crate) fn new(lengths: &Lengths, memory: MemoryKind, from: u64, count: u64) -> Self {
        Self {
            lengths: Arc::clone(lengths),
            memory,
            count,
            depth: 16,
            state: Arc::new(Mutex::new((from, VecDeque::new()))),
            stream: None,
            released: Box::new(|_| {}),
        }
    }

    /// Tells whether all messages are released.
    pub(crate) fn is_done(&self) -> impl Fn() -> bool + use<> {
        let (state, count) = (Arc::clone(&self.state), self.count);
        move || {
            let state = state.lock().unwrap();
            state.0 == count && state.1.is_empty()
        }
    }
}

impl Source for TestSource {
    fn next(&mut self) -> Result<Option<OutgoingMessage>> {
        let mut state = self.state.lock().unwrap();
        let position = state.0;
        if position == self.count || state.1.len() as u64 >= self.depth {
            return Ok(None);
        }
        let bytes = bytes_of(position, (self.lengths)(position));
        let memory = self.memory.device().allocate(bytes.len().max(1) as u64).unwrap();
        let slice = memory.slice(0, bytes.len() as u64).unwrap();
        if !bytes.is_empty() {
            let stream = self.stream.get_or_insert_with(|| self.memory.device().stream().unwrap());
            stream.upload(&slice, &bytes, TIMEOUT).unwrap();
        }
        state.0 += 1;
        state.1.push_back((position, slice.clone()));
        let header = header_of(position, bytes.len() as u64);
        Ok(Some(OutgoingMessage { header, place: self.memory.location(slice) }))
    }

    fn release(&mut self, through: u64) {
        let mut state = self.state.lock().unwrap();
        while state.1.front().is_some_and(|(position, _)| *position <= through) {
            state.1.pop_front();
        }
        (self.released)(through);
    }

    fn release_one(&mut self, position: u64) {
        self.state.lock().unwrap().1.retain(|(other, _)| *other != position);
    }
}

/// Checks received messages, and calls back for each of them.
pub(crate) struct TestSink {
    memory: MemoryKind,
    begun: VecDeque<Slice>,
    stream: Option<gpu::Stream>,
    /// One of this number of calls finds no memory, or a full queue; 0: none.
    pub(crate) refuse: u64,
    calls: u64,
    pub(crate) published: PublishedCallback,
}

impl TestSink {
    pub(crate) fn new(
        memory: MemoryKind,
        published: impl FnMut(&MessageHeader, &StageDurations) + Send + 'static,
    ) -> Self {
        let begun = VecDeque::new();
        Self { memory, begun, stream: None, refuse: 0, calls: 0, published: Box::new(published) }
    }

    fn refuses(&mut self) -> bool {
        self.calls += 1;
        self.refuse > 0 && (self.calls.wrapping_mul(0x9e37_79b9) >> 16).is_multiple_of(self.refuse)
    }
}

impl Sink for TestSink {
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<PayloadLocation>> {
        if self.refuses() {
            return Ok(None);
        }
        let memory = self.memory.device().allocate(header.length.max(1)).unwrap();
        let slice = memory.slice(0, header.length).unwrap();
        self.begun.push_back(slice.clone());
        Ok(Some(self.memory.location(slice)))
    }

    fn finish(&mut self, header: &MessageHeader, stages: &StageDurations) -> Result<FinishOutcome> {
        if self.refuses() {
            return Ok(FinishOutcome::Retry);
        }
        let slice = self.begun.pop_front().expect("begin before finish");
        let mut bytes = vec![0; header.length as usize];
        if header.length > 0 {
            let stream = self.stream.get_or_insert_with(|| self.memory.device().stream().unwrap());
            stream.download(&slice, &mut bytes, TIMEOUT).unwrap();
        }
        let expected = header_of(header.position, header.length);
        assert_eq!(MessageHeader { posted: 0, ..*header }, expected);
        assert!(bytes == bytes_of(header.position, bytes.len()), "message {}", header.position);
        (self.published)(header, stages);
        Ok(FinishOutcome::Published)
    }

    fn abandon(&mut self) {
        self.begun.clear();
    }
}

/// Positions of the published messages.
#[derive(Debug, Clone, Default)]
pub(crate) struct PublishedLog(pub(crate) Arc<Mutex<Vec<u64>>>);

impl PublishedLog {
    pub(crate) fn sink(&self, memory: MemoryKind) -> TestSink {
        let log = self.clone();
        TestSink::new(memory, move |header, _| log.0.lock().unwrap().push(header.position))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Checks that each message was published once and in order.
    pub(crate) fn check(&self, count: u64) {
        let published = self.0.lock().unwrap();
        assert!(published.iter().copied().eq(0..count), "{count}: {published:?}");
    }
}

pub(crate) fn options(provider: &str) -> WorkerOptions {
    WorkerOptions { policy: provider.parse().unwrap(), ..WorkerOptions::default() }
}

pub(crate) fn topic(largest: u64) -> TopicOptions {
    TopicOptions {
        device: None,
        parameters: TopicParameters { number: 1, largest, depth: 16 },
        max_retained: None,
    }
}

pub(crate) fn node(number: u8) -> NodeId {
    NodeId([number; 16])
}

/// Nodes of this process.
pub(crate) struct Nodes {
    pub(crate) workers: HashMap<NodeId, Worker>,
    /// Lost connections: topic, reporting node, other node, and the side of the reporting node.
    pub(crate) lost: Vec<(TopicKey, NodeId, NodeId, Side)>,
    /// The reasons of lost connections.
    pub(crate) reasons: Vec<String>,
    /// Permanent failures.
    pub(crate) failed: Vec<String>,
    /// The number of the last connection that a node requested.
    pub(crate) last_request: HashMap<(TopicKey, NodeId), u64>,
    /// Number of connections so far, at both ends.
    pub(crate) connected: usize,
    /// Nodes reported to block a topic.
    pub(crate) lagging: Vec<NodeId>,
    /// Nodes that writers must not connect to again.
    pub(crate) removed: Vec<NodeId>,
}

impl Nodes {
    pub(crate) fn start(count: u8, options: &WorkerOptions) -> Self {
        let start = |number| (node(number), Worker::start(options.clone(), LOCAL).unwrap());
        Self {
            workers: (0..count).map(start).collect(),
            lost: Vec::new(),
            reasons: Vec::new(),
            failed: Vec::new(),
            last_request: HashMap::new(),
            connected: 0,
            lagging: Vec::new(),
            removed: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, number: u8, options: &WorkerOptions) {
        self.workers.insert(node(number), Worker::start(options.clone(), LOCAL).unwrap());
    }

    pub(crate) fn of(&self, number: u8) -> &Worker {
        &self.workers[&node(number)]
    }

    pub(crate) fn counters(&self, number: u8) -> Counters {
        self.of(number).request_counters().unwrap().recv_timeout(TIMEOUT).unwrap()
    }

    /// Delivers control messages and records the other events of all workers.
    pub(crate) fn process_events(&mut self) {
        for (from, worker) in &self.workers {
            while let Some(event) = worker.try_event().unwrap() {
                match event {
                    WorkerEvent::ControlMessage { key, node: to, message } => {
                        if let ConnectionMessage::ConnectRequest { connection, .. } = message {
                            self.last_request.insert((key, *from), connection);
                        }
                        if let Some(reader) = self.workers.get(&to) {
                            reader.send(Command::ControlMessage(key, *from, message)).unwrap();
                        }
                    }
                    WorkerEvent::Connected { .. } => self.connected += 1,
                    WorkerEvent::Lagging { node, .. } => self.lagging.push(node),
                    WorkerEvent::Disconnected { key, node: of, side, reason } => {
                        self.lost.push((key, *from, of, side));
                        self.reasons.push(reason.to_string());
                        if side == Side::Writer && !self.removed.contains(&of) {
                            worker.send(Command::AddDestination(key, of)).unwrap();
                        }
                    }
                    WorkerEvent::Failed { key, node, side, error } => {
                        self.failed.push(format!("{key:?} {node:?} {side:?}: {error}"));
                    }
                }
            }
        }
    }

    /// Processes events until a condition holds, and panics after the timeout.
    pub(crate) fn until(&mut self, expected: &str, mut condition: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        loop {
            self.process_events();
            if condition(self) {
                return;
            }
            assert!(
                Instant::now() < end,
                "timeout: waited {TIMEOUT:?} for {expected}; {:?}",
                self.failed
            );
            self.wait();
        }
    }

    /// Waits until a worker has an event, at most a few milliseconds.
    fn wait(&self) {
        use nix::poll::{PollFd, PollFlags, poll};
        let descriptors = self.workers.values().map(|worker| worker.wake_descriptor());
        let mut polled: Vec<_> =
            descriptors.map(|descriptor| PollFd::new(descriptor, PollFlags::POLLIN)).collect();
        let _ = poll(&mut polled, 5_u8);
    }
}

/// Processor time of the threads of this process whose names have a prefix.
pub(crate) fn cpu_time(prefix: &str) -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    let selected = tasks.filter(|task| {
        std::fs::read_to_string(task.join("comm")).is_ok_and(|name| name.starts_with(prefix))
    });
    let times = selected.filter_map(|task| std::fs::read_to_string(task.join("schedstat")).ok());
    let nanoseconds = times.filter_map(|times| times.split(' ').next()?.parse::<u64>().ok());
    Duration::from_nanos(nanoseconds.sum())
}
