//! The network of a node: addresses, and options that are refused.

use std::fmt;
use std::net::IpAddr;

use pubsub::{NetworkOptions, NodeOptions};

use crate::failure::{Failure, Operation, Result};

/// The caller's name of an option's field.
pub(crate) type FieldName = fn(&str) -> String;

/// Fails for options that could never connect the node to others, as `fabricast node` does.
pub(crate) fn check(operation: Operation, name_of: FieldName, options: &NodeOptions) -> Result<()> {
    let Some(network) = &options.network else { return Ok(()) };
    let dialled =
        [("peers", network.peers.as_slice()), ("rendezvous", network.rendezvous.as_slice())];
    for (field, addresses) in dialled {
        for address in addresses {
            let peers = vec![address.clone()];
            let single = NetworkOptions { peers, insecure: true, ..NetworkOptions::default() };
            single.check("").map_err(|error| {
                Failure::invalid(operation, format_args!("{}: {}", name_of(field), error.detail()))
            })?;
        }
    }
    if let Some(address) = network.first_address().filter(|_| !network.insecure) {
        let detail = format!(
            "nodes at {address} are not contacted: peers are not authenticated and traffic is not \
             encrypted, so on loopback each user of the machine can connect. Set {} to accept this",
            name_of("insecure")
        );
        return Err(Failure::invalid(operation, detail));
    }
    network.check(&options.label)?;
    Ok(network.check_provider()?)
}

pub(crate) fn address<T, E: fmt::Display>(
    operation: Operation,
    name: &str,
    text: Option<&str>,
    parse: impl Fn(&str) -> std::result::Result<T, E>,
) -> Result<Option<T>> {
    let Some(text) = text else { return Ok(None) };
    let refused = |why| Failure::invalid(operation, format_args!("{name} is \"{text}\": {why}"));
    parse(text).map(Some).map_err(refused)
}

pub(crate) fn local_address(text: &str) -> std::result::Result<IpAddr, String> {
    fabric::local_address(text).map_err(|error| error.detail().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_options_are_errors_with_the_callers_names() {
        let variable: FieldName = |field| format!("FABRICAST_{}", field.to_uppercase());
        let refused = |network: &NetworkOptions, name_of: FieldName| {
            let options = NodeOptions { network: Some(network.clone()), ..NodeOptions::default() };
            check(c"test", name_of, &options).unwrap_err().message()
        };
        let peers = vec!["one:1".to_owned(), "nowhere".to_owned()];
        let network = NetworkOptions { peers, ..NetworkOptions::default() };
        let nowhere = "test failed: invalid argument: peers: \"nowhere\" is not like host:port";
        assert_eq!(refused(&network, str::to_owned), nowhere);
        let rendezvous = Some("nowhere".to_owned());
        let network = NetworkOptions { rendezvous, ..NetworkOptions::default() };
        let nowhere = "test failed: invalid argument: FABRICAST_RENDEZVOUS: \"nowhere\" is not like host:port";
        assert_eq!(refused(&network, variable), nowhere);
        let listen = Some("127.0.0.1:7007".parse().unwrap());
        let network = NetworkOptions { listen, ..NetworkOptions::default() };
        for (name_of, name) in
            [(str::to_owned as FieldName, "insecure"), (variable, "FABRICAST_INSECURE")]
        {
            let message = refused(&network, name_of);
            let start =
                "test failed: invalid argument: nodes at 127.0.0.1:7007 are not contacted: ";
            assert!(message.starts_with(start), "{message}");
            assert!(message.ends_with(&format!("Set {name} to accept this")), "{message}");
        }
    }
}
