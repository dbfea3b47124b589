//! Waking those that sleep until something changes in shared memory.
//!
//! Two words: a count that moves at each ring, on which sleepers sleep, and whether
//! anybody sleeps. Ringing while nobody sleeps is a look at a word that seldom
//! changes. Nothing is counted up and down, so a sleeper that dies leaves at most one
//! needless ring behind.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use crate::words::{FutexWords, LocalWords, Words};

/// How those wait that do not find what they wait for.
///
/// ```
/// use std::time::Duration;
/// use ipc::WaitStrategy;
/// let eager = WaitStrategy::Busy;
/// let sleepy = WaitStrategy::Block;
/// let usual = WaitStrategy::default(); // for as long as it has been worth it lately
/// assert!(matches!(usual, WaitStrategy::Adaptive { .. }));
/// # let _ = (eager, sleepy, Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitStrategy {
    /// Looks all the time: lowest latency, a whole core.
    Busy,
    /// Sleeps at once.
    Block,
    /// Looks for some time, and then sleeps. The time follows what waiting was like:
    /// it grows where that ended while looking, and shrinks where it did not.
    Adaptive {
        /// How long now.
        now: Duration,
        /// Never longer than this.
        max: Duration,
    },
}

impl Default for WaitStrategy {
    /// Going to sleep and being woken costs 4 to 25 µs: so long it may pay to look.
    fn default() -> Self {
        Self::Adaptive { now: Duration::from_micros(10), max: Duration::from_micros(25) }
    }
}

impl WaitStrategy {
    /// Shorter than this it makes no difference.
    const MIN_SPIN: Duration = Duration::from_micros(1);

    fn adapt(&mut self, took: Duration, slept: bool) {
        if let Self::Adaptive { now, max } = self {
            *now =
                if slept { (*now / 2).max(Self::MIN_SPIN) } else { (took * 2).max(*now).min(*max) };
        }
    }
}

/// Looks between two looks at the clock. A model, in which each may come at any moment,
/// learns nothing from more than one.
const POLLS_PER_CLOCK_READ: u32 = if cfg!(loom) { 1 } else { 16 };
/// The longest sleep. One who is killed between its change and its ring leaves sleepers
/// behind, whom its burial wakes ([`Doorbell::ring_unconditionally`]); this bounds what comes of one who is
/// stopped there, and of what nobody has thought of.
pub(crate) const MAX_SLEEP: Duration = Duration::from_secs(1);

/// A bell at two words: mostly in words of its own, for what changes elsewhere. One who waits for any
/// of many structures sleeps here, and who changes one of them rings.
///
/// ```
/// use std::time::{Duration, Instant};
/// use ipc::{Doorbell, LocalWords, WaitStrategy};
/// let doorbell = Doorbell::new(LocalWords::zeroed(Doorbell::<LocalWords>::WORDS)).unwrap();
/// doorbell.ring(); // nobody waits: next to nothing
/// let deadline = Instant::now() + Duration::from_secs(1);
/// let found = doorbell.wait(&mut WaitStrategy::default(), deadline, || Some("what was looked for"));
/// assert_eq!(found, Some("what was looked for"));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Doorbell<W> {
    words: W,
    /// The count; the sleepers come right after.
    at: usize,
}

impl Doorbell<LocalWords> {
    /// For threads of this process alone.
    #[must_use]
    pub fn in_this_process() -> Self {
        Self { words: LocalWords::zeroed(Self::WORDS), at: 0 }
    }
}

impl<W: Words> Doorbell<W> {
    /// Words that it takes.
    pub const WORDS: usize = 8;

    /// In zeroed words, or in those of another one; None if there are too few.
    #[must_use]
    pub fn new(words: W) -> Option<Self> {
        (words.count() >= Self::WORDS).then_some(Self { words, at: 0 })
    }

    /// One that is a part of something: two words of it.
    #[inline]
    pub(crate) fn at(words: W, at: usize) -> Self {
        Self { words, at }
    }

    /// Rings, after what sleepers wait for was stored.
    #[inline]
    pub fn ring(&self) {
        // Either the sleeper sees what was stored, or we see the sleeper.
        self.words.fence();
        self.ring_if_waiting();
    }

    /// Rings if somebody is seen to sleep: who is about to may be overlooked.
    #[inline]
    pub(crate) fn ring_if_waiting(&self) {
        if self.words.load(self.at + 1, Relaxed) != 0 {
            self.wake();
        }
    }

    /// Rings for one who has died, and may have been about to, or in the middle of it: then it has
    /// taken the sign of the sleepers away, and woken nobody. Costs a call of the system each time.
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

    /// How often it was rung while somebody slept: one who is going to sleep knows that before it
    /// [says so](Self::announce).
    pub(crate) fn count(&self) -> u64 {
        self.words.load(self.at, Acquire)
    }

    /// Says that somebody sleeps here; also for one who is woken in another way, by a
    /// [`DoorbellWatcher`](crate::Watch) that is here already. It looks once more afterwards: that look
    /// finds what was stored, or whoever stored it rings.
    pub fn announce_waiter(&self) {
        self.words.swap(self.at + 1, 1);
        self.words.fence();
    }

    /// Waits until `look` finds something; None once the deadline has passed.
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
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                self.words.pause();
                if let Some(found) = look() {
                    spin.adapt(self.words.now().saturating_duration_since(start), false);
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
        }
        spin.adapt(self.words.now().saturating_duration_since(start), true);
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
            // Mostly it has come: so look before saying once more that somebody sleeps. That would be
            // wrong then, the next ring would wake nobody, and all that were woken would take the line
            // in which it is said from each other.
            if let Some(found) = look() {
                return Some(found);
            }
        }
    }
}

impl<W: FutexWords> Doorbell<W> {
    /// The word that the kernel knows it by.
    pub(crate) fn word(&self) -> Option<&AtomicU64> {
        self.words.word(self.at)
    }
}
