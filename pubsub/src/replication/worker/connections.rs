//! Connections: requested, offered, answered and lost.

use fabric::Address;
use fabric::ring::RingOptions;
use ipc::{Layout, Segment};

use super::event_loop::WorkerLoop;
use super::stall_detection::SendProgress;
use super::topic_table::{
    ConnectRequest, InboundRing, OutboundConnection, TopicSlot, WorkerTopicKey,
};
use super::{MIN_RING_SIZE, NodeId, TopicKey, TopicParameters, WorkerEvent};
use crate::error::{Error, ErrorKind, Result};
use crate::replication::MAX_PREFIX_LENGTH;
use crate::replication::Side;
use crate::replication::connection_messages::{
    ConnectionMessage, MAX_LANES, MAX_REASON_LENGTH, fit_addresses,
};
use crate::replication::transport::MIN_STRIPED_LENGTH;
use crate::replication::transport::host_memory::SegmentMemory;
use crate::text::shortened;

const CONNECT: &str = "connect a topic to a node";
const RING: Layout = Layout::new("replication ring", 1);

impl WorkerLoop {
    fn send_message(&mut self, key: TopicKey, node: NodeId, message: ConnectionMessage) {
        self.events.send(WorkerEvent::ControlMessage { key, node, terms: message });
    }

    fn report_failure(&mut self, key: TopicKey, node: NodeId, side: Side, error: Error) {
        self.events.send(WorkerEvent::Failed { key, node: Some(node), side, error });
    }

    /// The fabric peer at an address of a node.
    fn resolve_peer(&mut self, node: NodeId, address: Vec<u8>) -> Result<fabric::Peer> {
        self.renewal.faults.note_address(node, &address);
        if let Some(peer) = self.fabric_peers.get(&address) {
            return Ok(*peer);
        }
        self.renewal.check_address_limit(self.fabric_peers.len())?;
        let address = Address(address);
        let peer = self.addresses.insert(&address).map_err(of_fabric)?;
        self.fabric_peers.insert(address.0, peer);
        Ok(peer)
    }

    /// A node wants a topic: requests a ring, unless there is one.
    pub(super) fn add(&mut self, key: TopicKey, node: NodeId) {
        let Some(index) = self.topic_index.get(&WorkerTopicKey::Out(key)).copied() else {
            // The topic failed, which was reported.
            tracing::trace!(?key, %node, "destination added to a topic that is not sent any more");
            return;
        };
        let (connection, from, since) =
            (self.last_connection + 1, self.address.clone(), self.now.monotonic);
        let Some(topic) = self.outbound_topics.get(index) else { return };
        topic.outbound.add(node);
        if topic.connections.get(&node).is_some_and(|link| link.requested_since.is_none()) {
            return;
        }
        if !self.transport.port.can_accept() {
            // Otherwise the reader would have to keep a ring that is never accepted.
            let detail = "the endpoint has no capacity for another ring";
            let reason = Error::new(CONNECT, ErrorKind::TooMany, detail).on(node);
            self.note_ring_capacity(Some(&reason));
            self.events.send(WorkerEvent::Disconnected { key, node, side: Side::Writer, reason });
            return;
        }
        topic.connections.insert(
            node,
            OutboundConnection {
                connection,
                requested_since: Some(since),
                send_progress: SendProgress::default(),
            },
        );
        let facts = topic.facts;
        self.last_connection = connection;
        let lane_addresses = self.further_lane_addresses(self.lane_count_for(&facts).into());
        self.send_message(
            key,
            node,
            ConnectionMessage::ConnectRequest { connection, facts, from, lane_addresses },
        );
    }

    /// Addresses of as many lanes, without the first.
    fn further_lane_addresses(&self, lanes: usize) -> Vec<Vec<u8>> {
        let addresses = self.transport.port.lane_addresses().into_iter();
        let lane_addresses =
            addresses.take(lanes.saturating_sub(1)).map(|address| address.0).collect();
        fit_addresses(&self.address, lane_addresses)
    }

    /// Number of lanes for messages of such a topic.
    fn lane_count_for(&self, facts: &TopicParameters) -> u8 {
        let lanes = u8::try_from(self.transport.port.lanes()).unwrap_or(MAX_LANES).min(MAX_LANES);
        if facts.largest < MIN_STRIPED_LENGTH { 1 } else { lanes }
    }

