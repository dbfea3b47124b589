//! Reports of peers for users.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use super::{Mesh, PeerConnection};
use crate::ids::NodeId;
use crate::peers::Timing;
use crate::peers::close_reason::{CloseReason, GoodbyeReason};

const MAX_DEPARTED: usize = 256;

/// A node that had a session, and that no configured address may lead to.
#[derive(Debug)]
pub(super) struct DepartedNode {
    label: String,
    address: String,
    /// The address it was seen at.
    host: IpAddr,
    since: Duration,
    /// Reported until then.
    until: Duration,
    why: String,
}

#[derive(Debug, Default)]
pub(super) struct DepartedNodes(BTreeMap<NodeId, DepartedNode>);

impl DepartedNodes {
    /// Records the end of a session.
    pub(super) fn record(
        &mut self,
        link: &PeerConnection,
        reason: &CloseReason,
        timing: &Timing,
        now: Duration,
    ) {
        let Some(peer) = &link.peer else { return };
        // A node that closed its session is remembered while messages may be retained for it.
        let remembered = match reason {
            CloseReason::Closed(GoodbyeReason::Leaving) => 2 * timing.lost_after,
            _ => timing.forget_after,
        };
        let gone = DepartedNode {
            label: peer.label.clone(),
            address: link.address(),
            host: link.peer_address.ip().to_canonical(),
            since: now,
            until: now + remembered,
            why: reason.to_string(),
        };
        self.insert(peer.identity, gone);
    }

    fn insert(&mut self, node: NodeId, gone: DepartedNode) {
        if self.0.len() >= MAX_DEPARTED && !self.0.contains_key(&node) {
            let first = self.0.iter().min_by_key(|(_, gone)| gone.until).map(|(node, _)| *node);
            first.and_then(|node| self.0.remove(&node));
        }
        self.0.insert(node, gone);
    }

    /// Removes entries of a node that connected: the same node, or another one at its address. A
    /// node created anew has another id, and another port unless it listens: it is matched by host
    /// and label.
    pub(super) fn remove_returned(&mut self, link: &PeerConnection) {
        let Some(peer) = &link.peer else { return };
        let (address, host) = (link.address(), link.peer_address.ip().to_canonical());
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum PeerState {
    Connected,
    Handshaking,
    Dialling,
    /// The next attempt to connect follows after a pause.
    Backoff,
    SelfConnection,
    /// The peer had connected by itself, and is gone; remembered for a while.
    Departed,
}

/// State of one peer, or of one address that is dialled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerReport {
    /// The last known node id.
    pub(crate) identity: Option<NodeId>,
    /// The last known label.
    pub(crate) label: Option<String>,
    /// The dialled address; for inbound connections the listening address, or else the source
    /// address.
    pub(crate) address: String,
    pub(crate) state: PeerState,
    /// This node dials it, and dials it again after a loss.
    pub(crate) is_dialled: bool,
    pub(crate) since: SystemTime,
    /// Why there is no session, if known.
    pub(crate) last_error: Option<String>,
}

impl Mesh {
    /// `moment` gives the time of day of a time.
    pub(in crate::peers) fn reports(
        &mut self,
        now: Duration,
        moment: impl Fn(Duration) -> SystemTime,
    ) -> Vec<PeerReport> {
        // Expired entries may not have been removed yet.
        self.departed.tick(now);
        let mut reports = Vec::new();
        let mut has_link = Vec::new();
        for link in self.connections.values() {
            let has_session = link.number.is_some();
            has_link.extend(link.dialled.as_deref());
            reports.push(PeerReport {
                identity: link.peer.as_ref().map(|peer| peer.identity),
                label: link.peer.as_ref().map(|peer| peer.label.clone()),
                address: link.address(),
                state: if has_session { PeerState::Connected } else { PeerState::Handshaking },
                is_dialled: link.dialled.is_some(),
                since: moment(link.since),
                last_error: None,
            });
        }
        reports.extend(self.addresses.reports(
            |address| has_link.contains(&address),
            |node| self.current(node).is_some(),
            &moment,
        ));
        for (node, gone) in &self.departed.0 {
            // A dialled node was reported above.
            if self.current(node).is_some() || self.addresses.contains(node) {
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
    /// The dialled address; or where it listens, or else its source address.
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
    fn node_that_departs_again_evicts_no_other_entry() {
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
        // Another node evicts the entry that would expire first.
        departed.insert(node(most), gone(most));
        assert_eq!(departed.0.len(), MAX_DEPARTED);
        assert!(!departed.0.contains_key(&node(0)) && departed.0.contains_key(&node(7)));
    }
}
