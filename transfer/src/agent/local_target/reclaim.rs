//! Memory that is kept until the copies complete that local initiators had in flight.
//!
//! A region is removed from the table first, so that no new copy starts. Copies in flight may
//! remain; then a thread waits for them, and frees the memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use threads::DeferredValue;

use super::{LocalTarget, OutstandingCopies};
use crate::region::Buffer;

/// Memory of a dropped region, until no copy uses it.
pub(super) struct RetainedMemory {
    copies: OutstandingCopies,
    region: u64,
    buffer: Buffer,
    local_target: Arc<LocalTarget>,
}

/// Keeps the memory of a region until these copies complete, or the process ends.
pub(super) fn retain_until_done(
    local_target: &Arc<LocalTarget>,
    copies: OutstandingCopies,
    region: u64,
    buffer: Buffer,
) {
    tracing::debug!(
        region,
        bytes = buffer.length(),
        peer = copies.label().unwrap_or_default(),
        "region dropped while a peer copies: its memory is kept until the copy ends"
    );
    let retained =
        RetainedMemory { copies, region, buffer, local_target: Arc::clone(local_target) };
    if let Err(error) = local_target.retained_memory.push(retained) {
        // The next region that is dropped this way retries.
        tracing::warn!(%error, "starting the thread that frees memory failed");
    }
}

impl DeferredValue for RetainedMemory {
    const THREAD_NAME: &'static str = "fabricast-reclaim";
    const CHECK_INTERVAL: Duration = Duration::from_millis(20);

    fn is_unused(&mut self) -> bool {
        self.copies.are_over()
    }

    fn end(self) {
        let Self { region, buffer, local_target, .. } = self;
        local_target.forget_region(region);
        // The owner of adopted memory may panic on drop.
        if catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err() {
            tracing::error!(region, "the owner of a region's memory panicked");
        }
    }
}
