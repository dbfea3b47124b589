//! Ends of connections, of topics and of the worker, and what has to be drained.

use std::mem;
use std::time::{Duration, Instant};

use super::NodeId;
use super::event_loop::{COPY_POLL_INTERVAL, WorkerLoop};
use super::events::WorkerEvent;
use super::topic_table::{TopicSlot, WorkerTopicKey};
use crate::error::Error;
use crate::replication::Side;

/// How long an ending worker waits for writes and copies.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl WorkerLoop {
    /// Ends the connection to a node; reports the reason, if there is one.
    pub(super) fn disconnect_writer(&mut self, index: usize, node: NodeId, reason: Option<Error>) {
        let Some(topic) = self.outbound_topics.get(index) else { return };
        topic.outbound.disconnect(node, &mut self.transport);
        if topic.connections.remove(&node).is_none() {
            return;
        }
        let (key, side) = (topic.key, Side::Writer);
        if let Some(reason) = reason {
            self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
        }
        self.forget_closed_senders();
        // Writes into its ring may still be in flight.
        self.ready(TopicSlot::Out(index));
    }

    /// Removes the index entries of closed rings.
    pub(super) fn forget_closed_senders(&mut self) {
        for ring in self.transport.closed.drain(..) {
            self.sender_topics.remove(&ring);
        }
    }

    pub(super) fn stop_sending(&mut self, index: usize) {
        let Some(topic) = self.outbound_topics.get(index) else { return };
        let nodes: Vec<_> = topic.connections.keys().copied().collect();
        for node in nodes {
            self.disconnect_writer(index, node, None);
        }
        let Some(mut topic) = self.outbound_topics.take(index) else { return };
        topic.outbound.close(&mut self.transport);
        self.topic_index.remove(&WorkerTopicKey::Out(topic.key));
        self.ready_topics.retain(|task| *task != TopicSlot::Out(index));
        let is_quiescent = topic.outbound.is_quiescent(self.now, &mut self.transport);
        self.forget_closed_senders();
        if !is_quiescent {
            // Writes in flight read memory of the source.
            self.draining_outbound.push(*topic);
        }
    }

    pub(super) fn stop_receiving(&mut self, index: usize, has_failed: bool) {
        if has_failed {
            self.request_restart(index, "the reader failed");
        }
        self.close_inbound_ring(index, false);
        let Some(mut topic) = self.inbound_topics.take(index) else { return };
        self.topic_index.remove(&WorkerTopicKey::In(topic.key, topic.origin));
        self.ready_topics.retain(|task| *task != TopicSlot::In(index));
        self.unacknowledged.retain(|one| *one != index);
        topic.inbound.disconnect();
        if !topic.drain(&mut self.transport) {
            // Copies in progress write memory of the sink.
            self.draining_inbound.push(*topic);
        }
    }

    /// Drops topics without writes or copies in progress.
    pub(super) fn release_drained(&mut self) {
        let (now, transport) = (self.now, &mut self.transport);
        self.draining_outbound.retain_mut(|topic| !topic.outbound.is_quiescent(now, transport));
        self.draining_inbound.retain_mut(|topic| !topic.drain(transport));
        self.forget_closed_senders();
    }

    /// Waits until all topics are drained, up to a timeout.
    fn finish(&mut self) {
        let end = Instant::now() + DRAIN_TIMEOUT;
        self.release_drained();
        while !(self.draining_outbound.is_empty() && self.draining_inbound.is_empty())
            && Instant::now() < end
        {
            let progress = self.transport.port.wait(COPY_POLL_INTERVAL);
            self.handle_turn(progress);
            self.update_clock();
            self.release_drained();
        }
        // A device that hangs may still write: its memory is leaked.
        mem::take(&mut self.draining_inbound).into_iter().for_each(mem::forget);
    }

    /// Closes the endpoint.
    pub(super) fn close(mut self) {
        for index in 0..self.outbound_topics.len() {
            self.stop_sending(index);
        }
        for index in 0..self.inbound_topics.len() {
            self.stop_receiving(index, false);
        }
        self.finish();
        if let Err(error) = self.transport.close() {
            tracing::warn!(%error, "closing the endpoint failed");
        }
    }
}
