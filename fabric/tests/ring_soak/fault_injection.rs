//! Injects faults into the two processes.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::message::Rng;
use crate::supervisor::{STALL_TIMEOUT, Supervisor};

/// Longest interval without a fault.
const MAX_FAULT_INTERVAL: Duration = Duration::from_secs(2);
/// Longest interval between faults of a burst: shorter than a process takes to start.
const BURST_INTERVAL: Duration = Duration::from_millis(50);

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    KillWriter,
    KillReader,
    KillBoth,
    /// Both are alive, and reconnect.
    Reconnect,
}

use Fault::{KillBoth, KillReader, KillWriter, Reconnect};

/// Faults of one phase, with equal probability. Two phases kill only one side, to show that the
/// memory of the other does not grow.
const PHASES: &[&[Fault]] = &[
    &[KillWriter, KillWriter, Reconnect],
    &[KillReader, KillReader, Reconnect],
    &[KillWriter, KillReader, KillBoth, Reconnect],
];

/// On shm a process may die holding a spin lock in its peer's memory, and the peer then waits for
/// it inside libfabric forever, beyond any deadline. So both are killed at once, or neither.
const PHASES_OF_SHM: &[&[Fault]] = &[&[Reconnect], &[KillBoth, KillBoth, Reconnect]];

/// Injects faults for this time.
pub fn inject_faults(
    supervisor: &mut Supervisor,
    rng: &mut Rng,
    time: Duration,
) -> Result<(), Failure> {
    let parts = if supervisor.provider() == "shm" { PHASES_OF_SHM } else { PHASES };
    let begin = Instant::now();
    for (number, faults) in (1..).zip(parts) {
        let end = begin + time * number / parts.len() as u32;
        while Instant::now() < end {
            match rng.below(10) {
                // Messages must be delivered: otherwise frequent kills would hide a stalled ring.
                0..3 => supervisor.until_delivered(1 + rng.below(100), STALL_TIMEOUT * 2)?,
                3..8 => supervisor
                    .pass(Duration::min(up_to(rng, MAX_FAULT_INTERVAL), end - Instant::now()))?,
                _ => {
                    for _ in 0..rng.below(4) {
                        supervisor.inject(rng.one_of(faults))?;
                        supervisor.pass(up_to(rng, BURST_INTERVAL))?;
                    }
                }
            }
            supervisor.inject(rng.one_of(faults))?;
        }
    }
    Ok(())
}

fn up_to(rng: &mut Rng, longest: Duration) -> Duration {
    Duration::from_micros(rng.below(longest.as_micros() as u64))
}
