//! What the mesh does about what is said to it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::close_reason::{CloseReason, GoodbyeReason};
use super::connection_protocol::ReceivedFrame;
use super::event::PeerEvent;
use super::identity::{NodeId, SessionId};
use super::mesh::{Action, Mesh, Node, PeerConnection};
use super::protocol::{Frame, Hello, PeerAddress, capability, malformed};
use super::session_arbitration::{ConnectionId, SessionArbitration, Step};

/// While more waits to be sent, a peer's knowledge of our interests may be old.
const QUEUED_BYTES_THRESHOLD: usize = 1 << 18;
/// Acquaintances of one frame.
const ADDRESSES_PER_FRAME: usize = 512;

impl Mesh {
    pub(super) fn came(
        &mut self,
        connection: ConnectionId,
        came: ReceivedFrame,
        now: Duration,
    ) -> Result<(), CloseReason> {
        let frame = match came {
            ReceivedFrame::Hello(hello) => return self.on_hello(connection, hello, now),
            ReceivedFrame::Frame(frame) => frame,
        };
        let Some(line) = self.connections.get_mut(&connection) else { return Ok(()) };
        let Some(peer) = &line.peer else { return Ok(()) };
        let node = peer.identity;
        match (frame, line.number) {
            (Frame::Goodbye { why, detail }, _) => {
                line.is_told = true;
                return Err(CloseReason::of_goodbye(why, detail));
            }
            (Frame::Claim { instead_of }, _) if node < self.me.identity => {
                let number = SessionId(self.next_session);
                self.next_session = self.next_session.wrapping_add(1);
                let is_stale = self.is_stale(&node, now);
                let Some(known) = self.nodes.get_mut(&node) else { return Ok(()) };
                let steps = known.arbitration.claims(connection, instead_of, (number, is_stale));
                self.perform(steps, now);
            }
            (Frame::Accept { session }, _) if node > self.me.identity => {
                let known = self.nodes.get_mut(&node);
                let steps = known
                    .and_then(|known| known.arbitration.accepted(connection, session))
                    .ok_or_else(|| malformed("unexpected answer"))?;
                self.perform(steps, now);
            }
            (Frame::Heartbeat, Some(_)) => {}
            (Frame::Interests { number, changes }, Some(session)) => {
                line.peer_interests.apply(number, &changes)?;
                let event = PeerEvent::Interests { node, session, changes };
                self.actions.push_back(Action::Tell(event));
            }
            (Frame::ControlMessage(bytes), Some(session)) => {
                self.actions.push_back(Action::Tell(PeerEvent::ControlMessage {
                    node,
                    session,
                    bytes,
                }));
            }
            (Frame::RequestPeers, Some(_)) => self.handle_peers_request(connection, now),
            (Frame::PeerList { others }, Some(_)) if line.requested_peers => {
                self.learn(&others, now)
            }
            _ => return Err(malformed("unexpected frame")),
        }
        Ok(())
    }

    /// It is known who is there.
    fn on_hello(
        &mut self,
        connection: ConnectionId,
        hello: Hello,
        now: Duration,
    ) -> Result<(), CloseReason> {
        let node = hello.identity;
        if node == self.me.identity {
            if hello.run == self.me.run {
                return Err(CloseReason::Closed(GoodbyeReason::SelfConnection));
            }
            if self.log.allows(now) {
                tracing::warn!(%node, label = hello.label, "another service has this node's identity");
            }
            return Err(CloseReason::Closed(GoodbyeReason::IdentityConflict));
        }
        let Some(line) = self.connections.get_mut(&connection) else { return Ok(()) };
        let dialled = line.dialled.clone();
        let (run, label) = (hello.run, hello.label.clone());
        line.peer = Some(hello);
        let is_stale = self.is_stale(&node, now);
        let known = self
            .nodes
            .entry(node)
            .or_insert_with(|| Node { run, arbitration: SessionArbitration::default() });
        if run != known.run && known.arbitration.current().is_some() && !is_stale {
            // As long as a session moves something nothing takes its place but a connection of the same
            // service: anything may say that it is this node, started later.
            if self.log.allows(now) {
                tracing::warn!(%node, label, "a second service claims the id of a node that has a session");
            }
            return Err(CloseReason::Closed(GoodbyeReason::SessionExists));
        }
        if run < known.run {
            return Err(CloseReason::Closed(GoodbyeReason::Superseded));
        }
        if run > known.run {
            known.run = run;
            let is_older = |line: &PeerConnection| {
                line.peer.as_ref().is_some_and(|peer| peer.identity == node && peer.run < run)
            };
            let older: Vec<_> = self
                .connections
                .iter()
                .filter(|(_, line)| is_older(line))
                .map(|(old, _)| *old)
                .collect();
            for old in older {
                self.end(old, CloseReason::Closed(GoodbyeReason::Superseded), now);
            }
        }
        if let Some(address) = dialled
            && self.addresses.reached(&address, (node, &label), &mut self.log, now)
        {
            // It may have dialled us before we knew that we want to ask it.
            self.ask(node, now);
        }
        if self.me.identity < node {
            let is_stale = self.is_stale(&node, now);
            let known = self.nodes.get_mut(&node);
            let step = known.and_then(|known| known.arbitration.on_hello(connection, is_stale));
            self.perform(step, now);
        }
        Ok(())
    }

