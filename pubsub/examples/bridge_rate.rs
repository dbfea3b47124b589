//! How fast small messages go from one node to another, without topics: two workers of this
//! process, on the loopback address.
//!
//!     cargo run --release -p fabricast-pubsub --example bridge_rate -- '=tcp;ofi_rxm'

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use gpu::{Device, Memory};
use pubsub::bridge::{
    Finished, MessageHeader, Metadata, NodeId, Outgoing, Place, Report, Room, Sink, Source, Stages,
    TopicFacts, TopicKey, TopicOptions, Worker, WorkerOptions,
};

const SIZE: u64 = 64;
const DEPTH: u64 = 1024;
const MESSAGES: u64 = 2_000_000;
const PINGS: u64 = 5_000;
const KEY: TopicKey = TopicKey(0);
const PATIENCE: Duration = Duration::from_secs(60);

/// What both sides look at.
struct Board {
    start: Instant,
    /// Messages that there are.
    limit: AtomicU64,
    released: AtomicU64,
    published: AtomicU64,
    /// When each of the pings came.
    came: Vec<AtomicU64>,
}

impl Board {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
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
}

struct Drain {
    board: Arc<Board>,
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
            came.store(self.board.now(), Ordering::Relaxed);
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
        std::thread::yield_now();
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
    let board = Arc::new(Board {
        start: Instant::now(),
        limit: AtomicU64::new(0),
        released: AtomicU64::new(0),
        published: AtomicU64::new(0),
        came: (0..PINGS).map(|_| AtomicU64::new(0)).collect(),
    });
    let (nodes, memory) = ([NodeId([0; 16]), NodeId([1; 16])], device.allocate(DEPTH * SIZE)?);
    let sink = Drain { board: Arc::clone(&board), memory, begun: VecDeque::new() };
    reader.receive_topic(KEY, nodes[0], 0, None, Box::new(sink))?;
    let source =
        Many { board: Arc::clone(&board), memory: device.allocate(DEPTH * SIZE)?, next: 0 };
    let facts = TopicFacts { number: 0, largest: 1 << 20, depth: DEPTH as u32 };
    let options = TopicOptions { facts, keep: None };
    let announcer = writer.send_topic(KEY, options, Box::new(source))?;
    writer.add_destination(KEY, nodes[1])?;
    let mut connected = 0;
    wait("connecting", || {
        for (worker, other, from) in [(&writer, &reader, nodes[0]), (&reader, &writer, nodes[1])] {
            match worker.try_report() {
                Ok(Some(Report::Letter { letter, .. })) => drop(other.letter(KEY, from, letter)),
                Ok(Some(Report::Connected { .. })) => connected += 1,
                _ => {}
            }
        }
        connected == 2
    })?;
    println!("{}", writer.address().provider);

    // One at a time, and how long each takes.
    let mut took = Vec::new();
    for ping in 0..PINGS {
        let begun = board.now();
        board.limit.store(ping + 1, Ordering::Release);
        announcer.announce();
        wait("a message", || board.published.load(Ordering::Acquire) > ping)?;
        took.push(board.came[ping as usize].load(Ordering::Relaxed) - begun);
    }
    took.sort_unstable();
    let at = |share: f64| took[(took.len() as f64 * share) as usize] as f64 / 1000.0;
    println!(
        "{SIZE} bytes one way: p50 {:.2} p99 {:.2} p99.9 {:.2} us",
        at(0.5),
        at(0.99),
        at(0.999)
    );

    // As fast as they go.
    let begun = Instant::now();
    board.limit.store(PINGS + MESSAGES, Ordering::Release);
    announcer.announce();
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
