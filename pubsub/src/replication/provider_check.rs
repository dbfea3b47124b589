//! The check of a node's provider before the node is served.

use super::worker;
use crate::error::Result;
use crate::network_options::NetworkOptions;

impl NetworkOptions {
    /// Refuses a [provider](Self::provider) that is not available or lacks a required capability,
    /// and a machine without a suitable one. The [source](Self::source) address is checked, if set;
    /// otherwise any address suffices. The actual address is known only once another node connects,
    /// so replication may still fail: then the service logs and
    /// [reports](crate::Row::ReplicationError) the cause. A service with such options serves its
    /// node all the same, and retries.
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
        worker::choose_provider(&self.policy()?, self.source).map(drop)
    }
}
