//! The topics of a worker, and their connections.

mod stall_detection;
pub(super) mod table;

use std::collections::HashMap;

use fabric::MemoryRegion;
use fabric::ring::{ChunkView, Port, ReceiverId, SenderId};
use gpu::Device;

use self::stall_detection::{MAX_DOUBLINGS, SendProgress, StallSuspicion, StallVerdict};
use super::ready_state::ReadyState;
use super::{
    ConnectRequest, Counters, InboundTopicOptions, NodeId, RingEnds, RingExtent, TopicKey,
    TopicOptions, TopicParameters, WorkerEvent, WorkerEvents,
};
use crate::error::Result;
use crate::replication::inbound::Inbound;
use crate::replication::outbound::{Outbound, RingForm};
use crate::replication::probe::RingProbe;
use crate::replication::transport::{CopyHandle, RingDeviceAccess, Transport};
use crate::replication::{
    ClockReading, ConnectionMessage, OutboundOptions, PayloadLocation, Progress, Sink, Source,
    TurnFailure,
};

/// State of a connection to a node, at the writer.
#[derive(Debug, Clone, Copy)]
struct OutboundConnection {
    connection: u64,
    /// Since when a ring is requested; None: messages flow.
    requested_since: Option<u64>,
    send_progress: SendProgress,
}

pub(super) struct OutboundTopic {
    key: TopicKey,
    parameters: TopicParameters,
    source: Box<dyn Source>,
    /// The device of its source's memory.
    device: Option<Device>,
    outbound: Outbound<Transport>,
    connections: HashMap<NodeId, OutboundConnection>,
    ready: ReadyState,
}

impl OutboundTopic {
    pub(super) fn new(
        key: TopicKey,
        TopicOptions { parameters, device, .. }: TopicOptions,
        source: Box<dyn Source>,
        options: OutboundOptions,
    ) -> Self {
        Self {
            key,
            parameters,
            source,
            device,
            outbound: Outbound::new(options),
            connections: HashMap::new(),
            ready: ReadyState::default(),
        }
    }

    pub(super) fn key(&self) -> TopicKey {
        self.key
    }

    pub(super) fn advance(
        &mut self,
        now: ClockReading,
        transport: &mut Transport,
    ) -> Result<Progress> {
        self.outbound.advance(now, &mut *self.source, transport)
    }

    pub(super) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(super) fn outbound(&mut self) -> &mut Outbound<Transport> {
        &mut self.outbound
    }

    /// Retains messages for a node that wants them. True if it needs a connection.
    pub(super) fn add(&mut self, node: NodeId) -> bool {
        self.outbound.add(node);
        self.connections.get(&node).is_none_or(|link| link.requested_since.is_some())
    }

    fn set_connection(&mut self, node: NodeId, connection: u64, requested_since: Option<u64>) {
        let send_progress = SendProgress::default();
        let link = OutboundConnection { connection, requested_since, send_progress };
        self.connections.insert(node, link);
    }

    /// A ring of a node is requested now.
    pub(super) fn request(&mut self, node: NodeId, connection: u64, now: u64) -> TopicParameters {
        self.set_connection(node, connection, Some(now));
        self.parameters
    }

    /// Returns true if this is the current connection to a node, with a requested ring if that
    /// matters.
    pub(super) fn is_current(&self, node: NodeId, number: u64, is_requested: bool) -> bool {
        self.connections.get(&node).is_some_and(|link| {
            link.connection == number && (!is_requested || link.requested_since.is_some())
        })
    }

    /// Writes to a node from a position on, into this ring.
    pub(super) fn connect(
        &mut self,
        node: NodeId,
        (connection, position): (u64, u64),
        ring: (SenderId, RingForm),
        transport: &mut Transport,
    ) {
        self.set_connection(node, connection, None);
        self.outbound.connect(node, ring, position, transport);
    }

    /// Ends the connection to a node. True if there was one, or a request.
    pub(super) fn disconnect(&mut self, node: NodeId, transport: &mut Transport) -> bool {
        self.outbound.disconnect(node, transport);
        self.connections.remove(&node).is_some()
    }

