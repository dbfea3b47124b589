//! The network of a node, from the texts of a structure.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use pubsub::{NetworkOptions, NodeOptions};

use crate::failure::{Failure, Operation, Result};

/// The caller's name of an option's field.
pub(crate) type FieldName = fn(&str) -> String;

/// The network from texts, each requested by its field. None without any address of peers or of
/// this node.
pub(crate) fn network(
    operation: Operation,
    text: impl Fn(&str) -> Result<Option<String>>,
    (lost_after, insecure, workers): (Duration, bool, usize),
) -> Result<Option<NetworkOptions>> {
    let (listen, peers, rendezvous) = (text("listen")?, text("peers")?, text("rendezvous")?);
    let (name, provider, source) = (text("name")?, text("provider")?, text("source")?);
    if listen.is_none() && peers.is_none() && rendezvous.is_none() {
        return Ok(None);
    }
    let peers = peers.unwrap_or_default();
    let peers = peers.split(',').map(str::trim).filter(|peer| !peer.is_empty());
    Ok(Some(NetworkOptions {
        listen: address(operation, "listen", listen, str::parse)?,
        peers: peers.map(str::to_owned).collect(),
        rendezvous,
        insecure,
        name: name.unwrap_or_default(),
        provider,
        source: address(operation, "source", source, local_address)?,
        lost_after,
        workers,
        ..NetworkOptions::default()
    }))
}

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

fn address<T, E: fmt::Display>(
    operation: Operation,
    name: &str,
    text: Option<String>,
    parse: impl Fn(&str) -> std::result::Result<T, E>,
) -> Result<Option<T>> {
    let Some(text) = text else { return Ok(None) };
    let refused = |why| Failure::invalid(operation, format_args!("{name} is \"{text}\": {why}"));
    parse(&text).map(Some).map_err(refused)
}

fn local_address(text: &str) -> std::result::Result<IpAddr, String> {
    fabric::local_address(text).map_err(|error| error.detail().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_secs(2);

    fn of(texts: &[(&str, &str)], how: (Duration, bool, usize)) -> Result<Option<NetworkOptions>> {
        let text = |name: &str| {
            Ok(texts.iter().find(|(is, _)| *is == name).map(|(_, text)| (*text).to_owned()))
        };
        network(c"test", text, how)
    }

    #[test]
    fn no_addresses_means_no_network() {
        assert_eq!(of(&[("name", "here")], (TIME, true, 0)).unwrap(), None);
    }

    #[test]
    fn texts_are_converted_to_options() {
        let texts =
            [("listen", "127.0.0.1:7007"), ("peers", "one:1, two:2,"), ("source", "127.0.0.0/8")];
        let network = of(&texts, (TIME, false, 3)).unwrap().unwrap();
        assert_eq!(network.listen, Some("127.0.0.1:7007".parse().unwrap()));
        assert_eq!(network.peers, ["one:1", "two:2"]);
        assert_eq!(network.source, Some("127.0.0.1".parse().unwrap()));
        assert_eq!((network.lost_after, network.workers), (TIME, 3));
        assert!(!network.insecure);
    }

    #[test]
    fn useless_options_are_errors_with_the_callers_names() {
        let variable: FieldName = |field| format!("FABRICAST_{}", field.to_uppercase());
        let refused = |texts: &[(&str, &str)], name_of: FieldName| {
            let network = of(texts, (TIME, false, 0)).unwrap();
            let options = NodeOptions { network, ..NodeOptions::default() };
            check(c"test", name_of, &options).unwrap_err().message()
        };
        let nowhere = "test failed: invalid argument: peers: \"nowhere\" is not like host:port";
        assert_eq!(refused(&[("peers", "one:1,nowhere")], str::to_owned), nowhere);
        let nowhere = "test failed: invalid argument: FABRICAST_RENDEZVOUS: \"nowhere\" is not like host:port";
        assert_eq!(refused(&[("rendezvous", "nowhere")], variable), nowhere);
        for (name_of, name) in
            [(str::to_owned as FieldName, "insecure"), (variable, "FABRICAST_INSECURE")]
        {
            let message = refused(&[("listen", "127.0.0.1:7007")], name_of);
            let start =
                "test failed: invalid argument: nodes at 127.0.0.1:7007 are not contacted: ";
            assert!(message.starts_with(start), "{message}");
            assert!(message.ends_with(&format!("Set {name} to accept this")), "{message}");
        }
    }

    #[test]
    fn invalid_address_is_an_error_with_its_name() {
        let failure = of(&[("listen", "here")], (TIME, false, 0)).unwrap_err();
        assert!(failure.message().contains("listen is \"here\""), "{failure:?}");
    }
}
