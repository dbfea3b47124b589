//! Options of the connections of a node with others.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fabric::Policy;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};

/// How a node is connected to others. A later service of the same node without options continues
/// with those of the last one.
///
/// ```
/// use pubsub::{NetworkOptions, NodeOptions};
/// let network = NetworkOptions {
///     listen: Some("127.0.0.1:7007".parse()?),
///     peers: vec!["127.0.0.1:7008".into()],
///     insecure: true,
///     ..NetworkOptions::default()
/// };
/// let options = NodeOptions { network: Some(network), ..NodeOptions::default() };
/// # let _ = options;
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOptions {
    /// Where other nodes reach this one; port 0: any.
    pub listen: Option<SocketAddr>,
    /// Nodes, as `host:port`.
    pub peers: Vec<String>,
    /// A node, as `host:port`, that reports the addresses of others.
    pub rendezvous: Option<String>,
    /// Allows other nodes, though none is authenticated and nothing is encrypted yet: any process
    /// that can connect reads and publishes in all topics; on loopback, each user of this machine.
    pub insecure: bool,
    /// The name of the node for others; the label of its service if empty.
    pub name: String,
    /// The provider of replication, if not the best one that reaches other nodes: `NAME` or `=NAME`
    /// only this one, `^NAME` any but this one; separated by commas.
    pub provider: Option<String>,
    /// The address of this machine that messages are sent from, if not the one that other nodes are
    /// connected from. Without it, a node that is reached first at the loopback address and later
    /// at another one moves to the other one.
    pub source: Option<IpAddr>,
    /// A node without a message for this long is disconnected; messages are retained for it for
    /// this long again. A connected node that blocks others has twice this time, and twice the
    /// topic's [`release_deadline`](crate::TopicSettings::release_deadline). Then it is given up,
    /// and its missed messages are [counted](crate::PublisherCounters::missed_by_nodes).
    pub lost_after: Duration,
    /// Threads that send and receive messages, each for its share of the topics; 0: one for every
    /// eight cores, at most four. Limited by the number of cores.
    pub workers: usize,
    /// Lanes of the first of these threads for messages of 1 MiB and more, each a thread and a
    /// connection; 0: as many as the provider and the cores make sensible. Limited by the number of
    /// cores, and by the lanes of the other node.
    pub lanes: usize,
}

impl NetworkOptions {
    /// Maximum of [lanes](Self::lanes).
    pub const MAX_LANES: u32 = 16;
    /// Maximum of [workers](Self::workers).
    pub const MAX_WORKERS: u32 = 16;

    /// Which providers may be used: `NAME` requires like `=NAME`, since nodes with different providers
    /// do not interoperate. Of several names any one may be used.
    ///
    /// ```
    /// use pubsub::NetworkOptions;
    /// let options = NetworkOptions { provider: Some("verbs".into()), ..NetworkOptions::default() };
    /// assert_eq!(options.policy()?.to_string(), "=verbs");
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), if [`provider`](Self::provider) is no policy.
    pub fn policy(&self) -> Result<Policy> {
        let Some(text) = &self.provider else { return Ok(Policy::default()) };
        let read = || {
            let mut policy: Policy = text.parse()?;
            policy.require.append(&mut policy.prefer);
            policy.check().map(|()| policy)
        };
        let refused = |error| Error::because("read provider", ErrorKind::InvalidArgument, error);
        read().map_err(refused)
    }

    /// The name of the node for others, given the label of its service.
    pub(crate) fn name<'a>(&'a self, label: &'a str) -> &'a str {
        if self.name.is_empty() { label } else { &self.name }
    }
}

impl Default for NetworkOptions {
    fn default() -> Self {
        Self {
            listen: None,
            peers: Vec::new(),
            rendezvous: None,
            insecure: false,
            name: String::new(),
            provider: None,
            source: None,
            lost_after: Duration::from_secs(5),
            workers: 0,
            lanes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(provider: &str) -> Result<Policy> {
        NetworkOptions { provider: Some(provider.into()), ..NetworkOptions::default() }.policy()
    }

    #[test]
    fn providers_are_required_and_denied_by_their_names() {
        assert_eq!(policy("net").unwrap(), policy("=net").unwrap());
        assert_eq!(policy("net").unwrap().require, ["net"]);
        let several = policy("net,=tcp,^sockets").unwrap();
        assert_eq!((several.require.len(), several.prefer.len()), (2, 0));
        assert_eq!(
            policy("^net").unwrap(),
            Policy { deny: vec!["net".into()], ..Policy::default() }
        );
        for wrong in ["^", "net,^net", "=net,^net"] {
            assert_eq!(policy(wrong).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong}");
        }
    }
}
