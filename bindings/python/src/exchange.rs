//! An exchange of bytes among the ranks of a job, by a function of Python.

use std::time::Duration;

use launch::{Error, ErrorKind, Exchange, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

const OPERATION: &str = "exchange bytes among ranks";

/// A function `(bytes, seconds) -> list[bytes]` that gathers the bytes of all ranks.
#[derive(Debug)]
pub(crate) struct PyExchange {
    gather: Py<PyAny>,
    job: String,
    rank: u32,
    size: u32,
}

impl PyExchange {
    pub(crate) fn new(gather: Py<PyAny>, job: String, [rank, size]: [u32; 2]) -> Self {
        Self { gather, job, rank, size }
    }
}

impl Exchange for PyExchange {
    fn name(&self) -> &str {
        "Python"
    }

    fn job(&self) -> &str {
        &self.job
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn all_gather(&mut self, own: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let failed = |detail| Error::new(OPERATION, ErrorKind::Failed, detail);
        let gathered = Python::try_attach(|py| {
            let own = PyBytes::new(py, own);
            self.gather.bind(py).call1((own, timeout.as_secs_f64()))?.extract::<Vec<Vec<u8>>>()
        });
        let ended = || failed("the interpreter has ended".to_owned());
        let gathered = gathered.ok_or_else(ended)?.map_err(|error| failed(error.to_string()))?;
        match gathered.len() == self.size as usize {
            true => Ok(gathered),
            false => Err(failed(format!("{} ranks, not {}", gathered.len(), self.size))),
        }
    }
}
