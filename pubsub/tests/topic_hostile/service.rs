//! A service that ends when its input does.

use std::path::Path;
use std::time::Duration;

use pubsub::{Budgets, NetworkOptions, Node, NodeOptions, ServiceMode};
use testkit::children::{say, wait_for_end_of_input};

use crate::limits;
use crate::network::address;
use crate::topics::LONGEST;

/// Descriptors of node 1, as many as a shell allows on most systems.
pub const DESCRIPTORS: u64 = 1024;
/// What topics of a node may take of the host's memory.
pub const BUDGET: u64 = 256 << 20;
const LOST_AFTER: Duration = Duration::from_secs(5);

/// A node without a number of its own, which listens nowhere.
pub const DEPARTING: u8 = 0;

/// Serves the node with this number, which is connected to that peer.
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
        // One port of the provider.
        workers: 1,
        lanes: 1,
        ..NetworkOptions::default()
    };
    let options = NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::Dedicated,
        network: Some(network),
        service_timeout: LONGEST,
        budgets: Budgets { host: Some(BUDGET), device: None },
        ..NodeOptions::default()
    };
    let _node = Node::join(options).expect("the node has no other service");
    say("ready");
    wait_for_end_of_input();
}
