//! A table with one writer, of which all ranks read the same values at the same step.
//!
//! Ranks take steps, each at its own pace; step 1 is the first. Rank 0 writes the table. A change that
//! it makes before it enters step `k` takes effect at step `k + window`, and no rank enters a step
//! while another one is more than `window` steps behind. So a rank that enters step `s` sees each
//! change that takes effect up to `s`: rank 0 made it before it entered step `s - window`. All ranks
//! read the same values at step `s`, whatever their order, and a rank that reads never waits or repeats.
//!
//! Each row has two cells of a value and the step at which it takes effect. A change overwrites the
//! cell that no rank needs any more: all have entered the step of the other one. The store of the step
//! commits it. A rank that dies before that store has changed nothing. After the death of rank 0 the
//! table stays as it is, for all ranks alike.
//!
//! Each rank announces what it does in a step, for others to compare, and reports how it went.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::words::Words;

/// The words of an announcement.
pub const ANNOUNCEMENT_WORDS: usize = 4;
/// The words of a report.
pub const REPORT_WORDS: usize = 7;

/// What a rank does in a step, as it announces it.
pub type Announcement = [u64; ANNOUNCEMENT_WORDS];
/// What a rank reports about a step.
pub type Report = [u64; REPORT_WORDS];

const LINE: usize = 8;
/// A line for an announcement, and one for a report: its step, then its words.
const STEP_WORDS: usize = 2 * LINE;
/// Two cells of effect and value.
const ROW: usize = 4;

/// The size of an [`AgreedTable`], which is the same for all its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgreedTableSetup {
    /// The number of ranks.
    pub ranks: u32,
    /// The number of rows.
    pub rows: u32,
    /// How many steps a rank may be ahead of another one, at least 1. A change takes effect so many steps
    /// later.
    pub window: u32,
}

impl AgreedTableSetup {
    /// The largest number of ranks, rows and steps of the window.
    pub const MAX: Self = Self { ranks: 4096, rows: 1 << 20, window: 4096 };

    /// The number of words of such a table; None if a number is 0 or too large.
    #[must_use]
    pub fn required_words(self) -> Option<usize> {
        let is_within = |number, most| (1..=most).contains(&number);
        let is_valid = is_within(self.ranks, Self::MAX.ranks)
            && is_within(self.rows, Self::MAX.rows)
            && is_within(self.window, Self::MAX.window);
        is_valid.then(|| self.first_row() + self.rows as usize * ROW)
    }

    /// The steps whose announcements and reports have a slot: those of a rank that is `window` steps
    /// ahead, down to those of one that is as far behind, and one that is being written. At least
    /// `2 * window + 2`, which is even.
    fn kept_steps(self) -> usize {
        (2 * self.window as usize + 1).next_power_of_two()
    }

    fn words_of_rank(self) -> usize {
        LINE + self.kept_steps() * STEP_WORDS
    }

    fn first_row(self) -> usize {
        LINE + self.ranks as usize * self.words_of_rank()
    }
}

/// Why a change of an [`AgreedTable`] was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeRefused {
    /// Only rank 0 changes the table.
    NotTheWriter,
    /// There is no such row.
    NoSuchRow,
    /// This rank has not entered the step at which the last change of the row takes effect.
    Pending {
        /// The rank.
        rank: u32,
    },
}

/// A table of which all ranks read the same values at the same step: the view of one rank.
///
/// ```
/// use ipc::{AgreedTable, AgreedTableSetup, LocalWords};
/// let setup = AgreedTableSetup { ranks: 2, rows: 8, window: 1 };
/// let words = LocalWords::zeroed(setup.required_words().unwrap());
/// let mut ranks = [0, 1].map(|rank| AgreedTable::join(&words, setup, rank).unwrap());
/// let is_gone = |_| false;
/// // Rank 0 changes row 3 before it enters step 1: it takes effect at step 2.
/// ranks[0].change(3, 17, is_gone).unwrap();
/// for expected in [0, 17] {
///     for rank in &mut ranks {
///         rank.enter([0; 4], is_gone).unwrap();
///         assert_eq!(rank.value(3), expected);
///     }
/// }
/// ```
#[derive(Debug)]
pub struct AgreedTable<W> {
    words: W,
    setup: AgreedTableSetup,
    rank: u32,
    /// The step that this rank has entered.
    step: u64,
    /// The steps that the others had entered when this rank looked last.
    seen: Box<[u64]>,
}

/// Set beside the last step of a rank that left: it is never behind.
const LEFT: u64 = 1 << 63;

impl<W: Words> AgreedTable<W> {
    /// The view of a rank. All ranks pass the same setup; zeroed words are a table whose values are
    /// all 0. None if the setup is invalid, the rank does not exist, or there are too few words.
    #[must_use]
    pub fn join(words: W, setup: AgreedTableSetup, rank: u32) -> Option<Self> {
        let fits = setup.required_words()? <= words.count() && rank < setup.ranks;
        let seen = vec![0; setup.ranks as usize].into_boxed_slice();
        fits.then_some(Self { words, setup, rank, step: 0, seen })
    }

