//! Rank 0 changes a table, or dies at any store, while other ranks read it.

use std::cell::Cell;
use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicBool;

use super::{Arc, ModelWords, Preemptions, TWO_THREADS, Waiting, check_within};
use crate::agreed_table::{AgreedTable, AgreedTableSetup};
use crate::words::{LocalWords, Words};

const NEVER: u32 = u32::MAX;

/// Words of a process that dies after so many stores: later ones have no effect.
struct MortalWords {
    words: ModelWords,
    stores_left: Cell<u32>,
    is_dead: Arc<AtomicBool>,
}

impl MortalWords {
    fn has_died(&self) -> bool {
        self.stores_left.get() == 0
    }
}

impl Words for MortalWords {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, _: usize) -> Option<&std::sync::atomic::AtomicU64> {
        None
    }
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.words.load(at, order)
    }
    fn store(&self, at: usize, value: u64, order: Ordering) {
        match self.stores_left.get() {
            0 => {}
            NEVER => self.words.store(at, value, order),
            left => {
                self.words.store(at, value, order);
                self.stores_left.set(left - 1);
                if left == 1 {
                    // The kernel tells the others after the last store.
                    self.is_dead.store(true, Ordering::Release);
                }
            }
        }
    }
}

/// A rank, which changes the only row before each step if it is rank 0.
struct Rank<'a> {
    words: &'a MortalWords,
    number: u32,
    table: AgreedTable<&'a MortalWords>,
}

impl<'a> Rank<'a> {
    fn new(words: &'a MortalWords, setup: AgreedTableSetup, number: u32) -> Self {
        Self { words, number, table: AgreedTable::join(words, setup, number).unwrap() }
    }

    /// The value at the next step; None if this process has died.
    fn next_value(&mut self) -> Option<u64> {
        let is_dead = &self.words.is_dead;
        // Only rank 0 dies.
        let is_gone = |rank: u32| rank == 0 && is_dead.load(Ordering::Acquire);
        let next = self.table.step() + 1;
        if self.number == 0 {
            let _ = self.table.change(0, next * 10, is_gone);
        }
        while !self.words.has_died() && self.table.enter([next; 4], is_gone).is_err() {
            loom::thread::yield_now();
        }
        (!self.words.has_died()).then(|| self.table.value(0))
    }
}

/// Runs so many ranks, of which rank 0 dies after this many stores, and compares what they read. The
/// others run in one thread, one after the other in each step.
fn run(ranks: u32, steps: usize, stores: u32) {
    let setup = AgreedTableSetup { ranks, rows: 1, window: 1 };
    let zeroed = LocalWords::zeroed(setup.required_words().unwrap());
    let words = ModelWords::new(&zeroed, &[], Waiting::Looking);
    let is_dead = Arc::new(AtomicBool::new(false));
    let writing = loom::thread::spawn({
        let (words, is_dead) = (words.clone(), Arc::clone(&is_dead));
        move || {
            let words = MortalWords { words, stores_left: Cell::new(stores), is_dead };
            let mut rank = Rank::new(&words, setup, 0);
            let values: Vec<_> = (0..steps).map_while(|_| rank.next_value()).collect();
            rank.table.leave();
            values
        }
    });
    let words = MortalWords { words, stores_left: Cell::new(NEVER), is_dead };
    let mut others: Vec<_> = (1..ranks).map(|rank| Rank::new(&words, setup, rank)).collect();
    let mut values = Vec::new();
    // Up to the step at which the last change takes effect.
    for _ in 0..=steps {
        let mut read = others.iter_mut().map(|rank| rank.next_value().unwrap());
        let value = read.next().unwrap();
        read.for_each(|other| assert_eq!(other, value));
        values.push(value);
    }
    let first = writing.join().unwrap();
    assert_eq!(values[..first.len()], first);
    // An unfinished change would bring back a value before the last one.
    assert!(values.is_sorted(), "{values:?}");
}

#[test]
fn two_ranks_read_the_same_values_at_each_step() {
    check_within(TWO_THREADS, || run(2, 3, NEVER));
}

#[test]
fn survivors_of_rank_0_read_the_same_values_at_each_step() {
    // A change and the entrance into a step are 7 stores.
    for stores in 1..=15 {
        check_within(Preemptions { usual: 1, deep: 2 }, move || run(3, 3, stores));
    }
}

#[test]
fn report_is_read_whole_or_not_at_all() {
    check_within(Preemptions { usual: 3, deep: 4 }, || {
        const TWO_RANKS: AgreedTableSetup = AgreedTableSetup { ranks: 2, rows: 1, window: 1 };
        let zeroed = LocalWords::zeroed(TWO_RANKS.required_words().unwrap());
        let words = ModelWords::new(&zeroed, &[], Waiting::Looking);
        let writing = loom::thread::spawn({
            let words = words.clone();
            move || {
                let table = AgreedTable::join(words, TWO_RANKS, 1).unwrap();
                // In the same slot.
                [1, 5].into_iter().for_each(|step| table.report(step, &[step; 7]));
            }
        });
        let table = AgreedTable::join(words, TWO_RANKS, 0).unwrap();
        for step in [1, 5] {
            let report = table.reported(1, step);
            assert!(report.is_none_or(|report| report == [step; 7]), "{report:?}");
        }
        writing.join().unwrap();
    });
}
