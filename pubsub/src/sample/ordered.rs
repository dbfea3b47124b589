//! What a sample says of a message that a stream writes.

use std::time::Instant;

use gpu::{Point, Stream};

use super::Sample;
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Readiness, Rest};
use crate::subscriber::Departure;
use crate::topic::Entry;

impl Sample {
    /// Is it written? Of one that was [published on a stream](crate::Loan::publish_on) and
    /// [pulled on one](crate::Subscriber::pull_on): asked after the latter has passed the message
    /// it tells whether what was read there was right.
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted) if it is not [valid](Self::is_valid) any more.
    pub fn readiness(&self) -> Result<Readiness> {
        let operation = "look at a message";
        let Some(turn) = self.entry.turn else { return Ok(Readiness::Ready) };
        let found = self.pool().ledger().readiness(self.entry.block, turn);
        // Afterwards: what was found while it was held is right.
        self.check(operation)?;
        found.ok_or_else(|| {
            let detail = "its memory is another message's";
            let error = Error::new(operation, ErrorKind::Malformed, detail);
            error.on(self.shared.desk.topic.name())
        })
    }

    /// Releases it when all is done that was begun on this stream so far, and waits for nothing:
    /// for what reads it there.
    ///
    /// Until then it is held, as any message, and nobody else gets its memory, not even if its
    /// subscriber is evicted for that; if this process dies, when it is dead. That the stream has
    /// come so far is seen within some milliseconds, or when this process pulls, or waits for room.
    /// The end of a subscription waits for that, ten seconds at most: a stream that takes longer
    /// keeps this process at its node until it has come so far.
    ///
    /// So it is, too, where messages lie on the host: a stream of any device may read there.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryPlace, Node, NodeOptions, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-release-on-{}", std::process::id()));
    /// # let path = directory.clone();
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
    /// # let patience = Duration::from_secs(10);
    /// let device = gpu::Device::open("stand-in:0".parse()?)?;
    /// let memory = MemoryPlace::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// # let (frame, producing) = (device.allocate(4096)?, device.stream()?);
    /// # publisher.push_on(&producing, &frame.whole(), patience)?;
    ///
    /// let (result, stream) = (device.allocate(4096)?, device.stream()?);
    /// let sample = subscriber.pull_on(&stream, patience)?;
    /// stream.copy(&result.whole(), sample.slice())?;
    /// sample.release_on(&stream)?; // after the copy
    /// # drop((subscriber, publisher, topic, node));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted): the subscriber was evicted before, and what the stream
    /// reads may be another message. If the device refuses, the message is held for as long as
    /// its subscriber is there.
    pub fn release_on(mut self, stream: &Stream) -> Result<()> {
        let operation = "release in the order of a stream";
        self.shared.desk.house.check_fork(operation)?;
        let (direction, block) = (self.direction, self.entry.block);
        let ledger = self.pool().ledger();
        // Before it is looked whether it is still held: who is not removed then is not before this
        // is seen by who removes it.
        let place = self.shared.seat(direction).place();
        ledger.is_passing(block, self.shared.desk.topic.number(), place);
        let read = stream.point();
        if let Err(error) = self.check(operation) {
            self.shared.has_passed(direction, block);
            return Err(error);
        }
        match read {
            Ok(point) => {
                self.departs(Some(point));
                Ok(())
            }
            Err(cause) => {
                self.departs(None);
                Err(below::of_device(operation, cause))
            }
        }
    }

    fn departs(&mut self, read: Option<Point>) {
        self.is_mine = false;
        let Self { direction, position, entry: Entry { block, .. }, .. } = *self;
        self.shared.departs(Departure { direction, position, block, read });
    }

    /// Waits until it is written, for as long as a device may take for anything.
    pub(super) fn await_ready(&self, operation: &'static str) -> Result<()> {
        let deadline = Instant::now() + gpu::PATIENCE;
        let mut rest = Rest::NEW;
        loop {
            let (kind, detail) = match self.readiness()? {
                Readiness::Ready => return Ok(()),
                Readiness::Poisoned => {
                    (ErrorKind::Poisoned, "its publisher was lost before it was written")
                }
                Readiness::Pending if Instant::now() >= deadline => {
                    (ErrorKind::DeadlineExceeded, "its publisher's stream has not written it")
                }
                Readiness::Pending => {
                    let pause = rest.next(deadline).saturating_duration_since(Instant::now());
                    std::thread::sleep(pause);
                    continue;
                }
            };
            return Err(Error::new(operation, kind, detail).on(self.shared.desk.topic.name()));
        }
    }
}
