//! The topics of a worker, by index.

use std::collections::HashMap;

use fabric::ring::{ChunkView, ReceiverId};
use gpu::{Device, Memory};

use super::stall_detection::{SendProgress, StallSuspicion};
use super::{NodeId, TopicKey};
use crate::replication::inbound::{Inbound, InboundFailure};
use crate::replication::outbound::Outbound;
use crate::replication::transport::{CopyHandle, ReceivedChunk, RingInput, Transport};
use crate::replication::{ClockReading, PayloadLocation, Progress, Sink, Source, TopicParameters};

/// The key of a topic of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WorkerTopicKey {
    /// A topic that it sends.
    Out(TopicKey),
    /// A topic that it receives from a node.
    In(TopicKey, NodeId),
}

/// The index of a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum TopicSlot {
    Out(usize),
    In(usize),
}

/// Whether a topic is polled in every round, and until when.
#[derive(Debug, Default)]
pub(super) struct ReadyState {
    pub(super) is_listed: bool,
    pub(super) until: u64,
    pub(super) progress: Progress,
}

/// State of a connection to a node, at the writer.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutboundConnection {
    pub(super) connection: u64,
    /// Since when a ring is requested; None: messages flow.
    pub(super) requested_since: Option<u64>,
    pub(super) send_progress: SendProgress,
}

/// A topic that is sent.
pub(super) struct OutboundTopic {
    pub(super) key: TopicKey,
    pub(super) facts: TopicParameters,
    pub(super) source: Box<dyn Source>,
    pub(super) outbound: Outbound<Transport>,
    pub(super) connections: HashMap<NodeId, OutboundConnection>,
    pub(super) ready: ReadyState,
}

/// A writer's connect request.
#[derive(Debug, Clone)]
pub(super) struct ConnectRequest {
    pub(super) connection: u64,
    pub(super) facts: TopicParameters,
    /// The address of its endpoint.
    pub(super) from: Vec<u8>,
    /// Addresses of further lanes that it could write from.
    pub(super) lane_addresses: Vec<Vec<u8>>,
}

/// The ring of an inbound topic.
pub(super) struct InboundRing {
    pub(super) ring: ReceiverId,
    /// Its memory, pinned for the device.
    pub(super) pinned: Option<Memory>,
    pub(super) request: ConnectRequest,
    pub(super) since: u64,
    pub(super) is_connected: bool,
    /// Difference between the writer's counts and the local ones.
    pub(super) suspicion: Option<StallSuspicion>,
}

/// A topic that is received from a node.
pub(super) struct InboundTopic {
    pub(super) key: TopicKey,
    pub(super) origin: NodeId,
    pub(super) sink: Box<dyn Sink>,
    pub(super) device: Option<Device>,
    pub(super) inbound: Inbound<ReceivedChunk, PayloadLocation, CopyHandle>,
    pub(super) inbound_ring: Option<InboundRing>,
    /// A request to be answered once the last connection is drained.
    pub(super) request: Option<ConnectRequest>,
    /// Memory that copies of a closed ring may still read.
    pub(super) previous_pinned: Option<Memory>,
    /// It released chunks, and the writer may not have the credit.
    pub(super) has_unacknowledged: bool,
    /// Restarts without effect since its connection stalled.
    pub(super) doublings: u32,
    pub(super) ready: ReadyState,
}

impl InboundTopic {
    pub(super) fn advance(
        &mut self,
        now: ClockReading,
        transport: &mut Transport,
    ) -> Result<Progress, InboundFailure> {
        let mut reading = RingInput {
            port: &mut transport.port,
            into: &mut transport.into,
            copy_threads: &mut transport.copy_threads,
            ring: self.inbound_ring.as_ref().map(|inbound_ring| inbound_ring.ring),
            pinned: self
                .inbound_ring
                .as_ref()
                .and_then(|inbound_ring| inbound_ring.pinned.as_ref()),
            has_taken: false,
        };
        let advanced = self.inbound.advance(now, &mut reading, &mut *self.sink);
        let has_taken = reading.has_taken;
        if self.inbound.is_drained() {
            self.previous_pinned = None;
        }
        self.has_unacknowledged |=
            has_taken || matches!(&advanced, Ok(progress) if progress.has_moved);
        advanced
    }

    /// Continues draining; true if it is complete.
    pub(super) fn drain(&mut self, transport: &mut Transport) -> bool {
        let Transport { port, into, copy_threads, .. } = transport;
        let (ring, pinned) = (None, None);
        let mut reading = RingInput { port, into, copy_threads, ring, pinned, has_taken: false };
        self.inbound.drain(&mut reading, &mut *self.sink)
    }

    /// Takes the ring, to be closed.
    pub(super) fn disconnect(&mut self) -> Option<InboundRing> {
        let mut inbound_ring = self.inbound_ring.take()?;
        self.inbound.disconnect();
        self.previous_pinned = inbound_ring.pinned.take();
        Some(inbound_ring)
    }
}

/// Items by index; indices are reused.
#[derive(Debug)]
pub(super) struct TopicSlab<T>(Vec<Option<Box<T>>>);

impl<T> TopicSlab<T> {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn put(&mut self, item: T) -> usize {
        let item = Some(Box::new(item));
        if let Some(index) = self.0.iter().position(Option::is_none) {
            self.0[index] = item;
            return index;
        }
        self.0.push(item);
        self.0.len() - 1
    }

    pub(super) fn take(&mut self, index: usize) -> Option<Box<T>> {
        self.0.get_mut(index)?.take()
    }

    pub(super) fn get(&mut self, index: usize) -> Option<&mut T> {
        self.0.get_mut(index)?.as_deref_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|item| &**item)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

// A chunk held by a topic is a view into its ring, which any thread may drop.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<ChunkView>();
    is_send::<OutboundTopic>();
    is_send::<InboundTopic>();
};
