//! The stages of a message between two nodes, each by itself: copied out of the memory where it
//! lies, on the wire, copied to where it is read.

use std::time::Instant;

use gpu::Device;
use ipc::{Layout, Segment};
use pubsub::MemoryPlace;

use super::part::PATIENCE;
use crate::cli::bench::report::median;
use crate::cli::bench::share::{of_device, of_transfer};
use crate::cli::exchange::flow::{self, Flow};
use crate::cli::exchange::initiator;
use crate::cli::exchange::percentile::Percentiles;
use crate::cli::exchange::plan::{Exchange, Mode, Place, Plan, ThreadingMode, WaitingMode};
use crate::cli::exit::{Exit, Failure};

/// Times that a copy is made.
const COPIES: usize = 11;

/// A ring between this process and another one, which is there as long as that takes: the median
/// in microseconds, one way or for a message of a stream.
pub(super) fn ring(
    provider: &str,
    mode: Mode,
    (size, iterations): (u64, u64),
    waiting: WaitingMode,
) -> Result<f64, Failure> {
    let flow = Flow {
        mode,
        size,
        capacity: 8 << 20,
        watermark: 2 << 20,
        chunk: 1 << 20,
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
        core: None,
        exchange: Exchange::Flow(flow.clone()),
    };
    let mut flown = flow::run(initiator::start(&plan, None)?, &flow)?.measured;
    if !flown.verified {
        return Err(Failure::new(Exit::Corrupt, "the ring's data did not arrive as it was sent"));
    }
    Ok(match mode {
        Mode::Lat => Percentiles::of(&mut flown.samples).map_or(0.0, |all| all.scaled(0.5e-3).p50),
        Mode::Bw => flown.elapsed as f64 / 1e3 / iterations as f64,
    })
}

/// A copy between pinned memory and a device's, there and back; of the host: between two places
/// there. Microseconds of each.
pub(super) fn copies(memory: MemoryPlace, size: u64) -> Result<[f64; 2], Failure> {
    let MemoryPlace::Device(name) = memory else {
        let (from, mut to) = (vec![1_u8; size as usize], vec![2_u8; size as usize]);
        let once = timed(|| {
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            Ok(())
        })?;
        return Ok([once; 2]);
    };
    let device = Device::open(name).map_err(of_device)?;
    let segment = Segment::create(Layout::new("fabricast bench copy", 1), size as usize);
    let segment = segment.map_err(|error| Failure::failed(error.to_string()))?;
    let pinned = transfer::pin(&segment, &device).map_err(of_transfer)?;
    let pinned = pinned.slice(0, size).map_err(of_device)?;
    let there = device.allocate(size).map_err(of_device)?.whole();
    let stream = device.stream().map_err(of_device)?;
    let copy = |to, from| {
        timed(|| {
            stream.copy(to, from).and_then(|()| stream.synchronize(PATIENCE)).map_err(of_device)
        })
    };
    Ok([copy(&pinned, &there)?, copy(&there, &pinned)?])
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
