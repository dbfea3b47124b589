//! Limits of inbound connections.

use std::net::IpAddr;
use std::time::Duration;

use super::{Mesh, PeerConnection};
use crate::peers::close_reason::{CloseReason, GoodbyeReason};
use crate::peers::{ConnectionId, Limits};

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 1024, per_source: 256, pending: 64 }
    }
}

/// A host with one address of IPv6 mostly has 2^64.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
    }
}

fn is_inbound(link: &PeerConnection) -> bool {
    link.dialled.is_none()
}

fn is_pending(link: &PeerConnection) -> bool {
    is_inbound(link) && !link.session.is_established()
}

impl Mesh {
    /// Makes room for one more connection from an address by closing one without a handshake. False
    /// if none can be closed.
    pub(super) fn make_room(&mut self, from: IpAddr, now: Duration) -> bool {
        let from = source(from);
        let connections = || self.connections.iter().filter(|(_, link)| is_inbound(link));
        let is_of = |link: &PeerConnection, from| source(link.peer_address.ip()) == from;
        let pending: Vec<_> = connections().filter(|(_, link)| is_pending(link)).collect();
        let oldest_of = |from| -> Option<ConnectionId> {
            pending.iter().find(|(_, link)| is_of(link, from)).map(|(connection, _)| **connection)
        };
        let (limits, of_source) =
            (self.limits, connections().filter(|(_, link)| is_of(link, from)).count());
        let victim = if of_source >= limits.per_source {
            oldest_of(from)
        } else if pending.len() >= limits.pending || connections().count() >= limits.connections {
            // The source with most pending connections is most likely the abusive one.
            let sources = pending.iter().map(|(_, link)| source(link.peer_address.ip()));
            let count = |from: &_| pending.iter().filter(|(_, link)| is_of(link, *from)).count();
            sources.max_by_key(count).and_then(oldest_of)
        } else {
            return true;
        };
        if let Some(victim) = victim {
            let reason = CloseReason::Closed(GoodbyeReason::TooManyConnections);
            self.close_connection(victim, reason, now);
        }
        victim.is_some()
    }
}
