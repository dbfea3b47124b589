//! A process waits for a file descriptor, and a watcher thread sleeps at the doorbell for it.

use std::sync::atomic::Ordering::{Acquire, Release};

use loom::sync::Mutex;

use super::{Arc, ModelWords, THREE_THREADS, Waiting, check_with, check_within};
use crate::doorbell::Doorbell;
use crate::words::{LocalWords, Words};

const DOORBELL: usize = 0;
/// Number of messages that were stored so far.
const STORED: usize = 2;
/// Stands for the file descriptor: how often it became readable. Edge-triggered pollers sleep
/// on it, and are not woken by an old edge.
const EDGES: usize = 3;
/// The listener was dropped.
const OVER: usize = 4;
/// 1 while the file descriptor is readable.
const RAISED: usize = 5;

fn doorbell(words: &ModelWords) -> Doorbell<&ModelWords> {
    Doorbell::at(words, DOORBELL)
}

fn words() -> ModelWords {
    ModelWords::new(&LocalWords::zeroed(6), &[DOORBELL, EDGES], Waiting::Sleeping)
}

/// The view of the threads that change the file descriptor.
#[derive(Clone)]
struct Flag(Arc<Mutex<()>>);

impl Flag {
    fn raise(&self, words: &ModelWords) {
        let _changing = self.0.lock().unwrap();
        if words.load(RAISED, Acquire) == 0 {
            words.store(RAISED, 1, Release);
            words.fetch_add(EDGES, 1);
            words.wake(EDGES, u32::MAX);
        }
    }

    fn lower(&self, words: &ModelWords) {
        let _changing = self.0.lock().unwrap();
        words.store(RAISED, 0, Release);
    }
}

/// The watcher thread.
fn watch(words: &ModelWords, flag: &Flag) {
    let mut seen = 0;
    loop {
        let count = doorbell(words).count();
        // After the count: the thread that ends it rings afterwards.
        if words.load(OVER, Acquire) != 0 {
            return;
        }
        if count != seen {
            seen = count;
            flag.raise(words);
        }
        words.sleep(DOORBELL, count as u32, std::time::Duration::MAX);
    }
}

/// Reads until it has this many messages, and polls the file descriptor when there is none.
fn read(words: &ModelWords, flag: &Flag, many: u64) {
    let mut taken = 0;
    let mut take = || {
        let is_more = words.load(STORED, Acquire) > taken;
        taken += u64::from(is_more);
        is_more
    };
    let mut seen_edges = 0;
    doorbell(words).announce_waiter();
    for _ in 0..many {
        while !take() {
            if words.load(RAISED, Acquire) == 1 {
                flag.lower(words);
                doorbell(words).announce_waiter();
                if take() {
                    flag.raise(words);
                    break;
                }
            }
            // A spurious wake-up is allowed, a lost one is not.
            loop {
                let edges = words.load(EDGES, Acquire);
                if edges != seen_edges {
                    seen_edges = edges;
                    break;
                }
                words.sleep(EDGES, edges as u32, std::time::Duration::MAX);
            }
        }
    }
    words.store(OVER, 1, Release);
    doorbell(words).ring_unconditionally();
}

fn run(publishers: u64, each: u64) {
    let (words, flag) = (words(), Flag(Arc::new(Mutex::new(()))));
    let watching = loom::thread::spawn({
        let (words, flag) = (words.clone(), flag.clone());
        move || watch(&words, &flag)
    });
    let publishing: Vec<_> = (0..publishers)
        .map(|_| {
            let words = words.clone();
            loom::thread::spawn(move || {
                for _ in 0..each {
                    words.fetch_add(STORED, 1);
                    doorbell(&words).ring();
                }
            })
        })
        .collect();
    read(&words, &flag, publishers * each);
    watching.join().unwrap();
    publishing.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn poller_is_woken_by_a_message() {
    check_with(3, || run(1, 1));
}

#[test]
fn poller_is_woken_by_the_next_message() {
    check_with(2, || run(1, 2));
}

#[test]
fn poller_is_woken_by_two_publishers() {
    check_within(THREE_THREADS, || run(2, 1));
}
