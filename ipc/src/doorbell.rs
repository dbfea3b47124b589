//! Waking processes that sleep until shared memory changes.
//!
//! Two words: a count that sleepers sleep on, and a flag that sleepers exist. A ring that finds the
//! flag increments the count. Without sleepers, a ring only reads a word that seldom changes. No
//! counter of sleepers exists, so a sleeper that dies causes at most one superfluous ring.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use crate::words::{LocalWords, Words};

/// How a caller waits.
///
/// ```
/// use std::time::Duration;
/// use ipc::WaitStrategy;
/// let busy = WaitStrategy::Busy;
/// let block = WaitStrategy::Block;
/// let adaptive = WaitStrategy::default(); // adapts the spin time
/// assert!(matches!(adaptive, WaitStrategy::Adaptive { .. }));
/// # let _ = (busy, block, Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitStrategy {
    /// Polls all the time: lowest latency, a whole core.
    Busy,
    /// Sleeps at once.
    Block,
    /// Polls for some time, and then sleeps. The time adapts: it grows when a wait took less than
    /// `max`, with or without a sleep, and shrinks otherwise. After 3 µs other threads of the core
    /// run between two looks.
    Adaptive {
        /// How long it polls now.
        now: Duration,
        /// The longest time that it polls.
        max: Duration,
    },
}

impl Default for WaitStrategy {
    /// Going to sleep and being woken costs 4 to 25 µs. Polling for twice that pays off when
    /// messages follow each other in less, and stops after few longer waits.
    fn default() -> Self {
        Self::Adaptive { now: Duration::from_micros(10), max: Duration::from_micros(50) }
    }
}

impl WaitStrategy {
    /// A shorter time makes no difference.
    const MIN_SPIN: Duration = Duration::from_micros(1);

    /// Sets the time of polling after a wait that took this long, its sleep included; None if a sleep
    /// ended at the deadline. A short wait that slept makes the time longer: polling would have
    /// ended it sooner.
    fn adapt(&mut self, took: Option<Duration>) {
        if let Self::Adaptive { now, max } = self {
            *now = match took {
                Some(took) if took <= *max => (took * 2).max(*now).min(*max),
                _ => (*now / 2).max(Self::MIN_SPIN),
            };
        }
    }
}

/// Polls between two reads of the clock. In a model each poll may happen at any moment, so one
/// is enough.
const POLLS_PER_CLOCK_READ: u32 = if cfg!(loom) { 1 } else { 16 };
/// After this time a thread that polls lets others of its core run between two looks: the thread
/// that it waits for may be one of them.
const POLLS_ALONE: Duration = Duration::from_micros(3);
/// The longest sleep. A process that is killed between its store and its ring leaves sleepers
/// behind; reclaiming it wakes them ([`Doorbell::ring_unconditionally`]). The limit bounds the
/// delay by a process that is stopped there, and by unknown faults.
pub(crate) const MAX_SLEEP: Duration = Duration::from_secs(1);

/// A doorbell of two words: usually separate words, for changes elsewhere. A process that waits
/// for any of several structures sleeps here, and a process that changes one of them rings.
///
/// ```
/// use std::time::{Duration, Instant};
/// use ipc::{Doorbell, LocalWords, WaitStrategy};
/// let doorbell = Doorbell::new(LocalWords::zeroed(Doorbell::<LocalWords>::WORDS)).unwrap();
/// doorbell.ring(); // no waiter: costs next to nothing
/// let deadline = Instant::now() + Duration::from_secs(1);
/// let found = doorbell.wait(&mut WaitStrategy::default(), deadline, || Some("the awaited value"));
/// assert_eq!(found, Some("the awaited value"));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Doorbell<W> {
    words: W,
    /// The index of the count; the sleepers flag follows.
    at: usize,
}

impl Doorbell<LocalWords> {
    /// A doorbell for threads of this process.
    #[must_use]
    pub fn in_this_process() -> Self {
        Self { words: LocalWords::zeroed(Self::WORDS), at: 0 }
    }
}

impl<W: Words> Doorbell<W> {
    /// Number of words.
    pub const WORDS: usize = 8;

