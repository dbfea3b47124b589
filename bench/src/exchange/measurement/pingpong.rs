//! One message at a time, back and forth; or one read after the other.

use std::time::Instant;

use super::{Measurement, Operation, read_stamp};
use command::exit::Failure;

/// Returns the samples.
pub(super) fn run(at: &mut Measurement) -> Result<Vec<u64>, Failure> {
    // Allocated and touched before the clock starts.
    let allocated = |count| vec![1; usize::try_from(count).unwrap_or(usize::MAX)];
    let (mut samples, mut warmup) =
        (allocated(at.measure.iterations), allocated(at.measure.warmup));
    if !warmup.is_empty() {
        initiate(at, &mut warmup)?;
    }
    initiate(at, &mut samples)?;
    Ok(samples)
}

/// The clock is read once an iteration.
fn initiate(at: &mut Measurement, samples: &mut [u64]) -> Result<(), Failure> {
    at.begin()?;
    let is_read = at.measure.operation == Operation::Read;
    let mut before = Instant::now();
    for sample in samples {
        at.sent += 1;
        let sequence = at.sent;
        let slot = slot_of(at, sequence);
        if is_read {
            at.payload.stamp_incoming(0, 0)?;
        } else {
            at.payload.stamp_outgoing(slot, sequence)?;
        }
        at.post(slot)?;
        // After the message: other receives are posted, this one is not urgent.
        at.post_used_receives()?;
        if is_read {
            at.side.peer_watchdog.waiting_for = "a read";
            while at.is_busy(0) {
                at.progress()?;
            }
            at.bad += u64::from(!at.payload.has(0, read_stamp(0))?);
        } else {
            await_message(at, slot, sequence)?;
        }
        let after = Instant::now();
        *sample = (after - before).as_nanos() as u64;
        before = after;
    }
    at.end()
}

pub(super) fn answer(at: &mut Measurement, count: u64) -> Result<(), Failure> {
    at.begin()?;
    // The target of reads serves in the barrier.
    let count = if at.measure.operation == Operation::Read { 0 } else { count };
    for _ in 0..count {
        at.sent += 1;
        let sequence = at.sent;
        let slot = slot_of(at, sequence);
        await_message(at, slot, sequence)?;
        at.payload.stamp_outgoing(slot, sequence)?;
        at.post(slot)?;
        at.post_used_receives()?;
    }
    at.end()
}

#[inline]
fn slot_of(at: &Measurement, sequence: u64) -> usize {
    match at.measure.operation {
        Operation::Send => ((sequence - 1) % at.measure.slots as u64) as usize,
        _ => 0,
    }
}

/// Waits until the other side's message has arrived and is checked, and this side's last operation
/// has released its slot.
#[inline]
fn await_message(at: &mut Measurement, slot: usize, sequence: u64) -> Result<(), Failure> {
    at.side.peer_watchdog.waiting_for = "the other side's message";
    if at.measure.operation == Operation::Write {
        // Plain writes have no completion here: poll the memory.
        while !at.payload.has(0, sequence)? || at.is_busy(0) {
            at.progress()?;
        }
        return Ok(());
    }
    while at.arrived < sequence || at.is_busy(slot) {
        at.progress()?;
    }
    if at.measure.operation == Operation::WriteData {
        // Messages are checked when their receive completes.
        at.bad += u64::from(!at.payload.has(0, sequence)?);
    }
    Ok(())
}
