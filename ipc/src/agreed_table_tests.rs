//! Ranks in arbitrary order, with deaths at any store, late starts and departures.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::{AgreedTable, AgreedTableSetup, ChangeRefused};
use crate::words::{LocalWords, Words};

const NEVER: u32 = u32::MAX;

/// Words of a rank that dies after so many stores.
struct MortalWords<'a> {
    words: &'a LocalWords,
    stores_left: Cell<u32>,
}

impl Words for MortalWords<'_> {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(at)
    }
    fn store(&self, at: usize, value: u64, order: Ordering) {
        let left = self.stores_left.get();
        if left > 0 {
            self.words.store(at, value, order);
            self.stores_left.set(if left == NEVER { NEVER } else { left - 1 });
        }
    }
}

/// An action of a test: of a rank, if it lives.
#[derive(Debug, Clone, Copy)]
enum Action {
    Change {
        row: u32,
        value: u64,
    },
    Enter {
        rank: u32,
    },
    Leave {
        rank: u32,
    },
    /// The rank dies after so many more stores.
    Kill {
        rank: u32,
        stores: u32,
    },
}

fn actions(setup: AgreedTableSetup) -> impl Strategy<Value = Vec<Action>> {
    let rank = 0..setup.ranks;
    let action = prop_oneof![
        60 => rank.clone().prop_map(|rank| Action::Enter { rank }),
        // One rank runs ahead as far as it may.
        20 => Just(Action::Enter { rank: 0 }),
        20 => Just(Action::Enter { rank: setup.ranks - 1 }),
        30 => (0..setup.rows, 1..u64::MAX).prop_map(|(row, value)| Action::Change { row, value }),
        1 => rank.clone().prop_map(|rank| Action::Leave { rank }),
        1 => (rank, 0..20_u32).prop_map(|(rank, stores)| Action::Kill { rank, stores }),
    ];
    prop::collection::vec(action, 0..400)
}

fn setups() -> impl Strategy<Value = AgreedTableSetup> {
    (1..=6_u32, 1..=3_u32, 1..=3_u32).prop_map(|(ranks, rows, window)| AgreedTableSetup {
        ranks,
        rows,
        window,
    })
}

/// Runs the actions, then the ranks that live for some more steps. All ranks must read the same at
/// each step.
fn run(setup: AgreedTableSetup, actions: &[Action]) {
    let words = LocalWords::zeroed(setup.required_words().unwrap());
    let words: Vec<_> = (0..setup.ranks)
        .map(|_| MortalWords { words: &words, stores_left: Cell::new(NEVER) })
        .collect();
    let mut tables: Vec<_> = (0..setup.ranks)
        .map(|rank| Some(AgreedTable::join(&words[rank as usize], setup, rank).unwrap()))
        .collect();
    let is_gone = |rank: u32| words[rank as usize].stores_left.get() == 0;
    let read: RefCell<BTreeMap<u64, Vec<u64>>> = RefCell::default();
    let enter = |table: &mut AgreedTable<&MortalWords<'_>>, rank: u32| {
        let next = table.step() + 1;
        if is_gone(rank) {
            return false;
        }
        let Ok(step) = table.enter([next, u64::from(rank), 0, 7], is_gone) else { return false };
        if is_gone(rank) {
            return false;
        }
        assert_eq!(step, next);
        let values: Vec<_> = (0..setup.rows).map(|row| table.value(row)).collect();
        let mut read = read.borrow_mut();
        assert_eq!(read.entry(step).or_insert_with(|| values.clone()), &values, "step {step}");
        // Others that did not die in between have announced theirs.
        for other in 0..setup.ranks {
            let announced = table.announcement(other, step);
            assert!(announced.is_none_or(|it| it == [step, u64::from(other), 0, 7]));
            assert!(announced.is_some() || table.entered(other) < step);
        }
        true
    };
    for action in actions {
        match *action {
            Action::Change { row, value } => {
                let Some(table) = tables[0].as_mut().filter(|_| !is_gone(0)) else { continue };
                match table.change(row, value, is_gone) {
                    Ok(effect) => {
                        assert_eq!(effect, table.step() + 1 + u64::from(setup.window));
                    }
                    Err(refused) => assert!(matches!(refused, ChangeRefused::Pending { .. })),
                }
            }
            Action::Enter { rank } => {
                if let Some(table) = &mut tables[rank as usize] {
                    enter(table, rank);
                }
            }
            Action::Leave { rank } => {
                if let Some(table) = tables[rank as usize].take() {
                    table.leave();
                }
            }
            Action::Kill { rank, stores } => {
                if !is_gone(rank) {
                    words[rank as usize].stores_left.set(stores);
                }
            }
        }
    }
    // Whatever happened, no living rank waits for ever.
    let lives = |rank: &u32| !is_gone(*rank);
    let last = read.borrow().keys().last().copied().unwrap_or(0) + 8;
    for _ in 0..last * u64::from(setup.ranks) {
        for rank in (0..setup.ranks).filter(lives) {
            if let Some(table) = tables[rank as usize].as_mut().filter(|table| table.step() < last)
            {
                enter(table, rank);
            }
        }
    }
    for rank in (0..setup.ranks).filter(lives) {
        assert!(tables[rank as usize].as_ref().is_none_or(|table| table.step() == last));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn ranks_read_the_same_values_at_each_step_in_any_order(
        (setup, actions) in setups().prop_flat_map(|setup| (Just(setup), actions(setup)))
    ) {
        run(setup, &actions);
    }

    /// Whatever another process writes, no index leaves the words and no call panics.
    #[test]
    fn corrupt_words_are_harmless(
        corrupt in prop::collection::vec((0..400_usize, any::<u64>()), 0..100)
    ) {
        let setup = AgreedTableSetup { ranks: 3, rows: 4, window: 2 };
        let words = LocalWords::zeroed(setup.required_words().unwrap());
        let mut table = AgreedTable::join(&words, setup, 0).unwrap();
        for (at, value) in corrupt {
            words.store(at % words.count(), value, Ordering::Relaxed);
            let _ = table.change(1, 5, |_| false);
            let _ = table.enter([1; 4], |_| false);
            for rank in 0..setup.ranks {
                let _ = (table.value(rank), table.has_left(rank));
                for step in [0, 1, 5, u64::MAX] {
                    let _ = (table.announcement(rank, step), table.reported(rank, step));
                }
            }
        }
    }
}

