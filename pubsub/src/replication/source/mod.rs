//! What leaves: the messages of a topic, as the bridge takes them.

pub(in crate::replication) mod last_sequences;
pub(in crate::replication) mod lost_publishers;
pub(in crate::replication) mod publish_listener;
pub(in crate::replication) mod start_sequences;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ipc::SubscriptionId;

use super::ServiceContext;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::pool::{Direction, Pool, Readiness};
use crate::replication::{MessageHeader, NodeId, OutgoingMessage, PayloadLocation, Source};
use crate::settings::SharedLocation;
use crate::topic::{Entry, Topic};

/// How far the destinations of a topic are, as it is told by who writes to them.
#[derive(Debug, Default)]
pub(super) struct DeliveredPositions(Mutex<BTreeMap<[u8; 16], u64>>);

impl DeliveredPositions {
    /// The first position that a node does not have, as far as that is known.
    pub(super) fn to(&self, node: &[u8; 16]) -> u64 {
        lock(&self.0).get(node).copied().unwrap_or(0)
    }

    /// It is no destination any more. It may be one again, and lack what it has now.
    pub(super) fn forget(&self, node: &[u8; 16]) {
        lock(&self.0).remove(node);
    }
}

/// Reads in the name of the role that outlives this service. When it is dropped, what it
/// took and did not release is as it was: the next one begins there.
pub(super) struct TopicSource {
    service_context: Arc<ServiceContext>,
    topic: Arc<Topic>,
    pool: Arc<Pool>,
    subscriber: ipc::Subscriber,
    subscription_id: SubscriptionId,
    /// Positions that were taken and not released, in order.
    held: VecDeque<u64>,
    /// One that was taken, and that a stream is still writing.
    unwritten: Option<(u64, Entry)>,
    /// It was not written when it was asked for, and nobody was told of that yet.
    is_pending_unreported: bool,
    delivered: Arc<DeliveredPositions>,
    /// Nothing leaves before it is known to whom it has to go.
    gate: Arc<AtomicBool>,
    /// Gone with this.
    _alive: Arc<AtomicBool>,
}

impl TopicSource {
    pub(super) fn new(
        service_context: &Arc<ServiceContext>,
        (topic, pool): (&Arc<Topic>, &Arc<Pool>),
        delivered: &Arc<DeliveredPositions>,
        gate: &Arc<AtomicBool>,
        alive: Arc<AtomicBool>,
    ) -> Result<Self> {
        let subscriber = topic.subscribe_for_replication(
            &service_context.caller(),
            service_context.role,
            pool,
        )?;
        Ok(Self {
            service_context: Arc::clone(service_context),
            topic: Arc::clone(topic),
            pool: Arc::clone(pool),
            subscription_id: subscriber.subscription_id(),
            subscriber,
            held: VecDeque::new(),
            unwritten: None,
            is_pending_unreported: false,
            delivered: Arc::clone(delivered),
            gate: Arc::clone(gate),
            _alive: alive,
        })
    }
}

impl TopicSource {
    /// How far a message is. One that is none is found out later.
    fn readiness(&self, entry: &Entry) -> Readiness {
        let Some(sync_point) = entry.sync_point else { return Readiness::Ready };
        let found = self.pool.control().readiness(entry.block, sync_point);
        found.unwrap_or(Readiness::Ready)
    }

    /// The next message, if it is written. Those that never will be are passed over: readers
    /// elsewhere see by the number of what comes next that one is missing.
    fn next_written(&mut self) -> Option<(u64, Entry)> {
        loop {
            let (position, entry) = match self.unwritten.take() {
                Some(unwritten) => unwritten,
                None => {
                    let taken = self.topic.local().take(&mut self.subscriber)?;
                    (taken.position, Entry::from_words(taken.entry))
                }
            };
            match self.readiness(&entry) {
                Readiness::Ready => return Some((position, entry)),
                Readiness::Pending => {
                    (self.unwritten, self.is_pending_unreported) = (Some((position, entry)), true);
                    return None;
                }
                Readiness::Poisoned => {
                    let (topic, sequence) = (self.topic.name(), entry.sequence);
                    tracing::warn!(
                        topic,
                        sequence,
                        "a message whose stream failed is not replicated"
                    );
                    let caller = self.service_context.caller();
                    let subscription_id = (Direction::Local, self.subscription_id);
                    self.topic.release_in(&caller, subscription_id, position, self.pool.control());
                }
            }
        }
    }
}

/// Where bytes of a pool are, for the bridge.
pub(super) fn payload_location(pool: &Pool, slice: gpu::Slice) -> PayloadLocation {
    match pool.id().place {
        SharedLocation::Host => PayloadLocation::Host(slice),
        SharedLocation::Device(_) => PayloadLocation::Device(slice),
    }
}

impl Source for TopicSource {
    fn next(&mut self) -> Result<Option<OutgoingMessage>> {
        let operation = "take a message for other nodes";
        if !self.gate.load(Ordering::Acquire) {
            return Ok(None);
        }
        let Some((position, entry)) = self.next_written() else {
            if self.topic.local().is_subscribed(&self.subscriber) {
                return Ok(None);
            }
            let detail = "the subscription of this node was removed";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(self.topic.name()));
        };
        self.held.push_back(position);
        let control = self.pool.control();
        let found = control.find(entry.block);
        let place = found.map_err(|cause| Error::of(operation, cause).on(self.topic.name()))?;
        let slice = self.pool.slice(place, entry.length)?;
        let metadata = control.sample_info(entry.block).metadata(usize::from(entry.metadata));
        let header = MessageHeader {
            position,
            length: entry.length,
            publisher: entry.publisher,
            sequence: entry.sequence,
            published: entry.published_at,
            posted: 0,
            metadata,
        };
        Ok(Some(OutgoingMessage { header, place: payload_location(&self.pool, slice) }))
    }

    fn is_write_pending(&mut self) -> bool {
        let Some((_, entry)) = self.unwritten else { return false };
        // It may have been written since it was asked for: then nobody knows yet that it can be had.
        let was_pending = std::mem::take(&mut self.is_pending_unreported);
        was_pending || self.readiness(&entry) == Readiness::Pending
    }

    fn note_delivered(&mut self, node: NodeId, before: u64) {
        // One who begins to write anew does not know yet what it has.
        let mut all = lock(&self.delivered.0);
        let known = all.entry(node.0).or_default();
        *known = before.max(*known);
    }

    fn release(&mut self, through: u64) {
        let (caller, at) =
            (self.service_context.caller(), (Direction::Local, self.subscription_id));
        while let Some(position) = self.held.front().copied().filter(|it| *it <= through) {
            self.held.pop_front();
            self.topic.release_in(&caller, at, position, self.pool.control());
        }
    }

    fn release_one(&mut self, position: u64) {
        if let Ok(place) = self.held.binary_search(&position) {
            self.held.remove(place);
            let (caller, at) =
                (self.service_context.caller(), (Direction::Local, self.subscription_id));
            self.topic.release_in(&caller, at, position, self.pool.control());
        }
    }
}
