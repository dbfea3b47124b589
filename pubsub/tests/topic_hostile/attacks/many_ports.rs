//! Connect requests that each name another port, none of them a port of a peer.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::connect_request::connect_request;
use crate::outcome::Outcome;
use crate::stop_signal::StopSignal;

const FIRST_PORT: u16 = 1024;
const PAUSE: Duration = Duration::from_millis(2);
/// More connections than the service has descriptors.
const MAX_OPEN: usize = 1400;

pub fn run(stop: &StopSignal, target: &Target) -> Outcome {
    let mut connections = Connections::default();
    let mut port = FIRST_PORT;
    while stop.sleep(PAUSE) {
        if connections.count() < MAX_OPEN && connections.open(target, Victim::Provider) {
            connections.send(&connect_request(port));
            port = port.checked_add(1).unwrap_or(FIRST_PORT);
        }
        connections.reap();
    }
    Outcome::new(connections.closed + connections.failed, connections.text())
}
