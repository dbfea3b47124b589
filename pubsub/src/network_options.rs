//! How a node is connected to others.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fabric::Policy;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::peers;
use crate::replication::{self, MAX_LANES};

/// How a node is connected to others, if the process that serves it is told so. The next one that
/// serves the same node and is told nothing goes on with what the last one was told.
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
    /// Where other nodes reach this one; port 0 is any.
    pub listen: Option<SocketAddr>,
    /// Nodes, as `host:port`.
    pub peers: Vec<String>,
    /// A node, as `host:port`, that tells of the others.
    pub rendezvous: Option<String>,
    /// Other nodes at all, though none is authenticated and nothing is encrypted yet: whatever can
    /// connect, on loopback each user of this machine, reads and publishes in all topics.
    pub insecure: bool,
    /// What the node calls itself to others; the label of its service if empty.
    pub name: String,
    /// Which provider carries the messages, if not the best that leads to other nodes: `NAME` or
    /// `=NAME` only this one, `^NAME` any but this one; several are separated by commas.
    pub provider: Option<String>,
    /// The address of this machine that messages leave from, if not the one that other nodes
    /// are talked to from. Without it, a node that is met at the loopback address first and at
    /// another one later moves to that.
    pub source: Option<IpAddr>,
    /// A node that was not heard for so long is gone; and for so long again what it is owed is
    /// kept. One that is there and takes nothing while others wait has twice as long, and twice
    /// the topic's [`release_deadline`](crate::TopicSettings::release_deadline). Then it is given
    /// up, and [counted](crate::PublisherCounters::missed_by_nodes) what it missed.
    pub lost_after: Duration,
    /// Threads that carry messages, each those of its share of the topics; 0: one for each eight
    /// processors, four at most. Never more than there are processors.
    pub workers: usize,
    /// Lanes by which the first of these carries messages of 1 MiB and more, a thread and a connection
    /// each; 0: as many as the provider and the processors make sensible. Never more than there are
    /// processors, nor than the other node has.
    pub lanes: usize,
}

impl NetworkOptions {
    /// The most [lanes](Self::lanes) that there can be.
    pub const MAX_LANES: u32 = MAX_LANES as u32;
    /// The most [workers](Self::workers) that can be asked for.
    pub const MAX_WORKERS: u32 = 16;

    /// Refuses what would be in vain, whatever else there is: addresses that are none, and any without
    /// [`insecure`](Self::insecure). A service that is told such a thing
    /// serves its node all the same, and logs that it cannot reach others.
    ///
    /// `label` is what the service calls itself, if the node has no name.
    ///
    /// # Errors
    /// Of the kind [`InvalidArgument`](crate::ErrorKind::InvalidArgument), with what is impossible.
    ///
    /// ```
    /// use pubsub::{ErrorKind, NetworkOptions};
    /// let listen = Some("127.0.0.1:7007".parse()?);
    /// let mut network = NetworkOptions { listen, ..NetworkOptions::default() };
    /// assert_eq!(network.check("camera").unwrap_err().kind(), ErrorKind::InvalidArgument);
    /// network.insecure = true;
    /// assert!(network.check("camera").is_ok());
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    pub fn check(&self, label: &str) -> Result<()> {
        self.policy()?;
        peers::check(self, self.name(label))
    }

    /// Refuses a [provider](Self::provider) that is not here or cannot do what is needed, and a
    /// machine without any that can. It is looked at the [address](Self::source) that messages are to
    /// leave from, if that is said; else it is enough that some address would do. Which one it will
    /// be is known only when there is another node, so messages may still fail to go; then the
    /// service logs why, and [reports](crate::Row::ReplicationError) it. A service that is told such a thing
    /// serves its node all the same, and tries again and again.
    ///
    /// # Errors
    /// Of the kind [`NoProvider`](crate::ErrorKind::NoProvider), with the reason.
    ///
    /// ```
    /// use pubsub::{ErrorKind, NetworkOptions};
    /// let provider = Some("carrier-pigeon".into());
    /// let network = NetworkOptions { provider, ..NetworkOptions::default() };
    /// let error = network.check_provider().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::NoProvider);
    /// assert!(error.detail().contains("carrier-pigeon"));
    /// ```
    pub fn check_provider(&self) -> Result<()> {
        replication::check_provider(&self.policy()?, self.source)
    }

    /// The first address at which this node would listen, or reach another one.
    #[must_use]
    pub fn first_address(&self) -> Option<String> {
        peers::first_address(self)
    }

    /// Logs what it means that other nodes are allowed, if there may be some.
    pub(crate) fn say_if_insecure(&self) {
        if let Some(address) = self.first_address().filter(|_| self.insecure) {
            tracing::warn!(address, "insecure: {}", peers::INSECURE);
        }
    }

    /// Which providers may carry messages.
    pub(super) fn policy(&self) -> Result<Policy> {
        let Some(text) = &self.provider else { return Ok(Policy::default()) };
        let read = || {
            let mut policy: Policy = text.parse()?;
            // Nodes with different providers do not understand each other: none takes its place.
            policy.require.append(&mut policy.prefer);
            policy.check().map(|()| policy)
        };
        let refused = |error| Error::because("read a provider", ErrorKind::InvalidArgument, error);
        read().map_err(refused)
    }

    /// How the node is called among others, if its service calls itself so.
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
