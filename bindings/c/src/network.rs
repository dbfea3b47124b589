//! How a node is connected to others, from texts of C's or of the environment.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pubsub::NetworkOptions;

use crate::failure::{Failure, Result};

/// What was said, each under the name by which it is refused.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Said<'a> {
    pub(crate) listen: Option<&'a str>,
    /// With commas between them.
    pub(crate) peers: Option<&'a str>,
    pub(crate) rendezvous: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) provider: Option<&'a str>,
    pub(crate) source: Option<&'a str>,
    pub(crate) lost_after: Option<Duration>,
    pub(crate) is_insecure: bool,
    /// 0: as usual.
    pub(crate) workers: usize,
}

impl Said<'_> {
    /// None if nothing was said of where others are or come from.
    pub(crate) fn meaning(&self, operation: &'static CStr) -> Result<Option<NetworkOptions>> {
        if self.listen.is_none() && self.peers.is_none() && self.rendezvous.is_none() {
            return Ok(None);
        }
        let usual = NetworkOptions::default();
        let peers = self.peers.unwrap_or_default().split(',').map(str::trim);
        Ok(Some(NetworkOptions {
            listen: address(operation, "listen", self.listen)?,
            peers: peers.filter(|peer| !peer.is_empty()).map(str::to_owned).collect(),
            rendezvous: self.rendezvous.map(str::to_owned),
            insecure: self.is_insecure,
            name: self.name.unwrap_or_default().to_owned(),
            provider: self.provider.map(str::to_owned),
            source: address(operation, "source", self.source)?,
            lost_after: self.lost_after.unwrap_or(usual.lost_after),
            workers: if self.workers == 0 { usual.workers } else { self.workers },
            ..usual
        }))
    }
}

fn address<T: FromStr<Err: fmt::Display>>(
    operation: &'static CStr,
    name: &str,
    text: Option<&str>,
) -> Result<Option<T>> {
    let Some(text) = text else { return Ok(None) };
    let refused = |why| Failure::invalid(operation, format_args!("{name} is \"{text}\": {why}"));
    text.parse().map(Some).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_said_is_no_network() {
        let said = Said { is_insecure: true, name: Some("here"), ..Said::default() };
        assert_eq!(said.meaning(c"test").unwrap(), None);
    }

    #[test]
    fn what_is_said_counts() {
        let said = Said {
            listen: Some("127.0.0.1:7007"),
            peers: Some("one:1, two:2,"),
            source: Some("::1"),
            lost_after: Some(Duration::from_secs(2)),
            workers: 3,
            ..Said::default()
        };
        let network = said.meaning(c"test").unwrap().unwrap();
        assert_eq!(network.listen, Some("127.0.0.1:7007".parse().unwrap()));
        assert_eq!(network.peers, ["one:1", "two:2"]);
        assert_eq!(network.source, Some("::1".parse().unwrap()));
        assert_eq!((network.lost_after, network.workers), (Duration::from_secs(2), 3));
        assert!(!network.insecure);
    }

    #[test]
    fn addresses_that_are_none_are_refused_by_name() {
        let said = Said { listen: Some("here"), ..Said::default() };
        let failure = said.meaning(c"test").unwrap_err();
        assert!(failure.message().contains("listen is \"here\""), "{failure:?}");
    }
}
