//! Publishers of a topic, as its users see them.

use pubsub::TopicPublisher;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A publisher of a topic on this node, or another node that publishes to it.
#[pyclass(frozen, name = "TopicPublisher", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyTopicPublisher {
    found: TopicPublisher,
}

impl PyTopicPublisher {
    pub(crate) fn of(found: TopicPublisher) -> Self {
        Self { found }
    }
}

#[pymethods]
impl PyTopicPublisher {
    /// The publisher, as its samples name it. None for another node: how many publishers it has is
    /// not known here.
    #[getter]
    fn publisher(&self) -> Option<u64> {
        self.found.publisher.map(|publisher| publisher.as_u64())
    }

    /// Identity of the other node, as the `origin` of its samples; None for this one.
    #[getter]
    fn node<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.found.node.map(|node| PyBytes::new(py, &node))
    }

    /// The publisher's process, as in reports; None for another node.
    #[getter]
    fn process(&self) -> Option<u32> {
        self.found.process
    }

    /// Name of the process, or of the other node.
    #[getter]
    fn label(&self) -> &str {
        &self.found.label
    }

    /// False for a process that died, and for a node that is lost, until they are removed.
    #[getter]
    fn is_alive(&self) -> bool {
        self.found.is_alive
    }

    fn __repr__(&self) -> String {
        let TopicPublisher { label, process, is_alive, .. } = &self.found;
        let process = process.map_or("None".to_owned(), |process| process.to_string());
        let is_alive = if *is_alive { "True" } else { "False" };
        format!("TopicPublisher(label={label:?}, process={process}, is_alive={is_alive})")
    }
}