    /// Nodes with a connection, or a request.
    pub(super) fn nodes(&self) -> Vec<NodeId> {
        self.connections.keys().copied().collect()
    }

    /// Nodes that did not answer a request within the timeout.
    pub(super) fn late_nodes(&self, now: u64, timeout: u64) -> Vec<NodeId> {
        let is_late = |link: &OutboundConnection| {
            link.requested_since.is_some_and(|since| now - since > timeout)
        };
        let late = self.connections.iter().filter(|(_, link)| is_late(link));
        late.map(|(node, _)| *node).collect()
    }

    pub(super) fn count(&self, port: &Port, counters: &mut Counters) {
        for (node, mut counted) in self.outbound.counters() {
            let sender = self.outbound.ring_of(node).and_then(|ring| port.sender(ring).ok());
            counted.lanes = sender.map_or(0, |sender| sender.lanes() as u64);
            counters.sent.push((self.key, node, counted));
        }
    }

    /// Sends checks for stalled connections.
    pub(super) fn send_stall_checks(&mut self, now: u64, port: &Port, events: &WorkerEvents) {
        for (node, link) in &mut self.connections {
            let ring = self.outbound.ring_of(*node);
            let Some(ring) = ring.filter(|_| link.requested_since.is_none()) else { continue };
            let Ok(sender) = port.sender(ring) else { continue };
            let (chunks, read) = (sender.statistics().chunks, sender.writer().known_head());
            let (is_unread, is_busy) = (sender.writer().unread() > 0, self.outbound.is_busy(*node));
            if link.send_progress.poll(now, (chunks, read), is_unread || is_busy) {
                // A chunk that waits for the provider counts as expected.
                let chunks = chunks + u64::from(!is_unread);
                let connection = link.connection;
                let message = ConnectionMessage::StallCheck { connection, chunks, read };
                events.send(WorkerEvent::ControlMessage { key: self.key, node: *node, message });
            }
        }
    }
}

/// A ring in device memory: its ends, its extent, and the memory as registered for each lane.
pub(super) type DirectRing = (RingEnds, RingExtent, Vec<MemoryRegion>);

/// A ring that is offered, and its memory as the topic's device reaches it.
pub(super) struct InboundRingMemory {
    id: ReceiverId,
    device_access: Option<RingDeviceAccess>,
    direct: Option<DirectRing>,
    /// Why a ring of a topic on a device lies in host memory.
    staged: Option<String>,
}

impl InboundRingMemory {
    pub(super) fn in_host(
        id: ReceiverId,
        device_access: Option<RingDeviceAccess>,
        staged: Option<String>,
    ) -> Self {
        Self { id, device_access, direct: None, staged }
    }

    pub(super) fn on_device(
        id: ReceiverId,
        device_access: RingDeviceAccess,
        direct: DirectRing,
    ) -> Self {
        Self { id, device_access: Some(device_access), direct: Some(direct), staged: None }
    }

    pub(super) fn id(&self) -> ReceiverId {
        self.id
    }
}

struct InboundRing {
    memory: InboundRingMemory,
    request: ConnectRequest,
    since: u64,
    /// Messages of the topic that arrived before it.
    messages_before: u64,
    is_connected: bool,
    /// Difference between the writer's counts and the local ones.
    suspicion: Option<StallSuspicion>,
}

impl InboundRing {
    /// Chunks received, and the credit sent to the writer.
    fn received_counts(&self, port: &Port) -> Option<(u64, u64)> {
        let reader = port.receiver(self.memory.id).ok()?.reader();
        Some((reader.received_chunks(), reader.credited_head()))
    }
}

pub(super) struct InboundTopic {
    key: TopicKey,
    origin: NodeId,
    sink: Box<dyn Sink>,
    device: Option<Device>,
    inbound: Inbound<ChunkView, PayloadLocation, CopyHandle>,
    ring: Option<InboundRing>,
    /// A request to be answered once the last connection is drained.
    request: Option<ConnectRequest>,
    /// Memory that copies of a closed ring may still read.
    previous_access: Option<RingDeviceAccess>,
    /// The topic released chunks, and the writer may not have the credit.
    has_unacknowledged: bool,
    /// Restarts without effect since its connection stalled.
    doublings: u32,
    ready: ReadyState,
}

