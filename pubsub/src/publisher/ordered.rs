//! Publishing messages that a stream still has to copy, and waiting for blocks that streams use.

use std::time::{Duration, Instant};

use gpu::{Slice, Stream};

use super::{Publisher, PublisherState};
use crate::error::{Error, Result};
use crate::loan::Sent;
use crate::loan_limit::Borrower;
use crate::pool::PollBackoff;

/// Longest wait before a waiting publisher polls streams.
pub(super) const STREAM_CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl PublisherState {
    /// Waits by a doorbell. Streams ring none, so they are polled.
    pub(super) fn wait<T>(
        &self,
        operation: &'static str,
        deadline: Instant,
        mut look: impl FnMut() -> Option<Result<T>>,
        mut wait: impl FnMut(Instant, &mut dyn FnMut() -> Option<Result<T>>) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        let (node, local) = (&self.context.node, &self.context.local);
        let interruption = node.interruption();
        let name = |error: Error| error.on(self.context.topic.name());
        let mut look =
            || look().or_else(|| interruption.check(operation).map_err(name).err().map(Err));
        let mut backoff = PollBackoff::NEW;
        loop {
            let end = if local.is_waiting_for_streams() {
                local.free_completed(&node.caller());
                backoff.next(deadline)
            } else if local.control().is_stream_ordered() {
                // Streams may start to hold blocks soon.
                backoff = PollBackoff::NEW;
                deadline.min(Instant::now() + STREAM_CHECK_INTERVAL)
            } else {
                deadline
            };
            let found = wait(end, &mut look);
            if found.is_some() || end >= deadline {
                return found;
            }
        }
    }
}

impl Publisher {
    /// Publishes a copy of device memory in stream order: the stream copies it after all work that
    /// was begun there before, and this call does not wait for it. Readers get the message at once,
    /// and [find it ready](crate::Subscriber::pull), or [let their streams
    /// wait](crate::Subscriber::pull_on), once it is copied. Work that is begun on the stream
    /// afterwards may write to `from` again.
    ///
    /// If this process dies before that, or the device fails, the message is
    /// [poisoned](crate::Readiness::Poisoned).
    ///
    /// On a topic with host memory it waits for the stream and the copy.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryLocation, Node, NodeOptions, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-push-on-{}", std::process::id()));
    /// # let path = directory.clone();
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
    /// # let timeout = Duration::from_secs(10);
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = MemoryLocation::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    ///
    /// let (frame, producing) = (device.allocate(4096)?, device.stream()?);
    /// producing.fill(&frame.whole(), 7)?; // … or a kernel
    /// publisher.push_on(&producing, &frame.whole(), timeout)?;
    ///
    /// let (result, consuming) = (device.allocate(4096)?, device.stream()?);
    /// let sample = subscriber.pull_on(&consuming, timeout)?; // it may not be written yet
    /// consuming.copy(&result.whole(), sample.slice())?; // begins when it is
    /// consuming.synchronize(timeout)?;
    /// assert_eq!(sample.readiness()?, pubsub::Readiness::Ready);
    /// # drop((sample, subscriber, publisher, topic, node));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`push_slice`](Self::push_slice); [`InvalidArgument`](crate::ErrorKind::InvalidArgument)
    /// for a stream of another kind of device.
    pub fn push_on(&self, stream: &Stream, from: &Slice, timeout: Duration) -> Result<Sent> {
        let deadline = ipc::deadline(timeout);
        let mut loan = self.borrow(from.length(), Borrower::Transient, || deadline)?;
        loan.copy_on(stream, from, timeout)?;
        let interruption = self.state.context.node.interruption();
        let attempt = loan.publish_in_order(stream, Some(deadline))?;
        attempt.into_sent(crate::loan::PUBLISH_ON_STREAM, &interruption)
    }

    /// As [`push_on`](Self::push_on), if there is room now; otherwise None.
    ///
    /// # Errors
    /// As [`push_on`](Self::push_on), except for the deadline.
    pub fn try_push_on(&self, stream: &Stream, from: &Slice) -> Result<Option<Sent>> {
        let borrowed = self.try_borrow(from.length(), Borrower::Transient)?;
        let Some(mut loan) = borrowed else { return Ok(None) };
        loan.copy_on(stream, from, gpu::DEFAULT_TIMEOUT)?;
        Ok(loan.try_publish_on(stream)?.sent())
    }
}
