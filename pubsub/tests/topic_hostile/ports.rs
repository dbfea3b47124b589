//! Listening ports of a network namespace, which any user can read.

use crate::network::address;

/// The state of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// All listening TCP ports in the network namespace of a process.
pub fn listening(process: u32) -> Vec<u16> {
    let table = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
        let port = local.rsplit_once(':')?.1;
        (state == LISTEN).then(|| u16::from_str_radix(port, 16).ok()).flatten()
    };
    table.lines().filter_map(port).collect()
}

/// The port of the provider in a service process. It changes with each renewal of the endpoint.
pub fn of_provider(service: u32) -> Option<u16> {
    listening(service).into_iter().find(|port| *port != address(1).port())
}
