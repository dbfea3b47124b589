//! What happens to the two processes, and when.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::message::Rng;
use crate::supervisor::{STALL_TIMEOUT, Supervisor};

/// Longest time that nothing happens to them.
const MAX_FAULT_INTERVAL: Duration = Duration::from_secs(2);
/// The same within a burst: shorter than a process takes to start.
const BURST_INTERVAL: Duration = Duration::from_millis(50);

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    KillWriter,
    KillReader,
    KillBoth,
    /// Both live, and begin again.
    Reconnect,
}

use Fault::{KillBoth, KillReader, KillWriter, Reconnect};

/// What may happen in one part of the time, each as likely: for long enough only to one side,
/// so that it can be seen that the other one's memory does not grow.
const PHASES: &[&[Fault]] = &[
    &[KillWriter, KillWriter, Reconnect],
    &[KillReader, KillReader, Reconnect],
    &[KillWriter, KillReader, KillBoth, Reconnect],
];

/// On shm, who dies may do so inside a spin lock that lies in its peer's memory, and the peer then
/// waits for it inside libfabric for ever: no deadline of ours helps against that. So both
/// die at once, or none.
const PHASES_OF_SHM: &[&[Fault]] = &[&[Reconnect], &[KillBoth, KillBoth, Reconnect]];

/// Lets things happen for so long.
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
                // It has to get on: a ring that does not would go unnoticed, if its processes
                // were killed soon enough.
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
