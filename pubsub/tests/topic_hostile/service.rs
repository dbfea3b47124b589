//! A dedicated service, which ends when its input is closed.

use std::path::Path;
use std::time::Duration;

use pubsub::{Budgets, NetworkOptions, Node, NodeOptions, ServiceMode};
use testkit::children::{say, wait_for_end_of_input};

use crate::limits;
use crate::network::address;
use crate::topics::TIMEOUT;

/// Descriptors of the service of node 1: the default limit on most systems.
pub const DESCRIPTORS: u64 = 1024;
/// Host memory that topics of a node may reserve.
pub const BUDGET: u64 = 256 << 20;
const LOST_AFTER: Duration = Duration::from_secs(5);

/// A node that does not listen, and leaves after its handshake.
pub const DEPARTING: u8 = 0;

/// Serves a node that connects to a peer.
pub fn run(directory: &Path, number: u8, peer: &str) {
    if number == 1 {
        limits::set_descriptors(DESCRIPTORS);
    }
    let network = NetworkOptions {
        listen: (number != DEPARTING).then(|| address(number)),
        peers: vec![peer.to_owned()],
        insecure: true,
        name: format!("node {number}"),
        lost_after: LOST_AFTER,
        // The provider has one port.
        workers: 1,
        lanes: 1,
        ..NetworkOptions::default()
    };
    let options = NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::Dedicated,
        network: Some(network),
        service_timeout: TIMEOUT,
        budgets: Budgets { host: Some(BUDGET), device: None },
        ..NodeOptions::default()
    };
    let _node = Node::join(options).expect("become the service of the node");
    say("ready");
    wait_for_end_of_input();
}
