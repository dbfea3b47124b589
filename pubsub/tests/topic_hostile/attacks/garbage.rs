//! Random bytes, over several connections a second.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::random::Random;
use crate::stop_signal::StopSignal;

const PAUSE: Duration = Duration::from_millis(50);
const MAX_OPEN: usize = 32;
const MAX_BYTES: u64 = 4096;
/// Shorter than a hello.
const MAX_HANDSHAKE_BYTES: u64 = 24;

pub fn run(stop: &StopSignal, target: &Target, victim: Victim) -> Outcome {
    let mut random = Random::new(target.seed);
    let mut connections = Connections::default();
    while stop.sleep(PAUSE) {
        if connections.open(target, victim) {
            let length = 1 + random.below(MAX_BYTES) as usize;
            let mut bytes = random.bytes(length);
            // Some connections begin with a part of a valid handshake.
            if random.below(4) == 0 {
                let begin = random.below(MAX_HANDSHAKE_BYTES) as usize;
                bytes.splice(..0, target.departed[..begin].iter().copied());
            }
            connections.send(&bytes);
        }
        connections.reap();
        connections.limit(MAX_OPEN);
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
