//! The providers of this node and of others. Nodes with incompatible providers detect this before
//! any topic is exchanged.

use std::fmt;
use std::time::Instant;

use crate::ids::NodeId;
use crate::replication::Provider;
use crate::replication::remote_nodes::RemoteNodes;
use crate::replication::routing::Routing;

/// Two providers that do not interoperate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProviderMismatch {
    pub(super) local: String,
    pub(super) remote: String,
}

impl ProviderMismatch {
    /// None as long as messages may be exchanged, as far as is known.
    pub(crate) fn of(ours: Option<&Provider>, theirs: Option<&Provider>) -> Option<Self> {
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

impl Routing {
    /// The provider of this node, or of another one, changed.
    pub(crate) fn compare_providers(&mut self, node: NodeId, remote_nodes: &mut RemoteNodes) {
        let provider_mismatch = remote_nodes.provider_mismatch(node);
        if self.incompatible_topics.provider_mismatch(node) == provider_mismatch.as_ref() {
            return;
        }
        let may_log = remote_nodes.may_log(Instant::now());
        match &provider_mismatch {
            _ if !may_log => {}
            Some(ProviderMismatch { local, remote }) => {
                tracing::warn!(
                    %node,
                    label = remote_nodes.label(node),
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
