//! Baselines of a message between two nodes: a ring by itself; and copies out of the memory of the
//! message and into that of the topic, by themselves. The throughput of the ring is in
//! `wire_baseline`.

use std::time::Instant;

use gpu::{Device, DeviceName, Memory, Slice, Stream};
use ipc::{Layout, Segment};
use pubsub::MemoryLocation;
use pubsub::replication::WorkerOptions;

use super::TopicKind;
use super::schedule::TIMEOUT;
use super::topic_results::Latency;
use crate::exchange::initiator;
use crate::exchange::plan::{Exchange, Mode, OfferQuery, Plan, RingExchange, Wait};
use crate::exchange::ring_exchange;
use crate::worker_group::empty_histogram;
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::stages::Stage;

/// A ring between this process and a temporary other one: the median in microseconds, one way. In
/// chunks as replication writes them; each on its own core, or not pinned: two busy-polling
/// processes on one core would delay each other.
pub(super) fn ring(
    provider: &str,
    (size, iterations): (u64, u64),
    waiting: Wait,
    [local, remote]: [Option<usize>; 2],
) -> Result<f64, Failure> {
    let WorkerOptions { chunk, ring, .. } = WorkerOptions::default();
    let ring_exchange = RingExchange {
        mode: Mode::Lat,
        size,
        capacity: ring,
        watermark: ring / 4,
        chunk,
        notify: None,
        iterations,
        warmup: (iterations / 10 + 1).min(1000),
    };
    let plan = Plan {
        offer_query: OfferQuery::new(provider),
        waiting,
        core: remote,
        exchange: Exchange::Ring(ring_exchange.clone()),
    };
    let result = ring_exchange::run(initiator::start(&plan, local)?, &ring_exchange)?.measured;
    if !result.verified {
        return Err(Failure::new(
            Exit::DataCorrupted,
            "data received through the ring is corrupted",
        ));
    }
    let samples: Histogram = result.samples.into_iter().collect();
    Ok(samples.microseconds(0.5).unwrap_or_default() / 2.0)
}

/// Copies of a message as replication makes them, piece by piece through buffers of the same size:
/// out of a device into pinned memory, and in from a ring. Host memory is not copied out: it is
/// written directly.
pub(super) struct StageCopies {
    out: Option<DeviceCopy>,
    into: Target,
    /// Nanoseconds of each copy.
    times: [Histogram; 2],
}

enum Target {
    Device(Box<DeviceCopy>),
    Host { from: Vec<u8>, to: Vec<u8>, chunk: usize },
}

/// Between pieces of a message in device memory and buffers that are used in turn.
struct DeviceCopy {
    device: Slice,
    stream: Stream,
    pinned: Memory,
    length: u64,
    chunk: u64,
}

impl DeviceCopy {
    fn new(name: DeviceName, size: u64, length: u64, chunk: u64) -> Result<Self, Failure> {
        let device = Device::open(name)?;
        let message = device.allocate(size)?.whole();
        let stream = device.stream()?;
        let segment = Segment::create(Layout::new("fabricast bench copy", 1), length as usize)
            .map_err(Failure::of)?;
        let pinned = transfer::pin(&segment, &device)?;
        Ok(Self { device: message, stream, pinned, length, chunk })
    }

    fn copy(&mut self, is_out: bool) -> Result<(), Failure> {
        let size = self.device.length();
        for offset in (0..size).step_by(self.chunk as usize) {
            let piece = self.chunk.min(size - offset);
            let buffer = self.pinned.slice(offset % self.length, piece);
            let copied = buffer.and_then(|buffer| {
                let message = self.device.slice(offset, piece)?;
                let (to, from) = if is_out { (&buffer, &message) } else { (&message, &buffer) };
                self.stream.copy(to, from)
            });
            copied?;
        }
        Ok(self.stream.synchronize(TIMEOUT)?)
    }
}

impl StageCopies {
    /// For messages with so many lanes. Each copy is made once before, not counted.
    pub(super) fn new(
        from: MemoryLocation,
        to: MemoryLocation,
        kind: &TopicKind,
        lanes: usize,
    ) -> Result<Self, Failure> {
        let options = WorkerOptions::default();
        let (chunk, size) = (options.chunk, kind.size);
        let ring = options.ring_size_for(lanes, size, kind.depth).max(chunk);
        let slots = chunk * options.slots_for(lanes) as u64;
        let out = match from.device()? {
            Some(name) => Some(DeviceCopy::new(name, size, slots, chunk)?),
            None => None,
        };
        let into = match to.device()? {
            Some(name) => Target::Device(Box::new(DeviceCopy::new(name, size, ring, chunk)?)),
            None => Target::Host {
                from: vec![1; ring as usize],
                to: vec![2; size as usize],
                chunk: chunk as usize,
            },
        };
        let mut copies = Self { out, into, times: Default::default() };
        copies.turn(1)?;
        copies.times = [empty_histogram(), empty_histogram()];
        Ok(copies)
    }

    /// The copies, and between them the ring by itself.
    pub(super) fn latencies(&self, wire: &Histogram) -> Vec<Latency> {
        let [out, into] = &self.times;
        let all = [(Stage::CopyOut, out), (Stage::Wire, wire), (Stage::CopyIn, into)];
        all.into_iter().filter_map(|(stage, times)| Latency::of(stage.name(), times)).collect()
    }

    /// Makes each copy so often.
    pub(super) fn turn(&mut self, count: u64) -> Result<(), Failure> {
        for _ in 0..count {
            let begin = Instant::now();
            if let Some(out) = &mut self.out {
                out.copy(true)?;
                self.times[0].add(begin.elapsed().as_nanos() as u64);
            }
            let begin = Instant::now();
            match &mut self.into {
                Target::Device(into) => into.copy(false)?,
                Target::Host { from, to, chunk } => {
                    let places = from.chunks(*chunk).cycle();
                    for (piece, from) in to.chunks_mut(*chunk).zip(places) {
                        piece.copy_from_slice(&std::hint::black_box(from)[..piece.len()]);
                    }
                    std::hint::black_box(to);
                }
            }
            self.times[1].add(begin.elapsed().as_nanos() as u64);
        }
        Ok(())
    }
}
