//! A doorbell with marks, which tell for which of many structures it was rung: the waiter polls
//! only those.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::doorbell::{Doorbell, WaitStrategy};
use crate::words::{WordRange, Words};

/// Number of marks; a mark stands for all numbers that are equal modulo this. In a model one
/// word of them is enough.
const MARKS: u32 = if cfg!(loom) { 64 } else { 4096 };
const MARK_WORDS: usize = MARKS as usize / 64;

/// A doorbell, with marks that tell the reason for a ring.
///
/// A mark is set after the store, and cleared before the poll: so it may be set without need.
/// A mark is missing only if the storing process dies before it sets the mark, or the taking
/// process dies before it polls. So there is one taker, which polls everything when it starts, in
/// place of a possible dead predecessor, and then from time to time.
///
/// ```
/// use std::time::{Duration, Instant};
/// use ipc::{LocalWords, MarkedDoorbell, WaitStrategy};
/// let words = LocalWords::zeroed(MarkedDoorbell::<&LocalWords>::WORDS);
/// let doorbell = MarkedDoorbell::new(&&words, 0).unwrap();
/// // … an entry is published in queue 7
/// doorbell.ring(7);
///
/// let mut marked = Vec::new();
/// let poll = || doorbell.take(|mark| marked.push(mark)).then_some(());
/// doorbell.wait(&mut WaitStrategy::default(), Instant::now() + Duration::from_secs(1), poll);
/// assert_eq!(marked, [MarkedDoorbell::<&LocalWords>::mark(7)]);
/// ```
#[derive(Debug)]
pub struct MarkedDoorbell<W> {
    doorbell: Doorbell<WordRange<W>>,
    marks: WordRange<W>,
}

impl<W: Words + Clone> MarkedDoorbell<W> {
    /// Number of words.
    pub const WORDS: usize = Doorbell::<WordRange<W>>::WORDS + MARK_WORDS;

    /// In zeroed words, or in those of an existing doorbell; None if there are too few.
    #[must_use]
    pub fn new(words: &W, at: usize) -> Option<Self> {
        let count = Doorbell::<WordRange<W>>::WORDS;
        let doorbell = Doorbell::new(WordRange::new(words.clone(), at, count)?)?;
        Some(Self { doorbell, marks: WordRange::new(words.clone(), at + count, MARK_WORDS)? })
    }
}

impl<W: Words> MarkedDoorbell<W> {
    /// The mark of the structure with this number.
    #[must_use]
    pub fn mark(number: u32) -> u32 {
        number % MARKS
    }

    /// Rings for a value that was stored in the structure with this number, after a fence, as
    /// [publishing](crate::Queue::publish) makes. So it only reads two words while the mark is
    /// set.
    #[inline]
    pub fn ring(&self, number: u32) {
        let mark = Self::mark(number);
        let (word, bit) = ((mark / 64) as usize, 1 << (mark % 64));
        // Either the taker that clears the mark sees the stored value, or this thread sees that
        // the mark is clear: the taker has a fence between the two, this thread has one before.
        if self.marks.load(word, Relaxed) & bit == 0 {
            self.marks.fetch_or(word, bit);
            // Its fence follows the mark: either the sleeper sees the mark, or this thread sees
            // the sleeper.
            self.doorbell.ring();
        } else {
            // The mark is set, and the process that set it rings. The woken taker clears it
            // after this read, and finds the value that was stored before. So no fence is
            // needed; this read covers a process that dies before it rings.
            self.doorbell.ring_if_waiting();
        }
    }

    /// Wakes the waiter for another reason.
    pub fn wake(&self) {
        self.doorbell.ring();
    }

    /// Clears all marks, and passes them to the callback, which polls their structures. True if
    /// any were set.
    pub fn take(&self, mut each: impl FnMut(u32)) -> bool {
        let mut has_any = false;
        for word in 0..MARK_WORDS {
            if self.marks.load(word, Relaxed) == 0 {
                continue;
            }
            let mut bits = self.marks.swap(word, 0);
            self.marks.fence();
            has_any |= bits != 0;
            while bits != 0 {
                each(word as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
        has_any
    }

    /// Waits until `look` finds a result; None if the deadline passes.
    pub fn wait<T>(
        &self,
        spin: &mut WaitStrategy,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.doorbell.wait(spin, deadline, look)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::words::LocalWords;

    use super::*;

    #[test]
    fn rings_report_their_marks() {
        let words = LocalWords::zeroed(3 + MarkedDoorbell::<&LocalWords>::WORDS);
        let doorbell = MarkedDoorbell::new(&&words, 3).unwrap();
        assert!(MarkedDoorbell::new(&&words, 4).is_none());
        let taken = || {
            let mut taken = Vec::new();
            let has_any = doorbell.take(|mark| taken.push(mark));
            assert_eq!(has_any, !taken.is_empty());
            taken
        };
        assert!(taken().is_empty());
        for number in [0, 63, 64, 700, 700, MARKS - 1, MARKS + 64, 3 * MARKS + 1, u32::MAX] {
            doorbell.ring(number);
        }
        let marks = [0, 1, 63, 64, 700, MARKS - 1];
        assert_eq!(taken(), marks);
        assert!(taken().is_empty());
        assert_eq!(MarkedDoorbell::<&LocalWords>::mark(MARKS + 64), 64);
        doorbell.wake();
        assert!(taken().is_empty());
    }
}
