//! The topics of a worker by index, by key and by ring.

use std::collections::HashMap;

use fabric::ring::RingEvent;

use super::{InboundTopic, OutboundTopic};
use crate::replication::worker::ready_queue::ReadyState;
use crate::replication::{ClockReading, NodeId, TopicKey};

/// The key of a topic of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum WorkerTopicKey {
    /// A topic that it sends.
    Out(TopicKey),
    /// A topic that it receives from a node.
    In(TopicKey, NodeId),
}

/// The index of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum TopicSlot {
    Out(usize),
    In(usize),
}

pub(crate) struct TopicTable {
    outbound: TopicSlab<OutboundTopic>,
    inbound: TopicSlab<InboundTopic>,
    indices: HashMap<WorkerTopicKey, usize>,
    /// By the event of their rings.
    rings: HashMap<RingEvent, TopicSlot>,
    last_connection: u64,
}

impl TopicTable {
    /// Connection numbers follow this one.
    pub(crate) fn new(last_connection: u64) -> Self {
        Self {
            outbound: TopicSlab::new(),
            inbound: TopicSlab::new(),
            indices: HashMap::new(),
            rings: HashMap::new(),
            last_connection,
        }
    }

    pub(crate) fn add_outbound(&mut self, topic: OutboundTopic) {
        let key = WorkerTopicKey::Out(topic.key);
        self.indices.insert(key, self.outbound.put(topic));
    }

    pub(crate) fn add_inbound(&mut self, topic: InboundTopic) {
        let key = WorkerTopicKey::In(topic.key, topic.origin);
        self.indices.insert(key, self.inbound.put(topic));
    }

    pub(crate) fn take_outbound(&mut self, index: usize) -> Option<Box<OutboundTopic>> {
        let topic = self.outbound.take(index)?;
        self.indices.remove(&WorkerTopicKey::Out(topic.key));
        Some(topic)
    }

    pub(crate) fn take_inbound(&mut self, index: usize) -> Option<Box<InboundTopic>> {
        let topic = self.inbound.take(index)?;
        self.indices.remove(&WorkerTopicKey::In(topic.key, topic.origin));
        Some(topic)
    }

    pub(crate) fn index_of(&self, key: WorkerTopicKey) -> Option<usize> {
        self.indices.get(&key).copied()
    }

    /// The topic of a ring with an event.
    pub(crate) fn slot_of(&self, event: RingEvent) -> Option<TopicSlot> {
        self.rings.get(&event).copied()
    }

    pub(crate) fn outbound(&mut self, index: usize) -> Option<&mut OutboundTopic> {
        self.outbound.get(index)
    }

    pub(crate) fn inbound(&mut self, index: usize) -> Option<&mut InboundTopic> {
        self.inbound.get(index)
    }

    /// Indices of outbound topics are below this one.
    pub(crate) fn outbound_end(&self) -> usize {
        self.outbound.0.len()
    }

    /// Indices of inbound topics are below this one.
    pub(crate) fn inbound_end(&self) -> usize {
        self.inbound.0.len()
    }

    pub(crate) fn outbound_topics(&mut self) -> impl Iterator<Item = &mut OutboundTopic> {
        self.outbound.0.iter_mut().flatten().map(|topic| &mut **topic)
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
            TopicSlot::Out(index) => self.outbound.get(index).map(|topic| &mut topic.ready),
            TopicSlot::In(index) => self.inbound.get(index).map(|topic| &mut topic.ready),
        }
    }

    /// Since when the sink of a topic has no memory or queue space, if so.
    pub(crate) fn waiting_since(&mut self, slot: TopicSlot) -> Option<u64> {
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
        self.outbound_topics().for_each(|topic| topic.outbound.forget_rings());
    }

    /// Whether no node but this one is connected.
    pub(crate) fn is_only_node(&self, node: NodeId) -> bool {
        let mut connections = self.outbound.iter().flat_map(|topic| &topic.connections);
        let mut others = self.inbound.iter().filter(|topic| topic.origin != node);
        !connections.any(|(other, link)| *other != node && link.requested_since.is_none())
            && !others.any(|topic| topic.ring.as_ref().is_some_and(|ring| ring.is_connected))
    }

    /// Whether the completion of a write is overdue.
    pub(crate) fn is_overdue(&self, now: ClockReading) -> bool {
        self.outbound.iter().any(|topic| topic.outbound.is_overdue(now))
    }
}

/// Items by index; indices are reused.
#[derive(Debug)]
struct TopicSlab<T>(Vec<Option<Box<T>>>);

impl<T> TopicSlab<T> {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn put(&mut self, item: T) -> usize {
        let item = Some(Box::new(item));
        if let Some(index) = self.0.iter().position(Option::is_none) {
            self.0[index] = item;
            return index;
        }
        self.0.push(item);
        self.0.len() - 1
    }

    fn take(&mut self, index: usize) -> Option<Box<T>> {
        self.0.get_mut(index)?.take()
    }

    fn get(&mut self, index: usize) -> Option<&mut T> {
        self.0.get_mut(index)?.as_deref_mut()
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|item| &**item)
    }

    /// Indices of the items that meet a condition.
    fn find(&self, is_wanted: impl Fn(&T) -> bool) -> Vec<usize> {
        let found = self.0.iter().enumerate();
        let found = found.filter(|(_, item)| item.as_deref().is_some_and(&is_wanted));
        found.map(|(index, _)| index).collect()
    }
}
