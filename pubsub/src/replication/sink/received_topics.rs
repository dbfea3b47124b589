//! Control messages of other nodes, and the topics received from them.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::ids::NodeId;
use crate::replication::Command;
use crate::replication::ConnectionMessage;
use crate::replication::control_messages::ControlMessage;
use crate::replication::routing::reconcile::TopicReplication;
use crate::replication::sink::TopicSink;
use crate::replication::sink::room_wait::RoomWait;
use crate::replication::source::start_sequences::ReplicationStart;
use crate::replication::{LocalTopic, Replicator, key};
use crate::settings::SharedLocation;
use crate::topic::{OriginId, Topic};

/// Limit of draining sinks; above it no further topic is received.
const MAX_DRAINING_SINKS: usize = 1024;

/// A topic received from a node.
pub(in crate::replication) struct ReceivedTopic {
    origin: OriginId,
    start: ReplicationStart,
    /// The writer's last connection request.
    connection: u64,
    pub(in crate::replication) room_wait: Arc<RoomWait>,
    /// Alive as long as the sink.
    sink: Weak<()>,
}

impl ReceivedTopic {
    pub(in crate::replication) fn start(&self) -> &ReplicationStart {
        &self.start
    }
}

/// A sink that may still be running, though its worker knows that it is to end.
pub(in crate::replication) struct DrainingSink {
    topic: Arc<Topic>,
    /// Its worker ends, too: its successor is another thread.
    worker_ended: bool,
    /// The node's topic was replaced by another one: forget this origin at the end.
    forget: Option<OriginId>,
    sink: Weak<()>,
}

impl Replicator {
    /// Handles a control message of another node.
    pub(in crate::replication) fn handle_control_message(&mut self, node: NodeId, bytes: &[u8]) {
        match ControlMessage::decode(bytes) {
            Ok(ControlMessage::Provider(theirs)) => self.handle_provider(node, theirs),
            Ok(ControlMessage::ConnectionMessage { topic, message }) => {
                self.handle_connection_message(node, &topic, message)
            }
            Ok(ControlMessage::StartSequences { topic, start_sequences }) => {
                self.handle_start_sequences(node, &topic, start_sequences);
            }
            Ok(ControlMessage::LastSequences { topic, last }) => {
                self.handle_last_sequences(node, &topic, last);
            }
            Ok(ControlMessage::PublisherLost { topic, publishers }) => {
                self.handle_lost_publishers(node, &topic, publishers);
            }
            Err(error) if self.may_log(Instant::now()) => {
                tracing::warn!(%error, %node, "decoding a control message failed");
            }
            Err(_) => {}
        }
    }

    /// Handles a connection message about a topic.
    fn handle_connection_message(&mut self, node: NodeId, topic: &str, message: ConnectionMessage) {
        let is_compatible = self.is_provider_compatible(node);
        let local = self.local_topic(topic).cloned();
        if let ConnectionMessage::ConnectRequest { connection, facts: theirs, .. } = &message
            && !local.as_ref().is_some_and(|local| {
                is_compatible && self.receive(node, local, (theirs.number, *connection))
            })
        {
            // Otherwise the writer would wait without an answer; it decides whether to ask again.
            return self.request_restart(node, topic, *connection);
        }
        if !is_compatible && matches!(message, ConnectionMessage::Offer { .. }) {
            return;
        }
        let Some(number) = local.map(|local| local.topic.number()) else { return };
        // A lost message is requested again after a timeout.
        self.with_worker(number, |worker| {
            worker.tell(Command::ControlMessage(key(number), node, message))
        });
    }

    /// A writer's connection is unknown, or not known any more.
    fn request_restart(&self, node: NodeId, topic: &str, connection: u64) {
        let reason = "the topic is not received now".to_owned();
        let (topic, message) =
            (topic.to_owned(), ConnectionMessage::Restart { connection, reason });
        self.send_control_message(node, &ControlMessage::ConnectionMessage { topic, message });
    }

