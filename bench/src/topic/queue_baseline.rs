//! The queue baseline: a queue of the depth and entry length of a topic's. The difference is the
//! cost of nodes, publishers and subscribers.

use std::time::{Duration, Instant};

use ipc::{
    MappedWords, OverflowPolicy, Queue, QueueError, QueueSetup, Subscriber, WaitStrategy, WordRange,
};

use super::message_stamps::now;
use super::schedule::TIMEOUT;
use super::shared_words::WORDS;
use crate::exchange::plan::Wait;
use crate::worker_group::SharedSegment;
use command::exit::{Exit, Failure};

/// A queue whose entries have as many words as a topic's.
type BaselineQueue = Queue<WordRange<MappedWords>, 6>;

const DEPTH: u32 = 4;

fn setup() -> QueueSetup {
    QueueSetup { depth: DEPTH, max_held: 1, overflow_policy: OverflowPolicy::Reject }
}

/// Words of the queue, after the common ones.
pub(super) fn words() -> usize {
    BaselineQueue::required_words(setup())
}

fn failed(error: QueueError) -> Failure {
    Failure::failed(format!("measure the queue baseline failed: {error}"))
}

/// The publisher of the queue.
pub(super) struct QueueBaseline<'a> {
    shared: &'a SharedSegment,
    queue: BaselineQueue,
    spin: WaitStrategy,
    next: u64,
}

impl<'a> QueueBaseline<'a> {
    /// Creates the queue. Call before readers start.
    pub(super) fn make(shared: &SharedSegment) -> Result<(), Failure> {
        BaselineQueue::format(shared.part_from(WORDS)?, setup()).map(drop).map_err(failed)
    }

    pub(super) fn new(shared: &'a SharedSegment, waiting: Wait) -> Result<Self, Failure> {
        let queue = BaselineQueue::attach(shared.part_from(WORDS)?).map_err(failed)?;
        Ok(Self { shared, queue, spin: waiting.wait_strategy(), next: 0 })
    }

    /// Publishes entries one at a time: the next when all readers have released the one before.
    pub(super) fn one_by_one(&mut self, count: u64, pause: Duration) -> Result<(), Failure> {
        let caller = self.shared.caller();
        for _ in 0..count {
            let resting = Instant::now();
            while resting.elapsed() < pause {
                std::hint::spin_loop();
            }
            let end = Instant::now() + TIMEOUT;
            let stamp = now();
            let entry = [stamp, self.next, stamp ^ self.next, 0, 0, 0];
            let published = self.queue.publish_until(&caller, entry, &mut self.spin, end, |_| {});
            let position = published.map_err(failed)?.position;
            let is_released = || self.queue.is_released(position).then_some(());
            let released = self.queue.room().wait(&mut self.spin, end, is_released);
            released.ok_or_else(|| late("readers stopped reading"))?;
            self.next += 1;
        }
        Ok(())
    }
}

/// A reader of the queue.
pub(super) struct QueueBaselineReader {
    queue: BaselineQueue,
    subscriber: Subscriber,
    next: u64,
}

impl QueueBaselineReader {
    pub(super) fn new(shared: &SharedSegment, waiting: Wait) -> Result<Self, Failure> {
        let queue = BaselineQueue::attach(shared.part_from(WORDS)?).map_err(failed)?;
        let mut subscriber = queue.subscribe(&shared.caller()).map_err(failed)?;
        subscriber.set_wait_strategy(waiting.wait_strategy());
        Ok(Self { queue, subscriber, next: 0 })
    }

    /// Reads a number of entries. False if they are not those published.
    pub(super) fn read(
        &mut self,
        count: u64,
        mut record: impl FnMut(u64),
    ) -> Result<bool, Failure> {
        let mut is_right = true;
        for _ in 0..count {
            let taken = self.queue.take_until(&mut self.subscriber, Instant::now() + TIMEOUT);
            let time = now();
            let taken = taken.ok_or_else(|| late("an entry did not arrive"))?;
            let [stamp, number, both, ..] = taken.entry;
            is_right &= number == self.next && both == stamp ^ number;
            self.next += 1;
            record(time.saturating_sub(stamp));
            if self.queue.release(&self.subscriber, taken.position).is_some() {
                self.queue.mark_disposed(taken.position);
            }
        }
        Ok(is_right)
    }
}

fn late(why: &str) -> Failure {
    Failure::new(Exit::Deadline, format!("measure the queue baseline failed: {why}"))
}