    pub(super) fn handle_control_message(
        &mut self,
        key: TopicKey,
        node: NodeId,
        message: ConnectionMessage,
    ) {
        let name = match message.side() {
            Side::Writer => WorkerTopicKey::In(key, node),
            Side::Reader => WorkerTopicKey::Out(key),
        };
        let Some(index) = self.topic_index.get(&name).copied() else {
            return self.answer_unknown_topic(key, node, &message);
        };
        match message {
            ConnectionMessage::ConnectRequest { connection, facts, from, lane_addresses } => {
                let old =
                    self.inbound_topics.get(index).and_then(|topic| topic.inbound_ring.as_ref());
                let is_obsolete = old.is_some_and(|inbound_ring| inbound_ring.request.from != from);
                self.close_inbound_ring(index, is_obsolete);
                if let Some(topic) = self.inbound_topics.get(index) {
                    topic.request =
                        Some(ConnectRequest { connection, facts, from, lane_addresses });
                }
                self.ready(TopicSlot::In(index));
            }
            ConnectionMessage::Answer { connection, answer } => {
                let Some(topic) = self.inbound_topics.get(index) else { return };
                let Some(inbound_ring) = &topic.inbound_ring else { return };
                if inbound_ring.request.connection != connection || inbound_ring.is_connected {
                    return;
                }
                let (ring, from) = (inbound_ring.ring, inbound_ring.request.from.clone());
                let connected = self.resolve_peer(node, from).and_then(|peer| {
                    let connected = self.transport.port.connect(ring, peer, &answer);
                    connected.map_err(|error| Error::of(CONNECT, error))
                });
                match connected {
                    Ok(()) => {
                        if let Some(inbound_ring) =
                            self.inbound_topics.get(index).and_then(|t| t.inbound_ring.as_mut())
                        {
                            inbound_ring.is_connected = true;
                        }
                        let side = Side::Reader;
                        self.events.send(WorkerEvent::Connected { key, node, side });
                        self.ready(TopicSlot::In(index));
                    }
                    Err(error) => self.disconnect_inbound_ring(index, error),
                }
            }
            ConnectionMessage::StallCheck { connection, chunks, read } => {
                self.handle_stall_check(index, connection, (chunks, read));
            }
            ConnectionMessage::Offer { connection, ring, position, from, lane_addresses } => {
                let Some(topic) = self.outbound_topics.get(index) else { return };
                let is_requested = |link: &OutboundConnection| {
                    link.connection == connection && link.requested_since.is_some()
                };
                if !topic.connections.get(&node).is_some_and(is_requested) {
                    return;
                }
                if let Err(error) =
                    self.accept(index, node, (connection, position), &ring, (from, lane_addresses))
                {
                    self.disconnect_writer(index, node, Some(error));
                }
            }
            ConnectionMessage::Refused { connection, reason } => {
                if self.is_current(index, node, connection) {
                    self.disconnect_writer(index, node, None);
                    let error = Error::new(CONNECT, ErrorKind::Denied, reason).on(node);
                    self.report_failure(key, node, Side::Writer, error);
                }
            }
            ConnectionMessage::Restart { connection, reason } => {
                if self.is_current(index, node, connection) {
                    let reason = Error::new(CONNECT, ErrorKind::Closed, reason).on(node);
                    self.disconnect_writer(index, node, Some(reason));
                }
            }
        }
    }

    /// A message about a topic that the worker does not have, or not any more: it is ignored. A
    /// connect request is answered with a restart, so that the writer does not wait.
    fn answer_unknown_topic(&mut self, key: TopicKey, node: NodeId, message: &ConnectionMessage) {
        tracing::trace!(?key, %node, ?message, "connection message about an unknown topic");
        if let ConnectionMessage::ConnectRequest { connection, .. } = message {
            let reason = "the topic is not received now".to_owned();
            self.send_message(
                key,
                node,
                ConnectionMessage::Restart { connection: *connection, reason },
            );
        }
    }

    /// Whether this is the current connection to a node.
    fn is_current(&mut self, index: usize, node: NodeId, connection: u64) -> bool {
        let link = self.outbound_topics.get(index).and_then(|topic| topic.connections.get(&node));
        link.is_some_and(|link| link.connection == connection)
    }

    /// Accepts an offered ring.
    fn accept(
        &mut self,
        index: usize,
        node: NodeId,
        (connection, position): (u64, u64),
        offer: &fabric::ring::RingOffer,
        (from, lane_addresses): (Vec<u8>, Vec<Vec<u8>>),
    ) -> Result<()> {
        if offer.capacity < MIN_RING_SIZE / 2 {
            let detail = format!("offered ring of {} bytes is too small", offer.capacity);
            return Err(Error::new(CONNECT, ErrorKind::Malformed, detail));
        }
        let peer = self.resolve_peer(node, from)?;
        let longest = self.options.chunk.min(offer.capacity / 4).max(4 * MAX_PREFIX_LENGTH as u64);
        let lane_addresses: Vec<_> = lane_addresses.into_iter().map(Address).collect();
        let accepted = self
            .transport
            .port
            .accept_on_lanes(peer, &lane_addresses, offer, longest)
            .map_err(of_fabric);
        self.note_ring_capacity(accepted.as_ref().err());
        let (ring, answer) = accepted?;
        let Some(topic) = self.outbound_topics.get(index) else { return Ok(()) };
        topic.connections.insert(
            node,
            OutboundConnection {
                connection,
                requested_since: None,
                send_progress: SendProgress::default(),
            },
        );
        topic.outbound.connect(node, ring, position, &mut self.transport);
        let key = topic.key;
        self.sender_topics.insert(ring, index);
        self.send_message(key, node, ConnectionMessage::Answer { connection, answer });
        self.events.send(WorkerEvent::Connected { key, node, side: Side::Writer });
        self.ready(TopicSlot::Out(index));
        Ok(())
    }