    /// The step that this rank has entered; 0 before the first.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    fn at_rank(&self, rank: u32) -> usize {
        LINE + rank as usize * self.setup.words_of_rank()
    }

    /// Where a rank keeps the announcement of a step.
    fn at_step(&self, rank: u32, step: u64) -> usize {
        let slot = (step % self.setup.kept_steps() as u64) as usize;
        self.at_rank(rank) + LINE + slot * STEP_WORDS
    }

    /// Where it keeps the report.
    fn at_report(&self, rank: u32, step: u64) -> usize {
        self.at_step(rank, step) + LINE
    }

    fn at_row(&self, row: u32) -> usize {
        self.setup.first_row() + row as usize * ROW
    }

    /// The step that a rank has entered, also after it left.
    #[must_use]
    pub fn entered(&self, rank: u32) -> u64 {
        self.words.load(self.at_rank(rank), Acquire) & !LEFT
    }

    /// Returns whether a rank has left.
    #[must_use]
    pub fn has_left(&self, rank: u32) -> bool {
        self.words.load(self.at_rank(rank), Acquire) & LEFT != 0
    }

    /// The first rank that has not entered this step; ranks that left or are gone count as if they
    /// had.
    fn before(&mut self, step: u64, is_gone: impl Fn(u32) -> bool) -> Option<u32> {
        (0..self.setup.ranks).find(|rank| {
            let seen = self.seen[*rank as usize];
            if seen >= step || *rank == self.rank {
                return false;
            }
            let now = self.words.load(self.at_rank(*rank), Acquire);
            self.seen[*rank as usize] = now;
            now < step && !is_gone(*rank)
        })
    }

    /// Changes a row from the step on that is `window` steps after the one that this rank enters next.
    /// Returns that step.
    ///
    /// # Errors
    /// If this is not rank 0, there is no such row, or a rank may still need the value before the last
    /// change.
    pub fn change(
        &mut self,
        row: u32,
        value: u64,
        is_gone: impl Fn(u32) -> bool,
    ) -> Result<u64, ChangeRefused> {
        if self.rank != 0 {
            return Err(ChangeRefused::NotTheWriter);
        }
        if row >= self.setup.rows {
            return Err(ChangeRefused::NoSuchRow);
        }
        let at = self.at_row(row);
        let effects = [at, at + 2].map(|cell| self.words.load(cell, Relaxed));
        let last = effects[0].max(effects[1]);
        if self.step < last {
            return Err(ChangeRefused::Pending { rank: self.rank });
        }
        if let Some(rank) = self.before(last, is_gone) {
            return Err(ChangeRefused::Pending { rank });
        }
        let superseded = if effects[0] <= effects[1] { at } else { at + 2 };
        let effect = self.step + 1 + u64::from(self.setup.window);
        self.words.store(superseded + 1, value, Release);
        self.words.store(superseded, effect, Release);
        Ok(effect)
    }

    /// The first rank that is too far behind for the next step, and is not gone.
    #[must_use]
    pub fn rank_behind(&mut self, is_gone: impl Fn(u32) -> bool) -> Option<u32> {
        self.before((self.step + 1).saturating_sub(self.setup.window.into()), is_gone)
    }

    /// Enters the next step, and returns its number.
    ///
    /// # Errors
    /// The first rank that is too far behind, and is not gone: certainly dead, with all its stores done.
    pub fn enter(
        &mut self,
        announcement: Announcement,
        is_gone: impl Fn(u32) -> bool,
    ) -> Result<u64, u32> {
        let next = self.step + 1;
        if let Some(rank) = self.rank_behind(is_gone) {
            return Err(rank);
        }
        let at = self.at_step(self.rank, next);
        for (word, at) in announcement.into_iter().zip(at..) {
            self.words.store(at, word, Relaxed);
        }
        self.words.store(self.at_rank(self.rank), next, Release);
        self.step = next;
        Ok(next)
    }

    /// The value of a row at the step that this rank has entered; 0 if there is no such row.
    #[must_use]
    pub fn value(&self, row: u32) -> u64 {
        let at = self.at_row(row);
        let cells = [at, at + 2].map(|cell| (self.words.load(cell, Acquire), cell));
        let in_effect = cells.into_iter().filter(|(effect, _)| *effect <= self.step).max();
        in_effect.map_or(0, |(_, cell)| self.words.load(cell + 1, Acquire))
    }

    /// What a rank announced for a step; None if it has not entered it. Announcements of the last
    /// `2 * window + 1` steps of a rank are kept.
    #[must_use]
    pub fn announcement(&self, rank: u32, step: u64) -> Option<Announcement> {
        let entered = self.entered(rank);
        let at = self.at_step(rank, step);
        // The slot after the last one may be written now.
        let is_kept = step <= entered && entered - step + 1 < self.setup.kept_steps() as u64;
        is_kept.then(|| std::array::from_fn(|word| self.words.load(at + word, Relaxed)))
    }

    /// Reports about a step that this rank has entered.
    pub fn report(&self, step: u64, report: &Report) {
        let at = self.at_report(self.rank, step);
        self.words.store(at, 0, Relaxed);
        for (word, at) in report.iter().zip(at + 1..) {
            // Not before the step is cleared.
            self.words.store(at, *word, Release);
        }
        self.words.store(at, step, Release);
    }

    /// What a rank reported about a step; None before that, and after the report was overwritten.
    #[must_use]
    pub fn reported(&self, rank: u32, step: u64) -> Option<Report> {
        let at = self.at_report(rank, step);
        if step == 0 || self.words.load(at, Acquire) != step {
            return None;
        }
        let report = std::array::from_fn(|word| self.words.load(at + 1 + word, Acquire));
        (self.words.load(at, Relaxed) == step).then_some(report)
    }

    /// Returns whether a rank has reported a step, as [`reported`](Self::reported) does.
    #[must_use]
    pub fn has_reported(&self, rank: u32, step: u64) -> bool {
        step != 0 && self.words.load(self.at_report(rank, step), Acquire) == step
    }

    /// Leaves: no rank waits for this one any more, and the table stays as it is if this is rank 0.
    pub fn leave(self) {
        self.words.store(self.at_rank(self.rank), LEFT | self.step, Release);
    }
}

#[cfg(all(test, not(loom)))]
#[path = "agreed_table_tests.rs"]
mod tests;
