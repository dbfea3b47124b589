//! What comes: messages of other nodes, as the bridge brings them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipc::{Block, Words};

use super::Household;
use super::beginnings::Start;
use super::room::Room;
use super::source::place_of;
use crate::bridge::{Finished, MessageHeader, Place, Sink, Stages};
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::lock::lock;
use crate::pool::{Note, Pool, Stage, Way};
use crate::settings::{Reliability, SharedPlace};
use crate::text::counted;
use crate::topic::{Delivery, Entry, OriginId, Topic};

/// How often it says that it waits for room.
const SAYING: Duration = Duration::from_secs(1);

/// Puts the messages of one node's topic into this node's.
pub(super) struct TopicSink {
    household: Arc<Household>,
    topic: Arc<Topic>,
    pool: Arc<Pool>,
    /// The node's topic, among all that have and had this name there.
    origin: OriginId,
    /// Each with where it begins in the pool.
    begun: VecDeque<(Block, u64)>,
    start: Start,
    /// Whether it waits for some: then a subscriber that holds messages for too long is in its way.
    room: Arc<Room>,
    /// When that was said last.
    said: Option<Instant>,
    /// Something was delivered: what another writer left is settled.
    has_settled: bool,
    /// Gone with this.
    _alive: Arc<()>,
}

/// Could a lock not be had now? It is held by one who lives, or is being found out to be dead.
fn is_held(error: &Error) -> bool {
    error.kind() == ErrorKind::DeadlineExceeded
}

/// Notes when a message that is to be published now reached each stage of its way.
fn note_stages<W: Words>(note: &Note<'_, W>, header: &MessageHeader, stages: &Stages, now: u64) {
    let copied = now.saturating_sub(stages.notice);
    note.stamp(Stage::Posted, header.posted);
    note.stamp(Stage::Filled, header.posted.saturating_add(stages.copy_out));
    note.stamp(Stage::Wire, now.saturating_sub(stages.landed));
    note.stamp(Stage::Copying, copied.saturating_sub(stages.copy_in));
    note.stamp(Stage::Copied, copied);
    note.stamp(Stage::Published, now);
}

impl TopicSink {
    pub(super) fn new(
        household: &Arc<Household>,
        (topic, pool): (&Arc<Topic>, &Arc<Pool>),
        origin: OriginId,
        start: Start,
        room: &Arc<Room>,
        alive: Arc<()>,
    ) -> Self {
        topic.receives(origin);
        Self {
            household: Arc::clone(household),
            topic: Arc::clone(topic),
            pool: Arc::clone(pool),
            origin,
            begun: VecDeque::new(),
            start,
            room: Arc::clone(room),
            said: None,
            has_settled: false,
            _alive: alive,
        }
    }

    /// A message waits for room until there is some.
    fn waits_for_room(&mut self) {
        self.room.set_waiting();
        self.says_that_there_is_none();
    }

    /// Says it at once, and again each second: a subscriber may be in the way.
    fn says_that_there_is_none(&mut self) {
        let now = Instant::now();
        if self.said.is_none_or(|said| now.saturating_duration_since(said) >= SAYING) {
            self.said = Some(now);
            self.household.is_crowded(self.topic.number());
        }
    }

    fn free(&self, block: Block) {
        // What cannot be freed now is freed when this service is cleaned up after.
        if let Err(error) = self.pool.free(&self.household.caller(), block) {
            tracing::warn!(%error, "cannot free a message that did not become one");
        }
    }

    fn first(&self, operation: &'static str) -> Result<(Block, u64)> {
        self.begun.front().copied().ok_or_else(|| {
            let detail = "a message that did not begin is said to be all there";
            Error::new(operation, ErrorKind::Failed, detail).on(self.topic.name())
        })
    }
}

