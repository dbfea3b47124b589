//! The publisher of a measurement.

use std::time::{Duration, Instant};

use pubsub::{Publisher, Topic};

use super::TopicKind;
use super::contents::Contents;
use super::message_stamps::{Stamps, now};
use super::schedule::{Round, TIMEOUT, Turn};
use crate::exchange::plan::Wait;
use crate::process::processor_time;
use command::exit::{Exit, Failure};
use command::histogram::Histogram;
use command::text;

/// A topic to publish to.
pub(super) struct TimedPublisher {
    publisher: Publisher,
    contents: Contents,
    size: u64,
    next: u64,
    /// Nanoseconds of the call that publishes, where it is timed.
    publish_times: Vec<u64>,
    /// Of timed messages, until they were released.
    processor_time: Duration,
    /// Pause between two messages: long enough for readers to wait again.
    pause: Duration,
    /// Does the time include writing the content?
    fill_is_timed: bool,
}

impl TimedPublisher {
    pub(super) fn new(
        topic: &Topic,
        kind: &TopicKind,
        waiting: Wait,
        fill_is_timed: bool,
    ) -> Result<Self, Failure> {
        let publisher = topic.publisher()?;
        publisher.set_wait_strategy(waiting.wait_strategy());
        Ok(Self {
            publisher,
            contents: Contents::new(kind, fill_is_timed),
            size: kind.size,
            next: 0,
            publish_times: Vec::new(),
            processor_time: Duration::ZERO,
            pause: waiting.pause(),
            fill_is_timed,
        })
    }

    /// Waits for so many readers; the replication to another node counts as one.
    pub(super) fn wait_for(&self, readers: u32) -> Result<(), Failure> {
        let end = Instant::now() + TIMEOUT;
        while self.publisher.subscribers() < readers {
            if Instant::now() > end {
                let found = self.publisher.subscribers();
                let readers = text::count_of(readers.into(), "reader");
                let why = format!("wait for readers failed: {found} of {readers} subscribed");
                return Err(Failure::new(Exit::Deadline, why));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Publishes the messages of a turn: one at a time, the next when all readers have released the
    /// one before; or a stream at full speed.
    pub(super) fn turn(&mut self, turn: Turn) -> Result<(), Failure> {
        for _ in 0..turn.count {
            if turn.round == Round::Stream {
                self.publish(turn.round)?;
                continue;
            }
            let resting = Instant::now();
            while resting.elapsed() < self.pause {
                std::hint::spin_loop();
            }
            let before = processor_time();
            self.publish(turn.round)?;
            self.publisher.flush(TIMEOUT)?;
            if turn.round == Round::Timed {
                self.processor_time += processor_time() - before;
            }
        }
        Ok(self.publisher.flush(TIMEOUT)?)
    }

    /// Processor time of this process for the timed messages.
    pub(super) fn processor_time(&self) -> Duration {
        self.processor_time
    }

    /// Nanoseconds of the calls that published timed messages.
    pub(super) fn publish_times(&self) -> Histogram {
        self.publish_times.iter().copied().collect()
    }

    fn publish(&mut self, round: Round) -> Result<(), Failure> {
        let requested = now();
        let mut loan = self.publisher.loan(self.size, TIMEOUT)?;
        let lent = now();
        self.contents.write(self.next, round, |offset, part| Ok(loan.write(offset, part)?))?;
        let written = now();
        let fill = if self.fill_is_timed { written.saturating_sub(lent) } else { 0 };
        let published = now();
        let loan_time = lent.saturating_sub(requested);
        let stamps = Stamps { published, loan: loan_time, fill, number: self.next };
        loan.set_metadata(&stamps.bytes())?;
        loan.publish(TIMEOUT)?;
        if round == Round::Timed {
            self.publish_times.push(now().saturating_sub(published));
        }
        self.next += 1;
        Ok(())
    }
}
