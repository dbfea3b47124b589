//! The first process: it publishes, and says what its readers are to do next.

use std::time::{Duration, Instant};

use pubsub::{Publisher, Topic};

use super::part::{Kind, PATIENCE, SAME, Stamps, now};
use crate::cli::exit::{Exit, Failure};
use crate::cli::window::Windows;

/// A topic that it publishes in.
pub(super) struct Line {
    publisher: Publisher,
    kind: Kind,
    windows: Windows,
    next: u64,
    /// Nanoseconds that publishing took.
    pub(super) publishing: Vec<u64>,
    /// Between two messages: long enough for readers to wait again.
    pause: Duration,
    /// Is writing the content to be counted?
    counts_writing: bool,
}

impl Line {
    pub(super) fn new(
        topic: &Topic,
        kind: &Kind,
        pause: Duration,
        counts_writing: bool,
    ) -> Result<Self, Failure> {
        Ok(Self {
            publisher: topic.publisher()?,
            kind: kind.clone(),
            windows: Windows::new(),
            next: 0,
            publishing: Vec::new(),
            pause,
            counts_writing,
        })
    }

    /// Waits until so many read: those that carry messages to another node count as one.
    pub(super) fn wait_for(&self, readers: u32) -> Result<(), Failure> {
        let end = Instant::now() + PATIENCE;
        while self.publisher.subscribers() < readers {
            if Instant::now() > end {
                let found = self.publisher.subscribers();
                let why = format!("{found} of {readers} readers came");
                return Err(Failure::new(Exit::Deadline, why));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Publishes so many messages one at a time: the next when all readers have let go of the one
    /// before. `next` is what readers are told with the last one.
    pub(super) fn one_by_one(&mut self, count: u64, next: u64) -> Result<(), Failure> {
        for message in 1..=count {
            let resting = Instant::now();
            while resting.elapsed() < self.pause {
                std::hint::spin_loop();
            }
            self.publish(if message == count { next } else { SAME })?;
            self.publisher.flush(PATIENCE)?;
        }
        Ok(())
    }

    /// Publishes so many messages as fast as it goes.
    pub(super) fn stream(&mut self, count: u64, next: u64) -> Result<(), Failure> {
        for message in 1..=count {
            self.publish(if message == count { next } else { SAME })?;
        }
        Ok(self.publisher.flush(PATIENCE)?)
    }

    fn publish(&mut self, next: u64) -> Result<(), Failure> {
        let asked = now();
        let mut loan = self.publisher.loan(self.kind.size, PATIENCE)?;
        let lent = now();
        let content = self.kind.content(self.next);
        self.windows.write(content, |offset, part| loan.write(offset, part))?;
        let written = now();
        let from = if self.counts_writing { written } else { lent };
        let published = now();
        let stamps = Stamps { published, before: from.saturating_sub(asked), next };
        loan.set_metadata(&stamps.bytes())?;
        loan.publish(PATIENCE)?;
        self.publishing.push(now().saturating_sub(published));
        self.next += 1;
        Ok(())
    }
}
