//! Messages of other nodes, published at this node.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ipc::{Block, Words};
use threads::lock;

use super::ServiceContext;
use crate::clock;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{DeliveryPath, Pool, SampleInfo, Stage};
use crate::replication::source::payload_location;
use crate::replication::{FinishOutcome, MessageHeader, PayloadLocation, Sink, StageDurations};
use crate::settings::{Reliability, SharedLocation};
use crate::text::counted;
use crate::topic::{Delivery, Entry, OriginId, RemotePublisher, Topic};

const REPORT_INTERVAL: Duration = Duration::from_secs(1);

const NO: u64 = 0;
const WAITS: u64 = u64::MAX;

/// Tells the service whether messages of another node wait for capacity; set by a sink.
#[derive(Debug)]
pub(crate) struct RoomWait {
    began: Instant,
    /// `NO`, `WAITS`, or the time of the last refused message in nanoseconds from 1.
    state: AtomicU64,
}

impl RoomWait {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), state: AtomicU64::new(NO) }
    }

    pub(crate) fn set_waiting(&self) {
        self.state.store(WAITS, Ordering::Release);
    }

    /// There is capacity, or no message waits any more.
    pub(crate) fn clear(&self) {
        self.state.store(NO, Ordering::Release);
    }

    /// A message was dropped for lack of capacity. It may have been the last one.
    pub(crate) fn record_refusal(&self) {
        let passed = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(WAITS);
        self.state.store(passed.clamp(NO + 1, WAITS - 1), Ordering::Release);
    }

    /// Returns true if a message waits; a refused message counts for `holds`.
    pub(crate) fn is_waiting(&self, holds: Duration) -> bool {
        match self.state.load(Ordering::Acquire) {
            NO => false,
            WAITS => true,
            refused => self.began.elapsed() < Duration::from_nanos(refused) + holds,
        }
    }
}

pub(super) struct TopicSink {
    service_context: Arc<ServiceContext>,
    topic: Arc<Topic>,
    pool: Arc<Pool>,
    /// The node's topic, among all topics of this name that existed there.
    origin: OriginId,
    /// Blocks of messages that began, with their offsets in the pool.
    begun: VecDeque<(Block, u64)>,
    /// Slot of the account of the last message's publisher.
    account: usize,
    /// Tells the service whether a message waits for capacity: then a subscriber that holds samples
    /// too long blocks it.
    room_wait: Arc<RoomWait>,
    last_reported: Option<Instant>,
    /// A message was delivered: arrivals left by another writer are repaired.
    has_repaired_arrivals: bool,
    /// Lives as long as this sink.
    _alive: Arc<()>,
}

/// Returns true if a lock could not be taken: a living process holds it, or a dead holder is being
/// detected.
fn is_lock_busy(error: &Error) -> bool {
    error.kind() == ErrorKind::DeadlineExceeded
}

/// Notes when a message reached each stage before it is published.
fn note_stages<W: Words>(
    sample_info: &SampleInfo<'_, W>,
    header: &MessageHeader,
    stages: &StageDurations,
    now: u64,
) {
    let copied = now.saturating_sub(stages.after_copy);
    sample_info.stamp(Stage::Posted, header.posted);
    sample_info.stamp(Stage::Filled, header.posted.saturating_add(stages.copy_out));
    sample_info.stamp(Stage::Wire, now.saturating_sub(stages.after_arrival));
    sample_info.stamp(Stage::Copying, copied.saturating_sub(stages.copy_in));
    sample_info.stamp(Stage::Copied, copied);
    sample_info.stamp(Stage::Published, now);
}