#[test]
fn rank_that_starts_late_delays_the_others_by_no_more_than_the_window() {
    let setup = AgreedTableSetup { ranks: 2, rows: 1, window: 3 };
    let words = LocalWords::zeroed(setup.required_words().unwrap());
    let mut early = AgreedTable::join(&words, setup, 0).unwrap();
    let is_gone = |_| false;
    for step in 1..=3 {
        assert_eq!(early.enter([0; 4], is_gone), Ok(step));
    }
    assert_eq!(early.enter([0; 4], is_gone), Err(1));
    let mut late = AgreedTable::join(&words, setup, 1).unwrap();
    assert_eq!(late.enter([0; 4], is_gone), Ok(1));
    assert_eq!(early.enter([0; 4], is_gone), Ok(4));
    // One that left, or is gone, delays no rank.
    assert_eq!(early.enter([0; 4], is_gone), Err(1));
    assert_eq!(early.enter([0; 4], |rank| rank == 1), Ok(5));
    late.leave();
    assert_eq!(early.enter([0; 4], is_gone), Ok(6));
    assert!(early.has_left(1) && early.entered(1) == 1);
}

#[test]
fn only_rank_0_changes_existing_rows() {
    let setup = AgreedTableSetup { ranks: 2, rows: 2, window: 1 };
    let words = LocalWords::zeroed(setup.required_words().unwrap());
    let [mut first, mut second] =
        [0, 1].map(|rank| AgreedTable::join(&words, setup, rank).unwrap());
    let is_gone = |_| false;
    assert_eq!(second.change(0, 1, is_gone), Err(ChangeRefused::NotTheWriter));
    assert_eq!(first.change(2, 1, is_gone), Err(ChangeRefused::NoSuchRow));
    assert_eq!(first.change(0, 1, is_gone), Ok(2));
    // Its effect is to come, for this rank and then for the other one.
    assert_eq!(first.change(0, 2, is_gone), Err(ChangeRefused::Pending { rank: 0 }));
    first.enter([0; 4], is_gone).unwrap();
    second.enter([0; 4], is_gone).unwrap();
    first.enter([0; 4], is_gone).unwrap();
    assert_eq!(first.change(0, 2, is_gone), Err(ChangeRefused::Pending { rank: 1 }));
    second.enter([0; 4], is_gone).unwrap();
    assert_eq!(first.change(0, 2, is_gone), Ok(4));
    assert_eq!((first.value(0), second.value(0), second.value(2)), (1, 1, 0));
}

#[test]
fn invalid_setups_are_refused() {
    let valid = AgreedTableSetup { ranks: 2, rows: 2, window: 1 };
    let words = LocalWords::zeroed(valid.required_words().unwrap());
    for setup in [
        AgreedTableSetup { ranks: 0, ..valid },
        AgreedTableSetup { rows: 0, ..valid },
        AgreedTableSetup { window: 0, ..valid },
        AgreedTableSetup { ranks: u32::MAX, ..valid },
        AgreedTableSetup { rows: u32::MAX, ..valid },
        AgreedTableSetup { window: u32::MAX, ..valid },
    ] {
        assert_eq!(setup.required_words(), None);
        assert!(AgreedTable::join(&words, setup, 0).is_none());
    }
    assert!(AgreedTable::join(&words, valid, 2).is_none());
    assert!(AgreedTable::join(&words, AgreedTableSetup { rows: 3, ..valid }, 0).is_none());
}
