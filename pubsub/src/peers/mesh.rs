//! All connections of a node, without sockets, threads or a clock.
//!
//! Whoever drives it says what happened (somebody came, bytes came, time passed) and
//! does what it is told ([`Action`]). Moments are told as the time since it began.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use super::address_book::{AddressBook, AddressSource, DialOutcome};
use super::admission::Limits;
use super::close_reason::{CloseReason, GoodbyeReason};
use super::connection_protocol::{ConnectionProtocol, Timing};
use super::event::PeerEvent;
use super::identity::{NodeId, ServiceInstance, SessionId, SplitMix64};
use super::interests::{InterestSender, Interests, PeerInterests};
use super::protocol::{Frame, Hello, MAX_CONTROL_MESSAGE_LENGTH, capability};
use super::report::DepartedNodes;
use super::session_arbitration::{ConnectionId, SessionArbitration};
use crate::error::{Error, ErrorKind, Result};
use crate::log_limit::LogLimit;
use crate::text::shortened;

/// What a mesh begins with.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) identity: NodeId,
    pub(super) run: ServiceInstance,
    pub(super) label: String,
    pub(super) listens: Option<SocketAddr>,
    pub(super) peers: Vec<String>,
    pub(super) rendezvous: Option<String>,
    pub(super) timing: Timing,
    pub(super) limits: Limits,
}

/// What is to be done for the mesh.
#[derive(Debug)]
pub(super) enum Action {
    /// Connect to this address, and say [how it went](Mesh::dialled).
    Dial { address: String },
    /// Send the rest as far as it can be sent, and close.
    Close { connection: ConnectionId, rest: Vec<u8> },
    /// Tell those above.
    Tell(PeerEvent),
}

/// A connection.
#[derive(Debug)]
pub(super) struct PeerConnection {
    pub(super) session: ConnectionProtocol,
    /// The address by which it came about, if we dialled.
    pub(super) dialled: Option<String>,
    pub(super) local_address: SocketAddr,
    pub(super) peer_address: SocketAddr,
    pub(super) peer: Option<Hello>,
    /// It is a session.
    pub(super) number: Option<SessionId>,
    pub(super) since: Duration,
    pub(super) interest_sender: InterestSender,
    pub(super) peer_interests: PeerInterests,
    /// The peer wants to know whom we know; we have asked it whom it knows.
    pub(super) wants_peers: bool,
    pub(super) requested_peers: bool,
    /// The peer may not be told yet what is published and subscribed to here.
    pub(super) withholds_interests: bool,
    /// It said goodbye, so there is nothing more to say.
    pub(super) is_told: bool,
    /// Nothing was heard for longer than it should take: another connection is tried.
    pub(super) is_stale: bool,
}

/// A node with which there are connections.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) run: ServiceInstance,
    pub(super) arbitration: SessionArbitration,
}

#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) me: Hello,
    pub(super) timing: Timing,
    pub(super) limits: Limits,
    chance: SplitMix64,
    pub(super) connections: BTreeMap<ConnectionId, PeerConnection>,
    pub(super) nodes: HashMap<NodeId, Node>,
    pub(super) addresses: AddressBook,
    pub(super) departed: DepartedNodes,
    pub(super) interests: Interests,
    /// It is not known yet what they are.
    pub(super) interests_unknown: bool,
    /// Each node has to be let know of them.
    pub(super) withholds_interests: bool,
    pub(super) actions: VecDeque<Action>,
    next_connection: u64,
    pub(super) next_session: u64,
    reading_paused: bool,
    /// Of what others can cause.
    pub(super) log: LogLimit,
    /// Of connections that are no node's.
    handshake_log: LogLimit,
}

