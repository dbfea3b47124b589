//! Words that processes share.
//!
//! Every structure of this crate in shared memory consists of 64-bit words, and accesses them
//! by index through [`Words`]. That has four uses. A structure works at any mapped address. An
//! index is checked before use, so that a process that corrupts memory cannot make another one
//! access memory outside of the structure. loom can run the same code on its own atomics. And a
//! test can stop a process before and after each store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::{futex, membarrier};

/// An array of 64-bit words, which are only accessed atomically.
///
/// An index beyond the end must be harmless: a load returns 0, a store does nothing. Indices
/// are read from shared memory, which a faulty process can write.
pub trait Words {
    /// The number of words.
    fn count(&self) -> usize;
    /// A word, which the other functions access, and on which the kernel can sleep; None beyond
    /// the end. Words of another kind return None, and implement the other functions themselves.
    fn word(&self, at: usize) -> Option<&AtomicU64>;
    /// Loads a word.
    #[inline]
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).map_or(0, |word| word.load(order))
    }
    /// Stores a word.
    #[inline]
    fn store(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.word(at) {
            word.store(value, order);
        }
    }
    /// Replaces a word that has the expected value; otherwise returns its value.
    ///
    /// # Errors
    /// The value that was found.
    #[inline]
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> Result<u64, u64> {
        let word = self.word(at).ok_or(0_u64)?;
        word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }
    /// Replaces a word, and returns the old value.
    #[inline]
    fn swap(&self, at: usize, value: u64) -> u64 {
        self.word(at).map_or(0, |word| word.swap(value, Ordering::AcqRel))
    }
    /// Clears all bits but these, and returns the old value.
    #[inline]
    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.word(at).map_or(0, |word| word.fetch_and(bits, Ordering::AcqRel))
    }
    /// Sets these bits, and returns the old value.
    #[inline]
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.word(at).map_or(0, |word| word.fetch_or(bits, Ordering::AcqRel))
    }
    /// Adds, wrapping, and returns the old value.
    #[inline]
    fn fetch_add(&self, at: usize, value: u64) -> u64 {
        self.word(at).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
    }
    /// A hint that the word will be written soon, so that the processor may prefetch it. It has
    /// no other effect.
    #[inline]
    fn prefetch_for_write(&self, _at: usize) {}
    /// Sleeps while the lower half of the word is `low`, until a wake-up or the timeout. May
    /// return early.
    fn sleep(&self, at: usize, low: u32, timeout: Duration) {
        if let Some(word) = self.word(at) {
            futex::sleep(word, low, timeout);
        }
    }
    /// Wakes up to this many threads that sleep on the word.
    fn wake(&self, at: usize, how_many: u32) {
        if let Some(word) = self.word(at) {
            futex::wake(word, how_many);
        }
    }
    /// A pause in a loop that waits for something imminent.
    #[inline]
    fn pause(&self) {
        std::hint::spin_loop();
    }
    /// A longer pause without sleeping: about 0.2 µs for each unit of `how_long`.
    #[inline]
    fn rest(&self, how_long: u32) {
        for _ in 0..how_long {
            self.pause();
            break_pause_sequence();
        }
    }
    /// The time for waits. A model has a time of its own, so that it runs deterministically.
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
    }
    /// Orders all accesses before it against all after it, for all threads.
    #[inline]
    fn fence(&self) {
        std::sync::atomic::fence(Ordering::SeqCst);
    }
    /// Orders stores before it against loads after it, for threads that call
    /// [`heavy_fence`](Self::heavy_fence). It costs next to nothing once it is
    /// [prepared](Self::prepare_light_fence).
    #[inline]
    fn light_fence(&self) {
        membarrier::light();
    }
    /// Prepares this process for [`light_fence`](Self::light_fence).
    fn prepare_light_fence(&self) {
        membarrier::prepare();
    }
    /// A [fence](Self::fence) of this thread, and of all that call
    /// [`light_fence`](Self::light_fence). It takes microseconds.
    fn heavy_fence(&self) {
        membarrier::heavy();
    }
    /// Orders loads before it, of any memory, against loads of words after it.
    #[inline]
    fn fence_loads(&self) {
        std::sync::atomic::fence(Ordering::Acquire);
    }
}

/// Some useless arithmetic. A hypervisor takes closely spaced pause instructions as a sign that
/// the awaited processor does not run, and deschedules this one for a while; pauses with this
/// between them do not count.
#[inline]
fn break_pause_sequence() {
    let mut number = 1_u64;
    for _ in 0..60 {
        number = std::hint::black_box(number).wrapping_mul(3);
    }
}

