//! What an attack is directed at.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::frames::{claim_as, hex, of_hex};
use crate::handshake::identity;
use crate::network::address;
use crate::ports;

/// What attackers know of node 1, and of its peer.
#[derive(Debug, Clone)]
pub struct Target {
    /// The processes of the services of node 1 and node 2.
    pub services: [u32; 2],
    /// Of node 1.
    pub directory: PathBuf,
    pub seed: u64,
    /// The handshake of a node that has left, and whose claims node 1 accepts.
    pub departed: Vec<u8>,
    /// What node 1 and node 2 say first to each that connects.
    pub hellos: [Vec<u8>; 2],
}

/// A TCP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// Of node 1.
    Node,
    /// That of the two nodes which accepts the claims of the other one.
    Acceptor,
    /// Of the provider of node 1.
    Provider,
}

impl Target {
    pub fn words(&self) -> Vec<String> {
        let [service, other] = self.services;
        let [hello, of_other] = &self.hellos;
        vec![
            service.to_string(),
            other.to_string(),
            self.directory.to_str().expect("a path of text").to_owned(),
            self.seed.to_string(),
            hex(&self.departed),
            hex(hello),
            hex(of_other),
        ]
    }

    pub fn of(words: &[&str]) -> Self {
        let [service, other, directory, seed, departed, hello, of_other] = words else {
            panic!("not a target: {words:?}");
        };
        Self {
            services: [service, other].map(|word| word.parse().expect("a process")),
            directory: directory.into(),
            seed: seed.parse().expect("a seed"),
            departed: of_hex(departed),
            hellos: [hello, of_other].map(|word| of_hex(word)),
        }
    }

    /// Where the port is now; None while the provider has none.
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
        identity(&self.hellos[0]) > identity(&self.hellos[1])
    }

    /// What the other node says to the [acceptor](Victim::Acceptor), to have its session.
    pub fn claim(&self) -> Vec<u8> {
        claim_as(&self.hellos[usize::from(self.is_node_1_acceptor())])
    }

    /// The port that the provider of a node had which has left.
    pub fn departed_port(&self) -> u16 {
        20_000 + (self.seed % 10_000) as u16
    }
}
