//! Connections: requested, offered, answered and lost.

use fabric::ring::RingEvent;

use super::WorkerLoop;
use crate::error::{Error, ErrorKind, Result};
use crate::replication::connection_messages::{ConnectionMessage, MAX_REASON_LENGTH};
use crate::replication::outbound::RingForm;
use crate::replication::probe::RingProbe;
use crate::replication::worker::topics::table::{TopicSlot, WorkerTopicKey};
use crate::replication::worker::{CONNECT, ConnectRequest, RingEnds};
use crate::replication::{NodeId, Side, TopicKey, WorkerEvent};
use crate::text::shortened;

impl WorkerLoop {
    fn send_message(&self, key: TopicKey, node: NodeId, message: ConnectionMessage) {
        self.events.send(WorkerEvent::ControlMessage { key, node, message });
    }

    pub(super) fn report_failure(&self, key: TopicKey, node: NodeId, side: Side, error: Error) {
        self.events.send(WorkerEvent::Failed { key, node: Some(node), side, error });
    }

    /// A node wants a topic: requests a ring, unless there is one.
    pub(super) fn add(&mut self, key: TopicKey, node: NodeId) {
        let Some(index) = self.topics.index_of(WorkerTopicKey::Out(key)) else {
            // The topic failed, which was reported.
            tracing::trace!(?key, %node, "destination added to a topic that is not sent any more");
            return;
        };
        let Some(topic) = self.topics.outbound(index) else { return };
        if !topic.add(node) {
            return;
        }
        // Otherwise the reader would have to keep a ring that is never accepted.
        if let Err(reason) = self.endpoint.check_capacity(node) {
            let side = Side::Writer;
            return self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
        }
        let (connection, from) = (self.topics.next_connection(), self.endpoint.address().to_vec());
        let Some(topic) = self.topics.outbound(index) else { return };
        let parameters = topic.request(node, connection, self.now.monotonic);
        let direct = self.endpoint.device_rings().as_writer(topic.device());
        let lanes = self.endpoint.lane_count_for(&parameters);
        let lane_addresses = self.endpoint.further_lane_addresses(lanes);
        let request = ConnectionMessage::ConnectRequest {
            connection,
            parameters,
            from,
            lane_addresses,
            direct,
        };
        self.send_message(key, node, request);
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
        let Some(index) = self.topics.index_of(name) else {
            return self.answer_unknown_topic(key, node, &message);
        };
        match message {
            ConnectionMessage::ConnectRequest {
                connection,
                parameters,
                from,
                lane_addresses,
                direct,
            } => {
                let topic = self.topics.inbound(index);
                let is_obsolete = topic.is_some_and(|topic| topic.has_obsolete_ring(&from));
                self.note_ended_ring(index);
                self.close_inbound_ring(index, is_obsolete);
                if let Some(topic) = self.topics.inbound(index) {
                    let request =
                        ConnectRequest { connection, parameters, from, lane_addresses, direct };
                    topic.set_request(Some(request));
                }
                self.ready(TopicSlot::In(index));
            }
            ConnectionMessage::Answer { connection, answer } => {
                let Some(topic) = self.topics.inbound(index) else { return };
                let Some((ring, from)) = topic.offered_ring(connection) else { return };
                match self.endpoint.connect(node, ring, from.to_vec(), &answer) {
                    Ok(()) => {
                        topic.set_connected();
                        let side = Side::Reader;
                        self.events.send(WorkerEvent::Connected { key, node, side });
                        self.ready(TopicSlot::In(index));
                    }
                    Err(error) => self.disconnect_inbound_ring(index, false, error),
                }
            }
            ConnectionMessage::StallCheck { connection, chunks, read } => {
                let (now, port) = (self.now.monotonic, self.endpoint.transport().port());
                if let Some(topic) = self.topics.inbound(index) {
                    topic.handle_stall_check(now, connection, (chunks, read), port);
                }
            }
            ConnectionMessage::Offer {
                connection,
                ring,
                position,
                from,
                lane_addresses,
                is_probed,
            } => {
                if !self.is_current(index, node, connection, true) {
                    return;
                }
                let offer = (&ring, is_probed);
                if let Err(error) =
                    self.accept(index, node, (connection, position), offer, (from, lane_addresses))
                {
                    self.disconnect_writer(index, node, Some(error));
                }
            }
            ConnectionMessage::Refused { connection, reason } => {
                if self.is_current(index, node, connection, false) {
                    self.disconnect_writer(index, node, None);
                    let error = Error::new(CONNECT, ErrorKind::Denied, reason).at(node);
                    self.report_failure(key, node, Side::Writer, error);
                }
            }
            ConnectionMessage::Restart { connection, reason } => {
                if self.is_current(index, node, connection, false) {
                    let reason = Error::new(CONNECT, ErrorKind::Closed, reason).at(node);
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
            let restart = ConnectionMessage::Restart { connection: *connection, reason };
            self.send_message(key, node, restart);
        }
    }

    fn is_current(&mut self, index: usize, node: NodeId, number: u64, is_requested: bool) -> bool {
        let topic = self.topics.outbound(index);
        topic.is_some_and(|topic| topic.is_current(node, number, is_requested))
    }

    /// Accepts an offered ring.
    fn accept(
        &mut self,
        index: usize,
        node: NodeId,
        (connection, position): (u64, u64),
        (offer, is_probed): (&fabric::ring::RingOffer, bool),
        addresses: (Vec<u8>, Vec<Vec<u8>>),
    ) -> Result<()> {
        let Some(topic) = self.topics.outbound(index) else { return Ok(()) };
        if offer.inline_data > 0 && self.endpoint.device_rings().as_writer(topic.device()).is_none()
        {
            let detail = "offered ring lies in device memory, which this node does not write to";
            return Err(Error::new(CONNECT, ErrorKind::Malformed, detail));
        }
        let (ring, answer) = self.endpoint.accept(node, offer, addresses, self.options.chunk)?;
        let Some(topic) = self.topics.outbound(index) else { return Ok(()) };
        let form = match offer.inline_data {
            0 => RingForm::Host,
            _ => {
                let probe = is_probed.then(|| RingProbe::new(connection, offer.capacity));
                RingForm::Device { probe }
            }
        };
        if let RingForm::Device { probe: Some(probe) } = &form {
            let device = topic.device();
            if let Err(error) = self.endpoint.transport().begin_probe(ring, probe, device) {
                self.endpoint.transport().port_mut().drop_sender(ring);
                return Err(error);
            }
        }
        topic.connect(node, (connection, position), (ring, form), self.endpoint.transport());
        let key = topic.key();
        self.topics.ring_opened(RingEvent::Sender(ring), TopicSlot::Out(index));
        self.send_message(key, node, ConnectionMessage::Answer { connection, answer });
        self.events.send(WorkerEvent::Connected { key, node, side: Side::Writer });
        self.ready(TopicSlot::Out(index));
        Ok(())
    }

    /// Offers a ring for a topic whose writer requested one.
    pub(super) fn offer_ring(&mut self, index: usize) {
        let Some(topic) = self.topics.inbound(index) else { return };
        let (key, node) = topic.id();
        if !self.endpoint.may_offer_ring(node) {
            // The request waits for a new endpoint.
            return;
        }
        let Some((request, position)) = topic.take_request() else { return };
        let connection = request.connection;
        let made = self.endpoint.offer(node, &request, topic.device(), &self.options);
        self.endpoint.note_ring_capacity(made.as_ref().err());
        match made {
            Ok((ring, memory, is_probed)) => {
                let event = RingEvent::Receiver(memory.id());
                let probe = is_probed.then(|| RingProbe::new(connection, ring.capacity));
                topic.set_ring(memory, probe, request, self.now.monotonic);
                self.topics.ring_opened(event, TopicSlot::In(index));
                let from = self.endpoint.address().to_vec();
                let lane_addresses = self.endpoint.further_lane_addresses(ring.lanes.len());
                let offer = ConnectionMessage::Offer {
                    connection,
                    ring,
                    position,
                    from,
                    lane_addresses,
                    is_probed,
                };
                self.send_message(key, node, offer);
            }
            Err(error) => {
                let reason = shortened(&error.to_string(), MAX_REASON_LENGTH).to_owned();
                if error.kind() == ErrorKind::TooMany {
                    // Capacity may be free later: the writer requests again, with growing backoff.
                    self.send_message(key, node, ConnectionMessage::Restart { connection, reason });
                    let (side, reason) = (Side::Reader, error);
                    self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
                } else {
                    self.send_message(key, node, ConnectionMessage::Refused { connection, reason });
                    self.report_failure(key, node, Side::Reader, error);
                }
            }
        }
    }

    /// Closes a ring that is not usable any more, or whose writer is gone.
    pub(super) fn disconnect_inbound_ring(&mut self, index: usize, is_gone: bool, reason: Error) {
        if reason.kind() != ErrorKind::Closed {
            self.request_restart(index, &reason.to_string());
        }
        self.close_inbound_ring(index, is_gone);
        if let Some(topic) = self.topics.inbound(index) {
            let ((key, node), side) = (topic.id(), Side::Reader);
            self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
        }
        self.ready(TopicSlot::In(index));
    }

    /// Counts a topic's ring that ends, if it lies in device memory: after too many of them without a
    /// message, further rings lie in host memory.
    pub(super) fn note_ended_ring(&mut self, index: usize) {
        let ring = self.topics.inbound(index).and_then(|topic| topic.direct_ring());
        if let Some((ends, has_messages)) = ring {
            self.endpoint.device_rings().ring_ended(ends, has_messages);
        }
    }

    /// The fabric was wrong about device memory: ends all rings with these ends, and keeps their
    /// memory.
    pub(super) fn end_direct_rings(&mut self, ends: RingEnds, cause: &str) {
        for index in 0..self.topics.inbound_end() {
            let Some(topic) = self.topics.inbound(index) else { continue };
            if topic.direct_ring().is_none_or(|(found, _)| found != ends) {
                continue;
            }
            if let Some(regions) = topic.take_direct_memory() {
                self.endpoint.device_rings().quarantine(regions, self.now.monotonic);
            }
            let reason = Error::new("probe ring in device memory", ErrorKind::Failed, cause);
            self.disconnect_inbound_ring(index, false, reason);
        }
    }

    /// Tells the writer that its ring is not usable any more.
    pub(super) fn request_restart(&mut self, index: usize, reason: &str) {
        let Some(topic) = self.topics.inbound(index) else { return };
        let Some(connection) = topic.connection() else { return };
        let (key, node) = topic.id();
        let reason = shortened(reason, MAX_REASON_LENGTH).to_owned();
        self.send_message(key, node, ConnectionMessage::Restart { connection, reason });
    }

    /// Closes a topic's ring. No answer is waited for if the writer is gone or has restarted.
    pub(super) fn close_inbound_ring(&mut self, index: usize, is_gone: bool) {
        let Some(topic) = self.topics.inbound(index) else { return };
        topic.set_request(None);
        let Some(ring) = topic.disconnect() else { return };
        let (_, node) = topic.id();
        self.topics.ring_closed(RingEvent::Receiver(ring));
        self.endpoint.close_ring(node, ring, is_gone, self.now.monotonic);
        self.ready(TopicSlot::In(index));
    }

    /// Ends all connections with a node, which may be gone.
    pub(super) fn disconnect_node(
        &mut self,
        node: NodeId,
        is_gone: bool,
        reason: impl Fn() -> Error,
    ) {
        for index in self.topics.outbound_to(node) {
            self.disconnect_writer(index, node, Some(reason()));
        }
        for index in self.topics.inbound_from(node) {
            self.disconnect_inbound_ring(index, is_gone, reason());
        }
    }

    /// Disconnects nodes that do not answer within the timeout.
    pub(super) fn expire_requests(&mut self, timeout: u64) {
        let now = self.now.monotonic;
        let late = |node: NodeId| {
            let detail = "the node did not answer within the timeout";
            Error::new(CONNECT, ErrorKind::DeadlineExceeded, detail).at(node)
        };
        for index in 0..self.topics.outbound_end() {
            let Some(topic) = self.topics.outbound(index) else { continue };
            for node in topic.late_nodes(now, timeout) {
                self.disconnect_writer(index, node, Some(late(node)));
            }
        }
        for index in 0..self.topics.inbound_end() {
            let Some(topic) = self.topics.inbound(index) else { continue };
            if topic.is_answer_late(now, timeout) {
                let (_, node) = topic.id();
                self.disconnect_inbound_ring(index, false, late(node));
            }
        }
    }
}
