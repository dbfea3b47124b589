//! Memory that is kept until the copies complete that local initiators had in flight.
//!
//! A region is removed from the table first, so that no new copy starts. Copies in flight may
//! remain; then a thread waits for them, and frees the memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use threads::lock;

use super::{LocalTarget, OutstandingCopies};
use crate::region::Buffer;

/// How often the thread checks whether copies have completed.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// Memory of dropped regions, until no copy uses it.
#[derive(Debug, Default)]
pub(super) struct Reclaim(Mutex<RetainedMemory>);

#[derive(Debug, Default)]
struct RetainedMemory {
    /// With the numbers of the regions.
    all: Vec<(OutstandingCopies, u64, Buffer)>,
    has_thread: bool,
}

impl Reclaim {
    /// Keeps memory until these copies complete, or the process ends.
    pub(super) fn retain_until_done(
        &self,
        copies: OutstandingCopies,
        number: u64,
        buffer: Buffer,
        local_target: &Arc<LocalTarget>,
    ) {
        tracing::debug!(
            region = number,
            bytes = buffer.length(),
            peer = copies.label().unwrap_or_default(),
            "region dropped while a peer copies: its memory is kept until the copy ends"
        );
        let mut retained = lock(&self.0);
        retained.all.push((copies, number, buffer));
        if retained.has_thread {
            return;
        }
        let thread_target = Arc::clone(local_target);
        let free = move || while thread_target.reclaim.free_finished(&thread_target) {};
        match threads::spawn("fabricast-reclaim", free) {
            Ok(_) => retained.has_thread = true,
            // The next region that is dropped this way retries.
            Err(error) => tracing::warn!(%error, "starting the thread that frees memory failed"),
        }
    }

    /// Waits for an interval, and frees memory that no copy uses any more. False if none is left.
    fn free_finished(&self, local_target: &LocalTarget) -> bool {
        std::thread::sleep(RECLAIM_INTERVAL);
        let mut retained = lock(&self.0);
        let finished: Vec<_> =
            retained.all.extract_if(.., |(copies, ..)| copies.are_over()).collect();
        retained.has_thread = !retained.all.is_empty();
        let has_more = retained.has_thread;
        drop(retained);
        for (_, number, buffer) in finished {
            local_target.forget_region(number);
            // The owner of adopted memory may panic on drop; the other memory is still freed.
            if catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err() {
                tracing::error!(region = number, "the owner of a region's memory panicked");
            }
        }
        has_more
    }
}