impl TopicSink {
    pub(super) fn new(
        service_context: &Arc<ServiceContext>,
        (topic, pool): (&Arc<Topic>, &Arc<Pool>),
        origin: OriginId,
        room_wait: &Arc<RoomWait>,
        alive: Arc<()>,
    ) -> Self {
        topic.track_origin(origin);
        Self {
            service_context: Arc::clone(service_context),
            topic: Arc::clone(topic),
            pool: Arc::clone(pool),
            origin,
            begun: VecDeque::new(),
            account: 0,
            room_wait: Arc::clone(room_wait),
            last_reported: None,
            has_repaired_arrivals: false,
            _alive: alive,
        }
    }

    fn wait_for_room(&mut self) {
        self.room_wait.set_waiting();
        self.report_no_room();
    }

    /// Reports waiting at once, and again each second: a subscriber may block it.
    fn report_no_room(&mut self) {
        let now = Instant::now();
        let is_due = |last| now.saturating_duration_since(last) >= REPORT_INTERVAL;
        if self.last_reported.is_none_or(is_due) {
            self.last_reported = Some(now);
            self.service_context.note_waiting_arrivals(self.topic.number());
        }
    }

    fn free(&self, block: Block) {
        // A block that cannot be freed now is freed by the cleanup after this service.
        if let Err(error) = self.pool.free(&self.service_context.caller(), block) {
            tracing::warn!(%error, "cannot free the block of an abandoned message");
        }
    }
}

impl Sink for TopicSink {
    fn begin(&mut self, header: &MessageHeader) -> Result<Option<PayloadLocation>> {
        let operation = "take message of another node for topic";
        let largest = self.topic.settings().largest;
        if header.length > largest {
            let length = counted(header.length, "byte");
            let detail = format!("{length} exceed the limit of {largest}");
            return Err(Error::new(operation, ErrorKind::TooLong, detail).on(self.topic.name()));
        }
        let bytes = header.length.max(1);
        // Before the attempt: a request must not add a second piece to one that arrives meanwhile.
        let admitted = self.pool.admitted();
        let (block, range) = match self.pool.allocate(&self.service_context.caller(), bytes) {
            Ok(allocated) => allocated,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                match self.pool.growth_request(admitted, bytes) {
                    Some(request) => self.service_context.request_growth(request),
                    None => self.wait_for_room(),
                }
                return Ok(None);
            }
            Err(error) if is_lock_busy(&error) => return Ok(None),
            Err(error) => return Err(error.on(self.topic.name())),
        };
        if self.topic.settings().reliability == Reliability::Reliable {
            self.room_wait.clear();
        }
        let slice = match self.pool.slice(range, header.length) {
            Ok(slice) => slice,
            Err(error) => {
                self.free(block);
                return Err(error);
            }
        };
        let sample_info = self.pool.control().sample_info(block);
        sample_info.set_origin(&self.origin.node);
        sample_info.set_path(match self.pool.id().place {
            SharedLocation::Host => DeliveryPath::Ring,
            SharedLocation::Device(_) => DeliveryPath::StagedRing,
        });
        sample_info.set_metadata(&header.metadata);
        self.begun.push_back((block, range.offset));
        Ok(Some(payload_location(&self.pool, slice)))
    }

    fn finish(&mut self, header: &MessageHeader, stages: &StageDurations) -> Result<FinishOutcome> {
        let Some((block, offset)) = self.begun.front().copied() else {
            let (operation, detail) = (
                "publish message of another node to topic",
                "a message was finished before it began",
            );
            return Err(Error::new(operation, ErrorKind::Failed, detail).on(self.topic.name()));
        };
        let sample_info = self.pool.control().sample_info(block);
        if stages.is_direct {
            sample_info.set_path(DeliveryPath::DirectRing);
        }
        note_stages(&sample_info, header, stages, clock::now());
        let entry = Entry {
            block,
            offset,
            length: header.length,
            publisher: header.publisher,
            sequence: header.sequence,
            published_at: header.published,
            metadata: header.metadata.len() as u16,
            has_origin: true,
            sync_point: None,
        };
        // First: a subscriber that is created after the delivery does not expect the message.
        let publisher = RemotePublisher::new(self.origin.node, header.publisher);
        let position = self.topic.inbound().position();
        let start =
            self.topic.note_arrival(&mut self.account, publisher, header.sequence, position);
        sample_info.set_start(start.words());
        let caller = self.service_context.caller();
        let origin = (&self.origin, header.position);
        // The first delivery repairs arrivals that a dead writer left, as its cleanup does.
        let arrival_repair_lock =
            (!self.has_repaired_arrivals).then(|| lock(&self.service_context.arrival_repair_lock));
        let delivered = self.topic.deliver_in(&caller, origin, entry, self.pool.control());
        drop(arrival_repair_lock);
        self.has_repaired_arrivals |= delivered.is_ok();
        match delivered {
            Ok(Delivery::Delivered(_)) => {}
            Ok(Delivery::NoSubscribers | Delivery::Duplicate) => {
                self.topic.note_passed(&mut self.account, publisher, header.sequence);
                self.free(block);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if self.topic.settings().reliability == Reliability::Reliable {
                    self.wait_for_room();
                    return Ok(FinishOutcome::Retry);
                }
                // Best effort: the newest message is dropped, as on its own node. Its publisher is
                // not told: readers here detect the gap in the sequence numbers.
                match self.topic.skip_in(&caller, origin, self.pool.control()) {
                    Err(error) if is_lock_busy(&error) => return Ok(FinishOutcome::Retry),
                    skipped => skipped?,
                }
                self.topic.note_passed(&mut self.account, publisher, header.sequence);
                self.free(block);
                if !self.topic.inbound().has_room() {
                    // Subscribers hold the maximum of messages, and may do so for a while.
                    self.room_wait.record_refusal();
                    self.report_no_room();
                    self.begun.pop_front();
                    return Ok(FinishOutcome::Published);
                }
            }
            Err(error) if is_lock_busy(&error) => return Ok(FinishOutcome::Retry),
            Err(error) => return Err(error),
        }
        self.begun.pop_front();
        self.room_wait.clear();
        Ok(FinishOutcome::Published)
    }

    fn abandon(&mut self) {
        self.room_wait.clear();
        while let Some((block, _)) = self.begun.pop_front() {
            self.free(block);
        }
    }
}

