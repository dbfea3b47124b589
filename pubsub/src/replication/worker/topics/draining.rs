//! Topics that are closed with writes or copies in progress.

use std::mem;

use super::{InboundTopic, OutboundTopic};
use crate::replication::ClockReading;
use crate::replication::transport::Transport;

#[derive(Default)]
pub(crate) struct Draining {
    /// With writes in flight, which read memory of the source.
    outbound: Vec<OutboundTopic>,
    /// With copies in progress, which write memory of the sink.
    inbound: Vec<InboundTopic>,
}

impl Draining {
    /// Closes a topic that is not sent any more.
    pub(crate) fn close_outbound(
        &mut self,
        mut topic: OutboundTopic,
        now: ClockReading,
        transport: &mut Transport,
    ) {
        topic.outbound.close(transport);
        if !topic.outbound.is_quiescent(now, transport) {
            self.outbound.push(topic);
        }
    }

    /// Closes a topic that is not received any more.
    pub(crate) fn close_inbound(&mut self, mut topic: InboundTopic, transport: &mut Transport) {
        topic.inbound.disconnect();
        if !topic.drain(transport) {
            self.inbound.push(topic);
        }
    }

    /// Drops topics without writes or copies in progress.
    pub(crate) fn release(&mut self, now: ClockReading, transport: &mut Transport) {
        self.outbound.retain_mut(|topic| !topic.outbound.is_quiescent(now, transport));
        self.inbound.retain_mut(|topic| !topic.drain(transport));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.outbound.is_empty() && self.inbound.is_empty()
    }

    /// Whether the completion of a write is overdue.
    pub(crate) fn is_overdue(&self, now: ClockReading) -> bool {
        self.outbound.iter().any(|topic| topic.outbound.is_overdue(now))
    }

    /// Forgets all rings after the endpoint was closed.
    pub(crate) fn forget_rings(&mut self) {
        self.outbound.iter_mut().for_each(|topic| topic.outbound.forget_rings());
    }

    /// Gives up waiting: a device that hangs may still write, so its memory is leaked.
    pub(crate) fn leak_inbound(&mut self) {
        mem::take(&mut self.inbound).into_iter().for_each(mem::forget);
    }
}
