//! Ends of connections, of topics and of the worker, and what has to be drained.

use std::time::{Duration, Instant};

use fabric::ring::RingEvent;

use super::{WorkerLoop, read_clock};
use crate::error::Error;
use crate::replication::worker::ready_queue::COPY_POLL_INTERVAL;
use crate::replication::worker::topics::table::TopicSlot;
use crate::replication::{NodeId, Side, WorkerEvent};

/// How long an ending worker waits for writes and copies.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl WorkerLoop {
    /// Ends the connection to a node; reports the reason, if there is one.
    pub(super) fn disconnect_writer(&mut self, index: usize, node: NodeId, reason: Option<Error>) {
        let Some(topic) = self.topics.outbound(index) else { return };
        if !topic.disconnect(node, self.endpoint.transport()) {
            return;
        }
        if let Some(reason) = reason {
            let (key, side) = (topic.key(), Side::Writer);
            self.events.send(WorkerEvent::Disconnected { key, node, side, reason });
        }
        self.forget_closed_senders();
        // Writes into its ring may still be in flight.
        self.ready(TopicSlot::Out(index));
    }

    /// Ends all connections to a node.
    pub(super) fn disconnect_writers(&mut self, node: NodeId, reason: impl Fn() -> Error) {
        for index in self.topics.outbound_to(node) {
            self.disconnect_writer(index, node, Some(reason()));
        }
    }

    /// Removes the index entries of closed rings.
    fn forget_closed_senders(&mut self) {
        for ring in self.endpoint.transport().take_closed() {
            self.topics.ring_closed(RingEvent::Sender(ring));
        }
    }

    pub(super) fn stop_sending(&mut self, index: usize) {
        let Some(topic) = self.topics.outbound(index) else { return };
        for node in topic.nodes() {
            self.disconnect_writer(index, node, None);
        }
        let Some(topic) = self.topics.take_outbound(index) else { return };
        self.ready_queue.remove(TopicSlot::Out(index));
        self.draining.close_outbound(*topic, self.now, self.endpoint.transport());
        self.forget_closed_senders();
    }

    pub(super) fn stop_receiving(&mut self, index: usize, has_failed: bool) {
        if has_failed {
            self.request_restart(index, "the reader failed");
        }
        self.close_inbound_ring(index, false);
        let Some(topic) = self.topics.take_inbound(index) else { return };
        self.ready_queue.remove(TopicSlot::In(index));
        self.draining.close_inbound(*topic, self.endpoint.transport());
    }

    /// Drops topics without writes or copies in progress.
    pub(super) fn release_drained(&mut self) {
        self.draining.release(self.now, self.endpoint.transport());
        self.forget_closed_senders();
    }

    /// Waits until all topics are drained, up to a timeout.
    fn finish(&mut self) {
        let end = Instant::now() + DRAIN_TIMEOUT;
        self.release_drained();
        while !self.draining.is_empty() && Instant::now() < end {
            self.endpoint.wait(COPY_POLL_INTERVAL);
            self.now = read_clock(self.start);
            self.release_drained();
        }
        self.draining.leak_inbound();
    }

    /// Closes the endpoint.
    pub(crate) fn close(mut self) {
        for index in 0..self.topics.outbound_end() {
            self.stop_sending(index);
        }
        for index in 0..self.topics.inbound_end() {
            self.stop_receiving(index, false);
        }
        self.finish();
        self.endpoint.close();
    }
}
