//! The messages of a topic, as replication reads them.

pub(crate) mod last_sequences;
pub(crate) mod lost_publishers;
pub(crate) mod publish_listener;
pub(crate) mod reported_sequences;
pub(crate) mod start_sequences;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ipc::SubscriptionId;
use threads::lock;

use super::ServiceContext;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Direction, Pool, Readiness};
use crate::replication::{MessageHeader, NodeId, OutgoingMessage, PayloadLocation, Source};
use crate::settings::SharedLocation;
use crate::topic::{Entry, Topic};

/// The positions that the destinations of a topic have acknowledged, as its worker reports them.
#[derive(Debug, Default)]
pub(super) struct DeliveredPositions(Mutex<BTreeMap<[u8; 16], u64>>);

impl DeliveredPositions {
    /// The first position that a node lacks, as far as is known.
    pub(super) fn to(&self, node: &[u8; 16]) -> u64 {
        lock(&self.0).get(node).copied().unwrap_or(0)
    }

    /// Forgets a former destination. If it becomes one again, it may lack earlier messages.
    pub(super) fn forget(&self, node: &[u8; 16]) {
        lock(&self.0).remove(node);
    }
}

/// Reads in the name of the role, which outlives this service. Dropping it leaves messages that it
/// took and did not release: the next source begins there.
pub(super) struct TopicSource {
    service_context: Arc<ServiceContext>,
    topic: Arc<Topic>,
    pool: Arc<Pool>,
    subscriber: ipc::Subscriber,
    subscription_id: SubscriptionId,
    /// Positions that were taken and not released, in order.
    held: VecDeque<u64>,
    /// A message that was taken, and that a stream is still writing.
    unwritten: Option<(u64, Entry)>,
    /// The write was pending at the last call of `next`, and this was not reported yet.
    is_pending_unreported: bool,
    delivered: Arc<DeliveredPositions>,
    /// No message is sent before all destinations are known.
    gate: Arc<AtomicBool>,
    /// Lives as long as this source.
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

    fn release_position(&self, position: u64) {
        let (caller, at) =
            (self.service_context.caller(), (Direction::Local, self.subscription_id));
        self.topic.release_in(&caller, at, position, self.pool.control());
    }

    /// Tells whether a message is written. An invalid entry is detected later.
    fn readiness(&self, entry: &Entry) -> Readiness {
        let Some(sync_point) = entry.sync_point else { return Readiness::Ready };
        let found = self.pool.control().readiness(entry.block, sync_point);
        found.unwrap_or(Readiness::Ready)
    }

    /// The next message, if it is written. Poisoned messages are skipped: remote readers detect the
    /// gap in the sequence numbers.
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
                        "a message that was never written is not replicated"
                    );
                    self.release_position(position);
                }
            }
        }
    }
}

pub(super) fn payload_location(pool: &Pool, slice: gpu::Slice) -> PayloadLocation {
    match pool.id().place {
        SharedLocation::Host => PayloadLocation::Host(slice),
        SharedLocation::Device(_) => PayloadLocation::Device(slice),
    }
}

impl Source for TopicSource {
    fn next(&mut self) -> Result<Option<OutgoingMessage>> {
        let operation = "take message for other nodes from topic";
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
        let range = found.map_err(|cause| Error::of(operation, cause).on(self.topic.name()))?;
        let slice = self.pool.slice(range, entry.length)?;
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
        // It may have been written since the last call of `next`, without any notification.
        let was_pending = std::mem::take(&mut self.is_pending_unreported);
        was_pending || self.readiness(&entry) == Readiness::Pending
    }

    fn note_delivered(&mut self, node: NodeId, before: u64) {
        // A new connection does not know yet what the node has.
        let mut all = lock(&self.delivered.0);
        let known = all.entry(node.0).or_default();
        *known = before.max(*known);
    }

    fn release(&mut self, through: u64) {
        while let Some(position) = self.held.front().copied().filter(|it| *it <= through) {
            self.held.pop_front();
            self.release_position(position);
        }
    }

    fn release_one(&mut self, position: u64) {
        if let Ok(index) = self.held.binary_search(&position) {
            self.held.remove(index);
            self.release_position(position);
        }
    }
}
