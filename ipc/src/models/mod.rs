//! Models of processes that change the same words, for loom, which tries all interleavings, and
//! all old values that a load may return.
//!
//! `scripts/test loom` runs them.

mod agreed_table_model;
mod doorbell_model;
mod lock_model;
mod marked_doorbell_model;
mod queue_model;
mod watch_model;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use loom::sync::atomic::AtomicU64;
use loom::sync::{Arc, Condvar, Mutex};

use crate::participant::{AlwaysAlive, Caller, Participant};
use crate::words::{LocalWords, Words};

/// The advance of the clock per read in a model: the phases of a wait end after a read or two.
const CLOCK_STEP: Duration = Duration::from_micros(40);

/// How the waiters of a model wait. The clock wakes only nappers: a lost wake-up hangs the
/// model, and loom reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    /// Poll, and yield at each poll.
    Looking,
    /// Run until they sleep, and sleep until they are woken.
    Sleeping,
    /// Like sleepers, but with a timeout.
    Napping,
}

/// A word of a model. A store is an exchange here: otherwise loom does not know that no store
/// happens between the read and the write of a compare-and-exchange.
#[derive(Debug)]
struct Word(AtomicU64);

impl Word {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }
    fn store(&self, value: u64, order: Ordering) {
        self.0.swap(value, order);
    }
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, success, failure)
    }
    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, order)
    }
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_and(bits, order)
    }
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.0.fetch_or(bits, order)
    }
    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
}

#[derive(Debug)]
struct Shared {
    words: Vec<Word>,
    /// Changed before each use of a word. Loom tries two orders of two uses only where it
    /// assumes that the order matters, and considers only the last use of each word: a thread's
    /// own read of a word hides another thread's read from its later store.
    turn: AtomicU64,
    /// One for each word that can be slept on.
    sleepable: HashMap<usize, (Mutex<()>, Condvar)>,
    waiting: Waiting,
}

/// The words of one thread of a model: each thread needs a clone, with its own time.
#[derive(Debug)]
struct ModelWords {
    shared: Arc<Shared>,
    began: Instant,
    passed: Cell<Duration>,
}

impl ModelWords {
    /// With these initial values; `sleepable` are the words that can be slept on.
    fn new(values: &LocalWords, sleepable: &[usize], waiting: Waiting) -> Self {
        let word = |at| Word(AtomicU64::new(values.load(at, Ordering::Relaxed)));
        let sleepers = |at: &usize| (*at, (Mutex::new(()), Condvar::new()));
        let shared = Shared {
            words: (0..values.count()).map(word).collect(),
            turn: AtomicU64::new(0),
            sleepable: sleepable.iter().map(sleepers).collect(),
            waiting,
        };
        Self { shared: Arc::new(shared), began: Instant::now(), passed: Cell::default() }
    }

    fn slice(&self) -> &[Word] {
        self.shared.turn.fetch_add(1, Ordering::Relaxed);
        &self.shared.words
    }

    /// A deadline that never passes.
    fn never(&self) -> Instant {
        self.began + Duration::from_secs(1 << 20)
    }
}

impl Clone for ModelWords {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), began: self.began, passed: Cell::default() }
    }
}

impl Words for ModelWords {
    fn count(&self) -> usize {
        self.slice().len()
    }

    fn word(&self, _: usize) -> Option<&std::sync::atomic::AtomicU64> {
        None
    }

    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.slice().get(at).map_or(0, |word| word.load(order))
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.slice().get(at) {
            word.store(value, order);
        }
    }

    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> Result<u64, u64> {
        let word = self.slice().get(at).ok_or(0_u64)?;
        word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.slice().get(at).map_or(0, |word| word.swap(value, Ordering::AcqRel))
    }

    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.slice().get(at).map_or(0, |word| word.fetch_and(bits, Ordering::AcqRel))
    }

    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.slice().get(at).map_or(0, |word| word.fetch_or(bits, Ordering::AcqRel))
    }

    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self.slice().get(at).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
    }

    /// Like the kernel: no wake-up happens between the check of the word and the sleep.
    fn sleep(&self, at: usize, low: u32, _: Duration) {
        if self.shared.waiting == Waiting::Napping {
            loom::thread::yield_now();
            return;
        }
        let (sleepers, woken) = &self.shared.sleepable[&at];
        let guard = sleepers.lock().unwrap();
        if self.load(at, Ordering::SeqCst) as u32 == low {
            drop(woken.wait(guard).unwrap());
        }
    }

    fn wake(&self, at: usize, how_many: u32) {
        if self.shared.waiting == Waiting::Napping {
            return;
        }
        let (sleepers, woken) = &self.shared.sleepable[&at];
        let _guard = sleepers.lock().unwrap();
        if how_many == 1 { woken.notify_one() } else { woken.notify_all() }
    }

    fn rest(&self, _: u32) {
        self.pause();
    }

    fn pause(&self) {
        if self.shared.waiting == Waiting::Looking {
            loom::thread::yield_now();
        }
    }

    fn now(&self) -> Instant {
        self.passed.set(self.passed.get() + CLOCK_STEP);
        self.began + self.passed.get()
    }

    fn fence(&self) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }

    fn light_fence(&self) {
        self.fence();
    }

    fn prepare_light_fence(&self) {}

    fn heavy_fence(&self) {
        self.fence();
    }

    fn fence_loads(&self) {
        loom::sync::atomic::fence(Ordering::Acquire);
    }
}

/// The most preemptions of runnable threads in an interleaving.
#[derive(Debug, Clone, Copy)]
struct Preemptions {
    usual: usize,
    /// With DEEP_MODELS set, in `scripts/test loom-deep`: minutes for a model.
    deep: usize,
}

/// Of threads that take a lock more than once.
const TWO_THREADS: Preemptions = Preemptions { usual: 2, deep: 3 };
const THREE_THREADS: Preemptions = Preemptions { usual: 1, deep: 2 };

/// Runs a model in all interleavings with so many preemptions, or as many as LOOM_MAX_PREEMPTIONS
/// says.
fn check_within(preemptions: Preemptions, model: impl Fn() + Sync + Send + 'static) {
    let is_deep = std::env::var_os("DEEP_MODELS").is_some();
    let bound = if is_deep { preemptions.deep } else { preemptions.usual };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(bound));
    builder.max_branches = 50_000;
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    builder.check({
        let runs = std::sync::Arc::clone(&runs);
        move || {
            runs.fetch_add(1, Ordering::Relaxed);
            model();
        }
    });
    println!("{} ways", runs.load(Ordering::Relaxed));
}

fn check_with(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    check_within(Preemptions { usual: preemptions, deep: preemptions }, model);
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_with(2, model);
}

fn caller(slot: u32) -> Caller<'static> {
    Caller {
        timeout: Duration::from_secs(1 << 19),
        ..Caller::new(Participant::new(slot, 1).unwrap(), &AlwaysAlive)
    }
}
