//! Events of agents.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use transfer::Event;

/// An event that another agent caused.
#[pyclass(frozen, name = "AgentEvent", module = "fabricast", get_all)]
#[derive(Debug)]
pub(crate) struct PyAgentEvent {
    /// `"joined"`, `"notice"`, `"left"`, `"rail-lost"` or `"rail-restored"`.
    kind: &'static str,
    /// Identity of the other agent.
    agent: Py<PyBytes>,
    /// Label of the other agent; empty for a notice.
    label: String,
    /// Tag of a notice.
    tag: u64,
    /// Data of a notice.
    data: Py<PyBytes>,
    /// The agent's process ended, or nothing was received from it in time.
    is_dead: bool,
    /// Number of the rail.
    rail: usize,
    /// Why a rail was lost.
    reason: String,
}

#[pymethods]
impl PyAgentEvent {
    fn __repr__(&self) -> String {
        format!("AgentEvent(kind=\"{}\", label={:?}, tag={})", self.kind, self.label, self.tag)
    }
}

impl PyAgentEvent {
    pub(super) fn of(py: Python<'_>, event: Event) -> Self {
        let new = |kind, agent: [u8; 16], label: String| Self {
            kind,
            agent: PyBytes::new(py, &agent).unbind(),
            label,
            tag: 0,
            data: PyBytes::new(py, &[]).unbind(),
            is_dead: false,
            rail: 0,
            reason: String::new(),
        };
        match event {
            Event::Joined { from, label } => new("joined", from, label),
            Event::Notice { from, notice } => Self {
                tag: notice.tag,
                data: PyBytes::new(py, notice.data()).unbind(),
                ..new("notice", from, String::new())
            },
            Event::Left { from, label, is_dead } => Self { is_dead, ..new("left", from, label) },
            Event::RailLost { with, label, rail, reason } => {
                Self { rail, reason, ..new("rail-lost", with, label) }
            }
            Event::RailRestored { with, label, rail } => {
                Self { rail, ..new("rail-restored", with, label) }
            }
            _ => new("other", [0; 16], String::new()),
        }
    }
}