    /// Offers a ring for a topic whose writer requested one.
    pub(super) fn offer_ring(&mut self, index: usize) {
        let (from, largest_ring) = (self.address.clone(), self.largest_ring());
        let Some(topic) = self.inbound_topics.get(index) else { return };
        let (key, node) = (topic.key, topic.origin);
        if !self.renewal.may_offer_ring(node, largest_ring) {
            // The request waits for a new endpoint.
            return;
        }
        let Some(request) = topic.request.take() else { return };
        let connection = request.connection;
        topic.inbound.set_largest(request.facts.largest);
        let position = topic.inbound.expected();
        let made = self.make_inbound_ring(index, request);
        self.note_ring_capacity(made.as_ref().err());
        match made {
            Ok(ring) => {
                let lane_addresses = self.further_lane_addresses(ring.lanes.len());
                self.send_message(
                    key,
                    node,
                    ConnectionMessage::Offer { connection, ring, position, from, lane_addresses },
                );
            }
            Err(reason) if reason.kind() == ErrorKind::TooMany => {
                // Capacity may be free later: the writer requests again, with growing backoff.
                let detail = shortened(&reason.to_string(), MAX_REASON_LENGTH).to_owned();
                self.send_message(
                    key,
                    node,
                    ConnectionMessage::Restart { connection, reason: detail },
                );
                self.events.send(WorkerEvent::Disconnected {
                    key,
                    node,
                    side: Side::Reader,
                    reason,
                });
            }
            Err(error) => {
                let reason = shortened(&error.to_string(), MAX_REASON_LENGTH).to_owned();
                self.send_message(key, node, ConnectionMessage::Refused { connection, reason });
                self.report_failure(key, node, Side::Reader, error);
            }
        }
    }

    fn make_inbound_ring(
        &mut self,
        index: usize,
        request: ConnectRequest,
    ) -> Result<fabric::ring::RingOffer> {
        let since = self.now.monotonic;
        let lanes =
            usize::from(self.lane_count_for(&request.facts)).min(1 + request.lane_addresses.len());
        // Only as many lanes as a message has space for.
        let lanes = 1 + self.further_lane_addresses(lanes).len();
        let Some(node) = self.inbound_topics.get(index).map(|topic| topic.origin) else {
            return Err(unknown());
        };
        // Before the writer knows the ring.
        self.resolve_peer(node, request.from.clone())?;
        let lane_addresses: Vec<_> =
            request.lane_addresses.iter().take(lanes - 1).cloned().map(Address).collect();
        self.transport.port.insert_lane_addresses(&lane_addresses).map_err(of_fabric)?;
        let capacity =
            self.options.ring_size_for(lanes, request.facts.largest, request.facts.depth);
        let Some(topic) = self.inbound_topics.get(index) else { return Err(unknown()) };
        let options =
            RingOptions::new(self.transport.port.endpoint(), capacity).map_err(of_fabric)?;
        let (ring, pinned) = match &topic.device {
            None => {
                let memory = fabric::HostMemory::zeroed(capacity as usize).map_err(of_fabric)?;
                let ring = self.transport.port.offer_on_lanes(&options, lanes, memory);
                (ring.map_err(of_fabric)?, None)
            }
            Some(device) => {
                let segment = Segment::create(RING, capacity as usize);
                let segment = segment.map_err(|error| Error::of(CONNECT, error))?;
                segment.mark_ready();
                let pinned = transfer::pin(&segment, device);
                let pinned = pinned.map_err(|error| Error::of(CONNECT, error))?;
                let ring =
                    self.transport.port.offer_on_lanes(&options, lanes, SegmentMemory(segment));
                (ring.map_err(of_fabric)?, Some(pinned))
            }
        };
        let offer = match self.transport.port.ring_offer(ring) {
            Ok(offer) => offer,
            Err(error) => {
                self.transport.port.forget(ring);
                return Err(of_fabric(error));
            }
        };
        self.receiver_topics.insert(ring, index);
        topic.inbound_ring = Some(InboundRing {
            ring,
            pinned,
            request,
            since,
            is_connected: false,
            suspicion: None,
        });
        Ok(offer)
    }

