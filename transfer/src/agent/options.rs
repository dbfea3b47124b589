//! How an agent is started.

use std::path::{Path, PathBuf};

use ipc::Spin;

use crate::service::Admission;

/// How an agent is started.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    pub(super) label: String,
    pub(super) directory: Option<PathBuf>,
    pub(super) admission: Admission,
    pub(super) node: Option<[u8; 16]>,
    pub(super) takes_all_for_remote: bool,
    pub(super) waiting: Spin,
}

impl AgentOptions {
    /// With what people are to call it.
    #[must_use]
    pub fn new(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            directory: None,
            admission: Admission::own_user(),
            node: None,
            takes_all_for_remote: false,
            waiting: Spin::default(),
        }
    }

    /// Where its socket is to be: a directory that those see who are to reach it without
    /// a network. Without one nobody does, except agents of this process.
    #[must_use]
    pub fn directory(mut self, directory: &Path) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Who may visit it, and whose agents it visits; the own user only, otherwise.
    #[must_use]
    pub fn admission(mut self, admission: Admission) -> Self {
        self.admission = admission;
        self
    }

    /// The node that it belongs to; one of its own, otherwise.
    #[must_use]
    pub fn node(mut self, node: [u8; 16]) -> Self {
        self.node = Some(node);
        self
    }

    /// Takes all others for remote, whatever is possible between them: to try out what
    /// happens between machines.
    #[must_use]
    pub fn take_all_for_remote(mut self) -> Self {
        self.takes_all_for_remote = true;
        self
    }

    /// How it waits.
    #[must_use]
    pub fn waiting(mut self, waiting: Spin) -> Self {
        self.waiting = waiting;
        self
    }
}
