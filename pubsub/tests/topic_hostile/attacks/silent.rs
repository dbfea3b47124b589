//! Connections that send no bytes.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

/// Interval at which closed connections are opened again.
const PAUSE: Duration = Duration::from_secs(1);

pub fn run(stop: &StopSignal, target: &Target, victim: Victim, count: usize) -> Outcome {
    let mut connections = Connections::default();
    loop {
        while connections.count() < count && !stop.is_over() && connections.open(target, victim) {}
        if !stop.sleep(PAUSE) {
            break;
        }
        connections.reap();
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
