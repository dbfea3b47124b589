//! Waits for subscribers and topics, and iterators of samples.

use std::time::{Duration, Instant};

use threads::RetryBackoff;

use crate::error::{Error, ErrorKind, Result};
use crate::error_mapping::On;
use crate::text::counted;
use crate::{Node, Publisher, Sample, Subscriber, Topic};

/// Pauses between polls of state that rings no doorbell.
const POLL_BACKOFF: RetryBackoff =
    RetryBackoff::new(Duration::from_millis(1), Duration::from_millis(20));
/// Minimum time for an answer of the service, even if the deadline is earlier.
const MIN_ANSWER_TIME: Duration = Duration::from_millis(50);

/// Polls with growing pauses until the deadline.
fn poll_until<T>(
    deadline: Instant,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    let mut backoff = POLL_BACKOFF;
    loop {
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        ipc::sleep_interruptible(backoff.next_pause().min(left));
    }
}

impl Publisher {
    /// Waits until this many subscribers would receive a message, as
    /// [`subscribers`](Self::subscribers) counts them. Returns their number.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-waits");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings::default())?;
    /// let publisher = topic.publisher()?;
    /// let error = publisher.wait_for_subscribers(1, Duration::from_millis(10)).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    /// let subscriber = topic.subscriber()?;
    /// assert_eq!(publisher.wait_for_subscribers(1, Duration::from_secs(5))?, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with their number;
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked).
    pub fn wait_for_subscribers(&self, count: u32, timeout: Duration) -> Result<u32> {
        let operation = "wait for subscribers of topic";
        let interruption = self.interruption();
        let found = poll_until(ipc::deadline(timeout), || {
            self.check(operation)?;
            let subscribers = self.subscribers();
            if subscribers >= count {
                return Ok(Some(subscribers));
            }
            interruption.check(operation).on(self.topic())?;
            Ok(None)
        })?;
        found.ok_or_else(|| {
            let found = counted(self.subscribers().into(), "subscriber");
            let detail = format!("{found} of {count} after {timeout:?}");
            Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.topic())
        })
    }
}

impl Publisher {
    /// Waits until there is no subscriber, as [`subscribers`](Self::subscribers) counts them: neither on
    /// this node nor, as far as known, on another one. A node that is lost counts until it is given up.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-no-subscribers");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings::default())?;
    /// let (publisher, subscriber) = (topic.publisher()?, topic.subscriber()?);
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| drop(subscriber)); // in another process, as a rule
    ///     publisher.wait_for_no_subscribers(Duration::from_secs(5))
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with their number;
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked).
    pub fn wait_for_no_subscribers(&self, timeout: Duration) -> Result<()> {
        let operation = "wait for end of subscribers of topic";
        let interruption = self.interruption();
        let found = poll_until(ipc::deadline(timeout), || {
            self.check(operation)?;
            if self.subscribers() == 0 {
                return Ok(Some(()));
            }
            interruption.check(operation).on(self.topic())?;
            Ok(None)
        })?;
        found.ok_or_else(|| {
            let left = counted(self.subscribers().into(), "subscriber");
            let detail = format!("{left} left after {timeout:?}");
            Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.topic())
        })
    }
}

impl Node {
    /// Waits until a topic exists on this node or a connected one, and subscribes to it. No
    /// settings are needed: the topic keeps those of its creator.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-subscribe");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// let timeout = Duration::from_secs(5);
    /// let other = node.clone(); // another process, as a rule
    /// let reader = std::thread::spawn(move || {
    ///     other.subscribe("lines", timeout)?.pull(timeout)?.to_vec()
    /// });
    /// let publisher = node.topic("lines", &TopicSettings::default())?.publisher()?;
    /// publisher.wait_for_subscribers(1, timeout)?;
    /// publisher.push(b"hello", timeout)?;
    /// assert_eq!(reader.join().unwrap()?, b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`wait_for_topic`](Self::wait_for_topic) and [`Topic::subscriber`].
    pub fn subscribe(&self, name: &str, timeout: Duration) -> Result<Subscriber> {
        self.wait_for_topic(name, timeout)?.subscriber()
    }