/// Words that forward to other words with an index shift: `$at` becomes `$place`.
macro_rules! words_of_words {
    (|$self:ident, $at:ident| $words:expr, $place:expr) => {
        #[inline]
        fn word(&$self, $at: usize) -> Option<&AtomicU64> {
            $words.word($place)
        }
        #[inline]
        fn load(&$self, $at: usize, order: Ordering) -> u64 {
            $words.load($place, order)
        }
        #[inline]
        #[track_caller]
        fn store(&$self, $at: usize, value: u64, order: Ordering) {
            $words.store($place, value, order);
        }
        #[inline]
        #[track_caller]
        fn compare_exchange(&$self, $at: usize, current: u64, new: u64) -> Result<u64, u64> {
            $words.compare_exchange($place, current, new)
        }
        #[inline]
        #[track_caller]
        fn swap(&$self, $at: usize, value: u64) -> u64 {
            $words.swap($place, value)
        }
        #[inline]
        #[track_caller]
        fn fetch_and(&$self, $at: usize, bits: u64) -> u64 {
            $words.fetch_and($place, bits)
        }
        #[inline]
        #[track_caller]
        fn fetch_or(&$self, $at: usize, bits: u64) -> u64 {
            $words.fetch_or($place, bits)
        }
        #[inline]
        #[track_caller]
        fn fetch_add(&$self, $at: usize, value: u64) -> u64 {
            $words.fetch_add($place, value)
        }
        #[inline]
        fn prefetch_for_write(&$self, $at: usize) {
            $words.prefetch_for_write($place);
        }
        fn sleep(&$self, $at: usize, low: u32, timeout: Duration) {
            $words.sleep($place, low, timeout);
        }
        fn wake(&$self, $at: usize, how_many: u32) {
            $words.wake($place, how_many);
        }
        #[inline]
        fn pause(&$self) {
            $words.pause();
        }
        #[inline]
        fn rest(&$self, how_long: u32) {
            $words.rest(how_long);
        }
        #[inline]
        fn now(&$self) -> Instant {
            $words.now()
        }
        #[inline]
        fn fence(&$self) {
            $words.fence();
        }
        #[inline]
        fn light_fence(&$self) {
            $words.light_fence();
        }
        fn prepare_light_fence(&$self) {
            $words.prepare_light_fence();
        }
        fn heavy_fence(&$self) {
            $words.heavy_fence();
        }
        #[inline]
        fn fence_loads(&$self) {
            $words.fence_loads();
        }
    };
}

impl<W: Words + ?Sized> Words for &W {
    #[inline]
    fn count(&self) -> usize {
        (**self).count()
    }
    words_of_words!(|self, at| (**self), at);
}

/// Words of this process only: for tests, and for structures that are not shared.
///
/// ```
/// use std::sync::atomic::Ordering;
/// use ipc::{LocalWords, Words};
/// let words = LocalWords::zeroed(4);
/// words.store(1, 7, Ordering::Relaxed);
/// assert_eq!(words.fetch_add(1, 3), 7);
/// assert_eq!(words.load(1, Ordering::Relaxed), 10);
/// words.store(99, 1, Ordering::Relaxed); // beyond the end: no effect
/// assert_eq!(words.load(99, Ordering::Relaxed), 0);
/// ```
#[derive(Debug)]
pub struct LocalWords(Box<[AtomicU64]>);

impl LocalWords {
    /// This many words, all 0.
    #[must_use]
    pub fn zeroed(count: usize) -> Self {
        Self((0..count).map(|_| AtomicU64::new(0)).collect())
    }
}

impl Words for LocalWords {
    #[inline]
    fn count(&self) -> usize {
        self.0.len()
    }
    #[inline]
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.0.get(at)
    }
}

/// A range of other words, for a structure inside of a larger one.
#[derive(Debug, Clone)]
pub struct WordRange<W> {
    words: W,
    first: usize,
    count: usize,
}

impl<W: Words> WordRange<W> {
    /// `count` words from `first` on; None if there are not that many.
    #[must_use]
    pub fn new(words: W, first: usize, count: usize) -> Option<Self> {
        let end = first.checked_add(count)?;
        (end <= words.count()).then_some(Self { words, first, count })
    }

    /// The index in the whole; beyond its end for an index beyond this range.
    #[inline]
    fn at(&self, at: usize) -> usize {
        if at < self.count { self.first + at } else { usize::MAX }
    }
}

impl<W: Words> Words for WordRange<W> {
    #[inline]
    fn count(&self) -> usize {
        self.count
    }
    words_of_words!(|self, at| self.words, self.at(at));
}
