//! Samples of messages that a stream writes.

use std::time::Instant;

use gpu::{Point, Stream};

use super::Sample;
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::pool::{PollBackoff, Readiness};
use crate::subscriber::DeferredRelease;
use crate::topic::Entry;

impl Sample {
    /// Whether it is written. A message that was [published on a stream](crate::Loan::publish_on)
    /// may be [pulled on one](crate::Subscriber::pull_on). Call this after the latter stream has
    /// read it, to know whether the data was valid.
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted) if it is not [valid](Self::is_valid) any more.
    pub fn readiness(&self) -> Result<Readiness> {
        let operation = "check a message";
        let Some(sync_point) = self.entry.sync_point else { return Ok(Readiness::Ready) };
        let found = self.pool().control().readiness(self.entry.block, sync_point);
        // Afterwards: a state that was read while it was held is valid.
        self.check(operation)?;
        found.ok_or_else(|| {
            let detail = "the block holds another message";
            let error = Error::new(operation, ErrorKind::Malformed, detail);
            error.on(self.shared.context.topic.name())
        })
    }

    /// Releases it once all work that was begun on this stream so far is done, without waiting.
    ///
    /// Until then it is held like any message, and its block is not reused, not even if its
    /// subscriber is evicted; if this process dies, it is released with it. The end of the work is
    /// detected within some milliseconds, or when this process pulls, or waits for room. The end of
    /// a subscription waits for it, at most ten seconds. A stream that takes longer keeps this
    /// process a member of its node until it has finished.
    ///
    /// This holds for host memory, too: a stream of any device may read it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryLocation, Node, NodeOptions, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-release-on-{}", std::process::id()));
    /// # let path = directory.clone();
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
    /// # let timeout = Duration::from_secs(10);
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = MemoryLocation::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// # let (frame, producing) = (device.allocate(4096)?, device.stream()?);
    /// # publisher.push_on(&producing, &frame.whole(), timeout)?;
    ///
    /// let (result, stream) = (device.allocate(4096)?, device.stream()?);
    /// let sample = subscriber.pull_on(&stream, timeout)?;
    /// stream.copy(&result.whole(), sample.slice())?;
    /// sample.release_on(&stream)?; // after the copy
    /// # drop((subscriber, publisher, topic, node));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Evicted`](ErrorKind::Evicted): the subscriber was evicted before, and the stream may read
    /// another message. If the device fails the call, the message is held as long as its subscriber
    /// exists.
    pub fn release_on(mut self, stream: &Stream) -> Result<()> {
        let operation = "release in stream order";
        self.shared.context.node.check_not_forked(operation)?;
        let (direction, block) = (self.direction, self.entry.block);
        let control = self.pool().control();
        // Before the check: if the subscription is still active then, a later eviction sees this
        // mark.
        let place = self.shared.subscription_id(direction).index();
        control.begin_stream_read(block, self.shared.context.topic.number(), place);
        let read = stream.point();
        if let Err(error) = self.check(operation) {
            self.shared.end_stream_read(direction, block);
            return Err(error);
        }
        match read {
            Ok(point) => {
                self.defer_release(Some(point));
                Ok(())
            }
            Err(cause) => {
                self.defer_release(None);
                Err(error_mapping::from_device(operation, cause))
            }
        }
    }

    fn defer_release(&mut self, read: Option<Point>) {
        self.is_owned = false;
        let Self { direction, position, entry: Entry { block, .. }, .. } = *self;
        self.shared.defer_release(DeferredRelease { direction, position, block, read });
    }

    /// Waits until it is written, at most for the timeout of a device.
    pub(super) fn await_ready(&self, operation: &'static str) -> Result<()> {
        let deadline = Instant::now() + gpu::DEFAULT_TIMEOUT;
        let mut backoff = PollBackoff::NEW;
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
                    let pause = backoff.next(deadline).saturating_duration_since(Instant::now());
                    std::thread::sleep(pause);
                    continue;
                }
            };
            return Err(Error::new(operation, kind, detail).on(self.shared.context.topic.name()));
        }
    }
}
