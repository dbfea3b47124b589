//! Who is there and who is not, for people to read.

use std::time::{Duration, SystemTime};

use super::book::Stage;
use super::identity::{NodeIdentity, SessionNumber};
use super::mesh::Mesh;

/// How it stands with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PeerState {
    /// There is a session.
    Connected,
    /// There is a connection, and it is not agreed yet that it is a session.
    Introducing,
    /// It is being dialled.
    Dialling,
    /// It will be dialled again.
    Waiting,
    /// The address is this node's own.
    Oneself,
}

/// How it stands with one peer, or with one address at which one is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerReport {
    /// Who it is, or was when it was last there.
    pub identity: Option<NodeIdentity>,
    /// What it calls itself, or did when it was last there.
    pub label: Option<String>,
    /// The address that was dialled; of one that came, where it listens, or from where it came if
    /// it does not.
    pub address: String,
    /// The session, if there is one.
    pub session: Option<SessionNumber>,
    /// How it stands.
    pub state: PeerState,
    /// Since when it stands so.
    pub since: SystemTime,
    /// Why there is no session, as far as it is known.
    pub why_not: Option<String>,
}

impl Mesh {
    pub(super) fn reports(&self, moment: impl Fn(Duration) -> SystemTime) -> Vec<PeerReport> {
        let mut reports = Vec::new();
        let mut has_line = Vec::new();
        for line in self.lines.values() {
            let state = match line.number {
                Some(_) => PeerState::Connected,
                None => PeerState::Introducing,
            };
            has_line.extend(line.dialled.as_ref());
            reports.push(PeerReport {
                identity: line.peer.as_ref().map(|peer| peer.identity),
                label: line.peer.as_ref().map(|peer| peer.label.clone()),
                address: line.dialled.clone().unwrap_or_else(|| {
                    let listens = line.acquaintance().map(|it| it.address);
                    listens.unwrap_or(line.theirs).to_string()
                }),
                session: line.number,
                state,
                since: moment(line.since),
                why_not: None,
            });
        }
        for (address, entry) in self.book.entries() {
            let state = match entry.stage {
                Stage::Own => PeerState::Oneself,
                Stage::Busy if has_line.contains(&address) => continue,
                Stage::Busy => PeerState::Dialling,
                // Another address of one that is there.
                Stage::Resting { .. } if entry.node.is_some_and(|node| self.has_session(&node)) => {
                    continue;
                }
                Stage::Resting { .. } => PeerState::Waiting,
            };
            reports.push(PeerReport {
                identity: entry.node,
                label: entry.label.clone(),
                address: address.clone(),
                session: None,
                state,
                since: moment(entry.since),
                why_not: entry.why_not.clone(),
            });
        }
        reports
    }
}
