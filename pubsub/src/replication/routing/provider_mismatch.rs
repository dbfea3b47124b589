//! Which providers carry messages here and at other nodes. Two that do not understand each other find
//! that out before any topic is to go between them.
//!
//! A node tells another one what its provider is in the first letter, before it tells what it subscribes
//! to: so nothing is ever kept for a node that nothing can go to. The same letter goes to all when it
//! has another one, which may be so when its workers are begun anew at another address. What a node
//! says of topics before it is taken for nothing.

use std::fmt;
use std::time::Instant;

use crate::peers::NodeId;
use crate::replication::Provider;
use crate::replication::Replicator;
use crate::replication::control_messages::ControlMessage;

/// So often a node may say that its provider is another one while it is connected: each time all
/// topics are looked at, and a line is logged.
const MAX_PROVIDER_CHANGES: u32 = 64;

/// Two that do not understand each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::replication) struct ProviderMismatch {
    pub(in crate::replication) local: String,
    pub(in crate::replication) remote: String,
}

impl ProviderMismatch {
    /// None as long as messages could go between the two, as far as it is known.
    fn of(ours: Option<&Provider>, theirs: Option<&Provider>) -> Option<Self> {
        let (ours, theirs) = (ours?, theirs?);
        (ours != theirs).then(|| Self { local: ours.to_string(), remote: theirs.to_string() })
    }
}

impl fmt::Display for ProviderMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { local, remote } = self;
        write!(
            f,
            "no messages can go there, or come from there: its provider is {remote}, and that of "
        )?;
        write!(f, "this node {local}; choose one for both")
    }
}

impl Replicator {
    /// Messages are carried by this provider from now on, which other nodes have to know.
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

    /// Tells a node that has just come, if there is something to tell; or else all are told later.
    pub(in crate::replication) fn send_provider(&self, node: NodeId) {
        if let Some(ours) = &self.provider {
            self.write(node, &ControlMessage::Provider(ours.clone()));
        }
    }

    /// Another node has this one.
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

    /// Has a node said that it has the same provider as this one?
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
                    %node, label, local, remote,
                    "another node has another provider: no messages go between the two until both have the same"
                );
            }
            None => tracing::info!(%node, "another node has the same provider now"),
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
    fn only_who_is_known_to_be_a_stranger_is_one() {
        let (ours, other) = (provider("tcp", 25), provider("net", 25));
        for same in [None, Some(&ours)] {
            assert_eq!(ProviderMismatch::of(Some(&ours), same), None);
            assert_eq!(ProviderMismatch::of(same, Some(&ours)), None);
        }
        assert_eq!(ProviderMismatch::of(None, Some(&other)), None, "nothing carries messages here");
        assert!(ProviderMismatch::of(Some(&provider("net", 26)), Some(&other)).is_some());
        let said = ProviderMismatch::of(Some(&ours), Some(&other)).unwrap().to_string();
        let words = "is net (protocol 25, addresses 2), and that of this node tcp (protocol 25, ";
        assert!(said.contains(words) && said.ends_with("choose one for both"), "{said}");
    }
}