    /// In zeroed words, or in those of an existing doorbell; None if there are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        (words.count() >= Self::WORDS).then_some(Self { words, at: 0 })
    }

    /// A doorbell inside a larger structure: two of its words.
    #[inline]
    pub(crate) fn at(words: W, at: usize) -> Self {
        Self { words, at }
    }

    /// Rings, after the awaited value was stored.
    #[inline]
    pub fn ring(&self) {
        // Either the sleeper sees the stored value, or this thread sees the sleeper.
        self.words.fence();
        self.ring_if_waiting();
    }

    /// Rings if a sleeper is visible: a thread that is about to sleep may be missed.
    #[inline]
    pub(crate) fn ring_if_waiting(&self) {
        if self.words.load(self.at + 1, Relaxed) != 0 {
            self.wake();
        }
    }

    /// Rings for a process that died and may have been about to ring, or ringing: then it
    /// cleared the sleepers flag, and woke no process. Costs a system call each time.
    #[cold]
    pub fn ring_unconditionally(&self) {
        self.words.fence();
        self.wake();
    }

    #[cold]
    fn wake(&self) {
        self.words.swap(self.at + 1, 0);
        self.words.fetch_add(self.at, 1);
        self.words.wake(self.at, u32::MAX);
    }

    /// The number of rings that found sleepers. A waiter reads it before it [announces
    /// itself](Self::announce_waiter).
    pub(crate) fn count(&self) -> u64 {
        self.words.load(self.at, Acquire)
    }

    /// Sets the sleepers flag; also for a waiter that a
    /// [`DoorbellWatcher`](crate::DoorbellWatcher) wakes. The caller must check its condition
    /// once more afterwards: that check finds the stored value, or the process that stored it
    /// rings.
    pub fn announce_waiter(&self) {
        self.words.swap(self.at + 1, 1);
        self.words.fence();
    }

    /// Waits until `look` finds a result; None if the deadline passes.
    pub fn wait<T>(
        &self,
        spin: &mut WaitStrategy,
        deadline: Instant,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        if let Some(found) = look() {
            return Some(found);
        }
        let start = self.words.now();
        let spin_end = match *spin {
            WaitStrategy::Busy => deadline,
            WaitStrategy::Block => start,
            WaitStrategy::Adaptive { now, .. } => deadline.min(start + now),
        };
        let gives_way = *spin != WaitStrategy::Busy && !cfg!(loom);
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                self.words.pause();
                if let Some(found) = look() {
                    spin.adapt(Some(self.words.now().saturating_duration_since(start)));
                    return Some(found);
                }
            }
            let now = self.words.now();
            if now >= deadline {
                return None;
            }
            if now >= spin_end {
                break;
            }
            if gives_way && now >= start + POLLS_ALONE {
                std::thread::yield_now();
            }
        }
        let found = self.sleep_until(deadline, look);
        let took = self.words.now().saturating_duration_since(start);
        spin.adapt(found.is_some().then_some(took));
        found
    }

    /// Sleeps until `look` finds a result; None if the deadline passes.
    fn sleep_until<T>(&self, deadline: Instant, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let count = self.count();
            self.announce_waiter();
            if let Some(found) = look() {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(self.words.now());
            if left.is_zero() {
                return None;
            }
            self.words.sleep(self.at, count as u32, left.min(MAX_SLEEP));
            // Usually the value has arrived: check before setting the sleepers flag again.
            // Otherwise the next ring would be superfluous, and all woken threads would contend
            // for the cache line of the flag.
            if let Some(found) = look() {
                return Some(found);
            }
        }
    }

    /// The word that the kernel uses as the futex.
    pub(crate) fn word(&self) -> Option<&AtomicU64> {
        self.words.word(self.at)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn waits_poll_as_long_as_messages_follow_each_other_soon() {
        let mut strategy = WaitStrategy::default();
        let polling_time = |strategy: &WaitStrategy| match *strategy {
            WaitStrategy::Adaptive { now, max } => (now.as_micros(), max.as_micros()),
            _ => unreachable!(),
        };
        let mut after = |took: Option<u64>| {
            strategy.adapt(took.map(Duration::from_micros));
            polling_time(&strategy)
        };
        // With a sleep and the wake-up, which took longer than it polled.
        assert_eq!(after(Some(30)), (50, 50));
        assert_eq!(after(Some(31)), (50, 50));
        for polling in [25, 12, 6, 3, 1, 1] {
            assert_eq!(after(Some(51)), (polling, 50));
        }
        assert_eq!(after(None), (1, 50));
        assert_eq!(after(Some(4)), (8, 50));
        // A shorter wait does not make it shorter.
        assert_eq!(after(Some(1)), (8, 50));
        assert_eq!(after(Some(50)), (50, 50));
    }
}
