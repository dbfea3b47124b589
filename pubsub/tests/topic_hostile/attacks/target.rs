//! The target of an attack.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::frames::{claim_as, hex, of_hex};
use crate::handshake::node_id;
use crate::network::address;
use crate::ports;

/// What attackers know of node 1 and its peer.
#[derive(Debug, Clone)]
pub struct Target {
    /// The processes of the services of node 1 and node 2.
    pub services: [u32; 2],
    /// The directory of node 1.
    pub directory: PathBuf,
    pub seed: u64,
    /// The handshake of a node that has left. Node 1 is the acceptor for its claims.
    pub departed: Vec<u8>,
    /// The hellos of node 1 and node 2.
    pub hellos: [Vec<u8>; 2],
}

/// A TCP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// Port of node 1.
    Node,
    /// Port of the node that is the acceptor of sessions between the two nodes.
    Acceptor,
    /// Port of the provider of node 1.
    Provider,
}

impl Target {
    pub fn args(&self) -> Vec<String> {
        let [service, other] = self.services;
        let [hello, other_hello] = &self.hellos;
        vec![
            service.to_string(),
            other.to_string(),
            self.directory.to_str().expect("a path in UTF-8").to_owned(),
            self.seed.to_string(),
            hex(&self.departed),
            hex(hello),
            hex(other_hello),
        ]
    }

    pub fn of(args: &[&str]) -> Self {
        let [service, other, directory, seed, departed, hello, other_hello] = args else {
            panic!("malformed target: {args:?}");
        };
        Self {
            services: [service, other].map(|arg| arg.parse().expect("a process id")),
            directory: directory.into(),
            seed: seed.parse().expect("a seed"),
            departed: of_hex(departed),
            hellos: [hello, other_hello].map(|arg| of_hex(arg)),
        }
    }

    /// The address of the port. The provider may have none during a renewal.
    pub fn address(&self, victim: Victim) -> Option<SocketAddr> {
        let node = address(1);
        match victim {
            Victim::Node => Some(node),
            Victim::Acceptor if self.is_node_1_acceptor() => Some(node),
            Victim::Acceptor => Some(address(2)),
            Victim::Provider => {
                ports::of_provider(self.services[0]).map(|port| SocketAddr::new(node.ip(), port))
            }
        }
    }

    fn is_node_1_acceptor(&self) -> bool {
        node_id(&self.hellos[0]) > node_id(&self.hellos[1])
    }

    /// The frames by which the other node claims a session with the [acceptor](Victim::Acceptor).
    pub fn claim(&self) -> Vec<u8> {
        claim_as(&self.hellos[usize::from(self.is_node_1_acceptor())])
    }

    /// A port for the provider of the departed node.
    pub fn departed_port(&self) -> u16 {
        20_000 + (self.seed % 10_000) as u16
    }
}
