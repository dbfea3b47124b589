//! Words that processes share.
//!
//! Every structure in this crate that lives in shared memory is made of 64-bit
//! words, and reaches them by index through [`Words`]. That has four uses. The
//! structure means the same at whatever address it is mapped; an index is checked
//! before it is used, so that a process that scribbles cannot make another one
//! read or write outside of the structure; loom can run the same code on its own
//! atomics; and a test can stop a process before and after each single store.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// An array of 64-bit words, each of which is only reached atomically.
///
/// An index beyond the end must be harmless: such a load gives 0, such a store
/// does nothing. Indices come out of shared memory, which a broken peer can write.
pub trait Words {
    /// How many there are.
    fn count(&self) -> usize;
    /// Reads one.
    fn load(&self, at: usize, order: Ordering) -> u64;
    /// Writes one.
    fn store(&self, at: usize, value: u64, order: Ordering);
    /// Replaces one that has this value; else gives the value it has.
    ///
    /// # Errors
    /// The value found.
    fn compare_exchange(&self, at: usize, current: u64, new: u64) -> Result<u64, u64>;
    /// Replaces one, and gives what it was.
    fn swap(&self, at: usize, value: u64) -> u64;
    /// Clears all bits but these, and gives what it was.
    fn fetch_and(&self, at: usize, bits: u64) -> u64;
    /// Sets these bits, and gives what it was.
    fn fetch_or(&self, at: usize, bits: u64) -> u64;
    /// Adds, wrapping, and gives what it was.
    fn fetch_add(&self, at: usize, value: u64) -> u64;
    /// It will be written soon: a processor that wants to may fetch it meanwhile. Nothing else
    /// comes of it.
    #[inline]
    fn prefetch_for_write(&self, _at: usize) {}
    /// Sleeps while the lower half of the word is `low`, until it is woken or time
    /// is over. May return early.
    fn sleep(&self, at: usize, low: u32, timeout: Duration);
    /// Wakes so many of those that sleep on the word.
    fn wake(&self, at: usize, how_many: u32);
    /// A pause in a loop that waits for what is about to happen.
    fn pause(&self);
    /// Waits for longer, but does not sleep: some 0.2 µs for each of `how_long`.
    #[inline]
    fn rest(&self, how_long: u32) {
        for _ in 0..how_long {
            self.pause();
            break_pause_sequence();
        }
    }
    /// What time it is, for those that wait. A model of processes has a time of its
    /// own, or it would not run twice in the same way.
    #[inline]
    fn now(&self) -> Instant {
        Instant::now()
    }
    /// Orders all before it against all after it, for everybody.
    fn fence(&self);
    /// Orders loads before it, of whatever memory, against loads of words after it.
    #[inline]
    fn fence_loads(&self) {
        std::sync::atomic::fence(Ordering::Acquire);
    }
}

/// Words that the kernel knows, so that it can be asked to wait at those of several structures
/// at once.
pub trait FutexWords: Words {
    /// One of them; None beyond the end.
    fn word(&self, at: usize) -> Option<&AtomicU64>;
}

/// Some arithmetic that nobody needs. A hypervisor takes pauses that follow each other
/// closely for a sign that whoever is waited for does not run, and stops the processor
/// for a while to let others; it does not count pauses with this between them.
#[inline]
fn break_pause_sequence() {
    let mut number = 1_u64;
    for _ in 0..60 {
        number = std::hint::black_box(number).wrapping_mul(3);
    }
}

