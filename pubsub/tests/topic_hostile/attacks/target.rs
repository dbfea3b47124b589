//! What an attack is directed at.

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::frames::{hex, of_hex};
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
    /// The handshake of a node that has left.
    pub departed: Vec<u8>,
    /// The hello of node 2, which is connected, and a claim.
    pub connected: Vec<u8>,
}

/// A TCP port of node 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    Node,
    Provider,
}

impl Target {
    pub fn words(&self) -> Vec<String> {
        let [service, other] = self.services;
        vec![
            service.to_string(),
            other.to_string(),
            self.directory.to_str().expect("a path of text").to_owned(),
            self.seed.to_string(),
            hex(&self.departed),
            hex(&self.connected),
        ]
    }

    pub fn of(words: &[&str]) -> Self {
        let [service, other, directory, seed, departed, connected] = words else {
            panic!("not a target: {words:?}");
        };
        Self {
            services: [service, other].map(|word| word.parse().expect("a process")),
            directory: directory.into(),
            seed: seed.parse().expect("a seed"),
            departed: of_hex(departed),
            connected: of_hex(connected),
        }
    }

    /// Where the port is now; None while the provider has none.
    pub fn address(&self, victim: Victim) -> Option<SocketAddr> {
        let node = address(1);
        match victim {
            Victim::Node => Some(node),
            Victim::Provider => {
                ports::of_provider(self.services[0]).map(|port| SocketAddr::new(node.ip(), port))
            }
        }
    }

    /// The port that the provider of a node had which has left.
    pub fn departed_port(&self) -> u16 {
        20_000 + (self.seed % 10_000) as u16
    }
}
