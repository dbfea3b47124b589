//! The stages of a message between two nodes, each by itself: copied out of the memory where it
//! lies, on the wire, copied to where it is read.

use std::time::Instant;

use gpu::Device;
use ipc::{Layout, Segment};
use pubsub::MemoryPlace;
use pubsub::bridge::WorkerOptions;

use super::part::PATIENCE;
use crate::cli::bench::report::median;
use crate::cli::bench::share::{of_device, of_transfer};
use crate::cli::exchange::flow::{self, Flow};
use crate::cli::exchange::initiator;
use crate::cli::exchange::percentile::Percentiles;
use crate::cli::exchange::plan::{Exchange, Mode, Place, Plan, ThreadingMode, WaitingMode};
use crate::cli::exit::{Exit, Failure};

/// Times that a copy is made, after once that is not counted.
const COPIES: usize = 11;

/// A ring between this process and another one, which is there as long as that takes: the median
/// in microseconds, one way or for a message of a stream. In chunks as a bridge writes, on a core
/// each, or where the system puts them: two who look all the time on one core take turns.
pub(super) fn ring(
    provider: &str,
    mode: Mode,
    (size, iterations): (u64, u64),
    waiting: WaitingMode,
    [here, there]: [Option<usize>; 2],
) -> Result<f64, Failure> {
    let WorkerOptions { chunk, ring, .. } = WorkerOptions::default();
    let flow = Flow {
        mode,
        size,
        capacity: ring,
        watermark: ring / 4,
        chunk,
        notify: None,
        stripes: 1,
        iterations,
        warmup: (iterations / 10 + 1).min(1000),
    };
    let place = Place {
        provider: provider.to_owned(),
        domain: None,
        source: None,
        threading: ThreadingMode::Safe,
    };
    let plan = Plan {
        parent: std::process::id(),
        place,
        waiting,
        core: there,
        exchange: Exchange::Flow(flow.clone()),
    };
    let mut flown = flow::run(initiator::start(&plan, here)?, &flow)?.measured;
    if !flown.verified {
        return Err(Failure::new(Exit::Corrupt, "the ring's data did not arrive as it was sent"));
    }
    Ok(match mode {
        Mode::Lat => Percentiles::of(&mut flown.samples).map_or(0.0, |all| all.scaled(0.5e-3).p50),
        Mode::Bw => flown.elapsed as f64 / 1e3 / iterations as f64,
    })
}

/// Copies of a message as a bridge makes them, piece by piece by way of as much memory as it has for
/// that: out of a device into pinned memory, and in from a ring. Microseconds of each. From the
/// host nothing is copied out: it is written from where it lies.
pub(super) fn copies(memory: MemoryPlace, size: u64) -> Result<(Option<f64>, f64), Failure> {
    let WorkerOptions { chunk, ring, slots, .. } = WorkerOptions::default();
    let MemoryPlace::Device(name) = memory else {
        let (from, mut to) = (vec![1_u8; ring as usize], vec![2_u8; size as usize]);
        let into = timed(|| {
            for (piece, from) in
                to.chunks_mut(chunk as usize).zip(from.chunks(chunk as usize).cycle())
            {
                piece.copy_from_slice(&std::hint::black_box(from)[..piece.len()]);
            }
            std::hint::black_box(&mut to);
            Ok(())
        })?;
        return Ok((None, into));
    };
    let device = Device::open(name).map_err(of_device)?;
    let there = device.allocate(size).map_err(of_device)?.whole();
    let stream = device.stream().map_err(of_device)?;
    // Between pieces of the message and places that come round again.
    let copy = |length: u64, is_out: bool| {
        let segment = Segment::create(Layout::new("fabricast bench copy", 1), length as usize);
        let segment = segment.map_err(|error| Failure::failed(error.to_string()))?;
        let pinned = transfer::pin(&segment, &device).map_err(of_transfer)?;
        timed(|| {
            for offset in (0..size).step_by(chunk as usize) {
                let piece = chunk.min(size - offset);
                let place = pinned.slice(offset % length, piece);
                let copied = place.and_then(|place| {
                    let there = there.slice(offset, piece)?;
                    let (to, from) = if is_out { (&place, &there) } else { (&there, &place) };
                    stream.copy(to, from)
                });
                copied.map_err(of_device)?;
            }
            stream.synchronize(PATIENCE).map_err(of_device)
        })
    };
    Ok((Some(copy(chunk * slots as u64, true)?), copy(ring, false)?))
}

fn timed(mut copy: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
    copy()?;
    let mut all = Vec::new();
    for _ in 0..COPIES {
        let begin = Instant::now();
        copy()?;
        all.push(begin.elapsed().as_nanos() as f64 / 1e3);
    }
    Ok(median(all).unwrap_or_default())
}