impl InboundTopic {
    pub(super) fn new(
        key: TopicKey,
        origin: NodeId,
        options: InboundTopicOptions,
        timeout: u64,
    ) -> Self {
        let InboundTopicOptions { from, device, sink } = options;
        Self {
            key,
            origin,
            sink,
            device,
            inbound: Inbound::new(from, 0, timeout),
            ring: None,
            request: None,
            previous_access: None,
            has_unacknowledged: false,
            doublings: 0,
            ready: ReadyState::default(),
        }
    }

    /// The topic's key, and the node that it is received from.
    pub(super) fn id(&self) -> (TopicKey, NodeId) {
        (self.key, self.origin)
    }

    pub(super) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    pub(super) fn advance(
        &mut self,
        now: ClockReading,
        transport: &mut Transport,
    ) -> std::result::Result<Progress, TurnFailure> {
        let ring = self.ring.as_ref();
        let device_access = ring.and_then(|ring| ring.memory.device_access.as_ref());
        let mut reading = transport.input(ring.map(|ring| ring.memory.id), device_access);
        let advanced = self.inbound.advance(now, &mut reading, &mut *self.sink);
        let has_taken = reading.has_taken();
        if self.inbound.is_drained() {
            self.previous_access = None;
        }
        self.has_unacknowledged |=
            has_taken || matches!(&advanced, Ok(progress) if progress.has_moved);
        advanced
    }

    /// Continues draining; true if it is complete.
    fn drain(&mut self, transport: &mut Transport) -> bool {
        self.inbound.drain(&mut transport.input(None, None), &mut *self.sink)
    }

    /// Takes the ring, to be closed.
    pub(super) fn disconnect(&mut self) -> Option<ReceiverId> {
        let InboundRingMemory { id, device_access, .. } = self.ring.take()?.memory;
        self.inbound.disconnect();
        self.previous_access = device_access;
        Some(id)
    }

    /// The ends and extent of its ring in device memory, if the probe has passed since the last call.
    pub(super) fn take_passed_probe(&mut self) -> Option<(RingEnds, RingExtent)> {
        if !self.inbound.take_passed_probe() {
            return None;
        }
        let InboundRingMemory { device_access, direct, .. } = &mut self.ring.as_mut()?.memory;
        device_access.iter_mut().for_each(RingDeviceAccess::end_probe);
        direct.as_ref().map(|(ends, extent, _)| (*ends, *extent))
    }

    /// The ends of its ring, if that lies in device memory, and whether a message arrived by it.
    pub(super) fn direct_ring(&self) -> Option<(RingEnds, bool)> {
        let ring = self.ring.as_ref()?;
        let (ends, ..) = ring.memory.direct.as_ref()?;
        Some((*ends, self.inbound.counters().messages > ring.messages_before))
    }

    /// The memory of its ring, to be kept.
    pub(super) fn take_direct_memory(&mut self) -> Option<Vec<MemoryRegion>> {
        self.ring.as_mut()?.memory.direct.take().map(|(.., regions)| regions)
    }

    /// The connection of its ring, if there is one.
    pub(super) fn connection(&self) -> Option<u64> {
        self.ring.as_ref().map(|ring| ring.request.connection)
    }

