//! A window of operations in flight, each with its own slot. The clock stops when the target has
//! acknowledged the last message; for reads, at the last completion.

use std::time::Instant;

use super::{FabricExchange, Measurement, Operation, read_stamp};
use command::exit::Failure;

/// Returns the samples and the elapsed time.
pub(super) fn run(at: &mut Measurement) -> Result<(Vec<u64>, u64), Failure> {
    let FabricExchange { slots, iterations, warmup, .. } = at.measure;
    let windows = iterations / slots as u64;
    // One sample for each window but the first, which only fills the queue. Allocated and touched
    // before the clock starts.
    let mut samples = vec![1; usize::try_from(windows.saturating_sub(1)).unwrap_or(usize::MAX)];
    if warmup > 0 {
        initiate(at, warmup, &mut [])?;
    }
    let elapsed = initiate(at, iterations, &mut samples)?;
    Ok((samples, elapsed))
}

/// Returns the elapsed time.
fn initiate(at: &mut Measurement, count: u64, samples: &mut [u64]) -> Result<u64, Failure> {
    at.begin()?;
    let slots = at.measure.slots as u64;
    let is_read = at.measure.operation == Operation::Read;
    let mut samples = samples.iter_mut();
    let start = Instant::now();
    let mut before = start;
    for i in 0..count {
        let slot = (at.sent % slots) as usize;
        at.sent += 1;
        at.side.peer_watchdog.waiting_for = "a slot of the window";
        while at.is_busy(slot) {
            at.progress()?;
        }
        if is_read {
            let is_good = at.sent <= slots || at.payload.has(slot, read_stamp(slot))?;
            at.bad += u64::from(!is_good);
            at.payload.stamp_incoming(slot, 0)?;
        } else {
            at.payload.stamp_outgoing(slot, at.sent)?;
        }
        at.post(slot)?;
        if (i + 1) % slots == 0 {
            let after = Instant::now();
            if i + 1 > slots
                && let Some(sample) = samples.next()
            {
                *sample = (after - before).as_nanos() as u64;
            }
            before = after;
        }
    }
    at.drain()?;
    if at.measure.operation == Operation::Write {
        // Without an immediate only this notifies the target of the end; one byte has only 256
        // stamps.
        at.send_notice()?;
    }
    if !is_read {
        at.await_notice("the target to acknowledge")?;
    }
    let elapsed = start.elapsed().as_nanos() as u64;
    at.end()?;
    Ok(elapsed)
}

pub(super) fn answer(at: &mut Measurement, count: u64) -> Result<(), Failure> {
    at.begin()?;
    match at.measure.operation {
        // It serves in the barrier.
        Operation::Read => {}
        operation => {
            // What the initiator will have sent.
            at.sent += count;
            if operation == Operation::Write {
                at.await_notice("the end of the stream")?;
                for slot in 0..at.measure.slots {
                    let last = at.last_of(slot);
                    while last > 0 && !at.payload.has(slot, last)? {
                        at.side.peer_watchdog.waiting_for = "the last writes of the stream";
                        at.progress()?;
                    }
                }
            }
            at.side.peer_watchdog.waiting_for = "the stream";
            while operation != Operation::Write && at.arrived < at.sent {
                at.progress()?;
                at.post_used_receives()?;
            }
            at.send_notice()?;
        }
    }
    at.end()
}
