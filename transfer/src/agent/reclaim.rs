//! Copies that local initiators had in flight at one moment, and memory that is kept until they
//! complete.
//!
//! A region is removed from the table first, so that no new copy starts. Copies in flight may
//! remain; then a thread waits for them, and frees the memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::local_target::{LocalInitiator, LocalTarget};
use crate::lock;
use crate::region::Buffer;

/// How often the thread checks whether copies have completed.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// Initiators with copies in flight, and the number of copies each had started.
#[derive(Debug)]
pub(super) struct OutstandingCopies(Vec<(u64, Arc<LocalInitiator>)>);

impl OutstandingCopies {
    /// The copies of all initiators that opened this region, or any.
    pub(super) fn of_all(local_target: &LocalTarget, region: Option<u64>) -> Self {
        Self::of(local_target, |initiator| initiator.has_opened(region))
    }

    /// The copies of other processes. Agents of this process keep the memory of their copies alive
    /// themselves.
    pub(super) fn of_other_processes(local_target: &LocalTarget, region: Option<u64>) -> Self {
        Self::of(local_target, |initiator| initiator.has_opened(region) && !initiator.is_in_process)
    }

    fn of(local_target: &LocalTarget, is_relevant: impl Fn(&LocalInitiator) -> bool) -> Self {
        let local_initiators = lock(&local_target.local_initiators);
        let relevant = local_initiators.iter().filter(|initiator| is_relevant(initiator));
        Self(relevant.map(|initiator| (initiator.begun(), Arc::clone(initiator))).collect())
    }

    /// Removes completed ones. True if all have completed.
    pub(super) fn are_over(&mut self) -> bool {
        self.0.retain(|(begun, initiator)| !initiator.is_settled(*begun));
        self.0.is_empty()
    }

    /// An initiator with copies in flight at the last check.
    pub(super) fn label(&self) -> Option<&str> {
        self.0.first().map(|(_, initiator)| initiator.label.as_str())
    }

    /// Bytes of the regions that these initiators opened.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, initiator)| initiator.bytes_opened()).sum()
    }
}

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
        let thread = std::thread::Builder::new().name("fabricast-reclaim".to_owned());
        match thread.spawn(move || while thread_target.reclaim().free_finished(&thread_target) {}) {
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
