//! The connected nodes and their sessions, and what is known of nodes beyond their sessions.
//!
//! A node sends its provider in its first control message, before its interests: so no messages are
//! ever retained for a node that nothing can be sent to. It sends the message to all nodes again
//! when its provider changes, which may happen when its workers restart at another address.
//! Connection messages that a node sends before its provider are ignored.

pub(super) mod seen_nodes;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::Instant;

use self::seen_nodes::SeenNodes;
use crate::ids::NodeId;
use crate::log_limit::LogLimit;
use crate::peers::{Peers, ServiceInstance, SessionId};
use crate::replication::{ControlMessage, Provider};

/// How often a node may change its provider while it is connected: each change reconciles all
/// topics, and logs a line.
const MAX_PROVIDER_CHANGES: u32 = 64;

struct ConnectedNode {
    session: SessionId,
    /// The address of this node that the other node reaches.
    local_address: IpAddr,
    /// The node's provider; None until its provider message arrives.
    provider: Option<Provider>,
    /// How often its provider changed.
    changes: u32,
}

pub(super) struct RemoteNodes {
    peers: Peers,
    nodes: BTreeMap<NodeId, ConnectedNode>,
    /// Nodes that have not received the interests of this node yet.
    unannounced: Vec<(NodeId, SessionId)>,
    seen_nodes: SeenNodes,
    /// The provider of this node, or the last one.
    provider: Option<Provider>,
    began: Instant,
    /// Limits log lines that other nodes can cause.
    log: LogLimit,
}

impl RemoteNodes {
    pub(super) fn new(peers: Peers) -> Self {
        Self {
            peers,
            nodes: BTreeMap::new(),
            unannounced: Vec::new(),
            seen_nodes: SeenNodes::default(),
            provider: None,
            began: Instant::now(),
            log: LogLimit::new(),
        }
    }

    pub(super) fn peers(&self) -> &Peers {
        &self.peers
    }

    pub(super) fn seen_nodes(&mut self) -> &mut SeenNodes {
        &mut self.seen_nodes
    }

    pub(super) fn label(&self, node: NodeId) -> &str {
        self.seen_nodes.label(node)
    }

    /// Returns true if one more log line that another node causes is allowed.
    pub(super) fn may_log(&mut self, now: Instant) -> bool {
        self.log.allows(now.saturating_duration_since(self.began))
    }

    /// Returns true if one more log line about a connected or disconnected node is allowed.
    fn may_log_node(&mut self, now: Instant, node: NodeId) -> bool {
        let since = now.saturating_duration_since(self.began);
        self.seen_nodes.may_log(node, since, |node| self.nodes.contains_key(node))
            && self.log.allows(since)
    }

    pub(super) fn is_connected(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    pub(super) fn is_session(&self, node: NodeId, session: SessionId) -> bool {
        self.nodes.get(&node).is_some_and(|remote| remote.session == session)
    }

    /// A local address that other nodes reach.
    pub(super) fn local_address(&self) -> Option<IpAddr> {
        let addresses = || self.nodes.values().map(|node| node.local_address);
        let remote = addresses().find(|address| !address.to_canonical().is_loopback());
        remote.or_else(|| addresses().next())
    }

    /// A node connects: it gets the local provider, if it is known; otherwise it gets it later.
    /// True if its service instance is the previous one: only the session was lost.
    pub(super) fn connect(
        &mut self,
        now: Instant,
        (node, session, instance): (NodeId, SessionId, ServiceInstance),
        label: String,
        local_address: IpAddr,
    ) -> bool {
        if self.may_log_node(now, node) {
            tracing::info!(%node, label, "node connected");
        }
        let remote = ConnectedNode { session, local_address, provider: None, changes: 0 };
        self.nodes.insert(node, remote);
        if let Some(ours) = &self.provider {
            self.send(node, &ControlMessage::Provider(ours.clone()));
        }
        self.unannounced.push((node, session));
        self.seen_nodes.connects(node, label, instance, |node| self.nodes.contains_key(node))
    }

    pub(super) fn disconnect(&mut self, now: Instant, node: NodeId, reason: &impl fmt::Display) {
        if self.may_log_node(now, node) {
            let label = self.label(node);
            tracing::info!(%node, label, %reason, "node disconnected");
        }
        self.nodes.remove(&node);
        self.unannounced.retain(|(other, _)| *other != node);
    }

    /// Sends a control message to a node, if it is connected.
    pub(super) fn send(&self, node: NodeId, message: &ControlMessage) {
        let Some(remote) = self.nodes.get(&node) else { return };
        if let Err(error) = self.peers.send(node, remote.session, message.encode()) {
            tracing::debug!(%error, %node, "a control message was not sent");
        }
    }

    /// Sends the interests of this node to new nodes.
    pub(super) fn announce_interests(&mut self) {
        for (node, session) in std::mem::take(&mut self.unannounced) {
            if let Err(error) = self.peers.announce_interests(node, session) {
                tracing::warn!(%error, %node, "cannot send interests to a node");
            }
        }
    }

    /// Sets the provider of this node. If it is another one, all connected nodes get it, and are
    /// returned.
    pub(super) fn set_provider(&mut self, ours: &Provider) -> Vec<NodeId> {
        if self.provider.as_ref() == Some(ours) {
            return Vec::new();
        }
        self.provider = Some(ours.clone());
        let nodes: Vec<_> = self.nodes.keys().copied().collect();
        nodes.iter().for_each(|node| self.send(*node, &ControlMessage::Provider(ours.clone())));
        nodes
    }

    /// Sets the provider of another node. True if it changed.
    pub(super) fn set_remote_provider(&mut self, node: NodeId, theirs: Provider) -> bool {
        let theirs = Some(theirs);
        let Some(remote) = self.nodes.get_mut(&node) else { return false };
        let is_accepted = remote.provider != theirs && remote.changes < MAX_PROVIDER_CHANGES;
        if is_accepted {
            remote.changes += 1;
            remote.provider = theirs;
        }
        is_accepted
    }

    pub(super) fn remote_provider(&self, node: NodeId) -> Option<&Provider> {
        self.nodes.get(&node).and_then(|remote| remote.provider.as_ref())
    }

    /// Returns true if a node has reported the same provider as the local one.
    pub(super) fn is_provider_compatible(&self, node: NodeId) -> bool {
        let theirs = self.remote_provider(node);
        theirs.is_some() && theirs == self.provider.as_ref()
    }

    pub(super) fn provider(&self) -> Option<&Provider> {
        self.provider.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RemoteNodes {
        pub(crate) fn is_empty(&self) -> bool {
            self.nodes.is_empty()
        }
    }
}
