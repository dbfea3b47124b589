//! Commands to a worker.

use std::collections::HashMap;

use super::event_loop::{WorkerLoop, nanoseconds};
use super::renewal::NODE_RETURNED;
use super::topic_table::{InboundTopic, OutboundTopic, ReadyState, TopicSlot, WorkerTopicKey};
use super::{Command, Counters, NodeId, TopicKey, TopicOptions, WorkerEvent, WorkerOptions};
use crate::error::{Error, ErrorKind};
use crate::replication::Side;
use crate::replication::inbound::Inbound;
use crate::replication::outbound::{Outbound, OutboundOptions};
use crate::replication::transport::MIN_STRIPED_LENGTH;

/// Commands handled in one turn.
const COMMANDS_PER_TURN: usize = 64;

/// Options of an outbound topic.
fn outbound_options(
    options: &WorkerOptions,
    topic: &TopicOptions,
    lanes: usize,
) -> OutboundOptions {
    let lanes = if topic.facts.largest < MIN_STRIPED_LENGTH { 1 } else { lanes };
    let (timeout, max_retained) = (nanoseconds(options.timeout), topic.max_retained);
    OutboundOptions { piece: options.chunk, slots: options.slots_for(lanes), max_retained, timeout }
}

impl WorkerLoop {
    pub(super) fn process_commands(&mut self) -> bool {
        let mut has_any = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Ok(command) = self.commands.try_recv() else { break };
            has_any = true;
            match command {
                Command::AddOutbound(key, options, source) => {
                    let name = WorkerTopicKey::Out(key);
                    if self.is_duplicate(name, key, None) {
                        continue;
                    }
                    let topic = OutboundTopic {
                        key,
                        facts: options.facts,
                        source,
                        outbound: Outbound::new(outbound_options(
                            &self.options,
                            &options,
                            self.transport.port.lanes(),
                        )),
                        connections: HashMap::new(),
                        ready: ReadyState::default(),
                    };
                    let index = self.outbound_topics.put(topic);
                    self.topic_index.insert(name, index);
                }
                Command::StopOutbound(key) => {
                    if let Some(index) = self.topic_index.get(&WorkerTopicKey::Out(key)).copied() {
                        self.stop_sending(index);
                    }
                }
                Command::AddDestination(key, node) => self.add(key, node),
                Command::RemoveDestination(key, node) => {
                    if let Some(index) = self.topic_index.get(&WorkerTopicKey::Out(key)).copied() {
                        self.disconnect_writer(index, node, None);
                        if let Some(topic) = self.outbound_topics.get(index) {
                            topic.outbound.remove(node, &mut self.transport);
                        }
                        self.ready(TopicSlot::Out(index));
                    }
                }
                Command::AddInbound(key, origin, inbound_options) => {
                    let name = WorkerTopicKey::In(key, origin);
                    if self.is_duplicate(name, key, Some(origin)) {
                        continue;
                    }
                    let timeout = nanoseconds(self.options.timeout);
                    let topic = InboundTopic {
                        key,
                        origin,
                        sink: inbound_options.sink,
                        device: inbound_options.device,
                        inbound: Inbound::new(inbound_options.from, 0, timeout),
                        inbound_ring: None,
                        request: None,
                        previous_pinned: None,
                        has_unacknowledged: false,
                        doublings: 0,
                        ready: ReadyState::default(),
                    };
                    let index = self.inbound_topics.put(topic);
                    self.topic_index.insert(name, index);
                }
                Command::StopInbound(key, origin) => {
                    if let Some(index) =
                        self.topic_index.get(&WorkerTopicKey::In(key, origin)).copied()
                    {
                        self.stop_receiving(index, false);
                    }
                }
                Command::ControlMessage(key, node, message) => {
                    self.handle_control_message(key, node, message)
                }
                Command::NodeLost(node) => self.lose_node(node),
                Command::NodeReturned(node) => self.handle_fault(node, NODE_RETURNED),
                Command::ReportLagging(key) => self.report_lagging(key),
                Command::GetCounters(reply) => {
                    let _ = reply.try_send(self.count());
                }
                Command::Stop => self.is_stopping = true,
            }
        }
        // If the sender was dropped, no further command can arrive.
        has_any
    }

    fn is_duplicate(&mut self, name: WorkerTopicKey, key: TopicKey, node: Option<NodeId>) -> bool {
        let is_duplicate = self.topic_index.contains_key(&name);
        if is_duplicate {
            let detail = "the worker has the topic already";
            let error = Error::new("add a topic to a worker", ErrorKind::InvalidArgument, detail);
            let side = if node.is_some() { Side::Reader } else { Side::Writer };
            self.events.send(WorkerEvent::Failed { key, node, side, error });
        }
        is_duplicate
    }

    fn report_lagging(&mut self, key: TopicKey) {
        let Some(index) = self.topic_index.get(&WorkerTopicKey::Out(key)).copied() else { return };
        let Some(topic) = self.outbound_topics.get(index) else { return };
        for node in topic.outbound.lagging() {
            self.events.send(WorkerEvent::Lagging { key, node });
        }
    }

    fn count(&self) -> Counters {
        let mut counters = Counters {
            quarantined_bytes: self.transport.port.quarantined_bytes(),
            renewals: self.renewal.count(),
            sleeps: self.sleep_count,
            ..Counters::default()
        };
        for topic in self.outbound_topics.iter() {
            for (node, mut counted) in topic.outbound.counters() {
                let ring = topic.outbound.ring_of(node);
                let sender = ring.and_then(|ring| self.transport.port.sender(ring).ok());
                counted.lanes = sender.map_or(0, |sender| sender.lanes() as u64);
                counters.sent.push((topic.key, node, counted));
            }
        }
        for topic in self.inbound_topics.iter() {
            let mut counted = topic.inbound.counters();
            let ring = topic.inbound_ring.as_ref().map(|inbound_ring| inbound_ring.ring);
            let receiver = ring.and_then(|ring| self.transport.port.receiver(ring).ok());
            counted.lanes = receiver.map_or(0, |receiver| receiver.lanes() as u64);
            counters.received.push((topic.key, topic.origin, counted));
        }
        counters
    }
}
