//! The first process: it publishes, as its schedule says.

use std::time::{Duration, Instant};

use pubsub::{Publisher, Topic};

use super::contents::Contents;
use super::role::{Stamps, TIMEOUT, TopicKind, now};
use super::schedule::{Round, Turn};
use crate::exchange::plan::Wait;
use command::exit::{Exit, Failure};
use command::text;

/// A topic that it publishes in.
pub(super) struct TimedPublisher {
    publisher: Publisher,
    contents: Contents,
    size: u64,
    next: u64,
    /// Nanoseconds that publishing took, where that is timed.
    pub(super) publish_times: Vec<u64>,
    /// Between two messages: long enough for readers to wait again.
    pause: Duration,
    /// Is writing the content to be counted?
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
            pause: waiting.pause(),
            fill_is_timed,
        })
    }

    /// Waits until so many read: those that carry messages to another node count as one.
    pub(super) fn wait_for(&self, readers: u32) -> Result<(), Failure> {
        let end = Instant::now() + TIMEOUT;
        while self.publisher.subscribers() < readers {
            if Instant::now() > end {
                let found = self.publisher.subscribers();
                let readers = text::count_of(readers.into(), "reader");
                let why = format!("{found} of {readers} came");
                return Err(Failure::new(Exit::Deadline, why));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Publishes what a turn says: one message at a time, the next when all readers have let go of
    /// the one before; or a stream as fast as it goes.
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
            self.publish(turn.round)?;
            self.publisher.flush(TIMEOUT)?;
        }
        Ok(self.publisher.flush(TIMEOUT)?)
    }

    fn publish(&mut self, round: Round) -> Result<(), Failure> {
        let asked = now();
        let mut loan = self.publisher.loan(self.size, TIMEOUT)?;
        let lent = now();
        self.contents.write(self.next, round, |offset, part| Ok(loan.write(offset, part)?))?;
        let written = now();
        let fill = if self.fill_is_timed { written.saturating_sub(lent) } else { 0 };
        let published = now();
        let borrow = lent.saturating_sub(asked);
        let stamps = Stamps { published, borrow, fill, number: self.next };
        loan.set_metadata(&stamps.bytes())?;
        loan.publish(TIMEOUT)?;
        if round == Round::Timed {
            self.publish_times.push(now().saturating_sub(published));
        }
        self.next += 1;
        Ok(())
    }
}
