//! One connect request that names the endpoint of node 2.

use std::time::Duration;

use super::connections::Connections;
use super::target::{Target, Victim};
use crate::connect_request::connect_request;
use crate::outcome::Outcome;
use crate::ports;
use crate::stop_signal::StopSignal;

const PAUSE: Duration = Duration::from_millis(100);

pub fn run(stop: &StopSignal, target: &Target) -> Outcome {
    let mut connections = Connections::default();
    let Some(port) = ports::of_provider(target.services[1]) else {
        return Outcome::new(0, "the provider of node 2 has no port");
    };
    let was_opened = connections.open(target, Victim::Provider);
    connections.send(&connect_request(port));
    while stop.sleep(PAUSE) {
        connections.reap();
    }
    let refused = connections.closed + connections.failed;
    let sent = if was_opened { "sent once" } else { "not sent" };
    Outcome::new(refused, format!("{sent}, as port {port}; {}", connections.text()))
}
