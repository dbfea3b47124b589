//! A dedicated service, which ends when its input is closed.

use std::path::Path;
use std::time::Duration;

use pubsub::{NetworkOptions, Node, NodeOptions, ServiceMode};
use testkit::children::wait_for_end_of_input;

use crate::network::address;
use crate::topics::TIMEOUT;

/// Shorter than the longest cut of the link, so that destinations are given up, too.
const LOST_AFTER: Duration = Duration::from_secs(5);

/// The service of a node without a network.
pub fn run_alone(directory: &Path) {
    serve(directory, None);
}

pub fn run(directory: &Path, number: u8) {
    let network = NetworkOptions {
        listen: Some(address(number)),
        peers: vec![address(3 - number).to_string()],
        insecure: true,
        name: format!("node {number}"),
        lost_after: LOST_AFTER,
        ..NetworkOptions::default()
    };
    serve(directory, Some(network));
}

fn serve(directory: &Path, network: Option<NetworkOptions>) {
    let options = NodeOptions {
        directory: directory.to_owned(),
        service: ServiceMode::Dedicated,
        network,
        service_timeout: TIMEOUT,
        ..NodeOptions::default()
    };
    let _node = Node::join(options).expect("become the service of the node");
    wait_for_end_of_input();
}