    /// Closes a ring that is not usable any more.
    pub(super) fn disconnect_inbound_ring(&mut self, index: usize, reason: Error) {
        if reason.kind() != ErrorKind::Closed {
            self.request_restart(index, &reason.to_string());
        }
        self.close_inbound_ring(index, false);
        if let Some(topic) = self.inbound_topics.get(index) {
            let (key, node, side) = (topic.key, topic.origin, Side::Reader);
            self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
        }
        self.ready(TopicSlot::In(index));
    }

    /// Tells the writer that its ring is not usable any more.
    pub(super) fn request_restart(&mut self, index: usize, reason: &str) {
        let Some(topic) = self.inbound_topics.get(index) else { return };
        let Some(connection) =
            topic.inbound_ring.as_ref().map(|inbound_ring| inbound_ring.request.connection)
        else {
            return;
        };
        let (key, node, reason) =
            (topic.key, topic.origin, shortened(reason, MAX_REASON_LENGTH).to_owned());
        self.send_message(key, node, ConnectionMessage::Restart { connection, reason });
    }

    /// Closes a topic's ring. No answer is waited for if the writer is gone or has restarted.
    pub(super) fn close_inbound_ring(&mut self, index: usize, is_gone: bool) {
        let Some(topic) = self.inbound_topics.get(index) else { return };
        topic.request = None;
        let Some(inbound_ring) = topic.disconnect() else { return };
        let node = topic.origin;
        self.receiver_topics.remove(&inbound_ring.ring);
        if is_gone {
            self.reclaim_ring(node, |port| port.forget(inbound_ring.ring));
        } else {
            match self.reclaim_ring(node, |port| port.close_receiver(inbound_ring.ring)) {
                Ok(_) => self.closing_rings.push((inbound_ring.ring, node, self.now.monotonic)),
                Err(error) => tracing::debug!(%error, "closing a ring failed"),
            }
        }
        self.ready(TopicSlot::In(index));
    }

    /// Ends all connections with a node.
    pub(super) fn lose_node(&mut self, node: NodeId) {
        self.renewal.faults.cancel_renewal(node);
        for index in 0..self.outbound_topics.len() {
            if self
                .outbound_topics
                .get(index)
                .is_some_and(|topic| topic.connections.contains_key(&node))
            {
                self.disconnect_writer(index, node, Some(disconnected(node)));
            }
        }
        for index in 0..self.inbound_topics.len() {
            let is_of_node = self
                .inbound_topics
                .get(index)
                .is_some_and(|t| t.origin == node && t.inbound_ring.is_some());
            if is_of_node {
                self.close_inbound_ring(index, true);
                if let Some(topic) = self.inbound_topics.get(index) {
                    let (key, side, reason) = (topic.key, Side::Reader, disconnected(node));
                    self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
                }
            }
        }
    }

    /// Disconnects nodes that do not answer within the timeout.
    pub(super) fn expire_requests(&mut self, timeout: u64) {
        let now = self.now.monotonic;
        let late = |node: NodeId| {
            let detail = "the node did not answer within the timeout";
            Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail).on(node)
        };
        for index in 0..self.outbound_topics.len() {
            let Some(topic) = self.outbound_topics.get(index) else { continue };
            let is_late = |link: &OutboundConnection| {
                link.requested_since.is_some_and(|since| now - since > timeout)
            };
            let nodes =
                topic.connections.iter().filter(|(_, link)| is_late(link)).map(|(node, _)| *node);
            for node in nodes.collect::<Vec<_>>() {
                self.disconnect_writer(index, node, Some(late(node)));
            }
        }
        for index in 0..self.inbound_topics.len() {
            let Some(topic) = self.inbound_topics.get(index) else { continue };
            let is_late = topic.inbound_ring.as_ref().is_some_and(|inbound_ring| {
                !inbound_ring.is_connected && now - inbound_ring.since > timeout
            });
            if is_late {
                let origin = topic.origin;
                self.disconnect_inbound_ring(index, late(origin));
            }
        }
    }
}

/// Exhausted capacity, which a retry may find free, has its own kind.
#[cold]
fn of_fabric(error: fabric::Error) -> Error {
    let kind = match error.kind() {
        fabric::ErrorKind::ResourceExhausted => ErrorKind::TooMany,
        _ => ErrorKind::Failed,
    };
    Error::because(CONNECT, kind, error)
}

#[cold]
fn unknown() -> Error {
    Error::new(CONNECT, ErrorKind::NotFound, "the worker does not have the topic")
}

#[cold]
fn disconnected(node: NodeId) -> Error {
    Error::new(CONNECT, ErrorKind::Closed, "the node disconnected").on(node)
}
