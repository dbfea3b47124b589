//! Addresses for tests to listen at.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

/// An address to listen at later, which no other program takes meanwhile: a loopback address
/// that only this process uses, with a port outside the system's ephemeral range.
///
/// ```
/// let (one, other) = (testkit::addresses::unused_listen_address(), testkit::addresses::unused_listen_address());
/// assert!(one.ip().is_loopback() && one != other);
/// std::net::TcpListener::bind(one).unwrap();
/// ```
#[must_use]
pub fn unused_listen_address() -> SocketAddr {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = 20_000 + TAKEN.fetch_add(1, Ordering::Relaxed) % 10_000;
    SocketAddr::from((Ipv4Addr::new(127, 0x40 | high, middle, low), port))
}

/// Ports for a launcher of MPICH (`MPIEXEC_PORT_RANGE`): others at each call, outside those that the
/// system hands out. A peer, or a proxy of a launcher that has ended, which connects once more to a
/// port that it knew would end the job of a launcher that listens there now.
#[must_use]
pub fn launcher_ports() -> String {
    /// Ports of a launcher.
    const COUNT: u32 = 8;
    /// Below those of `unused_listen_address`.
    const PORTS: Range<u32> = 10_000..20_000;
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let place =
        std::process::id().wrapping_add(call.wrapping_mul(397)) % (PORTS.len() as u32 / COUNT);
    let first = PORTS.start + place * COUNT;
    format!("{first}:{}", first + COUNT - 1)
}
