//! A recorded handshake, over one connection after the other, as fast as possible.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

/// Connections that stay open, so that the node reads their bytes.
const MAX_OPEN: usize = 32;
/// After a connection that failed.
const PAUSE: Duration = Duration::from_millis(20);

pub fn run(stop: &StopSignal, target: &Target, victim: Victim, recorded: &[u8]) -> Outcome {
    let mut connections = Connections::default();
    while !stop.is_over() {
        if connections.open(target, victim) {
            connections.send(recorded);
        } else {
            stop.sleep(PAUSE);
        }
        connections.reap();
        connections.limit(MAX_OPEN);
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
