//! The process that serves a node, as other processes see it, also if it is stopped and does not
//! answer.

use std::fmt;
use std::path::Path;

use super::election::LeaderLock;
use crate::error::Result;

/// The process that serves a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServiceProcess {
    /// Process ID; 0 for a process of another PID namespace.
    pub number: u32,
    /// True if the process is stopped, by a signal or a debugger; false if that is unknown.
    pub is_stopped: bool,
}

impl ServiceProcess {
    /// The process that now serves the node of a directory, if any. No message is sent to it.
    ///
    /// ```
    /// use pubsub::{Node, NodeOptions, ServiceProcess};
    /// # let parent = testkit::temp_dir::TempDir::new("fabricast-doc-serves");
    /// # let directory = parent.join("node");
    /// # let options = NodeOptions { directory: directory.clone(), ..NodeOptions::default() };
    /// let node = Node::join(options)?;
    /// let process = ServiceProcess::of(&directory)?.expect("a service");
    /// assert_eq!((process.number, process.is_stopped), (std::process::id(), false));
    /// # Ok::<(), pubsub::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Failed`](crate::ErrorKind::Failed) if the lock of the service cannot be read.
    pub fn of(directory: &Path) -> Result<Option<Self>> {
        let number = LeaderLock::holder("find service of node", directory)?;
        Ok(number.map(|number| Self { number, is_stopped: is_stopped(number) }))
    }

    /// Why it may not answer: it is stopped, or may be.
    #[must_use]
    pub fn state(&self) -> &'static str {
        if self.is_stopped { "it is stopped" } else { "it may be stopped" }
    }
}

impl fmt::Display for ServiceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe_process(self.number))
    }
}

pub(crate) fn describe_process(process: u32) -> String {
    match process {
        0 => "a process in another PID namespace".to_owned(),
        number => format!("process {number}"),
    }
}

pub(super) fn is_stopped(process: u32) -> bool {
    let line = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // Behind the name, which may contain any characters.
    let state = line.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with(['T', 't']))
}
