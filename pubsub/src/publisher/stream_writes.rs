//! Publishing messages that a stream still writes or copies, and waiting for blocks that streams
//! use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Slice, Stream};
use threads::RetryBackoff;

use super::{Attempt, Loan, Publisher, PublisherState, Sent};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::{During, On};
use crate::loan_limit::Borrower;
use crate::pool::{InFlightCopies, STREAM_POLL_BACKOFF};
use crate::settings::SharedLocation;
use crate::topic::Entry;

const OPERATION: &str = "publish in stream order to topic";
/// Pauses between looks for room that readers make silently, when they take a message.
pub(super) const RECHECK_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(1), Duration::from_millis(20));
/// Longest wait before a waiting publisher polls streams.
pub(super) const STREAM_CHECK_INTERVAL: Duration = Duration::from_millis(50);

impl Loan {
    /// Publishes it in stream order: at once, though its bytes are complete only after all work
    /// that was begun on the stream before. Readers get the message, and [find it
    /// ready](crate::Subscriber::pull) then, or [let their streams
    /// wait](crate::Subscriber::pull_on). Waits for room as [`publish`](Self::publish) does, and
    /// for no device.
    ///
    /// If this process dies before that, or the device fails, the message is
    /// [poisoned](crate::Readiness::Poisoned).
    ///
    /// On a topic with host memory it waits for the stream first.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryLocation, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-publish-on");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// # let timeout = Duration::from_secs(10);
    /// let device = gpu::Device::open("emulated:0".parse()?)?;
    /// let memory = MemoryLocation::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    ///
    /// let stream = device.stream()?;
    /// let loan = publisher.loan(4096, timeout)?;
    /// stream.fill(loan.slice(), 7)?; // … or a kernel that writes there
    /// loan.publish_on(&stream, timeout)?;
    ///
    /// let sample = subscriber.pull(timeout)?; // waits until it is written
    /// assert_eq!(sample.to_vec()?, [7; 4096]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`publish`](Self::publish). Whatever fails, the block is not reused before the stream has
    /// reached this point. [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream of another
    /// kind of device. [`Failed`](ErrorKind::Failed): it was published, but the stream cannot
    /// signal its completion. The message is poisoned when the stream has reached this point. If
    /// the driver cannot report that either, it is poisoned at once, and its block stays unused as
    /// long as this process lives.
    pub fn publish_on(self, stream: &Stream, timeout: Duration) -> Result<Sent> {
        let interruption = self.state.context.node.interruption();
        self.publish_on_within(stream, timeout)?.into_sent(OPERATION, &interruption)
    }

    /// Like [`publish_on`](Self::publish_on), but returns the loan if the deadline passes, to be
    /// published on the same stream.
    ///
    /// # Errors
    /// As [`publish_on`](Self::publish_on), except for the deadline.
    pub fn publish_on_within(self, stream: &Stream, timeout: Duration) -> Result<Attempt> {
        let deadline = (!timeout.is_zero()).then(|| ipc::deadline(timeout));
        self.publish_in_order(stream, deadline)
    }

    /// Publishes it in stream order, if there is room now; if not, returns it, to be published on
    /// the same stream.
    ///
    /// # Errors
    /// As [`publish_on`](Self::publish_on), except for the deadline.
    pub fn try_publish_on(self, stream: &Stream) -> Result<Attempt> {
        self.publish_in_order(stream, None)
    }

    fn copy_on(&mut self, stream: &Stream, from: &Slice, timeout: Duration) -> Result<()> {
        if !self.state.context.local.control().is_stream_ordered() {
            stream.synchronize(timeout).during(OPERATION)?;
            return self.copy(from, timeout);
        }
        self.state.context.local.check_stream(OPERATION, stream)?;
        if from.length() == 0 {
            return Ok(());
        }
        stream.copy(&self.slice, from).during(OPERATION).inspect_err(|_| {
            // The copy may have begun.
            self.mark_in_flight(stream.point().ok());
        })
    }

    /// Work of a stream on it that precedes this point may be unfinished.
    fn mark_in_flight(&mut self, point: Option<gpu::Point>) {
        self.in_flight = Some(InFlightCopies::before(point).and(self.in_flight.take()));
    }

    /// Does not wait without a deadline.
    fn publish_in_order(mut self, stream: &Stream, deadline: Option<Instant>) -> Result<Attempt> {
        self.state.context.node.check_not_forked(OPERATION)?;
        let local = Arc::clone(&self.state.context.local);
        if local.id().place == SharedLocation::Host {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            let synchronized = stream.synchronize(left.unwrap_or(gpu::DEFAULT_TIMEOUT));
            synchronized
                .during(OPERATION)
                .inspect_err(|_| self.mark_in_flight(stream.point().ok()))?;
            return self.publish_by(deadline);
        }
        let stream_check = local.check_stream(OPERATION, stream);
        self.publish_if(stream_check, stream, deadline)
    }

