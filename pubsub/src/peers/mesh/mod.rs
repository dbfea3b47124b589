//! All connections of a node, without sockets, threads or a clock.
//!
//! The driver of a mesh reports what happened (a connection, bytes, passed time) and executes its
//! [`Action`]s. Times are durations since it began.

mod frame_handling;
mod inbound_limits;
#[cfg(test)]
mod mesh_tests;
mod peer_reports;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use self::peer_reports::DepartedNodes;
pub(crate) use self::peer_reports::{PeerReport, PeerState};
use super::address_book::{AddressBook, AddressSource, DialOutcome};
use super::close_reason::{CloseReason, GoodbyeReason};
use super::heartbeats::ConnectionProtocol;
use super::identity::SessionId;
use super::interests::{InterestSender, Interests, PeerInterests};
use super::node_protocol::Frame;
use super::peer_event::PeerEvent;
use super::protocol_limits::MAX_CONTROL_MESSAGE_LENGTH;
use super::session_arbitration::SessionArbitration;
use super::{ConnectionId, Hello, Limits, ServiceInstance, SplitMix64, Timing};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::NodeId;
use crate::log_limit::LogLimit;
use crate::network_options::NetworkOptions;
use crate::text::shortened;

#[derive(Debug)]
pub(super) enum Action {
    /// Connect to this address, and report [the result](Mesh::dialled).
    Dial { address: String },
    /// Send the rest as far as possible, and close.
    Close { connection: ConnectionId, unsent: Vec<u8> },
    /// Report this event.
    Report(PeerEvent),
}

#[derive(Debug)]
struct PeerConnection {
    session: ConnectionProtocol,
    /// The dialled address; None if the peer dialled.
    dialled: Option<String>,
    local_address: SocketAddr,
    peer_address: SocketAddr,
    peer: Option<Hello>,
    /// The session, once established.
    number: Option<SessionId>,
    since: Duration,
    interest_sender: InterestSender,
    peer_interests: PeerInterests,
    /// The peer has asked for our peers; we have asked it for its peers.
    wants_peers: bool,
    requested_peers: bool,
    /// The peer must not get the interests of this node yet.
    withholds_interests: bool,
    /// The peer sent a goodbye, so it needs none.
    received_goodbye: bool,
    /// No bytes arrived for longer than expected: another connection is tried.
    is_stale: bool,
}

/// A node with at least one connection.
#[derive(Debug)]
struct Node {
    instance: ServiceInstance,
    arbitration: SessionArbitration,
}

#[derive(Debug)]
pub(super) struct Mesh {
    me: Hello,
    timing: Timing,
    limits: Limits,
    random: SplitMix64,
    connections: BTreeMap<ConnectionId, PeerConnection>,
    nodes: HashMap<NodeId, Node>,
    addresses: AddressBook,
    departed: DepartedNodes,
    interests: Interests,
    interests_unknown: bool,
    /// Each node gets them only after `announce_interests`.
    withholds_interests: bool,
    actions: VecDeque<Action>,
    next_connection: u64,
    next_session: u64,
    reading_paused: bool,
    /// Limits log lines that other nodes can cause.
    log: LogLimit,
    /// Limits log lines of connections without a handshake.
    handshake_log: LogLimit,
}

impl Mesh {
    /// If it withholds its interests, peers get them only once they are set and announced.
    pub(super) fn new(
        me: Hello,
        network: &NetworkOptions,
        limits: Limits,
        withholds_interests: bool,
        now: Duration,
    ) -> Self {
        let mut addresses = AddressBook::default();
        for address in &network.peers {
            addresses.add(address.clone(), AddressSource::Configured, None, now);
        }
        if let Some(address) = &network.rendezvous {
            addresses.add(address.clone(), AddressSource::Rendezvous, None, now);
        }
        let mut random = SplitMix64(me.instance.nonce);
        // Random, not from a clock, which may have been set back: no earlier service of this node
        // used it.
        let next_session = random.draw();
        Self {
            me,
            timing: Timing::new(network.lost_after),
            limits,
            random,
            connections: BTreeMap::new(),
            nodes: HashMap::new(),
            addresses,
            departed: DepartedNodes::default(),
            interests: Interests::new(),
            interests_unknown: withholds_interests,
            withholds_interests,
            actions: VecDeque::new(),
            next_connection: 0,
            next_session,
            reading_paused: false,
            log: LogLimit::new(),
            handshake_log: LogLimit::short(),
        }
    }

    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    // ------------------------------------------------------------ connections

