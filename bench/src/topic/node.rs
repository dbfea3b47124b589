//! Nodes of a measurement: their services, and how workers join them.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use pubsub::{Budgets, NetworkOptions, Node, NodeOptions, ServiceMode};

use super::schedule::TIMEOUT;
use super::{Arguments, Network, Service};
use crate::exchange::plan::Wait;
use crate::worker_group::WorkerGroup;
use command::exit::Failure;

/// A free address of this machine.
pub(super) fn address() -> Result<SocketAddr, Failure> {
    let found = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    found.map_err(|error| Failure::failed(format!("find a free port failed: {error}")))
}

/// The services of two connected nodes, below this directory.
pub(super) fn services(
    group: &WorkerGroup,
    arguments: &Arguments,
    budget: u64,
    cores: &[usize],
) -> Result<[Service; 2], Failure> {
    let addresses = [address()?, address()?];
    Ok([0, 1].map(|node| Service {
        directory: group.directory().join(format!("node-{node}")),
        network: Some(Network {
            listen: addresses[node],
            peer: (node == 1).then_some(addresses[0]),
            replication: arguments.replication.clone(),
        }),
        budget,
        cores: cores.to_vec(),
    }))
}

/// Joins a node that another process serves.
pub(super) fn join(directory: &Path, label: &str, waiting: Wait) -> Result<Node, Failure> {
    let options = NodeOptions {
        directory: directory.to_owned(),
        label: label.to_owned(),
        service: ServiceMode::External,
        service_timeout: TIMEOUT,
        waiting: waiting.wait_strategy(),
        ..NodeOptions::default()
    };
    Ok(Node::join(options)?)
}

/// Joins a node, and serves it.
pub(super) fn serve(service: &Service) -> Result<Node, Failure> {
    let network = service.network.as_ref().map(|network| NetworkOptions {
        listen: Some(network.listen),
        peers: network.peer.iter().map(ToString::to_string).collect(),
        provider: network.replication.provider.clone(),
        lanes: network.replication.lanes.unwrap_or(0) as usize,
        workers: network.replication.workers.unwrap_or(0) as usize,
        lost_after: TIMEOUT,
        insecure: true,
        ..NetworkOptions::default()
    });
    Ok(Node::join(NodeOptions {
        directory: service.directory.clone(),
        label: "service".to_owned(),
        service_timeout: TIMEOUT,
        budgets: Budgets { host: Some(service.budget), device: Some(service.budget) },
        network,
        ..NodeOptions::default()
    })?)
}
