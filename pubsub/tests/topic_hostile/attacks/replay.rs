//! Recorded bytes of a handshake, over one connection after the other, as fast as that goes.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::over::Over;

/// Connections that are kept, so that the node has to look at what was said.
const KEPT: usize = 32;
/// After a connection that failed.
const PAUSE: Duration = Duration::from_millis(20);

pub fn run(over: &Over, target: &Target, victim: Victim, recorded: &[u8]) -> Outcome {
    let mut connections = Connections::default();
    while !over.is_over() {
        if connections.open(target, victim) {
            connections.send(recorded);
        } else {
            over.sleep(PAUSE);
        }
        connections.reap();
        connections.keep(KEPT);
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