    /// Returns true if the topic's ring is for another address of the writer.
    pub(super) fn has_obsolete_ring(&self, from: &[u8]) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.request.from != from)
    }

    pub(super) fn set_request(&mut self, request: Option<ConnectRequest>) {
        self.request = request;
    }

    pub(super) fn can_answer(&self) -> bool {
        self.request.is_some() && self.inbound.is_drained()
    }

    /// Takes the request to be answered, with the first position that is lacking.
    pub(super) fn take_request(&mut self) -> Option<(ConnectRequest, u64)> {
        let request = self.request.take()?;
        self.inbound.set_largest(request.parameters.largest);
        Some((request, self.inbound.expected()))
    }

    /// A ring was offered now.
    pub(super) fn set_ring(
        &mut self,
        memory: InboundRingMemory,
        probe: Option<RingProbe>,
        request: ConnectRequest,
        now: u64,
    ) {
        self.inbound.expect_probe(probe);
        self.ring = Some(InboundRing {
            memory,
            request,
            since: now,
            messages_before: self.inbound.counters().messages,
            is_connected: false,
            suspicion: None,
        });
    }

    /// The ring offered for a connection, not connected yet, and the address of its writer.
    pub(super) fn offered_ring(&self, connection: u64) -> Option<(ReceiverId, &[u8])> {
        let is_offered =
            |ring: &&InboundRing| ring.request.connection == connection && !ring.is_connected;
        self.ring.as_ref().filter(is_offered).map(|ring| (ring.memory.id, &*ring.request.from))
    }

    pub(super) fn set_connected(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.is_connected = true;
        }
    }

    /// Returns true if the writer did not answer an offer within the timeout.
    pub(super) fn is_answer_late(&self, now: u64, timeout: u64) -> bool {
        let ring = self.ring.as_ref();
        ring.is_some_and(|ring| !ring.is_connected && now - ring.since > timeout)
    }

    pub(super) fn has_unacknowledged(&self) -> bool {
        self.has_unacknowledged
    }

    /// Returns credit to the writer.
    pub(super) fn acknowledge(&mut self, port: &mut Port, is_quiet: bool) -> fabric::Result<()> {
        let Some(ring) = self.ring.as_ref().filter(|ring| ring.is_connected) else {
            self.has_unacknowledged &= self.ring.is_some();
            return Ok(());
        };
        let returned = port.return_credit(ring.memory.id, is_quiet);
        if is_quiet || returned.is_err() {
            // Credit may still wait for the write of an earlier one.
            let receiver = port.receiver(ring.memory.id);
            self.has_unacknowledged =
                returned.is_ok() && receiver.is_ok_and(|receiver| receiver.has_unsent_credit());
        }
        returned.map(drop)
    }

    pub(super) fn count(&self, port: &Port, counters: &mut Counters) {
        let mut counted = self.inbound.counters();
        let memory = self.ring.as_ref().map(|ring| &ring.memory);
        let receiver = memory.and_then(|memory| port.receiver(memory.id).ok());
        counted.is_direct = memory.is_some_and(|memory| memory.direct.is_some());
        if let Some(cause) = memory.and_then(|memory| memory.staged.clone()) {
            counters.staged.push((self.key, self.origin, cause));
        }
        counted.lanes = receiver.map_or(0, |receiver| receiver.lanes() as u64);
        counters.received.push((self.key, self.origin, counted));
    }

    /// Handles the writer's check of a connection.
    pub(super) fn handle_stall_check(
        &mut self,
        now: u64,
        connection: u64,
        reported: (u64, u64),
        port: &Port,
    ) {
        let is_current =
            |ring: &&mut InboundRing| ring.is_connected && ring.request.connection == connection;
        let Some(ring) = self.ring.as_mut().filter(is_current) else { return };
        if let Some(received) = ring.received_counts(port) {
            let suspicion = StallSuspicion::update(ring.suspicion, now, reported, received);
            ring.suspicion = Some(suspicion);
        }
    }

    /// Evaluates a suspicion. True if the connection is found to be stalled.
    pub(super) fn poll_stall(&mut self, now: u64, port: &Port) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        let Some(suspicion) = ring.suspicion else { return false };
        let Some((received, _)) = ring.received_counts(port) else { return false };
        let verdict = suspicion.poll(now, received, self.doublings);
        if verdict == StallVerdict::Pending {
            return false;
        }
        ring.suspicion = None;
        let is_stalled = verdict == StallVerdict::Stalled;
        self.doublings = if is_stalled { (self.doublings + 1).min(MAX_DOUBLINGS) } else { 0 };
        is_stalled
    }
}
