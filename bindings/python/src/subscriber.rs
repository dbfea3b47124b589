//! Subscribers and the messages that they hold.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::sync::Arc;

use pubsub::{Closer, Event, Sample, Subscriber};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::array::{Array, Owner};
use crate::closable::Closable;
use crate::data_type::DataType;
use crate::exclusive::Exclusive;
use crate::failure::Result;
use crate::layout::Layout;
use crate::message_type::MessageType;
use crate::release::leave;
use crate::streams::UsingStreams;
use crate::topic_publisher::PyTopicPublisher;
use crate::waits::{Timeout, unless_late, wait};

const PULL: &str = "pull from topic";
const RELEASED: &str = "the sample was released";

/// Receives the messages of a topic, in order. An iterator of samples, also for `async for`.
#[pyclass(frozen, name = "Subscriber", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PySubscriber {
    subscriber: Exclusive<Subscriber>,
    closer: Closer,
    topic: String,
    /// What all messages have in common.
    message_type: Option<MessageType>,
}

impl PySubscriber {
    pub(crate) fn new(subscriber: Subscriber, message_type: Option<MessageType>) -> Self {
        let topic = subscriber.topic().to_owned();
        let closer = subscriber.closer();
        Self { subscriber: Exclusive::new("subscriber", subscriber), closer, topic, message_type }
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        operation: &'static str,
        call: impl FnOnce(&mut Subscriber) -> pubsub::Result<T> + Send,
    ) -> Result<T> {
        self.subscriber.with(py, operation, |subscriber| Ok(call(subscriber)?))
    }

    /// The next message of an iteration; None at its end.
    fn next(&self, py: Python<'_>, until_end: bool) -> Result<Option<PySample>> {
        match self.pull(py, None, until_end) {
            Err(error) if error.is_of("Closed") && self.closer.is_closed() => Ok(None),
            Err(error) if error.is_of("NoPublishers") => Ok(None),
            pulled => pulled.map(Some),
        }
    }

    fn sample(&self, sample: Sample) -> PySample {
        let metadata = sample.metadata();
        let length = sample.length();
        let found = Layout::from_header(&metadata, length);
        let (data_type, layout, rest) = found
            .or_else(|| {
                let (data_type, layout) = self.message_type.as_ref()?.of_message(length)?;
                Some((data_type, layout, &*metadata))
            })
            .or_else(|| Some((DataType::UINT8, Layout::contiguous(vec![length])?, &*metadata)))
            // A message is shorter than that.
            .unwrap_or_else(|| (DataType::UINT8, Layout::empty(), &*metadata));
        let metadata = rest.to_vec();
        let sample = Closable::new(RELEASED, sample);
        let memory = Arc::new(SampleMemory { sample, streams: UsingStreams::default() });
        let memory = Closable::new(RELEASED, memory);
        PySample { memory, data_type, layout, metadata }
    }
}

#[pymethods]
impl PySubscriber {
    /// Waits for the next message. With `until_end` it raises `NoPublishers` when the last publisher
    /// has left or died, on this node and on others, and all messages were pulled; there must have
    /// been a publisher.
    #[pyo3(signature = (timeout=30.0, *, until_end=false))]
    fn pull(&self, py: Python<'_>, timeout: Option<f64>, until_end: bool) -> Result<PySample> {
        let timeout = Timeout::new(PULL, timeout)?;
        let cause = || format!("topic \"{}\" has no message", self.topic);
        let sample = wait(py, PULL, timeout, cause, |slice| {
            self.subscriber.step(PULL, |subscriber| {
                subscriber.end_without_publishers(until_end);
                unless_late(subscriber.pull(slice))
            })
        })?;
        Ok(self.sample(sample))
    }

    /// The next message, or None if there is none now. `until_end` is as in `pull`.
    #[pyo3(signature = (*, until_end=false))]
    fn try_pull(&self, py: Python<'_>, until_end: bool) -> Result<Option<PySample>> {
        let pulled = self.with(py, PULL, |subscriber| {
            subscriber.end_without_publishers(until_end);
            subscriber.try_pull()
        })?;
        Ok(pulled.map(|sample| self.sample(sample)))
    }