/// What words do that lie in others, all but their number: where `$at` is, those have `$place`.
macro_rules! words_of_words {
    (|$self:ident, $at:ident| $words:expr, $place:expr) => {
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

/// Words of this process alone: for tests, and for structures that are not shared.
///
/// ```
/// use std::sync::atomic::Ordering;
/// use ipc::{LocalWords, Words};
/// let words = LocalWords::zeroed(4);
/// words.store(1, 7, Ordering::Relaxed);
/// assert_eq!(words.fetch_add(1, 3), 7);
/// assert_eq!(words.load(1, Ordering::Relaxed), 10);
/// words.store(99, 1, Ordering::Relaxed); // beyond the end: nothing
/// assert_eq!(words.load(99, Ordering::Relaxed), 0);
/// ```
#[derive(Debug)]
pub struct LocalWords(Box<[AtomicU64]>);

impl LocalWords {
    /// So many words, all 0.
    #[must_use]
    pub fn zeroed(count: usize) -> Self {
        Self((0..count).map(|_| AtomicU64::new(0)).collect())
    }
}

/// What the words of a slice of atomics do one by one: shared by the local kind, the
/// mapped kind, and models of both.
macro_rules! atomics_of_a_slice {
    () => {
        #[inline]
        fn count(&self) -> usize {
            self.slice().len()
        }
        #[inline]
        fn load(&self, at: usize, order: Ordering) -> u64 {
            self.slice().get(at).map_or(0, |word| word.load(order))
        }
        #[inline]
        fn store(&self, at: usize, value: u64, order: Ordering) {
            if let Some(word) = self.slice().get(at) {
                word.store(value, order);
            }
        }
        #[inline]
        fn compare_exchange(
            &self,
            at: usize,
            current: u64,
            new: u64,
        ) -> std::result::Result<u64, u64> {
            match self.slice().get(at) {
                Some(word) => {
                    word.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
                }
                None => Err(0),
            }
        }
        #[inline]
        fn swap(&self, at: usize, value: u64) -> u64 {
            self.slice().get(at).map_or(0, |word| word.swap(value, Ordering::AcqRel))
        }
        #[inline]
        fn fetch_and(&self, at: usize, bits: u64) -> u64 {
            self.slice().get(at).map_or(0, |word| word.fetch_and(bits, Ordering::AcqRel))
        }
        #[inline]
        fn fetch_or(&self, at: usize, bits: u64) -> u64 {
            self.slice().get(at).map_or(0, |word| word.fetch_or(bits, Ordering::AcqRel))
        }
        #[inline]
        fn fetch_add(&self, at: usize, value: u64) -> u64 {
            self.slice().get(at).map_or(0, |word| word.fetch_add(value, Ordering::AcqRel))
        }
    };
}
pub(crate) use atomics_of_a_slice;

/// The words as a slice of atomics does them: shared by the local and the mapped kind.
macro_rules! words_of_a_slice {
    () => {
        $crate::words::atomics_of_a_slice!();
        fn sleep(&self, at: usize, low: u32, timeout: Duration) {
            if let Some(word) = self.slice().get(at) {
                $crate::futex::sleep(word, low, timeout);
            }
        }
        fn wake(&self, at: usize, how_many: u32) {
            if let Some(word) = self.slice().get(at) {
                $crate::futex::wake(word, how_many);
            }
        }
        #[inline]
        fn pause(&self) {
            std::hint::spin_loop();
        }
        #[inline]
        fn fence(&self) {
            std::sync::atomic::fence(Ordering::SeqCst);
        }
    };
}
pub(crate) use words_of_a_slice;

impl LocalWords {
    #[inline]
    fn slice(&self) -> &[AtomicU64] {
        &self.0
    }
}

impl Words for LocalWords {
    words_of_a_slice!();
}

impl FutexWords for LocalWords {
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.0.get(at)
    }
}

/// A part of other words, for a structure that lies inside of something larger.
#[derive(Debug, Clone)]
pub struct WordRange<W> {
    words: W,
    first: usize,
    count: usize,
}

impl<W: Words> WordRange<W> {
    /// `count` words from `first` on; None if there are not so many.
    #[must_use]
    pub fn new(words: W, first: usize, count: usize) -> Option<Self> {
        let end = first.checked_add(count)?;
        (end <= words.count()).then_some(Self { words, first, count })
    }

    /// Where the word lies in the whole: beyond its end, for one beyond this part's.
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

impl<W: FutexWords> FutexWords for WordRange<W> {
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(self.at(at))
    }
}
