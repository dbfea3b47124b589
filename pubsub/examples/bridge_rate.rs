//! How fast small messages go from one node to another, without topics: two workers of this
//! process, on the loopback address.
//!
//!     cargo run --release -p fabricast-pubsub --example bridge_rate -- '=tcp;ofi_rxm'

use std::collections::VecDeque;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use gpu::{Device, Memory};
use pubsub::bridge::{
    Announcer, Finished, MessageHeader, Metadata, NodeId, Outgoing, Place, Report, Room, Sink,
    Source, Stages, TopicFacts, TopicKey, TopicOptions, Worker, WorkerOptions,
};

const SIZE: u64 = 64;
const DEPTH: u64 = 1024;
const MESSAGES: u64 = 2_000_000;
const PINGS: u64 = 20_000;
/// There, and back again.
const KEYS: [TopicKey; 2] = [TopicKey(0), TopicKey(1)];
const PATIENCE: Duration = Duration::from_secs(60);

/// One way: what both of its ends look at.
struct Board {
    start: Instant,
    /// Messages that there are.
    limit: AtomicU64,
    released: AtomicU64,
    published: AtomicU64,
    announcer: OnceLock<Announcer>,
    /// When each of the pings came.
    came: Vec<AtomicU64>,
}

impl Board {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            limit: AtomicU64::new(0),
            released: AtomicU64::new(0),
            published: AtomicU64::new(0),
            announcer: OnceLock::new(),
            came: (0..PINGS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// So many messages are there.
    fn allow(&self, limit: u64) {
        self.limit.store(limit, Ordering::Release);
        if let Some(announcer) = self.announcer.get() {
            announcer.announce();
        }
    }
}

struct Many {
    board: Arc<Board>,
    memory: Memory,
    next: u64,
}

impl Source for Many {
    fn next(&mut self) -> pubsub::Result<Option<Outgoing>> {
        let released = self.board.released.load(Ordering::Relaxed);
        if self.next == self.board.limit.load(Ordering::Acquire) || self.next - released >= DEPTH {
            return Ok(None);
        }
        let header = MessageHeader {
            position: self.next,
            length: SIZE,
            publisher: 0,
            sequence: self.next,
            published: 0,
            posted: 0,
            metadata: Metadata::NONE,
        };
        let place = self.memory.slice(self.next % DEPTH * SIZE, SIZE);
        self.next += 1;
        Ok(place.ok().map(|slice| Outgoing { header, place: Place::Host(slice) }))
    }

    fn release(&mut self, through: u64) {
        self.board.released.store(through + 1, Ordering::Release);
    }

    // All are kept.
    fn release_one(&mut self, _: u64) {}
}

struct Drain {
    board: Arc<Board>,
    /// The other way, and how much further it is there.
    answer: (Arc<Board>, u64),
    memory: Memory,
    begun: VecDeque<u64>,
}

impl Sink for Drain {
    fn begin(&mut self, header: &MessageHeader) -> pubsub::Result<Room> {
        self.begun.push_back(header.position);
        let slice = self.memory.slice(header.position % DEPTH * SIZE, SIZE);
        Ok(slice.map_or(Room::NotYet, |slice| Room::Here(Place::Host(slice))))
    }

    fn finish(&mut self, header: &MessageHeader, _: &Stages) -> pubsub::Result<Finished> {
        self.begun.pop_front();
        if let Some(came) = self.board.came.get(header.position as usize) {
            came.store(self.board.start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            let limit = header.position + 1 + self.answer.1;
            if limit <= PINGS {
                self.answer.0.allow(limit);
            }
        }
        self.board.published.store(header.position + 1, Ordering::Release);
        Ok(Finished::Published)
    }

    fn abandon(&mut self) {
        self.begun.clear();
    }
}

fn wait(what: &str, mut is_so: impl FnMut() -> bool) -> Result<(), Box<dyn Error>> {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > end {
            return Err(format!("{what}: not in {PATIENCE:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let policy = std::env::args().nth(1).unwrap_or_default().parse()?;
    let spin = Duration::from_millis(1);
    let options = WorkerOptions { policy, spin, ..WorkerOptions::default() };
    let local = "127.0.0.1".parse()?;
    let writer = Worker::start(options.clone(), local)?;
    let reader = Worker::start(options, local)?;
    let device = Device::open("stand-in:0".parse()?)?;
    let boards = [Arc::new(Board::new()), Arc::new(Board::new())];
    let nodes = [NodeId([0; 16]), NodeId([1; 16])];
    for (way, (from, to)) in [(&writer, &reader), (&reader, &writer)].into_iter().enumerate() {
        let (key, board) = (KEYS[way], Arc::clone(&boards[way]));
        let memory = device.allocate(DEPTH * SIZE)?;
        let answer = (Arc::clone(&boards[1 - way]), way as u64);
        let sink = Drain { board: Arc::clone(&board), answer, memory, begun: VecDeque::new() };
        to.receive_topic(key, nodes[way], 0, None, Box::new(sink))?;
        let memory = device.allocate(DEPTH * SIZE)?;
        let source = Many { board: Arc::clone(&board), memory, next: 0 };
        let facts = TopicFacts { number: 0, largest: 1 << 20, depth: DEPTH as u32 };
        let options = TopicOptions { facts, keep: None };
        let announcer = from.send_topic(key, options, Box::new(source))?;
        let _ = board.announcer.set(announcer);
        from.add_destination(key, nodes[1 - way])?;
    }
    let mut connected = 0;
    wait("connecting", || {
        for (worker, other, from) in [(&writer, &reader, nodes[0]), (&reader, &writer, nodes[1])] {
            match worker.try_report() {
                Ok(Some(Report::Letter { key, letter, .. })) => {
                    drop(other.letter(key, from, letter))
                }
                Ok(Some(Report::Connected { .. })) => connected += 1,
                _ => {}
            }
        }
        connected == 4
    })?;
    println!("{}", writer.address().provider);

    // One at a time, there and back.
    boards[0].allow(1);
    let published = || boards[1].published.load(Ordering::Acquire);
    wait("going there and back", || published() == PINGS)?;
    let came = boards[1].came.iter().map(|came| came.load(Ordering::Relaxed));
    let came: Vec<u64> = came.collect();
    let mut took: Vec<u64> = came.windows(2).map(|pair| (pair[1] - pair[0]) / 2).collect();
    took.sort_unstable();
    let at = |share: f64| took[(took.len() as f64 * share) as usize] as f64 / 1000.0;
    let (p50, p99, most) = (at(0.5), at(0.99), at(0.999));
    println!(
        "{SIZE} bytes one way, half of a round trip: p50 {p50:.2} p99 {p99:.2} p99.9 {most:.2} us"
    );

    // As fast as they go.
    let begun = Instant::now();
    let board = &boards[0];
    board.allow(PINGS + MESSAGES);
    let mut reports = 0;
    while board.released.load(Ordering::Acquire) < PINGS + MESSAGES {
        std::thread::sleep(Duration::from_millis(1));
        reports += usize::from(writer.try_report()?.is_some());
        if begun.elapsed() > PATIENCE {
            return Err("the stream does not end".into());
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let counted = writer.counters(PATIENCE)?.sent[0].2;
    println!(
        "{:.0} messages/s of {SIZE} bytes; {counted:?}, {reports} reports",
        MESSAGES as f64 / seconds
    );
    Ok(())
}
