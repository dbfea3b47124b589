//! The providers of this node and of others. Nodes with incompatible providers detect this before
//! any topic is exchanged.
//!
//! A node sends its provider in its first control message, before its interests: so no messages are
//! ever retained for a node that nothing can be sent to. It sends the message to all nodes again
//! when its provider changes, which may happen when its workers restart at another address.
//! Connection messages that a node sends before its provider are ignored.

use std::fmt;
use std::time::Instant;

use crate::ids::NodeId;
use crate::replication::Provider;
use crate::replication::Replicator;
use crate::replication::control_messages::ControlMessage;

/// How often a node may change its provider while it is connected: each change reconciles all
/// topics, and logs a line.
const MAX_PROVIDER_CHANGES: u32 = 64;

/// Two providers that do not interoperate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::replication) struct ProviderMismatch {
    pub(in crate::replication) local: String,
    pub(in crate::replication) remote: String,
}

impl ProviderMismatch {
    /// None as long as messages may be exchanged, as far as is known.
    fn of(ours: Option<&Provider>, theirs: Option<&Provider>) -> Option<Self> {
        let (ours, theirs) = (ours?, theirs?);
        (ours != theirs).then(|| Self { local: ours.to_string(), remote: theirs.to_string() })
    }
}

impl fmt::Display for ProviderMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, remote } = self;
        write!(f, "no messages can be exchanged: its provider is {remote}, ")?;
        write!(f, "the provider of this node is {local}; choose one for both")
    }
}

impl Replicator {
    /// Sets the provider of this node, and sends it to other nodes.
    pub(in crate::replication) fn set_local_provider(&mut self, ours: &Provider) {
        if self.provider.as_ref() == Some(ours) {
            return;
        }
        self.provider = Some(ours.clone());
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.send_provider(node);
            self.compare_providers(node);
        }
    }

    /// Sends the local provider to a newly connected node, if it is known; otherwise all nodes get
    /// it later.
    pub(in crate::replication) fn send_provider(&self, node: NodeId) {
        if let Some(ours) = &self.provider {
            self.send_control_message(node, &ControlMessage::Provider(ours.clone()));
        }
    }

    /// Handles the provider of another node.
    pub(in crate::replication) fn handle_provider(&mut self, node: NodeId, theirs: Provider) {
        let theirs = Some(theirs);
        if let Some(remote) = self.nodes.get_mut(&node)
            && remote.provider != theirs
            && remote.changes < MAX_PROVIDER_CHANGES
        {
            remote.changes += 1;
            remote.provider = theirs;
            self.compare_providers(node);
        }
    }

    /// Whether a node has reported the same provider as the local one.
    pub(in crate::replication) fn is_provider_compatible(&self, node: NodeId) -> bool {
        let theirs = self.nodes.get(&node).and_then(|remote| remote.provider.as_ref());
        theirs.is_some() && theirs == self.provider.as_ref()
    }

    fn compare_providers(&mut self, node: NodeId) {
        let theirs = self.nodes.get(&node).and_then(|remote| remote.provider.as_ref());
        let provider_mismatch = ProviderMismatch::of(self.provider.as_ref(), theirs);
        if self.incompatible_topics.provider_mismatch(node) == provider_mismatch.as_ref() {
            return;
        }
        let may_log = self.may_log(Instant::now());
        match &provider_mismatch {
            _ if !may_log => {}
            Some(provider_mismatch) => {
                let label = self.seen_nodes.label(node);
                let ProviderMismatch { local, remote } = provider_mismatch;
                tracing::warn!(
                    %node,
                    label,
                    local,
                    remote,
                    "provider mismatch: no messages are exchanged with this node. Start both with \
                     the same provider"
                );
            }
            None => tracing::info!(%node, "provider mismatch resolved"),
        }
        self.plan.set_incompatible(node, provider_mismatch.is_some());
        self.incompatible_topics.set_provider_mismatch(node, provider_mismatch);
        self.enqueue_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provider(name: &str, protocol: u32) -> Provider {
        Provider { name: name.to_owned(), protocol, format: 2 }
    }

    #[test]
    fn mismatch_needs_two_known_and_different_providers() {
        let (ours, other) = (provider("tcp", 25), provider("net", 25));
        for same in [None, Some(&ours)] {
            assert_eq!(ProviderMismatch::of(Some(&ours), same), None);
            assert_eq!(ProviderMismatch::of(same, Some(&ours)), None);
        }
        assert_eq!(ProviderMismatch::of(None, Some(&other)), None, "the local provider is unknown");
        assert!(ProviderMismatch::of(Some(&provider("net", 26)), Some(&other)).is_some());
        let text = ProviderMismatch::of(Some(&ours), Some(&other)).unwrap().to_string();
        let words =
            "is net (protocol 25, addresses 2), the provider of this node is tcp (protocol 25, ";
        assert!(text.contains(words) && text.ends_with("choose one for both"), "{text}");
    }
}
