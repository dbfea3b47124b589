//! How many may connect.

use std::net::IpAddr;
use std::time::Duration;

use super::mesh::{Line, Mesh};
use super::pair::Connection;
use super::reason::{Parting, Reason};

/// Connections that are held at the same time. Those that this node dials do not count: there are
/// as many as addresses that it was given, and others told of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Of those that came, in all.
    pub(super) connections: usize,
    /// Of those that came from one address.
    pub(super) of_one_source: usize,
    /// Of those that came and are no sessions yet.
    pub(super) strangers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 1024, of_one_source: 256, strangers: 64 }
    }
}

/// Those who have one address of IPv6 mostly have 2^64.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
    }
}

fn came(line: &Line) -> bool {
    line.dialled.is_none()
}

fn is_stranger(line: &Line) -> bool {
    came(line) && !line.session.is_established()
}

impl Mesh {
    /// Makes room for one more from there, at the cost of one that has not said yet who it
    /// is. False if there is none to be had.
    pub(super) fn make_room(&mut self, from: IpAddr, now: Duration) -> bool {
        let from = source(from);
        let lines = || self.lines.iter().filter(|(_, line)| came(line));
        let is_from = |line: &Line, from| source(line.theirs.ip()) == from;
        let strangers: Vec<_> = lines().filter(|(_, line)| is_stranger(line)).collect();
        let oldest_from = |from| -> Option<Connection> {
            strangers
                .iter()
                .find(|(_, line)| is_from(line, from))
                .map(|(connection, _)| **connection)
        };
        let victim = if lines().filter(|(_, line)| is_from(line, from)).count()
            >= self.limits.of_one_source
        {
            oldest_from(from)
        } else if strangers.len() >= self.limits.strangers
            || lines().count() >= self.limits.connections
        {
            // Where most come from, most are of no good: others lose nothing by it.
            let busiest =
                strangers.iter().map(|(_, line)| source(line.theirs.ip())).max_by_key(|from| {
                    strangers.iter().filter(|(_, line)| is_from(line, *from)).count()
                });
            busiest.and_then(oldest_from)
        } else {
            return true;
        };
        if let Some(victim) = victim {
            self.end(victim, Reason::Ended(Parting::Crowded), now);
        }
        victim.is_some()
    }
}
