//! Without the feature `fault-injection` an emulated device has no faults.

use std::time::Duration;

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

    pub(super) fn are_not_peers(&self) -> bool {
        false
    }

    pub(super) fn refuses_words(&self) -> bool {
        false
    }

    pub(super) fn refuses_points(&self) -> bool {
        false
    }

    pub(super) fn refuses_records(&self) -> bool {
        false
    }

    pub(super) fn refuses_read_only(&self) -> bool {
        false
    }
}
