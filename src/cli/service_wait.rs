//! Waiting for the service of a node, which may be stopped: a notice after a second, and a remedy
//! in the error.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pubsub::{ErrorKind, ServiceProcess};

use super::exit::{Failure, Result};
use super::remedy::with_remedy;
use super::signals::Signals;
use super::text;

const NOTICE_DELAY: Duration = Duration::from_secs(1);

/// The service of a node, by its directory.
#[derive(Debug)]
pub(crate) struct ServiceWait {
    directory: PathBuf,
    is_reported: Cell<bool>,
}

impl ServiceWait {
    pub(crate) fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), is_reported: Cell::new(false) }
    }

    /// Runs a task that needs the service. Fails if a signal ends the process meanwhile; without
    /// `signals` for a process that does not catch them.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        signals: Option<&Signals>,
        task: impl FnOnce() -> pubsub::Result<T> + Send + 'static,
    ) -> Result<pubsub::Result<T>> {
        Signals::run_interruptible(signals, task, NOTICE_DELAY, || self.report_waiting())
    }

    pub(crate) fn process(&self) -> Option<ServiceProcess> {
        let found = ServiceProcess::of(&self.directory).ok().flatten();
        // A task of this process that takes long is not reported.
        found.filter(|process| process.number != std::process::id())
    }

    fn report_waiting(&self) {
        let Some(process) = self.process() else { return };
        if !self.is_reported.replace(true) {
            let directory = text::escape_control(&self.directory.display().to_string());
            text::print_error(&format!(
                "fabricast: waiting for the node's service in {directory} ({process}) to answer; {}",
                process.state()
            ));
        }
    }

    /// An error of the library, with its remedy. If the service did not answer, the error names its
    /// process.
    pub(crate) fn explain(&self, error: pubsub::Error) -> Failure {
        let has_timed_out = error.kind() == ErrorKind::DeadlineExceeded;
        let failure = with_remedy(error);
        match self.process().filter(|process| has_timed_out && process.number != 0) {
            Some(process) => {
                Failure::new(failure.exit(), name_process(&failure.to_string(), process))
            }
            None => failure,
        }
    }
}

/// Adds the process that did not answer, and the remedy.
fn name_process(why: &str, process: ServiceProcess) -> String {
    let number = process.number;
    let named = match why.contains(&process.to_string()) {
        true => String::new(),
        false => format!(": {process} serves the node, and does not answer: {}", process.state()),
    };
    let remedy = format!("resume it (kill -CONT {number}) or kill it (kill -KILL {number})");
    let condition = if process.is_stopped { "To continue" } else { "If it is" };
    format!("{why}{named}. {condition}, {remedy}")
}