impl Mesh {
    pub(super) fn new(start: Start, now: Duration) -> Self {
        let Start { identity, run, label, listens, peers, rendezvous, timing, limits } = start;
        let mut addresses = AddressBook::default();
        for address in peers {
            addresses.add(address, AddressSource::Configured, None, now);
        }
        if let Some(address) = rendezvous {
            addresses.add(address, AddressSource::Rendezvous, None, now);
        }
        let me = Hello {
            identity,
            run,
            label,
            capabilities: if listens.is_some() { capability::RENDEZVOUS } else { 0 },
            lost_after: u32::try_from(timing.lost_after.as_millis()).unwrap_or(u32::MAX),
            listens,
        };
        let mut chance = SplitMix64(run.chance);
        // By chance, and not by a clock, which may have been set back: none that an earlier
        // service of this node used.
        let next_session = chance.draw();
        Self {
            me,
            timing,
            limits,
            chance,
            connections: BTreeMap::new(),
            nodes: HashMap::new(),
            addresses,
            departed: DepartedNodes::default(),
            interests: Interests::new(),
            interests_unknown: false,
            withholds_interests: false,
            actions: VecDeque::new(),
            next_connection: 0,
            next_session,
            reading_paused: false,
            log: LogLimit::new(),
            handshake_log: LogLimit::short(),
        }
    }

    /// What is to be done next.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // ------------------------------------------------------------ connections

    /// Somebody came. None if there are too many; then it is to be closed.
    pub(super) fn accepted(
        &mut self,
        local_address: SocketAddr,
        peer_address: SocketAddr,
        now: Duration,
    ) -> Option<ConnectionId> {
        self.make_room(peer_address.ip(), now)
            .then(|| self.open(None, local_address, peer_address, now))
    }

    /// How the dialling of an address went.
    pub(super) fn dialled(
        &mut self,
        address: &str,
        result: std::result::Result<(SocketAddr, SocketAddr), String>,
        now: Duration,
    ) -> Option<ConnectionId> {
        let failed = match result {
            Ok((local_address, peer_address)) => {
                return Some(self.open(Some(address.to_owned()), local_address, peer_address, now));
            }
            Err(why) => why,
        };
        tracing::debug!(address, why = failed, "dialling a peer failed");
        let Self { addresses, timing, chance, log, .. } = self;
        addresses.ended(address, DialOutcome::Failed(failed), (timing, chance, log), now);
        None
    }

    fn open(
        &mut self,
        dialled: Option<String>,
        local_address: SocketAddr,
        peer_address: SocketAddr,
        now: Duration,
    ) -> ConnectionId {
        let connection = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let mut session = ConnectionProtocol::new(&self.me, &self.timing, now);
        session.pause_reading(self.reading_paused, now);
        let line = PeerConnection {
            session,
            dialled,
            local_address,
            peer_address,
            peer: None,
            number: None,
            since: now,
            interest_sender: InterestSender::new(),
            peer_interests: PeerInterests::default(),
            wants_peers: false,
            requested_peers: false,
            withholds_interests: self.withholds_interests,
            is_told: false,
            is_stale: false,
        };
        self.connections.insert(connection, line);
        connection
    }

    /// Bytes came.
    pub(super) fn received(&mut self, connection: ConnectionId, bytes: &[u8], now: Duration) {
        let Some(line) = self.connections.get_mut(&connection) else { return };
        line.session.receive(bytes, now);
        line.is_stale = false;
        // What came may end it.
        while let Some(line) = self.connections.get_mut(&connection) {
            let done = match line.session.next() {
                Ok(None) => return,
                Ok(Some(came)) => self.came(connection, came, now),
                Err(reason) => Err(reason),
            };
            if let Err(reason) = done {
                self.end(connection, reason, now);
            }
        }
    }

    /// It can carry no more.
    pub(super) fn broken(&mut self, connection: ConnectionId, how: &str, now: Duration) {
        self.end(connection, CloseReason::Broken(how.to_owned()), now);
    }

    /// Bytes that wait to be sent: some of them, if there are any.
    pub(super) fn output(&self, connection: ConnectionId) -> &[u8] {
        self.connections.get(&connection).map_or(&[], |line| line.session.output())
    }

    /// So many of them were sent.
    pub(super) fn sent(&mut self, connection: ConnectionId, count: usize, now: Duration) {
        if let Some(line) = self.connections.get_mut(&connection) {
            line.session.sent(count, now);
            self.send_interests(connection, now);
        }
    }

