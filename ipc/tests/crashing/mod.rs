//! Children that are killed at a store, and their actions.

mod eviction;
mod scenarios;

use ipc::crash_test::{Crash, Sources};
use testkit::children::ForkedChild;

use self::eviction::{half_ended, half_evicted};
pub(crate) use self::scenarios::{Scenario, scenarios};

pub(crate) static SOURCES: Sources = Sources::new(
    &[
        "ipc/src/allocator/locked.rs",
        "ipc/src/allocator/mod.rs",
        "ipc/src/allocator/repair.rs",
        "ipc/src/doorbell.rs",
        "ipc/src/lock.rs",
        "ipc/src/queue/subscriptions.rs",
        "ipc/src/queue/mod.rs",
        "ipc/src/queue/publish.rs",
        "ipc/src/queue/subscriber.rs",
    ],
    9,
    3,
);

/// A child that runs this, and dies at the given point if it gets that far.
pub(crate) fn fork(crash: &Crash, point: u64, act: impl FnOnce()) -> ForkedChild {
    ForkedChild::new(|| {
        crash.crash_at(point);
        act();
    })
}
