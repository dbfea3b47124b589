//! Publishers that are created while other processes create and drop theirs.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use ipc::{LocalWords, Participant, Words};

use super::super::layout::{CACHE_LINE_WORDS, PUBLISHER_SLOTS, PUBLISHERS};
use super::super::publishers;
use crate::error::ErrorKind;

/// Words that other processes write before each load. The sequence of values is fixed.
#[derive(Debug)]
struct ChangingWords {
    words: LocalWords,
    value: Cell<u64>,
}

impl Words for ChangingWords {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(at)
    }
    fn load(&self, at: usize, order: Ordering) -> u64 {
        // Knuth's generator MMIX.
        let multiplied = self.value.get().wrapping_mul(6_364_136_223_846_793_005);
        self.value.set(multiplied.wrapping_add(1_442_695_040_888_963_407));
        self.words.store(at, self.value.get() >> 32, Ordering::Relaxed);
        self.words.load(at, order)
    }
}

#[test]
fn publishers_are_created_while_other_slots_change() {
    let count = PUBLISHERS + PUBLISHER_SLOTS * CACHE_LINE_WORDS;
    let words = ChangingWords { words: LocalWords::zeroed(count), value: Cell::new(1) };
    let me = Participant::new(1, 1).unwrap();
    let mut slots: Vec<_> = (1..=PUBLISHER_SLOTS as u64)
        .map(|expected| {
            let (slot, serial) = publishers::claim(&words, me).unwrap();
            assert_eq!(serial, expected);
            slot.id(0)
        })
        .collect();
    slots.sort_unstable();
    assert!(slots.into_iter().eq(0..PUBLISHER_SLOTS as u64), "a slot has two publishers");
    assert_eq!(publishers::claim(&words, me).unwrap_err().kind(), ErrorKind::TooMany);
}