    /// From now on nothing is read, or again.
    pub(super) fn pause_reading(&mut self, reading_paused: bool, now: Duration) {
        self.reading_paused = reading_paused;
        for line in self.connections.values_mut() {
            line.session.pause_reading(reading_paused, now);
        }
    }

    // ------------------------------------------------------------------- time

    pub(super) fn tick(&mut self, now: Duration) {
        let ended: Vec<_> = self
            .connections
            .iter_mut()
            .filter_map(|(connection, line)| Some((*connection, line.session.tick(now).err()?)))
            .collect();
        for (connection, reason) in ended {
            self.end(connection, reason, now);
        }
        self.departed.tick(now);
        let is_of = |line: &PeerConnection, address: &str| line.dialled.as_deref() == Some(address);
        let Self { connections, nodes, addresses, timing, log, .. } = self;
        addresses.log_unanswered(log, now, |address| {
            connections.values().any(|line| is_of(line, address))
        });
        for line in connections.values_mut().filter(|line| !line.is_stale) {
            line.is_stale = line.session.is_stale(now);
            if let (true, Some(peer)) = (line.is_stale, &line.peer) {
                tracing::debug!(node = %peer.identity, "a session moves nothing: another is tried");
                addresses.is_stale(&peer.identity, line.dialled.as_deref(), now);
            }
        }
        let due = addresses.due(now, timing, |node| has_live_session(nodes, connections, node));
        self.actions.extend(due.into_iter().map(|address| Action::Dial { address }));
    }

