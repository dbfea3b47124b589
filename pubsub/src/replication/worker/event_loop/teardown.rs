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
        self.ready_queue.remove(TopicSlot::Out(index));
        self.topics.close_outbound(index, self.now, self.endpoint.transport());
        self.forget_closed_senders();
    }

    pub(super) fn stop_receiving(&mut self, index: usize) {
        self.close_inbound_ring(index, false);
        self.ready_queue.remove(TopicSlot::In(index));
        self.topics.close_inbound(index, self.endpoint.transport());
    }

    /// Drops topics without writes or copies in progress.
    pub(super) fn release_drained(&mut self) {
        self.topics.release_drained(self.now, self.endpoint.transport());
        self.forget_closed_senders();
    }

    /// Waits until all topics are drained, up to a timeout, and closes the endpoint.
    pub(crate) fn close(mut self) {
        for index in 0..self.topics.outbound_end() {
            self.stop_sending(index);
        }
        for index in 0..self.topics.inbound_end() {
            self.stop_receiving(index);
        }
        let end = Instant::now() + DRAIN_TIMEOUT;
        self.release_drained();
        while !self.topics.is_drained() && Instant::now() < end {
            self.endpoint.wait(COPY_POLL_INTERVAL);
            self.now = read_clock(self.start);
            self.release_drained();
        }
        self.topics.leak_inbound();
        self.endpoint.close();
    }
}
