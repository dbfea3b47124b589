//! Copies that peers of this machine had begun at one moment, and memory that is retained until they
//! are over.
//!
//! A region is hidden first, so that no copy begins with it any more. What was begun before may be
//! under way; then a thread waits for its end, and frees the memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::local_target::{LocalInitiator, LocalTarget};
use crate::lock;
use crate::region::Buffer;

/// How often the thread looks whether copies are over.
const RECLAIM_INTERVAL: Duration = Duration::from_millis(20);

/// Visitors that had begun copies, each with how many.
#[derive(Debug)]
pub(super) struct OutstandingCopies(Vec<(u64, Arc<LocalInitiator>)>);

impl OutstandingCopies {
    /// What all have begun so far that were given this region, or any.
    pub(super) fn of_all(local_target: &LocalTarget, region: Option<u64>) -> Self {
        Self::of(local_target, |initiator| initiator.has_opened(region))
    }

    /// The same of other processes. An agent of this process has a handle to the memory that it
    /// copies to and from, so that may be let go of.
    pub(super) fn of_other_processes(local_target: &LocalTarget, region: Option<u64>) -> Self {
        Self::of(local_target, |initiator| initiator.has_opened(region) && !initiator.is_in_process)
    }

    fn of(local_target: &LocalTarget, is_meant: impl Fn(&LocalInitiator) -> bool) -> Self {
        let local_initiators = lock(&local_target.local_initiators);
        let meant = local_initiators.iter().filter(|initiator| is_meant(initiator));
        Self(meant.map(|initiator| (initiator.begun(), Arc::clone(initiator))).collect())
    }

    /// Looks which are not over yet, and whether all are.
    pub(super) fn are_over(&mut self) -> bool {
        self.0.retain(|(begun, initiator)| !initiator.is_settled(*begun));
        self.0.is_empty()
    }

    /// A visitor whose copies were not over at the last look.
    pub(super) fn label(&self) -> Option<&str> {
        self.0.first().map(|(_, initiator)| initiator.label.as_str())
    }

    /// Bytes of the regions that these were given.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, initiator)| initiator.bytes_opened()).sum()
    }
}

/// Memory of regions that are gone, until nothing copies to or from it.
#[derive(Debug, Default)]
pub(super) struct Reclaim(Mutex<RetainedMemory>);

#[derive(Debug, Default)]
struct RetainedMemory {
    /// Each with the number of its region.
    all: Vec<(OutstandingCopies, u64, Buffer)>,
    has_thread: bool,
}

impl Reclaim {
    /// Keeps memory until these are over. If they never are, until the process ends.
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
            "a region was dropped while a peer copies: its memory is kept until the copy is over"
        );
        let mut retained = lock(&self.0);
        retained.all.push((copies, number, buffer));
        if retained.has_thread {
            return;
        }
        let theirs = Arc::clone(local_target);
        let thread = std::thread::Builder::new().name("fabricast-reclaim".to_owned());
        match thread.spawn(move || while theirs.reclaim().free_finished(&theirs) {}) {
            Ok(_) => retained.has_thread = true,
            // The next region that is dropped so tries it again.
            Err(error) => tracing::warn!(%error, "no thread can be started that frees memory"),
        }
    }

    /// Waits a little, and frees what nothing copies to or from any more. False if that was all.
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
            // The owner of adopted memory may panic when it is dropped: others are freed all the same.
            if catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err() {
                tracing::error!(region = number, "the owner of a region's memory panicked");
            }
        }
        has_more
    }
}