    /// Publishes it, if the check of the stream succeeded.
    pub(crate) fn publish_if(
        mut self,
        stream_check: Result<()>,
        stream: &Stream,
        deadline: Option<Instant>,
    ) -> Result<Attempt> {
        let local = Arc::clone(&self.state.context.local);
        // First: whatever fails, the stream uses the block until this point.
        let written = match stream.point() {
            Ok(point) => point,
            Err(cause) => {
                self.mark_in_flight(None);
                return Err(cause.during(OPERATION));
            }
        };
        // A participant that was marked dead may not write a sync word.
        let checked = stream_check.and_then(|()| self.state.check(OPERATION));
        let checked =
            checked.and_then(|()| if self.is_stream_ordered { Ok(()) } else { self.check_done() });
        let word = match checked.and_then(|()| local.sync_word(self.block)) {
            Ok(word) => word,
            Err(error) => {
                self.mark_in_flight(Some(written));
                return Err(error);
            }
        };
        let (control, node) = (local.control(), Arc::clone(&self.state.context.node));
        let sync_point = control.begin_write(self.block, node.me);
        let filled = Entry { sync_point: Some(sync_point), ..self.entry() };
        let sent = match self.state.publish_by(filled, deadline) {
            Ok(Some(sent)) if sent.position.is_some() => sent,
            other => {
                control.end_write(self.block, sync_point);
                self.mark_in_flight(Some(written));
                // A retry is possible, and only on this stream.
                self.is_stream_ordered = true;
                // A message without subscribers is freed when the stream has finished.
                return match other {
                    Ok(Some(sent)) => Ok(Attempt::Sent(sent)),
                    Ok(None) => Ok(Attempt::Full(self)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Attempt::Full(self)),
                    Err(error) => Err(error),
                };
            }
        };
        self.is_owned = false;
        let published = (self.block, sync_point);
        let signal = local.signal_written(&node.caller(), stream, &word, published, written);
        node.service.poll_streams();
        signal.map(|()| Attempt::Sent(sent)).map_err(|cause| {
            let detail = "the message was published, and will be poisoned";
            let error = Error::because(OPERATION, ErrorKind::Failed, cause);
            tracing::error!(%error, topic = self.state.context.topic.name(), "{detail}");
            error
        })
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
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-push-on");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
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
        attempt.into_sent(OPERATION, &interruption)
    }

    /// Like [`push_on`](Self::push_on), if there is room now; otherwise returns None.
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

impl PublisherState {
    /// Waits by a doorbell until the deadline. Streams ring none, so they are polled.
    ///
    /// With pauses to `recheck`, it also looks again after these. Without, it arms no timer for them,
    /// which costs each wait some microseconds in a virtual machine.
    pub(super) fn wait<T>(
        &self,
        operation: &'static str,
        deadline: Instant,
        mut recheck: Option<RetryBackoff>,
        mut look: impl FnMut() -> Option<Result<T>>,
        mut wait: impl FnMut(Instant, &mut dyn FnMut() -> Option<Result<T>>) -> Option<Result<T>>,
    ) -> Option<Result<T>> {
        let (node, local) = (&self.context.node, &self.context.local);
        let interruption = node.interruption();
        let check = || interruption.check(operation).on(self.context.topic.name());
        let mut look = || look().or_else(|| check().err().map(Err));
        let mut backoff = STREAM_POLL_BACKOFF;
        self.slot().backpressure().begin_since(self.span.begin());
        self.context.publisher_blocked();
        let found = loop {
            let end = if local.is_waiting_for_streams() {
                local.free_completed(&node.caller());
                deadline.min(Instant::now() + backoff.next_pause())
            } else if local.control().is_stream_ordered() {
                // Streams may start to hold blocks soon.
                backoff.reset();
                deadline.min(Instant::now() + STREAM_CHECK_INTERVAL)
            } else if let Some(recheck) = &mut recheck {
                deadline.min(Instant::now() + recheck.next_pause())
            } else {
                deadline
            };
            let found = wait(end, &mut look);
            if found.is_some() || end >= deadline {
                break found;
            }
        };
        let has_found = matches!(found, Some(Ok(_)));
        self.span.end(has_found);
        // A closed publisher waits for nothing any more.
        self.slot().backpressure().end(has_found || self.closed.is_set());
        found
    }
}
