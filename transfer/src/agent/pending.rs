//! Copies that peers of this machine had begun at one moment, and memory that is retained until they
//! are over.
//!
//! A region is hidden first, so that no copy begins with it any more. What was begun before may be
//! under way; then a thread waits for its end, and frees the memory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::home::{Home, Visitor};
use crate::lock;
use crate::region::Buffer;

/// How often the thread looks whether copies are over.
const LOOK: Duration = Duration::from_millis(20);

/// Visitors that had begun copies, each with how many.
#[derive(Debug)]
pub(super) struct OutstandingCopies(Vec<(u64, Arc<Visitor>)>);

impl OutstandingCopies {
    /// What all have begun so far that were given this region, or any.
    pub(super) fn of_all(home: &Home, region: Option<u64>) -> Self {
        Self::of(home, |visitor| visitor.has_opened(region))
    }

    /// The same of other processes. An agent of this process has a handle to the memory that it
    /// copies to and from, so that may be let go of.
    pub(super) fn of_other_processes(home: &Home, region: Option<u64>) -> Self {
        Self::of(home, |visitor| visitor.has_opened(region) && !visitor.is_of_this_process)
    }

    fn of(home: &Home, is_meant: impl Fn(&Visitor) -> bool) -> Self {
        let visitors = lock(&home.visitors);
        let meant = visitors.iter().filter(|visitor| is_meant(visitor));
        Self(meant.map(|visitor| (visitor.begun(), Arc::clone(visitor))).collect())
    }

    /// Looks which are not over yet, and whether all are.
    pub(super) fn are_over(&mut self) -> bool {
        self.0.retain(|(begun, visitor)| !visitor.is_settled(*begun));
        self.0.is_empty()
    }

    /// A visitor whose copies were not over at the last look.
    pub(super) fn label(&self) -> Option<&str> {
        self.0.first().map(|(_, visitor)| visitor.label.as_str())
    }

    /// Bytes of the regions that these were given.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, visitor)| visitor.bytes_opened()).sum()
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
        home: &Arc<Home>,
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
        let theirs = Arc::clone(home);
        let thread = std::thread::Builder::new().name("fabricast-reclaim".to_owned());
        match thread.spawn(move || while theirs.reclaim().free_finished(&theirs) {}) {
            Ok(_) => retained.has_thread = true,
            // The next region that is dropped so tries it again.
            Err(error) => tracing::warn!(%error, "no thread can be started that frees memory"),
        }
    }

    /// Waits a little, and frees what nothing copies to or from any more. False if that was all.
    fn free_finished(&self, home: &Home) -> bool {
        std::thread::sleep(LOOK);
        let mut retained = lock(&self.0);
        let finished: Vec<_> =
            retained.all.extract_if(.., |(copies, ..)| copies.are_over()).collect();
        retained.has_thread = !retained.all.is_empty();
        let has_more = retained.has_thread;
        drop(retained);
        for (_, number, buffer) in finished {
            home.forget_region(number);
            // The owner of adopted memory may panic when it is dropped: others are freed all the same.
            if catch_unwind(AssertUnwindSafe(|| drop(buffer))).is_err() {
                tracing::error!(region = number, "the owner of a region's memory panicked");
            }
        }
        has_more
    }
}
