//! The port at which a node listens for peers, and why listening failed.

use std::io::{self, ErrorKind as Io};
use std::net::{IpAddr, SocketAddr, TcpListener};

use nix::ifaddrs::getifaddrs;

use crate::error::{Error, ErrorKind, Result};

const LISTEN: &str = "listen for other nodes at address";

/// Listens with a non-blocking socket.
pub(super) fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address)
        .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listener.map_err(|cause| refused(address, cause))
}

fn refused(address: SocketAddr, cause: io::Error) -> Error {
    let error = |detail: String| Error::new(LISTEN, ErrorKind::CannotListen, detail);
    let error = match cause.kind() {
        Io::AddrInUse => {
            error(format!("{cause}. Choose another port, or end the process that listens there"))
        }
        Io::AddrNotAvailable => error(of_another_machine(address.ip(), &of_this_machine())),
        _ => Error::because(LISTEN, ErrorKind::CannotListen, cause),
    };
    error.at(address)
}

/// Proposes the addresses of the same family, or all if there is none.
fn of_another_machine(wrong: IpAddr, all: &[IpAddr]) -> String {
    let same_family: Vec<_> = all.iter().filter(|one| one.is_ipv4() == wrong.is_ipv4()).collect();
    let possible = if same_family.is_empty() { all.iter().collect() } else { same_family };
    let possible: Vec<_> = possible.into_iter().map(IpAddr::to_string).collect();
    let remedy = match possible.is_empty() {
        true => "Choose one that is".to_owned(),
        false => format!("Choose one of: {}", possible.join(", ")),
    };
    format!("{wrong} is not an address of this machine. {remedy}")
}

/// The addresses of this machine, without link-local ones of IPv6, which need an interface.
fn of_this_machine() -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = Vec::new();
    for address in getifaddrs().into_iter().flatten().filter_map(|found| found.address) {
        let ip = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(found), _) => IpAddr::from(found.ip()),
            (None, Some(found)) if !found.ip().is_unicast_link_local() => IpAddr::from(found.ip()),
            _ => continue,
        };
        if !all.contains(&ip) {
            all.push(ip);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_in_use_and_foreign_address_are_distinguished() {
        let taken = listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = taken.local_addr().unwrap();
        let error = listen(address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CannotListen);
        assert_eq!(
            error.to_string(),
            format!(
                "listen for other nodes at address {address} failed: cannot listen there: Address already in use \
                 (os error 98). Choose another port, or end the process that listens there"
            )
        );
        // Reserved for documentation, so no machine has it.
        let error = listen("192.0.2.9:7700".parse().unwrap()).unwrap_err();
        let expected = "listen for other nodes at address 192.0.2.9:7700 failed: cannot listen there: 192.0.2.9 is \
                        not an address of this machine. Choose one of: 127.0.0.1";
        assert!(error.to_string().starts_with(expected), "{error}");
    }

    #[test]
    fn addresses_of_the_same_family_are_proposed() {
        let [wrong, four, six] = ["10.0.0.9", "10.0.0.1", "::1"].map(|it| it.parse().unwrap());
        let text = |all: &[IpAddr]| of_another_machine(wrong, all);
        let expected = "10.0.0.9 is not an address of this machine. Choose one";
        assert_eq!(text(&[six, four]), format!("{expected} of: 10.0.0.1"));
        assert_eq!(text(&[six]), format!("{expected} of: ::1"));
        assert_eq!(text(&[]), format!("{expected} that is"));
    }
}
