//! Without the feature `fault-injection` an emulated device has no faults.

use std::time::Duration;

use super::Fault;

pub(super) struct Faults;

impl Faults {
    pub(super) const fn new() -> Self {
        Self
    }

    pub(super) fn delay(&self) -> Duration {
        Duration::ZERO
    }

    pub(super) fn fails_now(&self) -> bool {
        false
    }

    pub(super) fn has(&self, _: Fault) -> bool {
        false
    }
}
