//! Addresses of this machine's network interfaces.

use std::fmt;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::{Error, ErrorKind, Result};

/// Prefixes of interfaces between containers of one machine: used only if there is no other.
const CONTAINER_INTERFACES: [&str; 5] = ["docker", "virbr", "br-", "cni", "veth"];
const OPERATION: &str = "find local address";

/// An interface that is up, with one of its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    address: IpAddr,
}

impl Interface {
    fn is_reachable(&self) -> bool {
        match self.address {
            IpAddr::V4(four) => !four.is_loopback() && !four.is_link_local(),
            IpAddr::V6(six) => !six.is_loopback() && !six.is_unicast_link_local(),
        }
    }

    fn is_of_containers(&self) -> bool {
        CONTAINER_INTERFACES.iter().any(|prefix| self.name.starts_with(prefix))
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.address, self.name)
    }
}

/// An address of this machine: itself, by a subnet (`10.1.0.0/16`), or by the name of an interface
/// (`ib0`). The last two have the same meaning on all machines of a cluster.
///
/// ```
/// use fabric::{ErrorKind, local_address};
/// assert_eq!(local_address("127.0.0.0/8")?.to_string(), "127.0.0.1");
/// assert_eq!(local_address("10.9.8.7")?.to_string(), "10.9.8.7");
/// assert_eq!(local_address("no-interface").unwrap_err().kind(), ErrorKind::InvalidArgument);
/// # Ok::<(), fabric::Error>(())
/// ```
///
/// # Errors
/// `InvalidArgument` if no interface that is up has such an address. Whether an address given itself
/// is one of this machine is found out when it is used.
pub fn local_address(text: &str) -> Result<IpAddr> {
    match text.parse() {
        Ok(address) => Ok(address),
        Err(_) => find(text, interfaces()?),
    }
}

/// The addresses at which other machines may reach this one: IPv4 before IPv6, network cards before
/// interfaces of containers.
///
/// ```
/// let addresses = fabric::local_addresses()?;
/// assert!(addresses.iter().all(|address| !address.is_loopback()));
/// # Ok::<(), fabric::Error>(())
/// ```
///
/// # Errors
/// If the system does not list its interfaces.
pub fn local_addresses() -> Result<Vec<IpAddr>> {
    Ok(sorted(interfaces()?).into_iter().map(|it| it.address).collect())
}

fn interfaces() -> Result<Vec<Interface>> {
    let failed = |errno: nix::Error| {
        Error::new(ErrorKind::Other, OPERATION, format!("getifaddrs failed: {errno}"))
    };
    let found = getifaddrs().map_err(failed)?.filter_map(|found| {
        let is_up = found.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
        let storage = found.address.filter(|_| is_up)?;
        let address = match (storage.as_sockaddr_in(), storage.as_sockaddr_in6()) {
            (Some(four), _) => IpAddr::V4(four.ip()),
            (_, Some(six)) => IpAddr::V6(six.ip()),
            _ => return None,
        };
        Some(Interface { name: found.interface_name, address })
    });
    Ok(found.collect())
}

fn sorted(mut interfaces: Vec<Interface>) -> Vec<Interface> {
    interfaces.retain(Interface::is_reachable);
    interfaces.sort_by_key(|it| (it.address.is_ipv6(), it.is_of_containers()));
    interfaces
}

fn find(text: &str, interfaces: Vec<Interface>) -> Result<IpAddr> {
    let invalid = |detail| Err(Error::new(ErrorKind::InvalidArgument, OPERATION, detail));
    let is_wanted: Box<dyn Fn(&Interface) -> bool> = match text.split_once('/') {
        None => Box::new(|it| it.name == text),
        Some((network, length)) => {
            let (Ok(network), Ok(length)) = (network.parse(), length.parse()) else {
                return invalid(format!("{text:?} is no subnet. Give it like 10.1.0.0/16"));
            };
            let Some(network) = subnet(network, length) else {
                return invalid(format!("{text:?} is no subnet: its prefix is too long"));
            };
            Box::new(move |it| subnet(it.address, length) == Some(network))
        }
    };
    let shown: Vec<_> = interfaces.iter().map(ToString::to_string).collect();
    let mut found: Vec<_> = interfaces.into_iter().filter(is_wanted).collect();
    // A named interface often has a link-local address beside the one that is meant.
    found.sort_by_key(|it| (!it.is_reachable(), it.address.is_ipv6()));
    let Some(first) = found.first() else {
        let what = if text.contains('/') { "an address in the subnet" } else { "the name" };
        return invalid(format!(
            "no interface that is up has {what} {text:?}: this machine has {}. Give one of its \
             addresses, a subnet, or an interface",
            shown.join(", ")
        ));
    };
    Ok(first.address)
}

/// The first `length` bits of an address, with its family.
fn subnet(address: IpAddr, length: u32) -> Option<(bool, u128)> {
    let (bits, width) = match address {
        IpAddr::V4(four) => (u128::from(four.to_bits()), 32),
        IpAddr::V6(six) => (six.to_bits(), 128),
    };
    let rest = u32::checked_sub(width, length)?;
    Some((width == 32, bits.checked_shr(rest).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(all: &[(&str, &str)]) -> Vec<Interface> {
        let one = |(name, address): &(&str, &str)| Interface {
            name: (*name).to_owned(),
            address: address.parse().unwrap(),
        };
        all.iter().map(one).collect()
    }

    fn best_of(all: &[(&str, &str)]) -> Option<String> {
        sorted(interfaces(all)).first().map(|it| it.address.to_string())
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

    #[test]
    fn subnet_or_interface_name_finds_the_address_of_this_machine() {
        let all = [
            ("lo", "127.0.0.1"),
            ("eth0", "10.0.3.5"),
            ("ib0", "fe80::1"),
            ("ib0", "10.1.3.5"),
            ("ib1", "2001:db8:1::5"),
        ];
        let find = |text| find(text, interfaces(&all)).map(|address| address.to_string());
        for (text, address) in [
            ("10.1.0.0/16", "10.1.3.5"),
            ("10.0.3.0/24", "10.0.3.5"),
            ("10.1.3.5/32", "10.1.3.5"),
            ("0.0.0.0/0", "10.0.3.5"),
            ("2001:db8::/32", "2001:db8:1::5"),
            ("ib0", "10.1.3.5"),
            ("lo", "127.0.0.1"),
        ] {
            assert_eq!(find(text).unwrap(), address, "{text}");
        }
        for text in
            ["10.2.0.0/16", "ib", "", "10.1.0.0/33", "10.1.0/16", "10.1.0.0/", "/8", "::/129"]
        {
            assert_eq!(find(text).unwrap_err().kind(), ErrorKind::InvalidArgument, "{text}");
        }
    }

    #[test]
    fn error_lists_the_addresses_of_this_machine() {
        let error =
            find("ib7", interfaces(&[("lo", "127.0.0.1"), ("ib0", "10.1.3.5")])).unwrap_err();
        let text = "find local address failed: invalid argument: no interface that is up has the name \
                    \"ib7\": this machine has 127.0.0.1 (lo), 10.1.3.5 (ib0). Give one of its \
                    addresses, a subnet, or an interface";
        assert_eq!(error.to_string(), text);
    }
}