    /// `pull` for asyncio: `await subscriber.pull_async()`. A task that is cancelled takes no message.
    #[pyo3(signature = (timeout=30.0, *, until_end=false))]
    fn pull_async<'py>(
        slf: Bound<'py, Self>,
        timeout: Option<f64>,
        until_end: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let timeout = Timeout::new(PULL, timeout)?.seconds();
        let py = slf.py();
        let pull = py.import(intern!(py, "fabricast._asyncio"))?.getattr(intern!(py, "pull"))?;
        pull.call1((slf, timeout, until_end))
    }

    /// An iterator of samples, also for `async for`, that ends when the last publisher has left or
    /// died, on this node and on others, and all messages were pulled. It waits for the first
    /// publisher.
    ///
    /// >>> import tempfile
    /// >>> import fabricast
    /// >>> directory = tempfile.TemporaryDirectory()
    /// >>> with fabricast.Node(directory.name) as node:
    /// ...     topic = node.topic("letters")
    /// ...     subscriber = topic.subscriber()
    /// ...     with topic.publisher() as publisher:
    /// ...         for letter in (b"a", b"b"):
    /// ...             sent = publisher.publish(letter)
    /// ...     [sample.array.tobytes() for sample in subscriber.until_end()]
    /// [b'a', b'b']
    /// >>> directory.cleanup()
    fn until_end(slf: Py<Self>) -> PyUntilEnd {
        PyUntilEnd { subscriber: slf }
    }

    /// The publishers of the topic on this node, and other nodes that publish to it.
    fn publishers(&self, py: Python<'_>) -> Result<Vec<PyTopicPublisher>> {
        let operation = "list publishers of topic";
        let found = self.with(py, operation, |subscriber| Ok(subscriber.publishers()))?;
        Ok(found.into_iter().map(PyTopicPublisher::of).collect())
    }

    /// Waits until the topic has this many publishers; another node counts as one. Returns their
    /// number.
    #[pyo3(signature = (count=1, timeout=30.0))]
    fn wait_for_publishers(
        &self,
        py: Python<'_>,
        count: usize,
        timeout: Option<f64>,
    ) -> Result<usize> {
        let operation = "wait for publishers";
        let timeout = Timeout::new(operation, timeout)?;
        let cause = || format!("topic \"{}\" has fewer than {count} publishers", self.topic);
        wait(py, operation, timeout, cause, |slice| {
            self.subscriber.step(operation, |subscriber| {
                unless_late(subscriber.wait_for_publishers(count, slice))
            })
        })
    }

    /// A descriptor for select, poll and asyncio, which is readable while there may be messages.
    fn fileno(&self, py: Python<'_>) -> Result<i32> {
        let operation = "get descriptor of subscriber";
        self.with(py, operation, |subscriber| Ok(subscriber.descriptor()?.as_raw_fd()))
    }

    /// May there be a message, or an event?
    fn _is_ready(&self, py: Python<'_>) -> Result<bool> {
        self.with(py, "wait for subscriber", |subscriber| Ok(subscriber.is_ready()))
    }

    /// The next event that is no message, as a dictionary of `fabricast.events`; None without one.
    fn poll_event<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        let event =
            self.with(py, "poll event of subscriber", |subscriber| Ok(subscriber.poll_event()))?;
        let Some(event) = event else { return Ok(None) };
        let fields = PyDict::new(py);
        match event {
            Event::Gap { missed } => {
                fields.set_item("event", "gap")?;
                fields.set_item("missed", missed)?;
            }
            Event::PublisherLost { publisher } => {
                fields.set_item("event", "publisher-lost")?;
                fields.set_item("publisher", publisher.as_u64())?;
            }
            Event::RemotePublisherLost { node, publisher } => {
                fields.set_item("event", "remote-publisher-lost")?;
                fields.set_item("node", PyBytes::new(py, &node))?;
                fields.set_item("publisher", publisher.as_u64())?;
            }
            Event::NoPublishers => fields.set_item("event", "no-publishers")?,
            Event::Evicted { held_for } => {
                fields.set_item("event", "evicted")?;
                fields.set_item("held_for", held_for.map(|held_for| held_for.as_secs_f64()))?;
            }
            other => fields.set_item("event", format!("{other:?}"))?,
        }
        Ok(Some(fields))
    }

    /// Number of messages that it missed.
    #[getter]
    fn missed(&self, py: Python<'_>) -> Result<u64> {
        self.with(py, "count missed messages", |subscriber| Ok(subscriber.missed()))
    }

    /// Name of the subscriber's topic.
    #[getter]
    fn topic(&self) -> &str {
        &self.topic
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Waits for the next message; the iteration ends when the subscriber, its topic or its node is
    /// closed.
    fn __next__(&self, py: Python<'_>) -> Result<Option<PySample>> {
        self.next(py, false)
    }

    fn __aiter__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("fabricast._asyncio")?.getattr("Samples")?.call1((slf, false))
    }

    /// Closes it at once: calls that wait in other threads raise `Closed`. Samples that were pulled
    /// stay.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.closer.close());
        let subscriber = self.subscriber.take(py);
        py.detach(move || drop(subscriber));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }
}

