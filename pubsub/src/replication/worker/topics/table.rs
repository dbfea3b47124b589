//! The topics of a worker by index, by key and by ring.

use std::collections::HashMap;
use std::mem;

use fabric::ring::RingEvent;

use super::{InboundTopic, OutboundTopic};
use crate::replication::slab::Slab;
use crate::replication::transport::Transport;
use crate::replication::worker::ready_state::ReadyState;
use crate::replication::{ClockReading, NodeId, TopicKey};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum WorkerTopicKey {
    Out(TopicKey),
    In(TopicKey, NodeId),
}

/// The index of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TopicSlot {
    Out(usize),
    In(usize),
}

#[derive(Default)]
pub(crate) struct TopicTable {
    outbound: Slab<OutboundTopic>,
    inbound: Slab<InboundTopic>,
    /// Closed topics with writes in flight, which read memory of the source.
    draining_outbound: Vec<OutboundTopic>,
    /// Closed topics with copies in progress, which write memory of the sink.
    draining_inbound: Vec<InboundTopic>,
    indices: HashMap<WorkerTopicKey, usize>,
    /// By the event of their rings.
    rings: HashMap<RingEvent, TopicSlot>,
    last_connection: u64,
}

impl TopicTable {
    /// Connection numbers follow this one.
    pub(crate) fn new(last_connection: u64) -> Self {
        Self { last_connection, ..Self::default() }
    }

    pub(crate) fn add_outbound(&mut self, topic: OutboundTopic) {
        let key = WorkerTopicKey::Out(topic.key);
        self.indices.insert(key, self.outbound.put(topic));
    }

    pub(crate) fn add_inbound(&mut self, topic: InboundTopic) {
        let key = WorkerTopicKey::In(topic.key, topic.origin);
        self.indices.insert(key, self.inbound.put(topic));
    }

    /// Closes a topic that is not sent any more.
    pub(crate) fn close_outbound(
        &mut self,
        index: usize,
        now: ClockReading,
        transport: &mut Transport,
    ) {
        let Some(mut topic) = self.outbound.take(index) else { return };
        self.indices.remove(&WorkerTopicKey::Out(topic.key));
        topic.outbound.close(transport);
        if !topic.outbound.is_quiescent(now, transport) {
            self.draining_outbound.push(*topic);
        }
    }

    /// Closes a topic that is not received any more.
    pub(crate) fn close_inbound(&mut self, index: usize, transport: &mut Transport) {
        let Some(mut topic) = self.inbound.take(index) else { return };
        self.indices.remove(&WorkerTopicKey::In(topic.key, topic.origin));
        topic.inbound.disconnect();
        if !topic.drain(transport) {
            self.draining_inbound.push(*topic);
        }
    }

    /// Drops closed topics without writes or copies in progress.
    pub(crate) fn release_drained(&mut self, now: ClockReading, transport: &mut Transport) {
        self.draining_outbound.retain_mut(|topic| !topic.outbound.is_quiescent(now, transport));
        self.draining_inbound.retain_mut(|topic| !topic.drain(transport));
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.draining_outbound.is_empty() && self.draining_inbound.is_empty()
    }

    /// Gives up waiting: a device that hangs may still write, so its memory is leaked.
    pub(crate) fn leak_inbound(&mut self) {
        mem::take(&mut self.draining_inbound).into_iter().for_each(mem::forget);
    }

    pub(crate) fn index_of(&self, key: WorkerTopicKey) -> Option<usize> {
        self.indices.get(&key).copied()
    }

    /// The topic of a ring with an event.
    pub(crate) fn slot_of(&self, event: RingEvent) -> Option<TopicSlot> {
        self.rings.get(&event).copied()
    }

    pub(crate) fn outbound(&mut self, index: usize) -> Option<&mut OutboundTopic> {
        self.outbound.get_mut(index)
    }

    pub(crate) fn inbound(&mut self, index: usize) -> Option<&mut InboundTopic> {
        self.inbound.get_mut(index)
    }

    /// Indices of outbound topics are below this one.
    pub(crate) fn outbound_end(&self) -> usize {
        self.outbound.end()
    }

    /// Indices of inbound topics are below this one.
    pub(crate) fn inbound_end(&self) -> usize {
        self.inbound.end()
    }

    pub(crate) fn outbound_topics(&mut self) -> impl Iterator<Item = &mut OutboundTopic> {
        self.outbound.iter_mut()
    }

    pub(crate) fn inbound_topics(&self) -> impl Iterator<Item = &InboundTopic> {
        self.inbound.iter()
    }

    /// Topics that are sent to a node, or are to be.
    pub(crate) fn outbound_to(&self, node: NodeId) -> Vec<usize> {
        self.outbound.find(|topic| topic.connections.contains_key(&node))
    }

    /// Topics with a ring for a node.
    pub(crate) fn inbound_from(&self, node: NodeId) -> Vec<usize> {
        self.inbound.find(|topic| topic.origin == node && topic.ring.is_some())
    }

    pub(crate) fn ready(&mut self, slot: TopicSlot) -> Option<&mut ReadyState> {
        match slot {
            TopicSlot::Out(index) => self.outbound.get_mut(index).map(|topic| &mut topic.ready),
            TopicSlot::In(index) => self.inbound.get_mut(index).map(|topic| &mut topic.ready),
        }
    }

    /// Since when the sink of a topic has no memory or queue space, if so.
    pub(crate) fn waiting_since(&self, slot: TopicSlot) -> Option<u64> {
        let TopicSlot::In(index) = slot else { return None };
        self.inbound.get(index)?.inbound.waiting_since()
    }

    pub(crate) fn next_connection(&mut self) -> u64 {
        self.last_connection += 1;
        self.last_connection
    }

    pub(crate) fn ring_opened(&mut self, ring: RingEvent, slot: TopicSlot) {
        self.rings.insert(ring, slot);
    }

    pub(crate) fn ring_closed(&mut self, ring: RingEvent) {
        self.rings.remove(&ring);
    }

    /// Forgets all rings after the endpoint was closed.
    pub(crate) fn forget_rings(&mut self) {
        self.rings.clear();
        let topics = self.outbound.iter_mut().chain(&mut self.draining_outbound);
        topics.for_each(|topic| topic.outbound.forget_rings());
    }

    /// Returns true if no node but this one is connected.
    pub(crate) fn is_only_node(&self, node: NodeId) -> bool {
        let mut connections = self.outbound.iter().flat_map(|topic| &topic.connections);
        let mut others = self.inbound.iter().filter(|topic| topic.origin != node);
        !connections.any(|(other, link)| *other != node && link.requested_since.is_none())
            && !others.any(|topic| topic.ring.as_ref().is_some_and(|ring| ring.is_connected))
    }

    /// Returns true if the completion of a write is overdue.
    pub(crate) fn is_overdue(&self, now: ClockReading) -> bool {
        let mut topics = self.outbound.iter().chain(&self.draining_outbound);
        topics.any(|topic| topic.outbound.is_overdue(now))
    }
}
