//! Publishing what a stream is still writing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Slice, Stream};

use super::{Attempt, Loan, Sent};
use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping;
use crate::pool::{InFlightCopies, StreamWrite};
use crate::publisher::OutgoingMessage;
use crate::settings::SharedLocation;

pub(crate) const OPERATION: &str = "publish in stream order";

impl Loan {
    /// Publishes it in the order of a stream: at once, though its bytes are there only when all
    /// is done that was begun on the stream before. Readers get the message, and
    /// [find it ready](crate::Subscriber::pull), or
    /// [let their streams wait](crate::Subscriber::pull_on), then. Waits for room as
    /// [`publish`](Self::publish) does, and for no device.
    ///
    /// Should this process die before, or the device fail, it is
    /// [poisoned](crate::Readiness::Poisoned).
    ///
    /// On a topic whose messages lie on the host it waits for the stream first.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use pubsub::{MemoryLocation, Node, NodeOptions, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-publish-on-{}", std::process::id()));
    /// # let path = directory.clone();
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
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
    /// # drop((sample, subscriber, publisher, topic, node));
    /// # std::fs::remove_dir_all(path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`publish`](Self::publish). Whatever fails, nobody else gets the memory before the stream
    /// has come to this point. [`InvalidArgument`](ErrorKind::InvalidArgument) for a stream of
    /// another kind of device. [`Failed`](ErrorKind::Failed): it was published, but the stream
    /// cannot say when it is written, and it is poisoned when the stream has come to this point; at
    /// once if its driver cannot say that either, and then its memory is not used again as long as
    /// this process lives.
    pub fn publish_on(self, stream: &Stream, timeout: Duration) -> Result<Sent> {
        let interruption = self.state.context.node.interruption();
        self.publish_on_within(stream, timeout)?.into_sent(OPERATION, &interruption)
    }

    /// As [`publish_on`](Self::publish_on), but the loan comes back if the deadline passes: to be
    /// published on the same stream.
    ///
    /// # Errors
    /// As [`publish_on`](Self::publish_on), but for the deadline.
    pub fn publish_on_within(self, stream: &Stream, timeout: Duration) -> Result<Attempt> {
        let deadline = (!timeout.is_zero()).then(|| ipc::deadline(timeout));
        self.publish_in_order(stream, deadline)
    }

    /// Publishes it in the order of a stream, if there is room now; if not, it comes back, to be
    /// published on the same stream.
    ///
    /// # Errors
    /// As [`publish_on`](Self::publish_on), but for the deadline.
    pub fn try_publish_on(self, stream: &Stream) -> Result<Attempt> {
        self.publish_in_order(stream, None)
    }

    /// Has a stream copy to it, all of it.
    pub(crate) fn copy_on(
        &mut self,
        stream: &Stream,
        from: &Slice,
        timeout: Duration,
    ) -> Result<()> {
        if !self.state.context.local.control().is_stream_ordered() {
            synchronize(stream, timeout)?;
            return self.copy(from, timeout);
        }
        self.state.context.local.check_stream(OPERATION, stream)?;
        if from.length() == 0 {
            return Ok(());
        }
        stream.copy(&self.slice, from).map_err(|cause| {
            // It may have begun, for all that is known.
            self.mark_in_flight(stream.point().ok());
            error_mapping::from_device(OPERATION, cause)
        })
    }

    /// What a stream does with it that is before this point may go on.
    fn mark_in_flight(&mut self, point: Option<gpu::Point>) {
        self.in_flight = Some(InFlightCopies::before(point).and(self.in_flight.take()));
    }

    /// At once, if there is no deadline.
    pub(crate) fn publish_in_order(
        mut self,
        stream: &Stream,
        deadline: Option<Instant>,
    ) -> Result<Attempt> {
        self.state.context.node.check_not_forked(OPERATION)?;
        let local = Arc::clone(&self.state.context.local);
        if local.id().place == SharedLocation::Host {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if let Err(error) = synchronize(stream, left.unwrap_or(gpu::DEFAULT_TIMEOUT)) {
                self.mark_in_flight(stream.point().ok());
                return Err(error);
            }
            return self.publish_by(deadline);
        }
        let stream_check = local.check_stream(OPERATION, stream);
        self.publish_if(stream_check, stream, deadline)
    }

    /// If the stream is one that can do it.
    pub(crate) fn publish_if(
        mut self,
        stream_check: Result<()>,
        stream: &Stream,
        deadline: Option<Instant>,
    ) -> Result<Attempt> {
        let local = Arc::clone(&self.state.context.local);
        // First of all: whatever becomes of it, the stream is at it until then.
        let written = match stream.point() {
            Ok(point) => point,
            Err(cause) => {
                self.mark_in_flight(None);
                return Err(error_mapping::from_device(OPERATION, cause));
            }
        };
        // Whoever was taken for dead has no word to write any more.
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
        let outgoing = OutgoingMessage { sync_point: Some(sync_point), ..self.outgoing() };
        let sent = match self.state.publish_by(outgoing, deadline) {
            Ok(Some(sent)) if sent.position.is_some() => sent,
            other => {
                control.end_write(self.block, sync_point);
                self.mark_in_flight(Some(written));
                // After a refusal it may be tried again, and only on this stream.
                self.is_stream_ordered = true;
                // What nobody wanted is given back when the stream is through.
                return match other {
                    Ok(Some(sent)) => Ok(Attempt::Sent(sent)),
                    Ok(None) => Ok(Attempt::Full(self)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Attempt::Full(self)),
                    Err(error) => Err(error),
                };
            }
        };
        self.is_owned = false;
        let said = stream.write_word(&word, sync_point.ready());
        let mut message =
            StreamWrite { block: self.block, sync_point, written, is_unsignalled: said.is_err() };
        if message.is_unsignalled
            && let Ok(later) = stream.point()
        {
            // Should it have begun after all, that is over by then, too.
            message.written = later;
        }
        local.track_stream_write(&node.caller(), message);
        node.service.poll_streams();
        said.map(|()| Attempt::Sent(sent)).map_err(|cause| {
            let detail = "the message was published, but is marked as unwritten";
            let error = Error::because(OPERATION, ErrorKind::Failed, cause);
            tracing::error!(%error, topic = self.state.context.topic.name(), "{detail}");
            error
        })
    }
}

fn synchronize(stream: &Stream, longest: Duration) -> Result<()> {
    stream.synchronize(longest).map_err(|cause| error_mapping::from_device(OPERATION, cause))
}
