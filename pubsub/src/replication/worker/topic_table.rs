//! The topics of a worker, each in a place of its own.

use std::collections::HashMap;

use fabric::ring::{ChunkView, ReceiverId};
use gpu::{Device, Memory};

use super::stall_detection::{SendProgress, StallSuspicion};
use super::{NodeId, TopicKey};
use crate::replication::inbound::{Inbound, InboundFailure};
use crate::replication::outbound::Outbound;
use crate::replication::transport::{CopyHandle, ReceivedChunk, RingInput, Transport};
use crate::replication::{ClockReading, PayloadLocation, Progress, Sink, Source, TopicParameters};

/// A topic of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WorkerTopicKey {
    /// That it sends.
    Out(TopicKey),
    /// That it receives from a node.
    In(TopicKey, NodeId),
}

/// A topic, by its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum TopicSlot {
    Out(usize),
    In(usize),
}

/// Whether a topic is looked after all the time, and until when.
#[derive(Debug, Default)]
pub(super) struct ReadyState {
    pub(super) is_listed: bool,
    pub(super) until: u64,
    pub(super) progress: Progress,
}

/// How far a connection to a node is, at the writer.
#[derive(Debug, Clone, Copy)]
pub(super) struct OutboundConnection {
    pub(super) connection: u64,
    /// Since when a ring is wished for; None: messages flow.
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

/// What a writer wishes.
#[derive(Debug, Clone)]
pub(super) struct ConnectRequest {
    pub(super) connection: u64,
    pub(super) facts: TopicParameters,
    /// The address of its endpoint.
    pub(super) from: Vec<u8>,
    /// Those of its further lanes, by which it could write, too.
    pub(super) lane_addresses: Vec<Vec<u8>>,
}

/// A ring that a topic is received by.
pub(super) struct InboundRing {
    pub(super) ring: ReceiverId,
    /// Its memory, as the device knows it.
    pub(super) pinned: Option<Memory>,
    pub(super) request: ConnectRequest,
    pub(super) since: u64,
    pub(super) is_connected: bool,
    /// Between what the writer says and what is here.
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
    /// To be answered as soon as nothing of the last connection is under way.
    pub(super) request: Option<ConnectRequest>,
    /// What copies of a ring that is gone may still read.
    pub(super) previous_pinned: Option<Memory>,
    /// It released chunks of which the writer may not know.
    pub(super) has_unacknowledged: bool,
    /// How often it was of no use to begin anew since its connection moved nothing.
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

    /// Goes on until nothing is being copied: true then.
    pub(super) fn drain(&mut self, transport: &mut Transport) -> bool {
        let Transport { port, into, copy_threads, .. } = transport;
        let (ring, pinned) = (None, None);
        let mut reading = RingInput { port, into, copy_threads, ring, pinned, has_taken: false };
        self.inbound.drain(&mut reading, &mut *self.sink)
    }

    /// The ring is gone: gives it, to be closed.
    pub(super) fn disconnect(&mut self) -> Option<InboundRing> {
        let mut inbound_ring = self.inbound_ring.take()?;
        self.inbound.disconnect();
        self.previous_pinned = inbound_ring.pinned.take();
        Some(inbound_ring)
    }
}

/// Things in places that are used again.
#[derive(Debug)]
pub(super) struct TopicSlab<T>(Vec<Option<Box<T>>>);

impl<T> TopicSlab<T> {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn put(&mut self, thing: T) -> usize {
        let thing = Some(Box::new(thing));
        if let Some(place) = self.0.iter().position(Option::is_none) {
            self.0[place] = thing;
            return place;
        }
        self.0.push(thing);
        self.0.len() - 1
    }

    pub(super) fn take(&mut self, place: usize) -> Option<Box<T>> {
        self.0.get_mut(place)?.take()
    }

    pub(super) fn get(&mut self, place: usize) -> Option<&mut T> {
        self.0.get_mut(place)?.as_deref_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().flatten().map(|thing| &**thing)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

// A chunk that is held by a topic is a view into its ring; it may be dropped by any thread.
const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<ChunkView>();
    is_send::<OutboundTopic>();
    is_send::<InboundTopic>();
};
