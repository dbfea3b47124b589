//! The lock: it excludes others, and every process gets it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::AtomicBool;

use super::{
    ModelWords, THREE_THREADS, TWO_THREADS, Waiting, caller, check, check_with, check_within,
};
use crate::lock::{Acquired, Guard, WORDS};
use crate::participant::{AlwaysAlive, Caller, Liveness, Participant};
use crate::words::{LocalWords, Words};

/// The protected value: each thread increments it, not atomically.
const COUNT: usize = WORDS;
/// The lock's second word: the waiters.
const WAITERS: usize = 1;

/// This many threads take the lock this many times each, while dead waiters have these bits.
fn run(waiting: Waiting, threads: u32, times: u64, line: u64) {
    let values = LocalWords::zeroed(WORDS + 1);
    values.store(WAITERS, line, Relaxed);
    let words = ModelWords::new(&values, &[0], waiting);
    let others: Vec<_> = (1..threads)
        .map(|slot| {
            let words = words.clone();
            loom::thread::spawn(move || (0..times).for_each(|_| add(&words, &caller(slot))))
        })
        .collect();
    (0..times).for_each(|_| add(&words, &caller(0)));
    others.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(words.load(COUNT, Relaxed), u64::from(threads) * times);
}

fn add(words: &ModelWords, caller: &Caller<'_>) {
    let (guard, taken) = Guard::take(words, 0, caller).unwrap();
    assert_eq!(taken, Acquired::Clean);
    let count = words.load(COUNT, Relaxed);
    words.store(COUNT, count + 1, Relaxed);
    drop(guard);
}

#[test]
fn lock_excludes_two_spinners() {
    check_with(3, || run(Waiting::Looking, 2, 2, 0));
}

#[test]
fn lock_excludes_and_wakes_two_sleepers() {
    check_within(TWO_THREADS, || run(Waiting::Sleeping, 2, 2, 0));
}

#[test]
fn lock_excludes_two_nappers() {
    check_within(TWO_THREADS, || run(Waiting::Napping, 2, 2, 0));
}

#[test]
fn lock_excludes_three_spinners() {
    check_within(THREE_THREADS, || run(Waiting::Looking, 3, 1, 0));
}

#[test]
fn lock_excludes_and_wakes_three_sleepers() {
    check_within(THREE_THREADS, || run(Waiting::Sleeping, 3, 1, 0));
}

#[test]
fn dead_waiters_are_skipped() {
    check_with(3, || run(Waiting::Looking, 2, 1, 1 << 1 | 1 << 40));
}

#[test]
fn dead_waiters_do_not_prolong_a_sleep() {
    check(|| run(Waiting::Sleeping, 2, 2, 1 << 40));
}

#[test]
fn lock_excludes_threads_of_one_participant() {
    check_with(3, || {
        let words = ModelWords::new(&LocalWords::zeroed(WORDS + 1), &[0], Waiting::Sleeping);
        let other = words.clone();
        let thread = loom::thread::spawn(move || add(&other, &caller(3)));
        add(&words, &caller(3));
        thread.join().unwrap();
        assert_eq!(words.load(COUNT, Relaxed), 2);
    });
}

struct DeadProcess {
    dead: Participant,
    is_over: AtomicBool,
}

impl Liveness for DeadProcess {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        participant.is_none() || participant == Some(self.dead) && self.is_over.load(Acquire)
    }
}

/// An owner dies, two others want the lock: exactly one gets `OwnerDied`.
#[test]
fn lock_of_a_dead_owner_is_taken_once() {
    check_with(3, || {
        let words = ModelWords::new(&LocalWords::zeroed(WORDS + 1), &[], Waiting::Napping);
        let dead = Participant::new(9, 1).unwrap();
        let dead_owner = Arc::new(DeadProcess { dead, is_over: AtomicBool::new(false) });
        let timeout = Duration::from_secs(1 << 19);
        let survive = move |words: &ModelWords, dead_owner: &DeadProcess, slot| {
            let me = Participant::new(slot, 1).unwrap();
            let caller = Caller { me, liveness: dead_owner, timeout };
            let (guard, taken) = Guard::take(words, 0, &caller).unwrap();
            let count = words.load(COUNT, Relaxed);
            // It died right after its increment; the thread that gets `OwnerDied` adds nothing
            // more.
            words.store(COUNT, count + 1, Relaxed);
            drop(guard);
            u64::from(taken == Acquired::OwnerDied)
        };
        let other = loom::thread::spawn({
            let (words, dead_owner) = (words.clone(), Arc::clone(&dead_owner));
            move || {
                let caller = Caller::new(dead, &AlwaysAlive);
                let (guard, taken) = Guard::take(&words, 0, &caller).unwrap();
                assert_eq!(taken, Acquired::Clean);
                let count = words.load(COUNT, Relaxed);
                words.store(COUNT, count + 1, Relaxed);
                std::mem::forget(guard);
                dead_owner.is_over.store(true, Release);
            }
        });
        let owner_died = survive(&words, &dead_owner, 1);
        other.join().unwrap();
        // Exactly one of the later owners gets `OwnerDied`.
        let owner_died = owner_died + survive(&words, &dead_owner, 2);
        assert_eq!(owner_died, 1);
        assert_eq!(words.load(COUNT, Relaxed), 3);
    });
}
