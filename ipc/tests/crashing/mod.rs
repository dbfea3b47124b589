//! Children that are killed at a store, and what they do.

mod scenarios;
mod slow;

use ipc::crash_test::{Crash, Sources};
use testkit::children::ForkedChild;

pub(crate) use self::scenarios::{Scenario, scenarios};
use self::slow::half_evicted;

pub(crate) static SOURCES: Sources = Sources::new(
    &[
        "ipc/src/allocator/change.rs",
        "ipc/src/allocator/mod.rs",
        "ipc/src/allocator/repair.rs",
        "ipc/src/bell.rs",
        "ipc/src/lock.rs",
        "ipc/src/queue/members.rs",
        "ipc/src/queue/mod.rs",
        "ipc/src/queue/publish.rs",
        "ipc/src/queue/subscribe.rs",
    ],
    9,
    3,
);

/// A child that does this, and dies at the given point if it comes there.
pub(crate) fn fork(crash: &Crash, point: u64, act: impl FnOnce()) -> ForkedChild {
    ForkedChild::new(|| {
        crash.die_at(point);
        act();
    })
}