    pub(super) fn perform(&mut self, steps: impl IntoIterator<Item = Step>, now: Duration) {
        for step in steps {
            match step {
                Step::Claim { on, instead_of } => self.send(on, &Frame::Claim { instead_of }, now),
                Step::Accept { on, session } => self.send(on, &Frame::Accept { session }, now),
                Step::Replace(old) => {
                    self.end(old, CloseReason::Closed(GoodbyeReason::Replaced), now)
                }
                Step::Refuse(duplicate) => {
                    self.end(duplicate, CloseReason::Closed(GoodbyeReason::Duplicate), now)
                }
                Step::Establish { on, session } => self.establish(on, session, now),
            }
        }
    }

    fn establish(&mut self, connection: ConnectionId, session: SessionId, now: Duration) {
        let Some(line) = self.connections.get_mut(&connection) else { return };
        let Some(peer) = &line.peer else { return };
        let (node, run, label) = (peer.identity, peer.run, peer.label.clone());
        line.session.establish(now);
        line.number = Some(session);
        line.since = now;
        self.departed.remove_returned(line);
        let (local_address, peer_address) = (line.local_address, line.peer_address);
        tracing::debug!(%node, label, %session, %peer_address, "a session began");
        let event = PeerEvent::Connected { node, session, run, label, local_address };
        self.actions.push_back(Action::Tell(event));
        let reachable_address = line.reachable_address();
        self.send_interests(connection, now);
        if self.addresses.is_rendezvous(&node) {
            self.ask(node, now);
        }
        if let Some(reachable_address) = reachable_address {
            let asking = self
                .connections
                .iter()
                .filter(|(other, line)| line.wants_peers && **other != connection);
            let asking: Vec<_> = asking.map(|(other, _)| *other).collect();
            for other in asking {
                self.send(other, &Frame::PeerList { others: vec![reachable_address] }, now);
            }
        }
    }

    /// Asks a node for others, once in a session.
    fn ask(&mut self, node: NodeId, now: Duration) {
        let current = self.nodes.get(&node).and_then(|known| known.arbitration.current());
        let Some((connection, _)) = current else { return };
        let Some(line) = self.connections.get_mut(&connection) else { return };
        let answers =
            line.peer.as_ref().is_some_and(|peer| peer.capabilities & capability::RENDEZVOUS != 0);
        if line.number.is_some() && answers && !line.requested_peers {
            line.requested_peers = true;
            self.send(connection, &Frame::RequestPeers, now);
        }
    }

    fn handle_peers_request(&mut self, connection: ConnectionId, now: Duration) {
        let Some(line) = self.connections.get_mut(&connection) else { return };
        if std::mem::replace(&mut line.wants_peers, true) {
            return;
        }
        let others: Vec<_> = self
            .connections
            .iter()
            .filter(|(other, line)| **other != connection && line.number.is_some())
            .filter_map(|(_, line)| line.reachable_address())
            .collect();
        for some in others.chunks(ADDRESSES_PER_FRAME) {
            self.send(connection, &Frame::PeerList { others: some.to_vec() }, now);
        }
    }

    fn learn(&mut self, others: &[PeerAddress], now: Duration) {
        for PeerAddress { node, address } in others {
            let can_be = !address.ip().is_unspecified() && address.port() != 0;
            if *node == self.me.identity || !can_be {
                continue;
            }
            if !self.addresses.learn(*node, *address, now) {
                if self.log.allows(now) {
                    tracing::warn!(%node, %address, "address table full: a learned address was ignored");
                }
                return;
            }
        }
    }

    pub(super) fn send_interests(&mut self, connection: ConnectionId, now: Duration) {
        while !self.interests_unknown
            && let Some(line) = self.connections.get_mut(&connection)
            && line.number.is_some()
            && !line.withholds_interests
            && line.session.waiting() < QUEUED_BYTES_THRESHOLD
            && let Some((number, changes)) = line.interest_sender.next(&self.interests)
        {
            self.send(connection, &Frame::Interests { number, changes }, now);
        }
    }

    fn send(&mut self, connection: ConnectionId, frame: &Frame, now: Duration) {
        let Some(line) = self.connections.get_mut(&connection) else { return };
        if let Err(reason) = line.session.send(frame) {
            self.end(connection, reason, now);
        }
    }
}

impl PeerConnection {
    /// Who is there, and where others can reach it, if they can.
    pub(super) fn reachable_address(&self) -> Option<PeerAddress> {
        let peer = self.peer.as_ref()?;
        let address = reachable(peer.listens?, self.peer_address.ip())?;
        Some(PeerAddress { node: peer.identity, address })
    }
}

/// Where others can reach one who listens there and was seen with this address.
fn reachable(listens: SocketAddr, seen: IpAddr) -> Option<SocketAddr> {
    let (said, seen) = (listens.ip().to_canonical(), seen.to_canonical());
    let address = if said.is_unspecified() { seen } else { said };
    // Its own loopback is not ours.
    (listens.port() != 0 && (!address.is_loopback() || seen.is_loopback()))
        .then(|| SocketAddr::new(address, listens.port()))
}
