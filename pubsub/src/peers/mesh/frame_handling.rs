//! Handling of received frames by the mesh.

use std::time::Duration;

use super::{Action, Mesh, Node, PeerConnection};
use crate::ids::NodeId;
use crate::peers::advertised_address::advertised_address;
use crate::peers::close_reason::{CloseReason, GoodbyeReason, malformed};
use crate::peers::heartbeats::ReceivedFrame;
use crate::peers::identity::SessionId;
use crate::peers::node_protocol::{Frame, RENDEZVOUS};
use crate::peers::peer_event::PeerEvent;
use crate::peers::session_arbitration::{SessionArbitration, Step};
use crate::peers::{ConnectionId, Hello, PeerAddress};

/// Above this number of queued bytes a peer's view of our interests may be old.
const QUEUED_BYTES_THRESHOLD: usize = 1 << 18;
const ADDRESSES_PER_FRAME: usize = 512;

impl Mesh {
    pub(super) fn handle_frame(
        &mut self,
        connection: ConnectionId,
        received: ReceivedFrame,
        now: Duration,
    ) -> Result<(), CloseReason> {
        let frame = match received {
            ReceivedFrame::Hello(hello) => return self.on_hello(connection, hello, now),
            ReceivedFrame::Frame(frame) => frame,
        };
        let Some(link) = self.connections.get_mut(&connection) else { return Ok(()) };
        let Some(peer) = &link.peer else { return Ok(()) };
        let node = peer.identity;
        match (frame, link.number) {
            (Frame::Goodbye { why, detail }, _) => {
                link.received_goodbye = true;
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
                let steps = known.and_then(|it| it.arbitration.accepted(connection, session));
                self.perform(steps.ok_or_else(|| malformed("unexpected answer"))?, now);
            }
            (Frame::Heartbeat, Some(_)) => {}
            (Frame::Interests { number, changes }, Some(session)) => {
                link.peer_interests.apply(number, &changes)?;
                let event = PeerEvent::Interests { node, session, changes };
                self.actions.push_back(Action::Report(event));
            }
            (Frame::ControlMessage(bytes), Some(session)) => {
                let event = PeerEvent::ControlMessage { node, session, bytes };
                self.actions.push_back(Action::Report(event));
            }
            (Frame::RequestPeers, Some(_)) => self.handle_peers_request(connection, now),
            (Frame::PeerList { others }, Some(_)) if link.requested_peers => {
                self.learn(&others, now)
            }
            _ => return Err(malformed("unexpected frame")),
        }
        Ok(())
    }