impl Sink for TopicSink {
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<Place>> {
        let operation = "take a message of another node";
        let largest = self.topic.settings().largest;
        if header.length > largest {
            let length = counted(header.length, "byte");
            let detail = format!("{length}, where {largest} is the most");
            return Err(Error::new(operation, ErrorKind::TooLong, detail).on(self.topic.name()));
        }
        let bytes = header.length.max(1);
        let (block, place) = match self.pool.allocate(&self.household.caller(), bytes) {
            Ok(allocated) => allocated,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if self.pool.should_ask(bytes) {
                    self.household.ask_to_grow(self.pool.id(), bytes);
                } else {
                    self.waits_for_room();
                }
                return Ok(None);
            }
            Err(error) if is_held(&error) => return Ok(None),
            Err(error) => return Err(error.on(self.topic.name())),
        };
        if self.topic.settings().reliability == Reliability::Reliable {
            self.room.clear();
        }
        let slice = match self.pool.slice(place, header.length) {
            Ok(slice) => slice,
            Err(error) => {
                self.free(block);
                return Err(error);
            }
        };
        let note = self.pool.ledger().note(block);
        note.set_origin(&self.origin.node);
        let (first, since) = self.start.first_of(header.publisher);
        note.set_beginning(first, since);
        note.set_way(match self.pool.id().place {
            SharedPlace::Host => Way::Ring,
            SharedPlace::Device(_) => Way::StagedRing,
        });
        note.set_metadata(&header.metadata);
        self.begun.push_back((block, place.offset));
        Ok(Some(place_of(&self.pool, slice)))
    }

    fn finish(&mut self, header: &MessageHeader, stages: &Stages) -> Result<Finished> {
        let (block, offset) = self.first("publish a message of another node")?;
        note_stages(&self.pool.ledger().note(block), header, stages, clock::now());
        let entry = Entry {
            block,
            offset,
            length: header.length,
            publisher: header.publisher,
            sequence: header.sequence,
            published_at: header.published,
            metadata: header.metadata.len() as u16,
            has_origin: true,
            turn: None,
        };
        let caller = self.household.caller();
        let origin = (&self.origin, header.position);
        // The first delivery looks through what a dead one left, as who buries that one does.
        let settling = (!self.has_settled).then(|| lock(&self.household.settling));
        let delivered = self.topic.deliver_in(&caller, origin, entry, self.pool.ledger());
        drop(settling);
        self.has_settled |= delivered.is_ok();
        match delivered {
            Ok(Delivery::Delivered(_)) => {}
            Ok(Delivery::Nobody | Delivery::Before) => self.free(block),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if self.topic.settings().reliability == Reliability::Reliable {
                    self.waits_for_room();
                    return Ok(Finished::NotYet);
                }
                // Best effort: the newest is dropped, as on its own node. But its publisher is not
                // told: those that read here see by its number that it is missing.
                match self.topic.pass_over_in(&caller, origin, self.pool.ledger()) {
                    Err(error) if is_held(&error) => return Ok(Finished::NotYet),
                    passed => passed?,
                }
                self.free(block);
                if !self.topic.arrivals().has_room() {
                    // Subscribers hold all messages that there may be: they may do so for a while.
                    self.room.record_refusal();
                    self.says_that_there_is_none();
                    self.begun.pop_front();
                    return Ok(Finished::Published);
                }
            }
            Err(error) if is_held(&error) => return Ok(Finished::NotYet),
            Err(error) => return Err(error),
        }
        self.begun.pop_front();
        self.room.clear();
        Ok(Finished::Published)
    }

    fn abandon(&mut self) {
        self.room.clear();
        while let Some((block, _)) = self.begun.pop_front() {
            self.free(block);
        }
    }
}

impl Drop for TopicSink {
    fn drop(&mut self) {
        self.abandon();
        self.topic.receives_no_more(&self.origin);
    }
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;
    use crate::bridge::Metadata;
    use crate::pool::Times;

    #[test]
    fn stages_that_overlap_have_times_of_their_own() {
        let words = LocalWords::zeroed(64);
        let note = Note::new(&words, 0);
        let header = MessageHeader {
            position: 0,
            length: 1,
            publisher: 1,
            sequence: 1,
            published: 90,
            posted: 100,
            metadata: Metadata::NONE,
        };
        // It was copied in from 500 to 900, and its last chunk came at 700.
        let stages = Stages { copy_out: 300, copy_in: 400, notice: 50, landed: 250 };
        note_stages(&note, &header, &stages, 950);
        let expected = Times {
            posted: 100,
            filled: 400,
            wire: 700,
            copying: 500,
            copied: 900,
            published: 950,
            ..Times::default()
        };
        assert_eq!(note.times(), expected);
    }
}
