//! How many may connect.

use std::net::IpAddr;
use std::time::Duration;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::mesh::{Mesh, PeerConnection};
use super::session_arbitration::ConnectionId;

/// Connections that are held at the same time. Those that this node dials do not count: there are
/// as many as addresses that it was given, and others told of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of those that came, in all.
    pub(super) connections: usize,
    /// Of those that came from one address.
    pub(super) per_source: usize,
    /// Of those that came and are no sessions yet.
    pub(super) pending: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 1024, per_source: 256, pending: 64 }
    }
}

/// Those who have one address of IPv6 mostly have 2^64.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
    }
}

fn is_inbound(line: &PeerConnection) -> bool {
    line.dialled.is_none()
}

fn is_pending(line: &PeerConnection) -> bool {
    is_inbound(line) && !line.session.is_established()
}

impl Mesh {
    /// Makes room for one more from there, at the cost of one that has not said yet who it
    /// is. False if there is none to be had.
    pub(super) fn make_room(&mut self, from: IpAddr, now: Duration) -> bool {
        let from = source(from);
        let connections = || self.connections.iter().filter(|(_, line)| is_inbound(line));
        let is_from = |line: &PeerConnection, from| source(line.peer_address.ip()) == from;
        let pending: Vec<_> = connections().filter(|(_, line)| is_pending(line)).collect();
        let oldest_from = |from| -> Option<ConnectionId> {
            pending.iter().find(|(_, line)| is_from(line, from)).map(|(connection, _)| **connection)
        };
        let victim = if connections().filter(|(_, line)| is_from(line, from)).count()
            >= self.limits.per_source
        {
            oldest_from(from)
        } else if pending.len() >= self.limits.pending
            || connections().count() >= self.limits.connections
        {
            // Where most come from, most are of no good: others lose nothing by it.
            let busiest = pending
                .iter()
                .map(|(_, line)| source(line.peer_address.ip()))
                .max_by_key(|from| pending.iter().filter(|(_, line)| is_from(line, *from)).count());
            busiest.and_then(oldest_from)
        } else {
            return true;
        };
        if let Some(victim) = victim {
            self.end(victim, CloseReason::Closed(GoodbyeReason::TooManyConnections), now);
        }
        victim.is_some()
    }
}
