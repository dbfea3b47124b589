//! Operations of agents.

use std::sync::{Arc, OnceLock};

use gpu::DeviceName;
use pyo3::prelude::*;
use transfer::{Done, Token};

use super::access::Access;
use crate::caller_stream::CallerStream;
use crate::failure::Result;
use crate::release::leave;
use crate::waits::{Timeout, unless_late, wait};

const WAIT: &str = "wait for operation";
const CANCEL: &str = "cancel operation";
const DELAY: &str = "delay stream";

/// An operation in flight: wait for it with `wait`.
#[pyclass(frozen, name = "Operation", module = "fabricast")]
#[derive(Debug)]
pub(crate) struct PyOperation {
    agent: Arc<Access>,
    token: Token,
    /// The device of the region here; None for memory of the host, and without a region.
    device: Option<DeviceName>,
    /// The number of bytes, or the failure: the agent returns it once.
    outcome: OnceLock<transfer::Result<u64>>,
}

impl PyOperation {
    pub(super) fn new(agent: &Arc<Access>, token: Token, device: Option<DeviceName>) -> Self {
        Self { agent: Arc::clone(agent), token, device, outcome: OnceLock::new() }
    }

    fn keep(&self, outcome: transfer::Result<Done>) -> transfer::Result<u64> {
        self.outcome.get_or_init(|| outcome.map(|done| done.bytes)).clone()
    }
}

#[pymethods]
impl PyOperation {
    /// Waits until it is complete. Returns the number of bytes.
    #[pyo3(signature = (timeout=30.0))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> Result<u64> {
        let cause = || "it is in flight".to_owned();
        wait(py, WAIT, Timeout::new(WAIT, timeout)?, cause, |slice| {
            self.agent.step(WAIT, |agent| {
                if let Some(outcome) = self.outcome.get() {
                    return Ok(Some(outcome.clone()?));
                }
                match agent.wait(self.token, slice) {
                    Err(error) if error.kind() == transfer::ErrorKind::DeadlineExceeded => {
                        // The operation itself may have failed so; then its outcome was returned now.
                        match agent.test(self.token) {
                            None => Ok(None),
                            Some(Err(gone)) if gone.kind() == transfer::ErrorKind::Unknown => {
                                Ok(Some(self.keep(Err(error))?))
                            }
                            Some(outcome) => Ok(Some(self.keep(outcome)?)),
                        }
                    }
                    outcome => Ok(Some(self.keep(outcome)?)),
                }
            })
        })
    }

    /// Returns True if the operation is complete. Raises its error if it failed.
    fn done(&self, py: Python<'_>) -> Result<bool> {
        self.agent.with(py, WAIT, |agent| {
            agent.progress();
            if let Some(outcome) = self.outcome.get() {
                outcome.clone()?;
                return Ok(true);
            }
            let outcome = agent.test(self.token).map(|outcome| self.keep(outcome));
            Ok(outcome.transpose()?.is_some())
        })
    }

    /// Later work on a stream waits for the data of the operation. The call waits only until the
    /// operation has begun.
    #[pyo3(signature = (stream, timeout=30.0))]
    fn delay_stream(
        &self,
        py: Python<'_>,
        stream: &Bound<'_, PyAny>,
        timeout: Option<f64>,
    ) -> Result<()> {
        let stream = CallerStream::of(DELAY, stream)?.adopt(DELAY, self.device)?;
        let cause = || "the operation has not begun".to_owned();
        let delayed = wait(py, DELAY, Timeout::new(DELAY, timeout)?, cause, |slice| {
            self.agent
                .step(DELAY, |agent| unless_late(agent.delay_stream(self.token, &stream, slice)))
        });
        // Its drop would wait for the operation.
        leave(stream);
        delayed
    }

    /// Ends it as far as it has not begun, without its notice: then `wait` raises `Cancelled`.
    /// Returns False if all of it is under way or over.
    fn cancel(&self, py: Python<'_>) -> Result<bool> {
        self.agent.with(py, CANCEL, |agent| Ok(agent.cancel(self.token)?))
    }
}
