//! Addresses of hosts, by their names.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Instant;

use super::bounded_call;

/// What the system's resolver returned.
pub(super) type Resolved = io::Result<Vec<SocketAddr>>;

/// The addresses of a name; None if they are not known before the deadline. The system's resolver
/// takes no deadline, so it runs on a thread, which remains until the resolver returns.
pub(super) fn resolve(
    name: impl ToSocketAddrs + Send + 'static,
    deadline: Instant,
) -> io::Result<Option<Resolved>> {
    let resolve = move || name.to_socket_addrs().map(Vec::from_iter);
    bounded_call::run("fabricast-resolve", deadline, resolve)
}
