//! Commands to a worker.

use super::{WorkerLoop, nanoseconds};
use crate::error::{Error, ErrorKind};
use crate::replication::transport::MIN_STRIPED_LENGTH;
use crate::replication::worker::CONNECT;
use crate::replication::worker::endpoint::RenewalReason;
use crate::replication::worker::topics::table::{TopicSlot, WorkerTopicKey};
use crate::replication::worker::topics::{InboundTopic, OutboundTopic};
use crate::replication::{Command, Counters, OutboundOptions, Side, TopicKey, WorkerEvent};

const COMMANDS_PER_TURN: usize = 64;

impl WorkerLoop {
    pub(super) fn process_commands(&mut self) -> bool {
        let mut has_any = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Ok(command) = self.commands.try_recv() else { break };
            has_any = true;
            match command {
                Command::AddOutbound(key, options, source) => {
                    if self.is_duplicate(WorkerTopicKey::Out(key)) {
                        continue;
                    }
                    let is_striped = options.parameters.largest >= MIN_STRIPED_LENGTH;
                    let lanes = self.endpoint.transport().port().lanes();
                    let outbound = OutboundOptions {
                        piece: self.options.chunk,
                        slots: self.options.slots_for(if is_striped { lanes } else { 1 }),
                        max_retained: options.max_retained,
                        timeout: nanoseconds(self.options.timeout),
                    };
                    let topic = OutboundTopic::new(key, options, source, outbound);
                    self.topics.add_outbound(topic);
                }
                Command::StopOutbound(key) => {
                    if let Some(index) = self.topics.index_of(WorkerTopicKey::Out(key)) {
                        self.stop_sending(index);
                    }
                }
                Command::AddDestination(key, node) => self.add(key, node),
                Command::RemoveDestination(key, node) => {
                    if let Some(index) = self.topics.index_of(WorkerTopicKey::Out(key)) {
                        self.disconnect_writer(index, node, None);
                        if let Some(topic) = self.topics.outbound(index) {
                            topic.outbound().remove(node, self.endpoint.transport());
                        }
                        self.ready(TopicSlot::Out(index));
                    }
                }
                Command::AddInbound(key, origin, options) => {
                    if self.is_duplicate(WorkerTopicKey::In(key, origin)) {
                        continue;
                    }
                    let timeout = nanoseconds(self.options.timeout);
                    self.topics.add_inbound(InboundTopic::new(key, origin, *options, timeout));
                }
                Command::StopInbound(key, origin) => {
                    if let Some(index) = self.topics.index_of(WorkerTopicKey::In(key, origin)) {
                        self.stop_receiving(index);
                    }
                }
                Command::ControlMessage(key, node, message) => {
                    self.handle_control_message(key, node, message)
                }
                Command::NodeLost(node) => {
                    self.endpoint.node_lost(node);
                    let detail = "the node disconnected";
                    self.disconnect_node(node, true, || {
                        Error::new(CONNECT, ErrorKind::Closed, detail).at(node)
                    });
                }
                Command::NodeReturned(node) => self.handle_fault(node, RenewalReason::NodeReturned),
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

    fn is_duplicate(&mut self, name: WorkerTopicKey) -> bool {
        let is_duplicate = self.topics.index_of(name).is_some();
        if is_duplicate {
            let detail = "the worker has the topic already";
            let error = Error::new("add topic to worker", ErrorKind::InvalidArgument, detail);
            let (key, node, side) = match name {
                WorkerTopicKey::Out(key) => (key, None, Side::Writer),
                WorkerTopicKey::In(key, origin) => (key, Some(origin), Side::Reader),
            };
            self.events.send(WorkerEvent::Failed { key, node, side, error });
        }
        is_duplicate
    }

    fn report_lagging(&mut self, key: TopicKey) {
        let Some(index) = self.topics.index_of(WorkerTopicKey::Out(key)) else { return };
        let Some(topic) = self.topics.outbound(index) else { return };
        for node in topic.outbound().lagging() {
            self.events.send(WorkerEvent::Lagging { key, node });
        }
    }

    fn count(&mut self) -> Counters {
        let mut counters = self.endpoint.counters();
        let port = self.endpoint.transport().port();
        self.topics.outbound_topics().for_each(|topic| topic.count(port, &mut counters));
        self.topics.inbound_topics().for_each(|topic| topic.count(port, &mut counters));
        counters
    }
}
