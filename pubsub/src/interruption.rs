//! Waits that a signal ends.

use crate::error::{Error, ErrorKind, Result};

/// Whether one wait of the calling thread ends when a handler of a signal has run, and whether one
/// has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Interruption(Option<ipc::Interruption>);

impl Interruption {
    /// For a wait that begins now. One that is not to end goes on.
    pub(crate) fn watch(ends: bool) -> Self {
        Self(ends.then(ipc::Interruption::watch))
    }

    pub(crate) fn occurred(&self) -> bool {
        self.0.is_some_and(|interruption| interruption.occurred())
    }

    /// Fails if the wait is to end. Asked after a look that found nothing: what was found counts.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        if !self.occurred() {
            return Ok(());
        }
        let detail = "a signal handler ran in the waiting thread. Call again to go on";
        Err(Error::new(operation, ErrorKind::Interrupted, detail))
    }
}
