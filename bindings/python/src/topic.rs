//! Topics.

use pubsub::{Topic, TopicSettings};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::failure::Result;
use crate::message_type::MessageType;
use crate::publisher::PyPublisher;
use crate::subscriber::PySubscriber;
use crate::topic_publisher::PyTopicPublisher;
use crate::waits::interruptibly;

/// A topic: its messages are bytes or arrays, each stored once for all its subscribers of a node.
#[pyclass(frozen, name = "Topic", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyTopic {
    topic: Topic,
    settings: TopicSettings,
}

impl PyTopic {
    pub(crate) fn new(topic: Topic) -> Result<Self> {
        Ok(Self { settings: topic.settings()?, topic })
    }

    /// What its arrays have in common; None if nothing.
    fn message_type(&self) -> Option<MessageType> {
        MessageType::of_name(self.settings.type_name?.as_str())
    }
}

#[pymethods]
impl PyTopic {
    /// The topic's name.
    #[getter]
    fn name(&self) -> &str {
        self.topic.name()
    }

    /// Where its messages are: `"host"`, or a device such as `"cuda:0"`. A device that this process
    /// does not see has its UUID instead: `"GPU-…"`.
    #[getter]
    fn memory(&self) -> String {
        self.settings.memory.to_string()
    }

    /// What happens to a message when there is no room.
    #[getter]
    fn reliability(&self) -> String {
        self.settings.reliability.to_string()
    }

    /// Maximum number of messages that are unread or held.
    #[getter]
    fn depth(&self) -> u32 {
        self.settings.depth
    }

    /// Maximum length of a message in bytes.
    #[getter]
    fn largest(&self) -> u64 {
        self.settings.largest
    }

    /// Name of the type of its messages, such as `"float32[3,480,640]"`.
    #[getter]
    fn type_name(&self) -> Option<String> {
        self.settings.type_name.map(|name| name.to_string())
    }

    /// Publishers of the topic on this node, and other nodes that publish to it.
    fn publishers(&self) -> Vec<PyTopicPublisher> {
        self.topic.publishers().into_iter().map(PyTopicPublisher::of).collect()
    }

    /// Closes the topic: publishers and subscribers made from it end at once, also calls that wait
    /// in other threads, and raise `Closed` from now on. Samples stay readable. The topic as it was
    /// opened another time stays open.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.topic.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) {
        self.close(py);
    }

    /// Creates a publisher.
    fn publisher(&self, py: Python<'_>) -> Result<PyPublisher> {
        let topic = self.topic.clone();
        let publisher = interruptibly(py, "create publisher", move || topic.publisher())?;
        Ok(PyPublisher::new(publisher, self.message_type()))
    }

    /// Creates a subscriber, which receives all messages published from now on.
    fn subscriber(&self, py: Python<'_>) -> Result<PySubscriber> {
        let topic = self.topic.clone();
        let subscriber = interruptibly(py, "create subscriber", move || topic.subscriber())?;
        Ok(PySubscriber::new(subscriber, self.message_type()))
    }

    fn __repr__(&self) -> String {
        let kind = self.type_name().map_or_else(String::new, |name| format!(" of {name}"));
        format!("<fabricast.Topic \"{}\"{kind} on {}>", self.name(), self.memory())
    }
}
