//! One message at a time, back and forth; or one read after the other.

use std::time::Instant;

use super::measurement::{Measurement, read_stamp};
use super::plan::{FabricExchange, Operation};
use super::side::ExchangeSide;
use command::exit::Failure;

/// Result of a measurement.
#[derive(Debug)]
pub(crate) struct Measured {
    /// Nanoseconds: of a round trip or a read, or in a stream of a window.
    pub(crate) samples: Vec<u64>,
    /// Nanoseconds of the whole stream; 0 for a ping-pong.
    pub(crate) elapsed: u64,
    /// Was every byte correct, on both sides?
    pub(crate) verified: bool,
}

/// The initiator's side.
pub(crate) fn run(side: ExchangeSide, measure: &FabricExchange) -> Result<Measured, Failure> {
    let mut measurement = Measurement::new(side, measure)?;
    // Allocated and touched before the clock starts.
    let mut samples = vec![1; usize::try_from(measure.iterations).unwrap_or(usize::MAX)];
    let mut warmup = vec![1; usize::try_from(measure.warmup).unwrap_or(usize::MAX)];
    if !warmup.is_empty() {
        initiate(&mut measurement, &mut warmup)?;
    }
    initiate(&mut measurement, &mut samples)?;
    Ok(Measured { samples, elapsed: 0, verified: measurement.check_and_finish()? })
}

/// The target's side.
pub(crate) fn serve(side: ExchangeSide, measure: &FabricExchange) -> Result<(), Failure> {
    let mut measurement = Measurement::new(side, measure)?;
    for count in [measure.warmup, measure.iterations] {
        if count > 0 {
            answer(&mut measurement, count)?;
        }
    }
    measurement.check_and_finish().map(drop)
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

fn answer(at: &mut Measurement, count: u64) -> Result<(), Failure> {
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