    /// A peer connected. None if there are too many connections; then it is to be closed.
    pub(super) fn accepted(
        &mut self,
        local_address: SocketAddr,
        peer_address: SocketAddr,
        now: Duration,
    ) -> Option<ConnectionId> {
        self.make_room(peer_address.ip(), now)
            .then(|| self.open(None, local_address, peer_address, now))
    }

    pub(super) fn dialled(
        &mut self,
        address: &str,
        result: std::result::Result<(SocketAddr, SocketAddr), String>,
        now: Duration,
    ) -> Option<ConnectionId> {
        match result {
            Ok((local_address, peer_address)) => {
                Some(self.open(Some(address.to_owned()), local_address, peer_address, now))
            }
            Err(why) => {
                tracing::debug!(address, why, "dialling a peer failed");
                let Self { addresses, timing, random, log, .. } = self;
                addresses.ended(address, (DialOutcome::Failed, &why), (timing, random, log), now);
                None
            }
        }
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
        let link = PeerConnection {
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
            received_goodbye: false,
            is_stale: false,
        };
        self.connections.insert(connection, link);
        connection
    }

    pub(super) fn received(&mut self, connection: ConnectionId, bytes: &[u8], now: Duration) {
        let Some(link) = self.connections.get_mut(&connection) else { return };
        link.session.receive(bytes, now);
        link.is_stale = false;
        // Handling a frame may close the connection.
        while let Some(link) = self.connections.get_mut(&connection) {
            let done = match link.session.next() {
                Ok(None) => return,
                Ok(Some(frame)) => self.handle_frame(connection, frame, now),
                Err(reason) => Err(reason),
            };
            if let Err(reason) = done {
                self.close_connection(connection, reason, now);
            }
        }
    }

    /// The socket failed, or was closed.
    pub(super) fn broken(&mut self, connection: ConnectionId, how: &str, now: Duration) {
        self.close_connection(connection, CloseReason::Broken(how.to_owned()), now);
    }

    /// Some of the bytes queued for a connection, if any.
    pub(super) fn output(&self, connection: ConnectionId) -> &[u8] {
        self.connections.get(&connection).map_or(&[], |link| link.session.output())
    }

    pub(super) fn sent(&mut self, connection: ConnectionId, count: usize, now: Duration) {
        if let Some(link) = self.connections.get_mut(&connection) {
            link.session.sent(count, now);
            self.send_interests(connection, now);
        }
    }

    pub(super) fn pause_reading(&mut self, reading_paused: bool, now: Duration) {
        self.reading_paused = reading_paused;
        for link in self.connections.values_mut() {
            link.session.pause_reading(reading_paused, now);
        }
    }

    /// Closes connections from addresses that this machine does not have any more.
    pub(super) fn close_without_address(
        &mut self,
        has_address: impl Fn(IpAddr) -> bool,
        now: Duration,
    ) {
        let local = self.connections.values().map(|link| link.local_address.ip());
        let remote = local.filter(|address| !address.to_canonical().is_loopback());
        let mut gone: BTreeSet<_> = remote.collect();
        gone.retain(|address| !has_address(*address));
        if gone.is_empty() {
            return;
        }
        for connection in self.connections_with(|link| gone.contains(&link.local_address.ip())) {
            self.broken(connection, "the local address was removed from this machine", now);
        }
    }

