//! The marked doorbell: every value that it was rung for is found.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::{ModelWords, Waiting, check_with};
use crate::doorbell::WaitStrategy;
use crate::marked_doorbell::MarkedDoorbell;
use crate::words::{LocalWords, Words};

/// The words after the doorbell: the awaited values.
const STORED: [usize; 2] =
    [MarkedDoorbell::<ModelWords>::WORDS, MarkedDoorbell::<ModelWords>::WORDS + 1];
/// The numbers of the values.
const NUMBER: u32 = 5;

fn words() -> ModelWords {
    let values = LocalWords::zeroed(MarkedDoorbell::<ModelWords>::WORDS + STORED.len());
    ModelWords::new(&values, &[0], Waiting::Sleeping)
}

fn doorbell(words: &ModelWords) -> MarkedDoorbell<ModelWords> {
    MarkedDoorbell::new(words, 0).unwrap()
}

/// Stores like a publisher.
fn store(words: &ModelWords, at: usize) {
    words.store(at, 1, Release);
    words.fence();
    doorbell(words).ring(NUMBER);
}

/// Waits for all values, and polls only those with a mark.
fn find(words: &ModelWords, all: &[usize]) {
    let doorbell = doorbell(words);
    let mut missing = all.to_vec();
    while !missing.is_empty() {
        let look = || {
            let is_marked = doorbell.take(|mark| {
                assert_eq!(mark, NUMBER);
                missing.retain(|at| words.load(*at, Acquire) == 0);
            });
            is_marked.then_some(())
        };
        assert!(doorbell.wait(&mut WaitStrategy::Block, words.never(), look).is_some());
    }
}

#[test]
fn consecutive_stores_are_found() {
    check_with(3, || {
        let words = words();
        let other = words.clone();
        let thread = loom::thread::spawn(move || STORED.iter().for_each(|at| store(&other, *at)));
        find(&words, &STORED);
        thread.join().unwrap();
    });
}

/// The second ringer finds the mark that the first one set, and makes no fence.
#[test]
fn concurrent_stores_are_found() {
    check_with(2, || {
        let words = words();
        let threads = STORED.map(|at| {
            let words = words.clone();
            loom::thread::spawn(move || store(&words, at))
        });
        find(&words, &STORED);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
