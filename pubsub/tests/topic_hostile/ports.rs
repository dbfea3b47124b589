//! Ports at which a process of a network namespace listens, as every user of it sees them.

use crate::network::address;

/// The state of a socket that listens, in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// All TCP ports that are listened at in the network namespace of this process.
pub fn listening(process: u32) -> Vec<u16> {
    let table = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (local, _, state) = (words.next()?, words.next()?, words.next()?);
        let port = local.rsplit_once(':')?.1;
        (state == LISTEN).then(|| u16::from_str_radix(port, 16).ok()).flatten()
    };
    table.lines().filter_map(port).collect()
}

/// The port of the provider of the service that this process is; another one after each renewal.
pub fn of_provider(service: u32) -> Option<u16> {
    listening(service).into_iter().find(|port| *port != address(1).port())
}