    fn connections_with(&self, is_one: impl Fn(&PeerConnection) -> bool) -> Vec<ConnectionId> {
        let found = self.connections.iter().filter(|(_, link)| is_one(link));
        found.map(|(connection, _)| *connection).collect()
    }

    pub(super) fn accept_failed(&mut self, error: &std::io::Error, now: Duration) {
        if self.log.allows(now) {
            tracing::warn!(%error, "accepting a connection failed");
        }
    }

    // ------------------------------------------------------------------- time

    pub(super) fn tick(&mut self, now: Duration) {
        let ended = self
            .connections
            .iter_mut()
            .filter_map(|(connection, link)| Some((*connection, link.session.tick(now).err()?)));
        for (connection, reason) in ended.collect::<Vec<_>>() {
            self.close_connection(connection, reason, now);
        }
        self.departed.tick(now);
        let is_of = |link: &PeerConnection, address: &str| link.dialled.as_deref() == Some(address);
        let Self { connections, nodes, addresses, timing, log, .. } = self;
        addresses.log_unanswered(log, now, |address| {
            connections.values().any(|link| is_of(link, address))
        });
        for link in connections.values_mut().filter(|link| !link.is_stale) {
            link.is_stale = link.session.is_stale(now);
            if let (true, Some(peer)) = (link.is_stale, &link.peer) {
                tracing::debug!(node = %peer.identity, "a session is stale; dialling again");
                addresses.is_stale(&peer.identity, link.dialled.as_deref(), now);
            }
        }
        let due = addresses.due(now, timing, |node| has_live_session(nodes, connections, node));
        self.actions.extend(due.into_iter().map(|address| Action::Dial { address }));
    }