    /// Receives a topic from a node, if this node subscribes.
    fn receive(
        &mut self,
        node: NodeId,
        local: &LocalTopic,
        (theirs, connection): (u64, u64),
    ) -> bool {
        let topic = &local.topic;
        let number = topic.number();
        // Only one thread may deliver to a topic.
        let is_running = |it: &DrainingSink| it.worker_ended && it.topic.number() == number;
        if self.draining_sinks.iter().any(|it| is_running(it) && it.sink.strong_count() > 0) {
            return false;
        }
        let origin = OriginId { node: node.0, topic: theirs };
        if let Some(known) = self.received.get_mut(&(number, node)) {
            if known.origin == origin {
                known.connection = connection;
                return true;
            }
            // A worker that hangs in its provider ends no sink, and a node may ask without limit.
            if self.draining_sinks.len() >= MAX_DRAINING_SINKS {
                return false;
            }
            self.end_sink(number, node, true);
        }
        let Some(workers) = self.workers.as_mut().filter(|_| local.subscribes) else {
            return false;
        };
        let device = match topic.settings().place {
            SharedLocation::Host => None,
            SharedLocation::Device(_) => local.inbound.device().cloned(),
        };
        let room_wait = Arc::new(RoomWait::new());
        let pool = &local.inbound;
        let start_sequences = self.announced_starts.remove(&(number, node));
        let start_sequences =
            start_sequences.filter(|start_sequences| start_sequences.topic == theirs);
        let start = ReplicationStart::new(start_sequences, topic.inbound().position());
        let (sink, alive) = {
            let alive = Arc::new(());
            let weak = Arc::downgrade(&alive);
            let service_context = &self.service_context;
            let start = start.clone();
            (TopicSink::new(service_context, (topic, pool), origin, start, &room_wait, alive), weak)
        };
        let from = topic.delivered(&origin).map_or(0, |last| last + 1);
        workers.assign(key(number), topic.settings().largest);
        let worker = workers.of(key(number));
        match worker.receive_topic(key(number), node, from, device, Box::new(sink)) {
            Ok(()) => {
                let sink = alive;
                let received = ReceivedTopic { origin, start, connection, room_wait, sink };
                self.received.insert((number, node), received);
                true
            }
            Err(error) => {
                tracing::error!(%error, "receiving a topic of a node failed");
                false
            }
        }
    }

    /// Whether this node receives a topic of a node, given by its number there.
    pub(in crate::replication) fn is_receiving(
        &self,
        number: u32,
        node: NodeId,
        theirs: u64,
    ) -> bool {
        self.receiving_of(number, node, theirs).is_some()
    }

    pub(in crate::replication) fn receiving_of(
        &self,
        number: u32,
        node: NodeId,
        theirs: u64,
    ) -> Option<&ReceivedTopic> {
        let known = self.received.get(&(number, node));
        known.filter(|known| known.origin.topic == theirs)
    }

    pub(in crate::replication) fn stop_receiving(&mut self, number: u32, node: NodeId) {
        self.end_sink(number, node, false);
    }

    /// Stops receiving topics without subscribers. Messages published until the next subscription
    /// are no gap for that subscriber: it gets a sink of its own.
    pub(in crate::replication) fn stop_receiving_unwanted(&mut self) {
        let is_wanted = |replicated: &TopicReplication| {
            !replicated.is_gone && replicated.local_topic.subscribes
        };
        let wanted = |number: &u32| self.replicated_topics.get(number).is_some_and(is_wanted);
        self.announced_starts.retain(|(number, _), _| wanted(number));
        let all = self.received.iter().filter(|((number, _), _)| !wanted(number));
        let all = all.map(|((number, node), known)| (*number, *node, known.connection));
        for (number, node, connection) in all.collect::<Vec<_>>() {
            // A later subscription may come before the node learns that the interest ended.
            if let Some(replicated) = self.replicated_topics.get(&number) {
                self.request_restart(node, replicated.local_topic.topic.name(), connection);
            }
            self.stop_receiving(number, node);
        }
    }

    /// Ends receiving a topic from a node.
    fn end_sink(&mut self, number: u32, node: NodeId, forgets: bool) {
        let Some(ReceivedTopic { origin, sink, .. }) = self.received.remove(&(number, node)) else {
            return;
        };
        self.with_worker(number, |worker| worker.tell(Command::StopInbound(key(number), node)));
        if let Some(replicated) = self.replicated_topics.get(&number) {
            let topic = Arc::clone(&replicated.local_topic.topic);
            let forget = forgets.then_some(origin);
            self.draining_sinks.push(DrainingSink { topic, worker_ended: false, forget, sink });
        }
    }

    /// The workers end: writers to them are asked to restart.
    pub(in crate::replication) fn stop_receiving_all(&mut self) {
        for ((number, node), known) in std::mem::take(&mut self.received) {
            let Some(replicated) = self.replicated_topics.get(&number) else { continue };
            let topic = Arc::clone(&replicated.local_topic.topic);
            self.request_restart(node, topic.name(), known.connection);
            let sink = known.sink;
            self.draining_sinks.push(DrainingSink {
                topic,
                worker_ended: true,
                forget: None,
                sink,
            });
        }
        self.draining_sinks.iter_mut().for_each(|sink| sink.worker_ended = true);
    }

    /// Removes ended sinks.
    pub(in crate::replication) fn reap_sinks(&mut self) {
        self.draining_sinks.retain(|draining| {
            let is_running = draining.sink.strong_count() > 0;
            if let Some(origin) = draining.forget.filter(|_| !is_running) {
                draining.topic.remove_origin(&origin);
            }
            is_running
        });
    }
}
