//! The address that is told to other nodes, so that they can reach a node.

use std::net::{IpAddr, SocketAddr};

/// The address at which others can reach a node that listens at `listens`, and was seen at `seen`.
pub(super) fn advertised_address(listens: SocketAddr, seen: IpAddr) -> Option<SocketAddr> {
    let (announced, seen) = (listens.ip().to_canonical(), seen.to_canonical());
    let address = if announced.is_unspecified() { seen } else { announced };
    // Its loopback is not the local one.
    (listens.port() != 0 && (!address.is_loopback() || seen.is_loopback()))
        .then(|| SocketAddr::new(address, listens.port()))
}