    /// When `tick` has something to do next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let sessions = self.connections.values().filter_map(|line| line.session.deadline());
        let heard = self.connections.values().filter(|line| !line.is_stale);
        let stale = heard.filter_map(|line| line.session.stale_at());
        let dialling =
            self.addresses.deadline(|node| has_live_session(&self.nodes, &self.connections, node));
        sessions.chain(stale).chain(dialling).min()
    }

    // --------------------------------------------------------------- commands

    /// What this node publishes and subscribes from now on.
    pub(super) fn set_interests(&mut self, interests: Interests, now: Duration) {
        self.interests = interests;
        self.interests_unknown = false;
        let connections: Vec<_> = self.connections.keys().copied().collect();
        for connection in connections {
            if let Some(line) = self.connections.get_mut(&connection) {
                line.interest_sender.mark_changed();
            }
            self.send_interests(connection, now);
        }
    }

    /// From now on a node is told of what is published and subscribed to here, behind the letters that
    /// it was sent; as long as it is the same session.
    pub(super) fn announce_interests(&mut self, node: NodeId, session: SessionId, now: Duration) {
        let current = self.nodes.get(&node).and_then(|known| known.arbitration.current());
        let Some((connection, number)) = current else { return };
        if number == session
            && let Some(line) = self.connections.get_mut(&connection)
        {
            line.withholds_interests = false;
            self.send_interests(connection, now);
        }
    }

    /// Sends a letter to a node, as long as it is the same session.
    pub(super) fn tell(
        &mut self,
        node: NodeId,
        session: SessionId,
        letter: Vec<u8>,
        now: Duration,
    ) -> Result<()> {
        let refuse = |kind, detail| Err(Error::new("send to a node", kind, detail).on(node));
        if letter.len() > MAX_CONTROL_MESSAGE_LENGTH {
            let detail =
                format!("a letter of {} bytes, {MAX_CONTROL_MESSAGE_LENGTH} at most", letter.len());
            return refuse(ErrorKind::TooLong, detail);
        }
        let current = self.nodes.get(&node).and_then(|known| known.arbitration.current());
        let line = match current {
            Some((connection, number)) if number == session => {
                self.connections.get_mut(&connection).map(|line| (connection, line))
            }
            _ => None,
        };
        let Some((connection, line)) = line else {
            return refuse(ErrorKind::Closed, format!("the session {session} is over"));
        };
        if let Err(reason) = line.session.send(&Frame::ControlMessage(letter)) {
            let detail = reason.to_string();
            self.end(connection, reason, now);
            return refuse(ErrorKind::TooMany, detail);
        }
        Ok(())
    }

    /// Says goodbye to all.
    pub(super) fn leave(&mut self) {
        self.actions.clear();
        for (connection, mut line) in std::mem::take(&mut self.connections) {
            let rest = line.session.take_final_bytes(Some(GoodbyeReason::Leaving), "");
            self.actions.push_back(Action::Close { connection, rest });
        }
        self.nodes.clear();
    }

    // ---------------------------------------------------------------- the end

    pub(super) fn end(&mut self, connection: ConnectionId, reason: CloseReason, now: Duration) {
        let Some(mut line) = self.connections.remove(&connection) else { return };
        let goodbye_reason = reason.goodbye_reason().filter(|_| !line.is_told);
        let rest = match reason {
            CloseReason::Broken(_) => Vec::new(),
            _ => line.session.take_final_bytes(goodbye_reason, &reason.to_string()),
        };
        self.actions.push_back(Action::Close { connection, rest });
        let (why, is_refusal) = (reason.to_string(), reason.is_refusal());
        if let Some(address) = &line.dialled {
            if reason == CloseReason::Closed(GoodbyeReason::SelfConnection) {
                self.addresses.is_own(address, now);
            }
            let end = match line.number {
                _ if reason == CloseReason::Closed(GoodbyeReason::Duplicate) => {
                    DialOutcome::Duplicate
                }
                _ if reason.is_permanent() => DialOutcome::Permanent(why.clone()),
                None if reason.is_session_conflict() => DialOutcome::SessionExists(why.clone()),
                Some(_) => {
                    DialOutcome::Lost { why: why.clone(), lasted: now.saturating_sub(line.since) }
                }
                None => DialOutcome::Failed(why.clone()),
            };
            let Self { addresses, timing, chance, log, .. } = self;
            addresses.ended(address, end, (timing, chance, log), now);
        }
        if line.number.is_some() {
            self.departed.record(&line, &reason, &self.timing, now);
        }
        let Some(peer) = line.peer else {
            let (peer_address, why) = (line.peer_address, shortened(&why, 300));
            // One that was closed without a word is nothing to know of.
            let is_told = is_refusal && self.handshake_log.allows(now);
            match is_told {
                true => tracing::info!(%peer_address, why, "a connection was refused: not a node"),
                false => {
                    tracing::debug!(%peer_address, why, "a connection ended before its handshake");
                }
            }
            return;
        };
        let node = peer.identity;
        if let Some(session) = line.number {
            let interests = line.peer_interests.len();
            tracing::debug!(%node, label = peer.label, %session, interests, why, "a session ended");
            self.addresses.lost(&node, &why, &self.timing, &mut self.chance, now);
            self.actions.push_back(Action::Tell(PeerEvent::Disconnected { node, session, reason }));
        }
        let step = self.nodes.get_mut(&node).and_then(|known| known.arbitration.gone(connection));
        self.perform(step, now);
        let has_lines = self
            .connections
            .values()
            .any(|line| line.peer.as_ref().is_some_and(|peer| peer.identity == node));
        if !has_lines {
            self.nodes.remove(&node);
        }
    }

    /// Was nothing heard of a node for longer than it should take, though it has a session?
    pub(super) fn is_stale(&self, node: &NodeId, now: Duration) -> bool {
        let current = self.nodes.get(node).and_then(|known| known.arbitration.current());
        let line = current.and_then(|(connection, _)| self.connections.get(&connection));
        line.is_some_and(|line| line.session.is_stale(now))
    }

    /// Has this node a session?
    pub(super) fn has_session(&self, node: &NodeId) -> bool {
        has_session(&self.nodes, node)
    }
}

fn has_session(nodes: &HashMap<NodeId, Node>, node: &NodeId) -> bool {
    nodes.get(node).is_some_and(|known| known.arbitration.current().is_some())
}

/// Has it one that moves something?
fn has_live_session(
    nodes: &HashMap<NodeId, Node>,
    connections: &BTreeMap<ConnectionId, PeerConnection>,
    node: &NodeId,
) -> bool {
    let current = nodes.get(node).and_then(|known| known.arbitration.current());
    let line = current.and_then(|(connection, _)| connections.get(&connection));
    line.is_some_and(|line| !line.is_stale)
}