    /// When `tick` has work next.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let sessions = self.connections.values().filter_map(|link| link.session.deadline());
        let live = self.connections.values().filter(|link| !link.is_stale);
        let stale = live.filter_map(|link| link.session.stale_at());
        let dialling =
            self.addresses.deadline(|node| has_live_session(&self.nodes, &self.connections, node));
        sessions.chain(stale).chain(dialling).min()
    }

    // --------------------------------------------------------------- commands

    pub(super) fn set_interests(&mut self, interests: Interests, now: Duration) {
        self.interests = interests;
        self.interests_unknown = false;
        for connection in self.connections_with(|_| true) {
            if let Some(link) = self.connections.get_mut(&connection) {
                link.interest_sender.mark_changed();
            }
            self.send_interests(connection, now);
        }
    }

    /// Sends the interests of this node to a peer from now on, after the messages already queued,
    /// while the session lasts.
    pub(super) fn announce_interests(&mut self, node: NodeId, session: SessionId, now: Duration) {
        if let Some((connection, number)) = self.current(&node)
            && number == session
            && let Some(link) = self.connections.get_mut(&connection)
        {
            link.withholds_interests = false;
            self.send_interests(connection, now);
        }
    }

    /// Sends a control message to a node, while the session lasts.
    pub(super) fn send_control_message(
        &mut self,
        node: NodeId,
        session: SessionId,
        message: Vec<u8>,
        now: Duration,
    ) -> Result<()> {
        let refuse = |kind, detail| Err(Error::new("send to node", kind, detail).at(node));
        if message.len() > MAX_CONTROL_MESSAGE_LENGTH {
            let length = message.len();
            let detail =
                format!("message of {length} bytes exceeds {MAX_CONTROL_MESSAGE_LENGTH} bytes");
            return refuse(ErrorKind::TooLong, detail);
        }
        let current = self.current(&node).filter(|(_, number)| *number == session);
        let link = current.and_then(|(it, _)| Some((it, self.connections.get_mut(&it)?)));
        let Some((connection, link)) = link else {
            return refuse(ErrorKind::Closed, format!("session {session} has ended"));
        };
        if let Err(reason) = link.session.send(&Frame::ControlMessage(message)) {
            let detail = reason.to_string();
            self.close_connection(connection, reason, now);
            return refuse(ErrorKind::TooMany, detail);
        }
        Ok(())
    }

    /// Closes all connections with a goodbye.
    pub(super) fn close_all(&mut self) {
        self.actions.clear();
        for (connection, mut link) in std::mem::take(&mut self.connections) {
            let unsent = link.session.take_final_bytes(Some(GoodbyeReason::Leaving), "");
            self.actions.push_back(Action::Close { connection, unsent });
        }
        self.nodes.clear();
    }

    // ---------------------------------------------------------------- the end

    fn close_connection(&mut self, connection: ConnectionId, reason: CloseReason, now: Duration) {
        let Some(mut link) = self.connections.remove(&connection) else { return };
        let goodbye_reason = reason.goodbye_reason().filter(|_| !link.received_goodbye);
        let unsent = match reason {
            CloseReason::Broken(_) => Vec::new(),
            _ => link.session.take_final_bytes(goodbye_reason, &reason.to_string()),
        };
        self.actions.push_back(Action::Close { connection, unsent });
        let (why, is_refusal) = (reason.to_string(), reason.is_refusal());
        if let Some(address) = &link.dialled {
            if reason == CloseReason::Closed(GoodbyeReason::SelfConnection) {
                self.addresses.is_own(address, now);
            }
            let outcome = match link.number {
                _ if reason == CloseReason::Closed(GoodbyeReason::Duplicate) => {
                    DialOutcome::Duplicate
                }
                _ if reason.is_permanent() => DialOutcome::Permanent,
                None if reason.is_session_conflict() => DialOutcome::SessionExists,
                Some(_) => DialOutcome::Lost { lasted: now.saturating_sub(link.since) },
                None => DialOutcome::Failed,
            };
            let Self { addresses, timing, random, log, .. } = self;
            addresses.ended(address, (outcome, &why), (timing, random, log), now);
        }
        if link.number.is_some() {
            self.departed.record(&link, &reason, &self.timing, now);
        }
        let Some(peer) = link.peer else {
            let (peer_address, why) = (link.peer_address, shortened(&why, 300));
            // Not logged: a connection closed without any bytes.
            if is_refusal && self.handshake_log.allows(now) {
                tracing::info!(%peer_address, why, "a connection was refused: not a node");
            } else {
                tracing::debug!(%peer_address, why, "a connection ended before its handshake");
            }
            return;
        };
        let node = peer.identity;
        if let Some(session) = link.number {
            let interests = link.peer_interests.len();
            tracing::debug!(%node, label = peer.label, %session, interests, why, "a session ended");
            self.addresses.lost(&node, &why, &self.timing, &mut self.random, now);
            let event = PeerEvent::Disconnected { node, session, reason };
            self.actions.push_back(Action::Report(event));
        }
        let step = self.nodes.get_mut(&node).and_then(|known| known.arbitration.gone(connection));
        self.perform(step, now);
        let is_of = |link: &PeerConnection| link.peer.as_ref().map(|peer| peer.identity);
        if !self.connections.values().any(|link| is_of(link) == Some(node)) {
            self.nodes.remove(&node);
        }
    }

    /// Returns true if a node has a session, and its connection is stale.
    fn is_stale(&self, node: &NodeId, now: Duration) -> bool {
        let link = self.current(node).and_then(|(connection, _)| self.connections.get(&connection));
        link.is_some_and(|link| link.session.is_stale(now))
    }

    /// The session of a node.
    fn current(&self, node: &NodeId) -> Option<(ConnectionId, SessionId)> {
        self.nodes.get(node)?.arbitration.current()
    }
}

fn has_live_session(
    nodes: &HashMap<NodeId, Node>,
    connections: &BTreeMap<ConnectionId, PeerConnection>,
    node: &NodeId,
) -> bool {
    let current = nodes.get(node).and_then(|known| known.arbitration.current());
    let link = current.and_then(|(connection, _)| connections.get(&connection));
    link.is_some_and(|link| !link.is_stale)
}
