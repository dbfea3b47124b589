//! Random bytes, over several connections a second.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::over::Over;
use crate::random::Random;

const PAUSE: Duration = Duration::from_millis(50);
const KEPT: usize = 32;
const MOST_BYTES: u64 = 4096;
/// Less than a hello.
const MOST_OF_HANDSHAKE: u64 = 24;

pub fn run(over: &Over, target: &Target, victim: Victim) -> Outcome {
    let mut random = Random::new(target.seed);
    let mut connections = Connections::default();
    while over.sleep(PAUSE) {
        if connections.open(target, victim) {
            let length = 1 + random.below(MOST_BYTES) as usize;
            let mut bytes = random.bytes(length);
            // Some begin as a handshake does.
            if random.below(4) == 0 {
                let begin = random.below(MOST_OF_HANDSHAKE) as usize;
                bytes.splice(..0, target.departed[..begin].iter().copied());
            }
            connections.send(&bytes);
        }
        connections.reap();
        connections.keep(KEPT);
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
