//! The doorbell: no wake-up is lost.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::{ModelWords, Preemptions, Waiting, check_with, check_within};
use crate::doorbell::{Doorbell, WaitStrategy};
use crate::words::{LocalWords, Words};

const DOORBELL: usize = 0;
/// The awaited value.
const FLAGS: [usize; 2] = [2, 3];

fn doorbell(words: &ModelWords) -> Doorbell<&ModelWords> {
    Doorbell::at(words, DOORBELL)
}

fn words() -> ModelWords {
    ModelWords::new(&LocalWords::zeroed(4), &[DOORBELL], Waiting::Sleeping)
}

fn ring(words: &ModelWords, flag: usize) {
    words.store(flag, 1, Release);
    doorbell(words).ring();
}

fn wait(words: &ModelWords, flag: usize) {
    let look = || (words.load(flag, Acquire) == 1).then_some(());
    assert!(doorbell(words).wait(&mut WaitStrategy::Block, words.never(), look).is_some());
}

#[test]
fn sleeper_is_woken() {
    check_with(3, || {
        let words = words();
        let ringer = words.clone();
        let thread = loom::thread::spawn(move || ring(&ringer, FLAGS[0]));
        wait(&words, FLAGS[0]);
        thread.join().unwrap();
    });
}

#[test]
fn both_sleepers_are_woken() {
    check_with(3, || {
        let words = words();
        let threads = FLAGS.map(|_| {
            let words = words.clone();
            loom::thread::spawn(move || wait(&words, FLAGS[0]))
        });
        ring(&words, FLAGS[0]);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn concurrent_rings_are_both_seen() {
    check_within(Preemptions { usual: 2, deep: 3 }, || {
        let words = words();
        let threads = FLAGS.map(|flag| {
            let words = words.clone();
            loom::thread::spawn(move || ring(&words, flag))
        });
        FLAGS.iter().for_each(|flag| wait(&words, *flag));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn alternating_waiters_both_continue() {
    check_with(3, || {
        let words = words();
        let other = words.clone();
        let thread = loom::thread::spawn(move || {
            wait(&other, FLAGS[0]);
            ring(&other, FLAGS[1]);
        });
        ring(&words, FLAGS[0]);
        wait(&words, FLAGS[1]);
        thread.join().unwrap();
    });
}
