//! The topics received from other nodes.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use crate::ids::NodeId;
use crate::replication::routing::plan::of_topic;
use crate::replication::sink::{RoomWait, TopicSink};
use crate::replication::{
    Command, ConnectionMessage, ControlMessage, LocalTopic, RemoteNodes, ServiceContext,
    WorkerPool, key,
};
use crate::settings::SharedLocation;
use crate::topic::{OriginId, Topic};

/// Limit of draining sinks; above it no further topic is received.
const MAX_DRAINING_SINKS: usize = 1024;

struct ReceivedTopic {
    topic: Arc<Topic>,
    origin: OriginId,
    /// The writer's last connection request.
    connection: u64,
    room_wait: Arc<RoomWait>,
    /// Alive as long as the sink.
    sink: Weak<()>,
}

/// A sink that may still be running, though its worker knows that it is to end.
struct DrainingSink {
    received: ReceivedTopic,
    /// The sink's worker ends, too: its successor is another thread.
    worker_ended: bool,
    /// The node's topic was replaced by another one: forget its origin at the end.
    forgets: bool,
}

impl ReceivedTopic {
    fn is_running(&self) -> bool {
        self.sink.strong_count() > 0
    }
}

/// A writer's connection is unknown, or not known any more.
fn request_restart(remote_nodes: &RemoteNodes, node: NodeId, topic: &str, connection: u64) {
    let reason = "the topic is not received now".to_owned();
    let (topic, message) = (topic.to_owned(), ConnectionMessage::Restart { connection, reason });
    remote_nodes.send(node, &ControlMessage::ConnectionMessage { topic, message });
}

pub(super) struct ReceivedTopics {
    service_context: Arc<ServiceContext>,
    received: BTreeMap<(u32, NodeId), ReceivedTopic>,
    draining_sinks: Vec<DrainingSink>,
}

impl ReceivedTopics {
    pub(super) fn new(service_context: Arc<ServiceContext>) -> Self {
        Self { service_context, received: BTreeMap::new(), draining_sinks: Vec::new() }
    }

    /// Handles a connection message about a topic; `local` is the topic of this name here.
    pub(super) fn handle_connection_message(
        &mut self,
        node: NodeId,
        (topic, local): (&str, Option<&LocalTopic>),
        message: ConnectionMessage,
        remote_nodes: &RemoteNodes,
        worker_pool: &mut WorkerPool,
    ) {
        let is_compatible = remote_nodes.is_provider_compatible(node);
        if let ConnectionMessage::ConnectRequest { connection, parameters: theirs, .. } = &message
            && !local.is_some_and(|local| {
                is_compatible
                    && self.receive(node, local, (theirs.number, *connection), worker_pool)
            })
        {
            // Otherwise the writer would wait without an answer; it decides whether to ask again.
            return request_restart(remote_nodes, node, topic, *connection);
        }
        if !is_compatible && matches!(message, ConnectionMessage::Offer { .. }) {
            return;
        }
        let Some(number) = local.map(|local| local.topic.number()) else { return };
        // A lost message is requested again after a timeout.
        worker_pool.send(number, Command::ControlMessage(key(number), node, message));
    }

    /// Receives a topic from a node, if this node subscribes.
    fn receive(
        &mut self,
        node: NodeId,
        local: &LocalTopic,
        (theirs, connection): (u64, u64),
        worker_pool: &mut WorkerPool,
    ) -> bool {
        let topic = &local.topic;
        let number = topic.number();
        // Only one thread may deliver to a topic.
        let mut ended = self.draining_sinks.iter().filter(|it| it.worker_ended);
        if ended.any(|it| it.received.topic.number() == number && it.received.is_running()) {
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
            self.end_sink(number, node, true, worker_pool);
        }
        if !local.subscribes {
            return false;
        }
        let Some(worker) = worker_pool.assign(number, topic.settings().largest) else {
            return false;
        };
        let device = match topic.settings().place {
            SharedLocation::Host => None,
            SharedLocation::Device(_) => local.inbound.device().cloned(),
        };
        let (room_wait, alive) = (Arc::new(RoomWait::new()), Arc::new(()));
        let received = ReceivedTopic {
            topic: Arc::clone(topic),
            origin,
            connection,
            room_wait: Arc::clone(&room_wait),
            sink: Arc::downgrade(&alive),
        };
        let parts = (topic, &local.inbound);
        let sink = TopicSink::new(&self.service_context, parts, origin, &room_wait, alive);
        let from = topic.delivered(&origin).map_or(0, |last| last + 1);
        match worker.receive_topic(key(number), node, from, device, Box::new(sink)) {
            Ok(()) => {
                self.received.insert((number, node), received);
                true
            }
            Err(error) => {
                tracing::error!(%error, "receiving a topic of a node failed");
                false
            }
        }
    }

    /// Returns true if a subscriber of this node blocks messages of other nodes.
    pub(super) fn has_waiters(&self, number: u32) -> bool {
        let mut received = self.received.range(of_topic(number)).map(|(_, received)| received);
        received.any(|it| it.room_wait.is_waiting(it.topic.refusal_window()))
    }

    pub(super) fn node_lost(&mut self, node: NodeId, worker_pool: &WorkerPool) {
        let of_node = self.received.keys().filter(|(_, from)| *from == node);
        for (number, node) in of_node.copied().collect::<Vec<_>>() {
            self.end_sink(number, node, false, worker_pool);
        }
    }

    /// Stops receiving topics without subscribers. Messages published until the next subscription
    /// are no gap for that subscriber: it gets a sink of its own.
    pub(super) fn stop_unwanted(
        &mut self,
        is_wanted: impl Fn(u32) -> bool,
        remote_nodes: &RemoteNodes,
        worker_pool: &WorkerPool,
    ) {
        let unwanted = self.received.keys().filter(|(number, _)| !is_wanted(*number));
        for (number, node) in unwanted.copied().collect::<Vec<_>>() {
            // A later subscription may come before the node learns that the interest ended.
            let known = &self.received[&(number, node)];
            request_restart(remote_nodes, node, known.topic.name(), known.connection);
            self.end_sink(number, node, false, worker_pool);
        }
    }

    /// Ends receiving a topic from a node; `forgets` its origin if another topic replaced it.
    pub(super) fn end_sink(
        &mut self,
        number: u32,
        node: NodeId,
        forgets: bool,
        worker_pool: &WorkerPool,
    ) {
        if let Some(received) = self.received.remove(&(number, node)) {
            worker_pool.send(number, Command::StopInbound(key(number), node));
            self.draining_sinks.push(DrainingSink { received, worker_ended: false, forgets });
        }
    }

    /// The workers end: writers to them are asked to restart.
    pub(super) fn workers_stopped(&mut self, remote_nodes: &RemoteNodes) {
        for ((_, node), received) in std::mem::take(&mut self.received) {
            request_restart(remote_nodes, node, received.topic.name(), received.connection);
            self.draining_sinks.push(DrainingSink { received, worker_ended: true, forgets: false });
        }
        self.draining_sinks.iter_mut().for_each(|sink| sink.worker_ended = true);
    }

    pub(super) fn is_draining(&self) -> bool {
        !self.draining_sinks.is_empty()
    }

    pub(super) fn reap_sinks(&mut self) {
        self.draining_sinks.retain(|DrainingSink { received, forgets, .. }| {
            let is_running = received.is_running();
            if *forgets && !is_running {
                received.topic.remove_origin(&received.origin);
            }
            is_running
        });
    }
}