    /// Waits until a topic exists, and opens it with its existing settings, as
    /// [`open`](Self::open).
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) if it does not exist before the deadline;
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if the service does not answer until then,
    /// or within 50 ms if less is left; as [`open`](Self::open).
    pub fn wait_for_topic(&self, name: &str, timeout: Duration) -> Result<Topic> {
        let (mut unknown, interruption) = (None::<Error>, self.interruption());
        let (deadline, answer_timeout_limit) = (ipc::deadline(timeout), self.answer_timeout());
        use ErrorKind as Kind;
        let topic = poll_until(deadline, || {
            let left = deadline.saturating_duration_since(Instant::now()).max(MIN_ANSWER_TIME);
            match self.open_topic(name, None, answer_timeout_limit.min(left)) {
                Ok(topic) => Ok(Some(topic)),
                // Another service may be about to take over.
                Err(error) if matches!(error.kind(), Kind::NotFound | Kind::DeadlineExceeded) => {
                    interruption.check(error.operation()).on(name)?;
                    // An attempt that was interrupted has a less useful error than the one before.
                    let was_interrupted =
                        error.kind() != Kind::NotFound && left < answer_timeout_limit;
                    if unknown.is_none() || !was_interrupted {
                        unknown = Some(error);
                    }
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        })?;
        let not_found = || Error::new("open topic", ErrorKind::NotFound, "").on(name);
        topic.ok_or_else(|| unknown.unwrap_or_else(not_found))
    }
}

impl Subscriber {
    /// Waits until the topic has this many publishers, as [`publishers`](Self::publishers) lists them:
    /// another node counts as one. Returns their number.
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-wait-publishers");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), label: "camera".into(), ..NodeOptions::default() })?;
    /// let topic = node.topic("frames", &TopicSettings::default())?;
    /// let (subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
    /// assert_eq!(subscriber.wait_for_publishers(1, Duration::from_secs(5))?, 1);
    /// let found = subscriber.publishers();
    /// assert_eq!(found[0].publisher, Some(publisher.id()));
    /// assert_eq!(found[0].process, Some(std::process::id()));
    /// assert_eq!((found[0].label.as_str(), found[0].is_alive), ("camera", true));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded), with their number;
    /// [`Closed`](ErrorKind::Closed), [`Forked`](ErrorKind::Forked).
    pub fn wait_for_publishers(&self, count: usize, timeout: Duration) -> Result<usize> {
        let operation = "wait for publishers of topic";
        let interruption = self.interruption();
        let found = poll_until(ipc::deadline(timeout), || {
            self.check(operation)?;
            let publishers = self.publishers().len();
            if publishers >= count {
                return Ok(Some(publishers));
            }
            interruption.check(operation).on(self.topic())?;
            Ok(None)
        })?;
        found.ok_or_else(|| {
            let found = counted(self.publishers().len() as u64, "publisher");
            let detail = format!("{found} of {count} after {timeout:?}");
            Error::new(operation, ErrorKind::DeadlineExceeded, detail).on(self.topic())
        })
    }
}

/// An iterator of samples: see [`Subscriber::samples`].
#[derive(Debug)]
pub struct Samples<'a> {
    subscriber: &'a mut Subscriber,
    timeout: Duration,
    is_over: bool,
}

impl Subscriber {
    /// An iterator of received messages, with a timeout for each. The first error is the last item:
    /// [`DeadlineExceeded`](ErrorKind::DeadlineExceeded) if no message was received in time. It ends
    /// without an error when the last publisher has gone, if the subscriber [was asked
    /// to](Self::end_without_publishers).
    ///
    /// ```
    /// use std::time::Duration;
    /// use pubsub::{ErrorKind, Node, NodeOptions, TopicSettings};
    /// # let directory = testkit::temp_dir::TempDir::new("fabricast-doc-samples");
    /// # let node = Node::join(NodeOptions { directory: directory.join("node"), ..NodeOptions::default() })?;
    /// # let topic = node.topic("lines", &TopicSettings::default())?;
    /// # let (mut subscriber, publisher) = (topic.subscriber()?, topic.publisher()?);
    /// let timeout = Duration::from_millis(50);
    /// for line in ["one", "two"] {
    ///     publisher.push(line.as_bytes(), timeout)?;
    /// }
    /// let mut lines = Vec::new();
    /// for sample in subscriber.samples(timeout) {
    ///     match sample {
    ///         Ok(sample) => lines.push(sample.to_vec()?),
    ///         Err(error) => assert_eq!(error.kind(), ErrorKind::DeadlineExceeded),
    ///     }
    /// }
    /// assert_eq!(lines, [b"one", b"two"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn samples(&mut self, timeout: Duration) -> Samples<'_> {
        Samples { subscriber: self, timeout, is_over: false }
    }
}

impl Iterator for Samples<'_> {
    type Item = Result<Sample>;

    fn next(&mut self) -> Option<Result<Sample>> {
        if self.is_over {
            return None;
        }
        let pulled = self.subscriber.pull(self.timeout);
        self.is_over = pulled.is_err();
        // The end that the subscriber was asked for is no failure.
        Some(pulled).filter(|pulled| !is_end(pulled))
    }
}

fn is_end(pulled: &Result<Sample>) -> bool {
    pulled.as_ref().is_err_and(|error| error.kind() == ErrorKind::NoPublishers)
}

impl std::iter::FusedIterator for Samples<'_> {}
