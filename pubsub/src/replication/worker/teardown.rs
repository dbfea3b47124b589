//! Ends: of a connection, of a topic, of the worker; and what has to be waited for then.

use std::mem;
use std::time::{Duration, Instant};

use super::NodeId;
use super::event_loop::{COPY_POLL_INTERVAL, WorkerLoop};
use super::events::WorkerEvent;
use super::topic_table::{TopicSlot, WorkerTopicKey};
use crate::error::Error;
use crate::replication::Side;

/// How long a worker that ends waits for what is under way.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

impl WorkerLoop {
    /// The connection to a node is over: with a reason that is reported, if it was not wished for.
    pub(super) fn disconnect_writer(&mut self, place: usize, node: NodeId, reason: Option<Error>) {
        let Some(topic) = self.outbound_topics.get(place) else { return };
        topic.outbound.disconnect(node, &mut self.transport);
        if topic.connections.remove(&node).is_none() {
            return;
        }
        let (key, side) = (topic.key, Side::Writer);
        if let Some(reason) = reason {
            self.events.tell(WorkerEvent::Disconnected { key, node, side, reason });
        }
        self.forget_closed_senders();
        // A ring may still be on its way out.
        self.ready(TopicSlot::Out(place));
    }

    /// Rings that are gone are nobody's.
    pub(super) fn forget_closed_senders(&mut self) {
        for ring in self.transport.closed.drain(..) {
            self.sender_topics.remove(&ring);
        }
    }

    pub(super) fn stop_sending(&mut self, place: usize) {
        let Some(topic) = self.outbound_topics.get(place) else { return };
        let nodes: Vec<_> = topic.connections.keys().copied().collect();
        for node in nodes {
            self.disconnect_writer(place, node, None);
        }
        let Some(mut topic) = self.outbound_topics.take(place) else { return };
        topic.outbound.close(&mut self.transport);
        self.topic_index.remove(&WorkerTopicKey::Out(topic.key));
        self.ready_topics.retain(|task| *task != TopicSlot::Out(place));
        let is_quiescent = topic.outbound.is_quiescent(self.now, &mut self.transport);
        self.forget_closed_senders();
        if !is_quiescent {
            // What is on its way is written from memory of the source's.
            self.draining_outbound.push(*topic);
        }
    }

    pub(super) fn stop_receiving(&mut self, place: usize, says_so: bool) {
        if says_so {
            self.request_restart(place, "the reader cannot go on");
        }
        self.close_inbound_ring(place, false);
        let Some(mut topic) = self.inbound_topics.take(place) else { return };
        self.topic_index.remove(&WorkerTopicKey::In(topic.key, topic.origin));
        self.ready_topics.retain(|task| *task != TopicSlot::In(place));
        self.unacknowledged.retain(|one| *one != place);
        topic.inbound.disconnect();
        if !topic.drain(&mut self.transport) {
            // What is being copied is copied into memory of the sink's.
            self.draining_inbound.push(*topic);
        }
    }

    /// Lets go of topics of which nothing is under way any more.
    pub(super) fn release_drained(&mut self) {
        let (now, transport) = (self.now, &mut self.transport);
        self.draining_outbound.retain_mut(|topic| !topic.outbound.is_quiescent(now, transport));
        self.draining_inbound.retain_mut(|topic| !topic.drain(transport));
        self.forget_closed_senders();
    }

    /// Waits until nothing is under way, but not for ever.
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
        // A device that hangs may go on for all that is known: then its memory stays.
        mem::take(&mut self.draining_inbound).into_iter().for_each(mem::forget);
    }

    /// Closes the endpoint.
    pub(super) fn close(mut self) {
        for place in 0..self.outbound_topics.len() {
            self.stop_sending(place);
        }
        for place in 0..self.inbound_topics.len() {
            self.stop_receiving(place, false);
        }
        self.finish();
        if let Err(error) = self.transport.close() {
            tracing::warn!(%error, "the endpoint was not closed");
        }
    }
}
