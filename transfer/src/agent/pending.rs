//! Copies that peers of this machine had begun at one moment, and memory that is kept until they are
//! over.
//!
//! A region is hidden first, so that no copy begins with it any more; then its owner waits for those
//! that were begun before. Where that takes too long, a thread goes on waiting, and frees the memory.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::home::{Home, Visitor};
use crate::lock;
use crate::region::Buffer;

/// Between two looks.
const REST: Duration = Duration::from_micros(200);
/// Between two looks of the thread that goes on waiting.
const LONG_REST: Duration = Duration::from_millis(20);

thread_local! {
    static MAY_WAIT: Cell<bool> = const { Cell::new(true) };
}

/// To be said by a thread that answers peers: where it drops the last handle to a region, it does not
/// wait.
pub(crate) fn never_wait_on_this_thread() {
    MAY_WAIT.set(false);
}

/// Those that had begun something, each with how much.
#[derive(Debug)]
pub(super) struct Pending(Vec<(u64, Arc<Visitor>)>);

impl Pending {
    /// What all have begun so far.
    pub(super) fn of_all(home: &Home) -> Self {
        Self::of(home, |_| true)
    }

    /// What other processes have begun so far. An agent of this process has a handle to the memory
    /// that it copies to and from, and may have no chance to go on while this thread waits.
    pub(super) fn of_other_processes(home: &Home) -> Self {
        Self::of(home, |visitor| !visitor.is_of_this_process)
    }

    fn of(home: &Home, is_meant: impl Fn(&Visitor) -> bool) -> Self {
        let visitors = lock(&home.visitors);
        let meant = visitors.iter().filter(|visitor| is_meant(visitor));
        Self(meant.map(|visitor| (visitor.begun(), Arc::clone(visitor))).collect())
    }

    /// Is all of it over?
    pub(super) fn is_over(&mut self) -> bool {
        self.0.retain(|(begun, visitor)| {
            let is_over = visitor.is_settled(*begun);
            if is_over {
                visitor.is_slow.store(false, Ordering::Relaxed);
            }
            !is_over
        });
        self.0.is_empty()
    }

    /// Waits until all of it is over. False if it was not in time. Whoever was not is not waited for
    /// again before it is.
    pub(super) fn wait(&mut self, longest: Duration) -> bool {
        let end = Instant::now() + longest;
        while !self.is_over() {
            let are_slow =
                self.0.iter().all(|(_, visitor)| visitor.is_slow.load(Ordering::Relaxed));
            if are_slow || !MAY_WAIT.get() {
                return false;
            }
            if Instant::now() >= end {
                let late = self.0.iter();
                late.for_each(|(_, visitor)| visitor.is_slow.store(true, Ordering::Relaxed));
                return false;
            }
            std::thread::sleep(REST);
        }
        true
    }

    /// Who has not finished, as far as is known from the last look.
    pub(super) fn label(&self) -> Option<&str> {
        self.0.first().map(|(_, visitor)| visitor.label.as_str())
    }
}

/// Memory of regions that are gone, until nobody copies to or from it.
#[derive(Debug, Default)]
pub(super) struct Reclaim(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    all: Vec<(Pending, Buffer)>,
    has_thread: bool,
}

impl Reclaim {
    /// Keeps memory until these are over. If they never are, until the process ends.
    pub(super) fn keep(&self, pending: Pending, buffer: Buffer, home: &Arc<Home>) {
        tracing::warn!(
            bytes = buffer.length(),
            peer = pending.label().unwrap_or_default(),
            "a region was dropped while a peer copies: its memory is kept until the copy is over"
        );
        let mut kept = lock(&self.0);
        kept.all.push((pending, buffer));
        if !kept.has_thread {
            let home = Arc::clone(home);
            let thread = std::thread::Builder::new().name("fabricast-reclaim".to_owned());
            kept.has_thread = thread.spawn(move || home.reclaim().free_in_time()).is_ok();
        }
    }

    fn free_in_time(&self) {
        loop {
            std::thread::sleep(LONG_REST);
            let mut kept = lock(&self.0);
            let over: Vec<_> = kept.all.extract_if(.., |(pending, _)| pending.is_over()).collect();
            let is_last = kept.all.is_empty();
            kept.has_thread = !is_last;
            drop(kept);
            drop(over);
            if is_last {
                return;
            }
        }
    }
}