impl Drop for TopicSink {
    fn drop(&mut self) {
        self.abandon();
        self.topic.untrack_origin(&self.origin);
    }
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;
    use crate::pool::Times;
    use crate::replication::Metadata;

    #[test]
    fn overlapping_stages_have_their_own_times() {
        let words = LocalWords::zeroed(64);
        let sample_info = SampleInfo::new(&words, 0);
        let header = MessageHeader {
            position: 0,
            length: 1,
            publisher: 1,
            sequence: 1,
            published: 90,
            posted: 100,
            metadata: Metadata::NONE,
        };
        // It was copied in from 500 to 900; its last chunk arrived at 700.
        let stages = StageDurations {
            copy_out: 300,
            copy_in: 400,
            after_copy: 50,
            after_arrival: 250,
            is_direct: false,
        };
        note_stages(&sample_info, &header, &stages, 950);
        let expected = Times {
            posted: 100,
            filled: 400,
            wire: 700,
            copying: 500,
            copied: 900,
            published: 950,
            ..Times::default()
        };
        assert_eq!(sample_info.times(), expected);
    }

    #[test]
    fn refused_message_counts_for_a_while_waiting_one_until_cleared() {
        let (room_wait, long) = (RoomWait::new(), Duration::from_secs(3600));
        assert!(!room_wait.is_waiting(long));
        room_wait.set_waiting();
        assert!(room_wait.is_waiting(Duration::ZERO));
        room_wait.record_refusal();
        assert!(room_wait.is_waiting(long) && !room_wait.is_waiting(Duration::ZERO));
        room_wait.clear();
        assert!(!room_wait.is_waiting(long));
    }
}
