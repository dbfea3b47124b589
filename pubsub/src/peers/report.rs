//! Who is there and who is not, for people to read.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use super::address_book::DialState;
use super::close_reason::{CloseReason, GoodbyeReason};
use super::connection_protocol::Timing;
use super::identity::NodeId;
use super::mesh::{Mesh, PeerConnection};

/// Nodes that are remembered though they are gone, at most.
const MAX_DEPARTED: usize = 256;

/// A node that had a session, and where nobody may know to dial it.
#[derive(Debug)]
pub(super) struct DepartedNode {
    label: String,
    address: String,
    /// Where it was seen.
    host: IpAddr,
    since: Duration,
    /// Until then it is told of.
    until: Duration,
    why: String,
}

/// Those, by who they are.
#[derive(Debug, Default)]
pub(super) struct DepartedNodes(BTreeMap<NodeId, DepartedNode>);

impl DepartedNodes {
    /// A session is over.
    pub(super) fn record(
        &mut self,
        line: &PeerConnection,
        reason: &CloseReason,
        timing: &Timing,
        now: Duration,
    ) {
        let Some(peer) = &line.peer else { return };
        // Who leaves in order is waited for as long as it may be owed something.
        let remembered = match reason {
            CloseReason::Closed(GoodbyeReason::Leaving) => 2 * timing.lost_after,
            _ => timing.forget_after,
        };
        let gone = DepartedNode {
            label: peer.label.clone(),
            address: line.address(),
            host: line.peer_address.ip().to_canonical(),
            since: now,
            until: now + remembered,
            why: reason.to_string(),
        };
        self.insert(peer.identity, gone);
    }

    fn insert(&mut self, node: NodeId, gone: DepartedNode) {
        if self.0.len() >= MAX_DEPARTED && !self.0.contains_key(&node) {
            let first = self.0.iter().min_by_key(|(_, gone)| gone.until);
            let first = first.map(|(node, _)| *node);
            first.and_then(|node| self.0.remove(&node));
        }
        self.0.insert(node, gone);
    }

    /// Somebody is there: the same node, or another one where that was. One that was founded anew
    /// is another node, and comes from another port if it does not listen; its name tells.
    pub(super) fn remove_returned(&mut self, line: &PeerConnection) {
        let Some(peer) = &line.peer else { return };
        let (address, host) = (line.address(), line.peer_address.ip().to_canonical());
        self.0.retain(|node, gone| {
            let has_its_name = !gone.label.is_empty() && gone.label == peer.label;
            let is_this = *node == peer.identity || gone.address == address;
            !(is_this || has_its_name && gone.host == host)
        });
    }

    pub(super) fn tick(&mut self, now: Duration) {
        self.0.retain(|_, gone| now < gone.until);
    }
}

/// How it stands with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PeerState {
    /// There is a session.
    Connected,
    /// There is a connection, and it is not agreed yet that it is a session.
    Handshaking,
    /// It is being dialled.
    Dialling,
    /// It will be dialled again.
    Backoff,
    /// The address is this node's own.
    SelfConnection,
    /// It had come by itself, and is gone. It is remembered for a while.
    Departed,
}

/// How it stands with one peer, or with one address at which one is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerReport {
    /// Who it is, or was when it was last there.
    pub(crate) identity: Option<NodeId>,
    /// What it calls itself, or did when it was last there.
    pub(crate) label: Option<String>,
    /// The address that was dialled; of one that came, where it listens, or from where it came if
    /// it does not.
    pub(crate) address: String,
    /// How it stands.
    pub(crate) state: PeerState,
    /// This node dials it, and dials it again when it is lost.
    pub(crate) is_dialled: bool,
    /// Since when it stands so.
    pub(crate) since: SystemTime,
    /// Why there is no session, as far as it is known.
    pub(crate) last_error: Option<String>,
}

impl Mesh {
    pub(super) fn reports(&self, moment: impl Fn(Duration) -> SystemTime) -> Vec<PeerReport> {
        let mut reports = Vec::new();
        let mut has_line = Vec::new();
        for line in self.connections.values() {
            let state = match line.number {
                Some(_) => PeerState::Connected,
                None => PeerState::Handshaking,
            };
            has_line.extend(line.dialled.as_ref());
            reports.push(PeerReport {
                identity: line.peer.as_ref().map(|peer| peer.identity),
                label: line.peer.as_ref().map(|peer| peer.label.clone()),
                address: line.address(),
                state,
                is_dialled: line.dialled.is_some(),
                since: moment(line.since),
                last_error: None,
            });
        }
        for (address, entry) in self.addresses.entries() {
            let state = match entry.stage {
                DialState::OwnAddress => PeerState::SelfConnection,
                DialState::Active if has_line.contains(&address) => continue,
                DialState::Active => PeerState::Dialling,
                // Another address of one that is there.
                DialState::Backoff { .. }
                    if entry.node.is_some_and(|node| self.has_session(&node)) =>
                {
                    continue;
                }
                DialState::Backoff { .. } => PeerState::Backoff,
            };
            reports.push(PeerReport {
                identity: entry.node,
                label: entry.label.clone(),
                address: address.clone(),
                state,
                is_dialled: entry.stage != DialState::OwnAddress,
                since: moment(entry.since),
                last_error: entry.last_error.clone(),
            });
        }
        for (node, gone) in &self.departed.0 {
            // Of one that is dialled it was told above.
            let mut dialled = self.addresses.entries().map(|(_, entry)| entry.node);
            if self.has_session(node) || dialled.any(|dialled| dialled == Some(*node)) {
                continue;
            }
            reports.push(PeerReport {
                identity: Some(*node),
                label: Some(gone.label.clone()),
                address: gone.address.clone(),
                state: PeerState::Departed,
                is_dialled: false,
                since: moment(gone.since),
                last_error: Some(gone.why.clone()),
            });
        }
        reports
    }
}

impl PeerConnection {
    /// The address that was dialled; or where it listens, or from where it came if it does not.
    fn address(&self) -> String {
        self.dialled.clone().unwrap_or_else(|| {
            let listens = self.reachable_address().map(|it| it.address);
            listens.unwrap_or(self.peer_address).to_string()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_goes_again_takes_nobody_elses_place() {
        let gone = |until| DepartedNode {
            label: String::new(),
            address: String::new(),
            host: IpAddr::from([127, 0, 0, 1]),
            since: Duration::ZERO,
            until: Duration::from_secs(until),
            why: String::new(),
        };
        let node = |number: u64| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&number.to_le_bytes());
            NodeId(bytes)
        };
        let mut departed = DepartedNodes::default();
        let most = MAX_DEPARTED as u64;
        (0..most).for_each(|number| departed.insert(node(number), gone(number)));
        departed.insert(node(7), gone(most));
        assert_eq!(departed.0.len(), MAX_DEPARTED);
        assert!(departed.0.contains_key(&node(0)));
        // One more takes that of who would be forgotten first.
        departed.insert(node(most), gone(most));
        assert_eq!(departed.0.len(), MAX_DEPARTED);
        assert!(!departed.0.contains_key(&node(0)) && departed.0.contains_key(&node(7)));
    }
}
