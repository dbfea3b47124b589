//! Addresses for tests to listen at.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

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
