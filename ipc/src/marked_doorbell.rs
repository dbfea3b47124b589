//! A bell with marks, which say for which of many structures it was rung: who sleeps there looks
//! at those alone.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::doorbell::{Doorbell, WaitStrategy};
use crate::words::{WordRange, Words};

/// Marks, each of which is for all numbers that are the same modulo this. In a model one word of
/// them is as good as many.
const MARKS: u32 = if cfg!(loom) { 64 } else { 4096 };
const MARK_WORDS: usize = MARKS as usize / 64;

/// A bell, and marks that say what it is rung for.
///
/// A mark is set after something was stored, and taken off before it is looked for: so it says too
/// much at times. It says too little only if the one who stored it dies before the mark is on, or
/// the one who takes it before the look. So there is one taker, who looks at all when it begins, in
/// place of one that may have died, and then at times.
///
/// ```
/// use std::time::{Duration, Instant};
/// use ipc::{LocalWords, MarkedDoorbell, WaitStrategy};
/// let words = LocalWords::zeroed(MarkedDoorbell::<&LocalWords>::WORDS);
/// let doorbell = MarkedDoorbell::new(&&words, 0).unwrap();
/// // … something is published in the queue that is called 7
/// doorbell.ring(7);
///
/// let mut marked = Vec::new();
/// let look = || doorbell.take(|mark| marked.push(mark)).then_some(());
/// doorbell.wait(&mut WaitStrategy::default(), Instant::now() + Duration::from_secs(1), look);
/// assert_eq!(marked, [MarkedDoorbell::<&LocalWords>::mark(7)]);
/// ```
#[derive(Debug)]
pub struct MarkedDoorbell<W> {
    doorbell: Doorbell<WordRange<W>>,
    marks: WordRange<W>,
}

impl<W: Words + Clone> MarkedDoorbell<W> {
    /// Words that it takes.
    pub const WORDS: usize = Doorbell::<WordRange<W>>::WORDS + MARK_WORDS;

    /// In zeroed words, or in those of another one, from there on; None if there are too few.
    #[must_use]
    pub fn new(words: &W, at: usize) -> Option<Self> {
        let count = Doorbell::<WordRange<W>>::WORDS;
        let doorbell = Doorbell::new(WordRange::new(words.clone(), at, count)?)?;
        Some(Self { doorbell, marks: WordRange::new(words.clone(), at + count, MARK_WORDS)? })
    }
}

impl<W: Words> MarkedDoorbell<W> {
    /// The mark of what has this number.
    #[must_use]
    pub fn mark(number: u32) -> u32 {
        number % MARKS
    }

    /// Something was stored that is looked for by this number, and a fence made afterwards, as
    /// [publishing](crate::Queue::publish) does. So this costs two looks, as long as the mark is on.
    #[inline]
    pub fn ring(&self, number: u32) {
        let mark = Self::mark(number);
        let (word, bit) = ((mark / 64) as usize, 1 << (mark % 64));
        // Either who takes the mark off sees what was stored, or this sees that it is off: the one
        // has a fence between that and its look, the other before this.
        if self.marks.load(word, Relaxed) & bit == 0 {
            self.marks.fetch_or(word, bit);
            // Its fence comes after the mark: either the sleeper sees that, or this sees the sleeper.
            self.doorbell.ring();
        } else {
            // It is on, and whoever set it rings: who is woken by that takes it off after this has
            // seen it, and finds what was stored before. Needs no fence, then; it is a look for the
            // sake of one who dies before it rings.
            self.doorbell.ring_if_waiting();
        }
    }

    /// Wakes who waits, for something else.
    pub fn wake(&self) {
        self.doorbell.ring();
    }

    /// Takes off all marks that are set, and gives them: what they were set for is looked for
    /// then. True if there were any.
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

    /// Waits until `look` finds something; None once the deadline has passed.
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
    fn it_is_told_what_it_was_rung_for() {
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
