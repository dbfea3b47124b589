//! What happens to the two processes, and when.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::message::Dice;
use crate::supervisor::{STALL, Supervisor};

/// Longest time that nothing happens to them.
const LONGEST_PEACE: Duration = Duration::from_secs(2);
/// The same within a burst: shorter than a process takes to start.
const SHORTEST_PEACE: Duration = Duration::from_millis(50);

/// What may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    KillWriter,
    KillReader,
    KillBoth,
    /// Both live, and begin again.
    Reconnect,
}

use Event::{KillBoth, KillReader, KillWriter, Reconnect};

/// What may happen in one part of the time, each as likely: for long enough only to one side,
/// so that it can be seen that the other one's memory does not grow.
const PARTS: &[&[Event]] = &[
    &[KillWriter, KillWriter, Reconnect],
    &[KillReader, KillReader, Reconnect],
    &[KillWriter, KillReader, KillBoth, Reconnect],
];

/// On shm, who dies may do so inside a spin lock that lies in its peer's memory, and the peer then
/// waits for it inside libfabric for ever: no deadline of ours helps against that. So both
/// die at once, or none.
const PARTS_OF_SHM: &[&[Event]] = &[&[Reconnect], &[KillBoth, KillBoth, Reconnect]];

/// Lets things happen for so long.
pub fn happen(supervisor: &mut Supervisor, dice: &mut Dice, time: Duration) -> Result<(), Failure> {
    let parts = if supervisor.provider() == "shm" { PARTS_OF_SHM } else { PARTS };
    let begin = Instant::now();
    for (number, events) in (1..).zip(parts) {
        let end = begin + time * number / parts.len() as u32;
        while Instant::now() < end {
            match dice.below(10) {
                // It has to get on: a ring that does not would go unnoticed, if its processes
                // were killed soon enough.
                0..3 => supervisor.until_delivered(1 + dice.below(100), STALL * 2)?,
                3..8 => supervisor
                    .pass(Duration::min(up_to(dice, LONGEST_PEACE), end - Instant::now()))?,
                _ => {
                    for _ in 0..dice.below(4) {
                        supervisor.befall(dice.one_of(events))?;
                        supervisor.pass(up_to(dice, SHORTEST_PEACE))?;
                    }
                }
            }
            supervisor.befall(dice.one_of(events))?;
        }
    }
    Ok(())
}

fn up_to(dice: &mut Dice, longest: Duration) -> Duration {
    Duration::from_micros(dice.below(longest.as_micros() as u64))
}
