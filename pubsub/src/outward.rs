//! How those that publish tell who carries messages to other nodes, and of which topics.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use ipc::{Doorbell, Part, Spin, Words};

/// Marks for topics, each of which is for all whose numbers are the same modulo this.
const MARKS: u32 = 4096;
const MARK_WORDS: usize = MARKS as usize / 64;

/// A bell, and marks that say which topics it is rung for.
///
/// A mark is set after the message is there, and taken off before it is looked for: so it says too
/// much at times, but too little only if the one who publishes dies in between.
#[derive(Debug)]
pub(crate) struct Outward<W> {
    bell: Doorbell<Part<W>>,
    marks: Part<W>,
}

impl<W: Words + Clone> Outward<W> {
    /// Words that it takes.
    pub(crate) const WORDS: usize = Doorbell::<Part<W>>::WORDS + MARK_WORDS;

    /// In zeroed words, or in those of another one, from there on; None if there are too few.
    pub(crate) fn new(words: &W, at: usize) -> Option<Self> {
        let count = Doorbell::<Part<W>>::WORDS;
        let bell = Doorbell::new(Part::new(words.clone(), at, count)?)?;
        Some(Self { bell, marks: Part::new(words.clone(), at + count, MARK_WORDS)? })
    }
}

impl<W: Words> Outward<W> {
    /// The mark of a topic.
    pub(crate) fn mark(number: u32) -> u32 {
        number % MARKS
    }

    /// Something was published in a topic that is carried.
    #[inline]
    pub(crate) fn ring(&self, number: u32) {
        let mark = Self::mark(number);
        let (word, bit) = ((mark / 64) as usize, 1 << (mark % 64));
        // Either who takes the mark off sees the message, or this sees that it is off.
        self.marks.fence();
        if self.marks.load(word, Relaxed) & bit == 0 {
            self.marks.fetch_or(word, bit);
        }
        self.bell.ring();
    }

    /// Wakes who listens, for something else than a topic.
    pub(crate) fn wake(&self) {
        self.bell.ring();
    }

    /// Takes off all marks that are set, and gives them: what they were set for is looked for
    /// then. True if there were any.
    pub(crate) fn take(&self, mut each: impl FnMut(u32)) -> bool {
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
    pub(crate) fn wait<T>(
        &self,
        spin: &mut Spin,
        deadline: Instant,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(spin, deadline, look)
    }
}

#[cfg(test)]
mod tests {
    use ipc::LocalWords;

    use super::*;

    #[test]
    fn it_is_told_for_which_topics_it_was_rung() {
        let words = LocalWords::zeroed(3 + Outward::<&LocalWords>::WORDS);
        let outward = Outward::new(&&words, 3).unwrap();
        assert!(Outward::new(&&words, 4).is_none());
        let taken = || {
            let mut taken = Vec::new();
            let has_any = outward.take(|mark| taken.push(mark));
            assert_eq!(has_any, !taken.is_empty());
            taken
        };
        assert!(taken().is_empty());
        for number in [0, 63, 64, 700, 700, MARKS - 1, MARKS + 64, 3 * MARKS + 1, u32::MAX] {
            outward.ring(number);
        }
        let marks = [0, 1, 63, 64, 700, MARKS - 1];
        assert_eq!(taken(), marks);
        assert!(taken().is_empty());
        assert_eq!(Outward::<&LocalWords>::mark(MARKS + 64), 64);
        outward.wake();
        assert!(taken().is_empty());
    }
}
