//! What comes from other nodes: their letters, and with them their topics.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::peers::NodeId;
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

/// Topics of other nodes that are to end at a worker, and have not yet, when none is begun anew.
const MAX_DRAINING_SINKS: usize = 1024;

/// A topic that comes from a node.
pub(in crate::replication) struct ReceivedTopic {
    origin: OriginId,
    start: ReplicationStart,
    /// The writer's last wish.
    connection: u64,
    pub(in crate::replication) room_wait: Arc<RoomWait>,
    /// As long as the sink lives.
    sink: Weak<()>,
}

impl ReceivedTopic {
    pub(in crate::replication) fn start(&self) -> &ReplicationStart {
        &self.start
    }
}

/// A sink that may still be at work, though its worker knows that it is to end.
pub(in crate::replication) struct DrainingSink {
    topic: Arc<Topic>,
    /// Its worker ends, too: whoever follows is another thread.
    worker_ended: bool,
    /// What comes after it is another topic of that node: this one's messages are no more.
    forget: Option<OriginId>,
    sink: Weak<()>,
}

impl Replicator {
    /// A letter of another node.
    pub(in crate::replication) fn handle_control_message(&mut self, node: NodeId, bytes: &[u8]) {
        match ControlMessage::decode(bytes) {
            Ok(ControlMessage::Provider(theirs)) => self.handle_provider(node, theirs),
            Ok(ControlMessage::ConnectionMessage { topic, terms }) => {
                self.handle_connection_message(node, &topic, terms)
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
                tracing::warn!(%error, %node, "a control message could not be decoded");
            }
            Err(_) => {}
        }
    }

    /// What a bridge has to say about a topic.
    fn handle_connection_message(&mut self, node: NodeId, topic: &str, terms: ConnectionMessage) {
        let is_understood = self.is_provider_compatible(node);
        let facts = self.facts(topic).cloned();
        if let ConnectionMessage::ConnectRequest { connection, facts: theirs, .. } = &terms
            && !facts.as_ref().is_some_and(|facts| {
                is_understood && self.receive(node, facts, (theirs.number, *connection))
            })
        {
            // Who wishes must not wait for nothing; it knows best whether to ask again.
            return self.request_restart(node, topic, *connection);
        }
        if !is_understood && matches!(terms, ConnectionMessage::Offer { .. }) {
            return;
        }
        let Some(number) = facts.map(|facts| facts.topic.number()) else { return };
        // One that is lost is asked for again, when it was waited for long enough.
        self.tell(number, |worker| worker.tell(Command::ControlMessage(key(number), node, terms)));
    }

    /// The connection of a writer's wish is none, or not any more.
    fn request_restart(&self, node: NodeId, topic: &str, connection: u64) {
        let reason = "the topic is not received now".to_owned();
        let (topic, terms) = (topic.to_owned(), ConnectionMessage::Restart { connection, reason });
        self.write(node, &ControlMessage::ConnectionMessage { topic, terms });
    }

    /// Receives a topic from a node, if anybody here subscribes.
    fn receive(
        &mut self,
        node: NodeId,
        facts: &LocalTopic,
        (theirs, connection): (u64, u64),
    ) -> bool {
        let topic = &facts.topic;
        let number = topic.number();
        // One thread at a time delivers to a topic.
        let is_at_work = |it: &DrainingSink| it.worker_ended && it.topic.number() == number;
        if self.draining_sinks.iter().any(|it| is_at_work(it) && it.sink.strong_count() > 0) {
            return false;
        }
        let origin = OriginId { node: node.0, topic: theirs };
        if let Some(known) = self.received.get_mut(&(number, node)) {
            if known.origin == origin {
                known.connection = connection;
                return true;
            }
            // A worker that hangs in its provider ends nothing, and a node can ask without end.
            if self.draining_sinks.len() >= MAX_DRAINING_SINKS {
                return false;
            }
            self.end_sink(number, node, true);
        }
        let Some(workers) = self.workers.as_mut().filter(|_| facts.subscribes) else {
            return false;
        };
        let device = match topic.settings().place {
            SharedLocation::Host => None,
            SharedLocation::Device(_) => facts.inbound.device().cloned(),
        };
        let room_wait = Arc::new(RoomWait::new());
        let pool = &facts.inbound;
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
        workers.place(key(number), topic.settings().largest);
        let worker = workers.of(key(number));
        match worker.receive_topic(key(number), node, from, device, Box::new(sink)) {
            Ok(()) => {
                let sink = alive;
                let received = ReceivedTopic { origin, start, connection, room_wait, sink };
                self.received.insert((number, node), received);
                true
            }
            Err(error) => {
                tracing::error!(%error, "the messages of a node's topic cannot be received");
                false
            }
        }
    }

    /// Does this one receive a topic of a node, by its number there?
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

    /// Nothing more comes of topics that nobody here subscribes to. What their nodes publish until
    /// somebody does again is no gap for that one: it gets a sink of its own.
    pub(in crate::replication) fn stop_receiving_unwanted(&mut self) {
        let is_wanted =
            |replicated: &TopicReplication| !replicated.is_gone && replicated.facts.subscribes;
        let wanted = |number: &u32| self.replicated_topics.get(number).is_some_and(is_wanted);
        self.announced_starts.retain(|(number, _), _| wanted(number));
        let all = self.received.iter().filter(|((number, _), _)| !wanted(number));
        let all = all.map(|((number, node), known)| (*number, *node, known.connection));
        for (number, node, connection) in all.collect::<Vec<_>>() {
            // It may hear too late that nobody does, or not at all, if somebody does again.
            if let Some(replicated) = self.replicated_topics.get(&number) {
                self.request_restart(node, replicated.facts.topic.name(), connection);
            }
            self.stop_receiving(number, node);
        }
    }

    /// Ends what comes from a node of a topic.
    fn end_sink(&mut self, number: u32, node: NodeId, forgets: bool) {
        let Some(ReceivedTopic { origin, sink, .. }) = self.received.remove(&(number, node)) else {
            return;
        };
        self.tell(number, |worker| worker.tell(Command::StopInbound(key(number), node)));
        if let Some(replicated) = self.replicated_topics.get(&number) {
            let topic = Arc::clone(&replicated.facts.topic);
            let forget = forgets.then_some(origin);
            self.draining_sinks.push(DrainingSink { topic, worker_ended: false, forget, sink });
        }
    }

    /// The workers are gone, or will be soon: those that write to them are told to begin again.
    pub(in crate::replication) fn stop_receiving_all(&mut self) {
        for ((number, node), known) in std::mem::take(&mut self.received) {
            let Some(replicated) = self.replicated_topics.get(&number) else { continue };
            let topic = Arc::clone(&replicated.facts.topic);
            self.request_restart(node, topic.name(), known.connection);
            let sink = known.sink;
            self.draining_sinks.push(DrainingSink {
                topic,
                worker_ended: true,
                forget: None,
                sink,
            });
        }
        self.draining_sinks
            .iter_mut()
            .for_each(|draining_sinks| draining_sinks.worker_ended = true);
    }

    /// What has ended is cleaned up after.
    pub(in crate::replication) fn reap_sinks(&mut self) {
        self.draining_sinks.retain(|draining_sinks| {
            let is_at_work = draining_sinks.sink.strong_count() > 0;
            if let Some(origin) = draining_sinks.forget.filter(|_| !is_at_work) {
                draining_sinks.topic.remove_origin(&origin);
            }
            is_at_work
        });
    }
}