/// Iterates over the samples of a subscriber until the last publisher has gone.
#[pyclass(frozen, name = "UntilEnd", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyUntilEnd {
    subscriber: Py<PySubscriber>,
}

#[pymethods]
impl PyUntilEnd {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<PySample>> {
        self.subscriber.get().next(py, true)
    }

    fn __aiter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let samples = py.import("fabricast._asyncio")?.getattr("Samples")?;
        samples.call1((self.subscriber.clone_ref(py), true))
    }
}

/// The memory of a message that was pulled. It is released with the last array and view of it.
#[derive(Debug)]
struct SampleMemory {
    /// Closed while it is dropped.
    sample: Closable<Sample>,
    streams: UsingStreams,
}

impl Owner for SampleMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let read = |sample: &Sample| sample.read(address - sample.address(), into);
        Ok(self.sample.with("read message of topic", read)??)
    }

    fn used_by(&self, stream: u64) {
        self.streams.add(stream);
    }
}

impl Drop for SampleMemory {
    /// Work that reads it may not be done yet: then the stream releases it.
    fn drop(&mut self) {
        let Some(sample) = self.sample.close() else { return };
        let Ok(Some(device)) = sample.place().device() else { return };
        if self.streams.are_done(device).unwrap_or(true) {
            return;
        }
        match self.streams.joined(device) {
            // The end of the process, or a device that failed: it is released at once.
            Ok(None) | Err(_) => {}
            Ok(Some(stream)) => {
                let _ = sample.release_on(&stream);
                leave(stream);
            }
        }
    }
}

/// A message. It is held until it and all views of its array are gone.
#[pyclass(frozen, name = "Sample", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PySample {
    memory: Closable<Arc<SampleMemory>>,
    data_type: DataType,
    layout: Layout,
    metadata: Vec<u8>,
}

impl PySample {
    fn get<T>(&self, operation: &'static str, get: impl FnOnce(&Sample) -> T) -> Result<T> {
        self.memory.get(operation)?.sample.with(operation, get)
    }
}

#[pymethods]
impl PySample {
    /// The sample's memory, as a read-only array.
    #[getter]
    fn array(&self) -> Result<Array> {
        let operation = "access sample";
        let memory = self.memory.get(operation)?;
        let (address, place) = self.get(operation, |sample| (sample.address(), sample.place()))?;
        let device = place.device()?;
        Ok(Array::new((address, device), (self.data_type, self.layout.clone()), true, memory))
    }

    /// Bytes that its publisher attached.
    #[getter]
    fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    /// True if the message is still held: not after its release, and not if the service has taken this
    /// process for dead. Then its memory may belong to another message. An eviction leaves it held.
    #[getter]
    fn is_valid(&self) -> bool {
        self.get("check sample", Sample::is_valid).unwrap_or(false)
    }

    /// Number of the message among those of its publisher, from 1 on.
    #[getter]
    fn sequence(&self) -> Result<u64> {
        self.get("get sequence of sample", Sample::sequence)
    }

    /// The message's publisher: unique on the node of its origin.
    #[getter]
    fn publisher(&self) -> Result<u64> {
        self.get("get publisher of sample", |sample| sample.publisher().as_u64())
    }

    /// Identity of the node that published it; None for this one.
    #[getter]
    fn origin<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyBytes>>> {
        let origin = self.get("get origin of sample", Sample::origin)?;
        Ok(origin.map(|origin| PyBytes::new(py, &origin)))
    }

    /// When it was published, in nanoseconds since 1970, by the clock of its publisher's node.
    #[getter]
    fn published_at(&self) -> Result<u64> {
        self.get("get time of sample", Sample::published_at)
    }

    /// How it came here: `"shared-memory"`, `"ring"`, …
    #[getter]
    fn path(&self) -> Result<String> {
        self.get("get path of sample", |sample| sample.path().to_string())
    }

    /// Gives it up. Its memory is released when all views of its array are gone, too.
    fn release(&self) {
        drop(self.memory.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.release();
    }

    fn __repr__(&self) -> String {
        format!("<fabricast.Sample of {}>", self.layout.type_name(self.data_type))
    }
}
