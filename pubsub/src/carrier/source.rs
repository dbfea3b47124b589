//! What leaves: the messages of a topic, as the bridge takes them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ipc::Seat;

use super::Household;
use crate::bridge::{MessageHeader, NodeIdentity, Outgoing, Place, Source};
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::pool::{Direction, Pool, Readiness};
use crate::settings::SharedPlace;
use crate::topic::{Entry, Topic};

/// How far the destinations of a topic are, as it is told by who writes to them.
#[derive(Debug, Default)]
pub(super) struct Delivered(Mutex<BTreeMap<[u8; 16], u64>>);

impl Delivered {
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
    household: Arc<Household>,
    topic: Arc<Topic>,
    pool: Arc<Pool>,
    subscriber: ipc::Subscriber,
    seat: Seat,
    /// Positions that were taken and not released, in order.
    held: VecDeque<u64>,
    /// One that was taken, and that a stream is still writing.
    ahead: Option<(u64, Entry)>,
    /// It was not written when it was asked for, and nobody was told of that yet.
    is_awaited: bool,
    delivered: Arc<Delivered>,
    /// Nothing leaves before it is known to whom it has to go.
    gate: Arc<AtomicBool>,
    /// Gone with this.
    _alive: Arc<AtomicBool>,
}

impl TopicSource {
    pub(super) fn new(
        household: &Arc<Household>,
        (topic, pool): (&Arc<Topic>, &Arc<Pool>),
        delivered: &Arc<Delivered>,
        gate: &Arc<AtomicBool>,
        alive: Arc<AtomicBool>,
    ) -> Result<Self> {
        let subscriber = topic.carry(&household.caller(), household.role, pool)?;
        Ok(Self {
            household: Arc::clone(household),
            topic: Arc::clone(topic),
            pool: Arc::clone(pool),
            seat: subscriber.seat(),
            subscriber,
            held: VecDeque::new(),
            ahead: None,
            is_awaited: false,
            delivered: Arc::clone(delivered),
            gate: Arc::clone(gate),
            _alive: alive,
        })
    }
}

impl TopicSource {
    /// How far a message is. One that is none is found out later.
    fn readiness(&self, entry: &Entry) -> Readiness {
        let Some(turn) = entry.turn else { return Readiness::Ready };
        let found = self.pool.ledger().readiness(entry.block, turn);
        found.unwrap_or(Readiness::Ready)
    }

    /// The next message, if it is written. Those that never will be are passed over: readers
    /// elsewhere see by the number of what comes next that one is missing.
    fn next_written(&mut self) -> Option<(u64, Entry)> {
        loop {
            let (position, entry) = match self.ahead.take() {
                Some(ahead) => ahead,
                None => {
                    let taken = self.topic.here().take(&mut self.subscriber)?;
                    (taken.position, Entry::from_words(taken.entry))
                }
            };
            match self.readiness(&entry) {
                Readiness::Ready => return Some((position, entry)),
                Readiness::Pending => {
                    (self.ahead, self.is_awaited) = (Some((position, entry)), true);
                    return None;
                }
                Readiness::Poisoned => {
                    let (topic, sequence) = (self.topic.name(), entry.sequence);
                    tracing::warn!(
                        topic,
                        sequence,
                        "a message that was never written is not sent to other nodes"
                    );
                    let caller = self.household.caller();
                    let seat = (Direction::Here, self.seat);
                    self.topic.release_in(&caller, seat, position, self.pool.ledger());
                }
            }
        }
    }
}

/// Where bytes of a pool are, for the bridge.
pub(super) fn place_of(pool: &Pool, slice: gpu::Slice) -> Place {
    match pool.id().place {
        SharedPlace::Host => Place::Host(slice),
        SharedPlace::Device(_) => Place::Device(slice),
    }
}

impl Source for TopicSource {
    fn next(&mut self) -> Result<Option<Outgoing>> {
        let operation = "take a message for other nodes";
        if !self.gate.load(Ordering::Acquire) {
            return Ok(None);
        }
        let Some((position, entry)) = self.next_written() else {
            if self.topic.here().is_subscribed(&self.subscriber) {
                return Ok(None);
            }
            let detail = "the subscription of this node was removed";
            return Err(Error::new(operation, ErrorKind::Closed, detail).on(self.topic.name()));
        };
        self.held.push_back(position);
        let ledger = self.pool.ledger();
        let found = ledger.find(entry.block);
        let place = found.map_err(|cause| Error::of(operation, cause).on(self.topic.name()))?;
        let slice = self.pool.slice(place, entry.length)?;
        let metadata = ledger.note(entry.block).metadata(usize::from(entry.metadata));
        let header = MessageHeader {
            position,
            length: entry.length,
            publisher: entry.publisher,
            sequence: entry.sequence,
            published: entry.published_at,
            posted: 0,
            metadata,
        };
        Ok(Some(Outgoing { header, place: place_of(&self.pool, slice) }))
    }

    fn is_being_written(&mut self) -> bool {
        let Some((_, entry)) = self.ahead else { return false };
        // It may have been written since it was asked for: then nobody knows yet that it can be had.
        let was_pending = std::mem::take(&mut self.is_awaited);
        was_pending || self.readiness(&entry) == Readiness::Pending
    }

    fn has(&mut self, node: NodeIdentity, before: u64) {
        // One who begins to write anew does not know yet what it has.
        let mut all = lock(&self.delivered.0);
        let known = all.entry(node.0).or_default();
        *known = before.max(*known);
    }

    fn release(&mut self, through: u64) {
        let (caller, at) = (self.household.caller(), (Direction::Here, self.seat));
        while let Some(position) = self.held.front().copied().filter(|it| *it <= through) {
            self.held.pop_front();
            self.topic.release_in(&caller, at, position, self.pool.ledger());
        }
    }

    fn release_one(&mut self, position: u64) {
        if let Ok(place) = self.held.binary_search(&position) {
            self.held.remove(place);
            let (caller, at) = (self.household.caller(), (Direction::Here, self.seat));
            self.topic.release_in(&caller, at, position, self.pool.ledger());
        }
    }
}
