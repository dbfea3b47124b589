//! Parameters that ranks without common memory agree on: each has a controller, and all controllers get the
//! same statistics.
//!
//! The time of an operation travels with the messages of a later one, in which all ranks get the greatest.
//! Controllers have no clock, so the same statistics give the same parameters on all ranks.

use std::time::Duration;

use crate::controller::{Choices, Controller};
use crate::operation::OpKey;
use crate::parameters::Parameters;
use crate::statistics::ExecStat;
use crate::status_file::StatusFile;

/// An operation whose time the other ranks do not know yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Measured {
    key: OpKey,
    used: Parameters,
    bytes: u64,
    /// Nanoseconds on this rank, at least 1.
    time: u64,
}

/// The parameters, as one rank has them.
#[derive(Debug)]
pub(crate) struct ReplicatedParameters {
    controller: Controller,
    measured: Option<Measured>,
    status: Option<StatusFile>,
}

impl ReplicatedParameters {
    pub(crate) fn new(
        choices: impl Fn(OpKey) -> Choices + Send + 'static,
        status: Option<StatusFile>,
    ) -> Self {
        Self { controller: Controller::new(choices), measured: None, status }
    }

    /// The parameters of the next operation: the same on all ranks that have called the same.
    pub(crate) fn parameters(&self, key: OpKey) -> Parameters {
        self.controller.parameters(key)
    }

    /// The word that the messages of the next operation carry.
    pub(crate) fn carried(&self) -> u64 {
        self.measured.map_or(0, |measured| measured.time)
    }

    /// Completes an operation, in which this rank got the greatest of the words that all carried. None if
    /// it did not get those of all: the same on all ranks.
    pub(crate) fn complete(&mut self, greatest: Option<u64>) {
        let Some(greatest) = greatest else { return };
        if let Some(Measured { key, used, bytes, .. }) = self.measured.take() {
            let fast_time = Duration::from_nanos(greatest);
            let stat =
                ExecStat { fast_time, fast_bytes: bytes, success: true, ..ExecStat::default() };
            self.controller.update(key, used, &stat);
            if let Some(status) = &mut self.status {
                status.update(&self.controller);
            }
        }
    }

    /// Records how long an operation took on this rank, after it was completed.
    pub(crate) fn record(&mut self, key: OpKey, used: Parameters, bytes: u64, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        // That of an earlier one is kept until all ranks have it.
        self.measured.get_or_insert(Measured { key, used, bytes, time });
    }

    pub(crate) fn controller(&self) -> &Controller {
        &self.controller
    }

    /// Changes the controller. All ranks do so before the same operation.
    pub(crate) fn with_controller(&mut self, change: impl FnOnce(&mut Controller)) {
        change(&mut self.controller);
    }
}