    fn on_hello(
        &mut self,
        connection: ConnectionId,
        hello: Hello,
        now: Duration,
    ) -> Result<(), CloseReason> {
        let node = hello.identity;
        if node == self.me.identity {
            if hello.instance == self.me.instance {
                return Err(CloseReason::Closed(GoodbyeReason::SelfConnection));
            }
            if self.log.allows(now) {
                let label = hello.label;
                tracing::warn!(%node, label, "another service has the node id of this service");
            }
            return Err(CloseReason::Closed(GoodbyeReason::IdentityConflict));
        }
        let Some(link) = self.connections.get_mut(&connection) else { return Ok(()) };
        let dialled = link.dialled.clone();
        let (instance, label) = (hello.instance, hello.label.clone());
        link.peer = Some(hello);
        let is_stale = self.is_stale(&node, now);
        let known = self
            .nodes
            .entry(node)
            .or_insert_with(|| Node { instance, arbitration: SessionArbitration::default() });
        if instance != known.instance && known.arbitration.current().is_some() && !is_stale {
            // A live session is replaced only by a connection of the same service instance: any
            // process may claim to be a later instance of the node.
            if self.log.allows(now) {
                tracing::warn!(
                    %node,
                    label,
                    "a second service claims the id of a node that has a session"
                );
            }
            return Err(CloseReason::Closed(GoodbyeReason::SessionExists));
        }
        if instance < known.instance {
            return Err(CloseReason::Closed(GoodbyeReason::Superseded));
        }
        if instance > known.instance {
            known.instance = instance;
            let is_older = |peer: &Hello| peer.identity == node && peer.instance < instance;
            for old in self.connections_with(|link| link.peer.as_ref().is_some_and(is_older)) {
                self.close_connection(old, CloseReason::Closed(GoodbyeReason::Superseded), now);
            }
        }
        if let Some(address) = dialled
            && self.addresses.reached(&address, (node, &label), &mut self.log, now)
        {
            // It may have dialled this node before it was known to be a rendezvous.
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
                    self.close_connection(old, CloseReason::Closed(GoodbyeReason::Replaced), now)
                }
                Step::Refuse(on) => {
                    self.close_connection(on, CloseReason::Closed(GoodbyeReason::Duplicate), now)
                }
                Step::Establish { on, session } => self.establish(on, session, now),
            }
        }
    }

    fn establish(&mut self, connection: ConnectionId, session: SessionId, now: Duration) {
        let Some(link) = self.connections.get_mut(&connection) else { return };
        let Some(peer) = &link.peer else { return };
        let (node, instance, label) = (peer.identity, peer.instance, peer.label.clone());
        link.session.establish(now);
        link.number = Some(session);
        link.since = now;
        self.departed.remove_returned(link);
        let (local_address, peer_address) = (link.local_address, link.peer_address);
        tracing::debug!(%node, label, %session, %peer_address, "a session began");
        let event = PeerEvent::Connected { node, session, instance, label, local_address };
        self.actions.push_back(Action::Report(event));
        let reachable_address = link.reachable_address();
        self.send_interests(connection, now);
        if self.addresses.is_rendezvous(&node) {
            self.ask(node, now);
        }
        if let Some(reachable_address) = reachable_address {
            for other in self.connections_with(|link| link.wants_peers) {
                if other != connection {
                    self.send(other, &Frame::PeerList { others: vec![reachable_address] }, now);
                }
            }
        }
    }

    /// Asks a node for its peers, once in a session.
    fn ask(&mut self, node: NodeId, now: Duration) {
        let Some((connection, _)) = self.current(&node) else { return };
        let Some(link) = self.connections.get_mut(&connection) else { return };
        let answers = link.peer.as_ref().is_some_and(|peer| peer.capabilities & RENDEZVOUS != 0);
        if link.number.is_some() && answers && !link.requested_peers {
            link.requested_peers = true;
            self.send(connection, &Frame::RequestPeers, now);
        }
    }

    fn handle_peers_request(&mut self, connection: ConnectionId, now: Duration) {
        let Some(link) = self.connections.get_mut(&connection) else { return };
        if std::mem::replace(&mut link.wants_peers, true) {
            return;
        }
        let others = self.connections.iter().filter(|(other, _)| **other != connection);
        let others = others.filter(|(_, link)| link.number.is_some());
        let others: Vec<_> = others.filter_map(|(_, link)| link.reachable_address()).collect();
        for some in others.chunks(ADDRESSES_PER_FRAME) {
            self.send(connection, &Frame::PeerList { others: some.to_vec() }, now);
        }
    }

    fn learn(&mut self, others: &[PeerAddress], now: Duration) {
        for PeerAddress { node, address } in others {
            let is_valid = !address.ip().is_unspecified() && address.port() != 0;
            if *node == self.me.identity || !is_valid {
                continue;
            }
            if !self.addresses.learn(*node, *address, now) {
                if self.log.allows(now) {
                    let what = "address table full: a learned address was ignored";
                    tracing::warn!(%node, %address, "{what}");
                }
                return;
            }
        }
    }

    pub(super) fn send_interests(&mut self, connection: ConnectionId, now: Duration) {
        while !self.interests_unknown
            && let Some(link) = self.connections.get_mut(&connection)
            && link.number.is_some()
            && !link.withholds_interests
            && link.session.waiting() < QUEUED_BYTES_THRESHOLD
            && let Some((number, changes)) = link.interest_sender.next(&self.interests)
        {
            self.send(connection, &Frame::Interests { number, changes }, now);
        }
    }

    fn send(&mut self, connection: ConnectionId, frame: &Frame, now: Duration) {
        let Some(link) = self.connections.get_mut(&connection) else { return };
        if let Err(reason) = link.session.send(frame) {
            self.close_connection(connection, reason, now);
        }
    }
}

impl PeerConnection {
    /// The peer, and the address at which others can reach it, if any.
    pub(super) fn reachable_address(&self) -> Option<PeerAddress> {
        let peer = self.peer.as_ref()?;
        let address = advertised_address(peer.listens?, self.peer_address.ip())?;
        Some(PeerAddress { node: peer.identity, address })
    }
}
