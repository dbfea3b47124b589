//! Waits that a signal ends.

use crate::error::{Error, ErrorKind, Result};

/// Ends a wait of the calling thread once a signal handler has run, if that is wanted.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Interruption(Option<ipc::Interruption>);

impl Interruption {
    /// For a wait that begins now; signals are ignored unless `ends`.
    pub(crate) fn watch(ends: bool) -> Self {
        Self(ends.then(ipc::Interruption::watch))
    }

    /// Fails if the wait is to end. Call it after an attempt that found nothing: a result takes
    /// precedence.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        if !self.0.is_some_and(|interruption| interruption.occurred()) {
            return Ok(());
        }
        let detail = "a signal handler ran in the waiting thread. Call again to continue";
        Err(Error::new(operation, ErrorKind::Interrupted, detail))
    }
}
