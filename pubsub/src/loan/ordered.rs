//! Publishing what a stream is still writing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu::{Slice, Stream};

use super::{Attempt, Loan, Sent};
use crate::below;
use crate::error::{Error, ErrorKind, Result};
use crate::pool::{Begun, Handed};
use crate::publisher::Outgoing;
use crate::settings::SharedPlace;

pub(crate) const OPERATION: &str = "publish in the order of a stream";

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
    /// # use pubsub::{MemoryPlace, Node, NodeOptions, TopicSettings};
    /// # let directory = std::env::temp_dir().join(format!("fabricast-doc-publish-on-{}", std::process::id()));
    /// # let path = directory.clone();
    /// # let node = Node::join(NodeOptions { directory, ..NodeOptions::default() })?;
    /// # let patience = Duration::from_secs(10);
    /// let device = gpu::Device::open("stand-in:0".parse()?)?;
    /// let memory = MemoryPlace::Device(device.name());
    /// let topic = node.topic("frames", &TopicSettings { memory, ..TopicSettings::default() })?;
    /// let (publisher, mut subscriber) = (topic.publisher()?, topic.subscriber()?);
    ///
    /// let stream = device.stream()?;
    /// let loan = publisher.loan(4096, patience)?;
    /// stream.fill(loan.slice(), 7)?; // … or a kernel that writes there
    /// loan.publish_on(&stream, patience)?;
    ///
    /// let sample = subscriber.pull(patience)?; // waits until it is written
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
    pub fn publish_on(self, stream: &Stream, patience: Duration) -> Result<Sent> {
        let interruption = self.post.desk.house.interruption();
        self.publish_on_within(stream, patience)?.in_time(OPERATION, &interruption)
    }

    /// As [`publish_on`](Self::publish_on), but the loan comes back if the deadline passes: to be
    /// published on the same stream.
    ///
    /// # Errors
    /// As [`publish_on`](Self::publish_on), but for the deadline.
    pub fn publish_on_within(self, stream: &Stream, patience: Duration) -> Result<Attempt> {
        let deadline = (!patience.is_zero()).then(|| ipc::deadline(patience));
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
        patience: Duration,
    ) -> Result<()> {
        if !self.post.desk.here.ledger().is_ordered() {
            synchronize(stream, patience)?;
            return self.copy(from, patience);
        }
        self.post.desk.here.check_stream(OPERATION, stream)?;
        if from.length() == 0 {
            return Ok(());
        }
        stream.copy(&self.slice, from).map_err(|cause| {
            // It may have begun, for all that is known.
            self.is_busy(stream.point().ok());
            below::of_device(OPERATION, cause)
        })
    }

    /// What a stream does with it that is before this point may go on.
    fn is_busy(&mut self, point: Option<gpu::Point>) {
        self.begun = Some(Begun::before(point).and(self.begun.take()));
    }

    /// At once, if there is no deadline.
    pub(crate) fn publish_in_order(
        mut self,
        stream: &Stream,
        deadline: Option<Instant>,
    ) -> Result<Attempt> {
        self.post.desk.house.check_fork(OPERATION)?;
        let here = Arc::clone(&self.post.desk.here);
        if here.id().place == SharedPlace::Host {
            let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
            if let Err(error) = synchronize(stream, left.unwrap_or(gpu::PATIENCE)) {
                self.is_busy(stream.point().ok());
                return Err(error);
            }
            return self.publish_by(deadline);
        }
        let is_fit = here.check_stream(OPERATION, stream);
        self.publish_if(is_fit, stream, deadline)
    }

    /// If the stream is one that can do it.
    pub(crate) fn publish_if(
        mut self,
        is_fit: Result<()>,
        stream: &Stream,
        deadline: Option<Instant>,
    ) -> Result<Attempt> {
        let here = Arc::clone(&self.post.desk.here);
        // First of all: whatever becomes of it, the stream is at it until then.
        let written = match stream.point() {
            Ok(point) => point,
            Err(cause) => {
                self.is_busy(None);
                return Err(below::of_device(OPERATION, cause));
            }
        };
        // Whoever was taken for dead has no word to write any more.
        let checked = is_fit.and_then(|()| self.post.check(OPERATION));
        let checked =
            checked.and_then(|()| if self.is_ordered { Ok(()) } else { self.check_done() });
        let word = match checked.and_then(|()| here.word_of(self.block)) {
            Ok(word) => word,
            Err(error) => {
                self.is_busy(Some(written));
                return Err(error);
            }
        };
        let (ledger, house) = (here.ledger(), Arc::clone(&self.post.desk.house));
        let turn = ledger.begin_turn(self.block, house.me);
        let outgoing = Outgoing { turn: Some(turn), ..self.outgoing() };
        let sent = match self.post.publish_by(outgoing, deadline) {
            Ok(Some(sent)) if sent.position.is_some() => sent,
            other => {
                ledger.end_turn(self.block, turn);
                self.is_busy(Some(written));
                // After a refusal it may be tried again, and only on this stream.
                self.is_ordered = true;
                // What nobody wanted is given back when the stream is through.
                return match other {
                    Ok(Some(sent)) => Ok(Attempt::Sent(sent)),
                    Ok(None) => Ok(Attempt::Full(self)),
                    Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Attempt::Full(self)),
                    Err(error) => Err(error),
                };
            }
        };
        self.is_mine = false;
        let said = stream.write_word(&word, turn.ready());
        let mut message = Handed { block: self.block, turn, written, is_lost: said.is_err() };
        if message.is_lost
            && let Ok(later) = stream.point()
        {
            // Should it have begun after all, that is over by then, too.
            message.written = later;
        }
        here.has_handed(&house.caller(), message);
        house.office.tend();
        said.map(|()| Attempt::Sent(sent)).map_err(|cause| {
            let detail = "the message was published, and will be poisoned";
            let error = Error::because(OPERATION, ErrorKind::Failed, cause);
            tracing::error!(%error, topic = self.post.desk.topic.name(), "{detail}");
            error
        })
    }
}

fn synchronize(stream: &Stream, longest: Duration) -> Result<()> {
    stream.synchronize(longest).map_err(|cause| below::of_device(OPERATION, cause))
}
