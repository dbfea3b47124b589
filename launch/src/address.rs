//! The address of this machine at which ranks of others reach it.

use std::net::IpAddr;

use control::launcher::{Error, ErrorKind, Result};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// Prefixes of interfaces between containers of one machine: used only if there is no other.
const CONTAINER_INTERFACES: [&str; 5] = ["docker", "virbr", "br-", "cni", "veth"];

/// An interface that is up, with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    address: IpAddr,
}

/// The first address of this machine that is not a loopback address: IPv4 before IPv6, network cards
/// before interfaces of containers.
pub(crate) fn own() -> Result<IpAddr> {
    let failed = |cause| Error::caused_by("find address of machine", ErrorKind::Failed, cause);
    let interfaces = getifaddrs().map_err(failed)?.filter_map(|found| {
        let is_up = found.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
        let storage = found.address.filter(|_| is_up)?;
        let address = match (storage.as_sockaddr_in(), storage.as_sockaddr_in6()) {
            (Some(four), _) => IpAddr::V4(four.ip()),
            (_, Some(six)) => IpAddr::V6(six.ip()),
            _ => return None,
        };
        Some(Interface { name: found.interface_name, address })
    });
    best(interfaces).ok_or_else(|| {
        let detail = "the machine has no address beyond loopback. Set GroupOptions::source";
        Error::new("find address of machine", ErrorKind::Unavailable, detail)
    })
}

fn best(interfaces: impl Iterator<Item = Interface>) -> Option<IpAddr> {
    let is_usable = |interface: &Interface| match interface.address {
        IpAddr::V4(four) => !four.is_loopback() && !four.is_link_local(),
        IpAddr::V6(six) => !six.is_loopback() && !six.is_unicast_link_local(),
    };
    let is_of_containers =
        |name: &str| CONTAINER_INTERFACES.iter().any(|prefix| name.starts_with(prefix));
    interfaces
        .filter(is_usable)
        .min_by_key(|it| (it.address.is_ipv6(), is_of_containers(&it.name)))
        .map(|it| it.address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best_of(interfaces: &[(&str, &str)]) -> Option<String> {
        let all = interfaces.iter().map(|(name, address)| Interface {
            name: (*name).to_owned(),
            address: address.parse().unwrap(),
        });
        best(all).map(|address| address.to_string())
    }

    #[test]
    fn network_card_is_preferred_to_loopback_and_containers() {
        let loopback = ("lo", "127.0.0.1");
        assert_eq!(best_of(&[loopback]), None);
        assert_eq!(best_of(&[loopback, ("eth0", "169.254.1.2"), ("eth0", "fe80::1")]), None);
        let docker = ("docker0", "172.17.0.1");
        assert_eq!(best_of(&[loopback, docker]).unwrap(), "172.17.0.1");
        let card = ("ib0", "10.0.0.5");
        assert_eq!(best_of(&[docker, ("eth0", "2001:db8::1"), card]).unwrap(), "10.0.0.5");
        assert_eq!(best_of(&[("eth0", "2001:db8::1")]).unwrap(), "2001:db8::1");
    }
}
