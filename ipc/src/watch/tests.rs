use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::mpsc;

use super::*;
use crate::segment::{Layout, MappedWords, Segment};
use crate::words::WordRange;

/// Only reached if a test fails.
const TIMEOUT: Duration = Duration::from_secs(60);

type SharedDoorbell = Doorbell<WordRange<MappedWords>>;

/// This many doorbells, shared like those of another process.
fn doorbells(count: usize) -> Vec<SharedDoorbell> {
    let words = Segment::create(Layout::new("doorbells", 1), count * SharedDoorbell::WORDS * 8)
        .unwrap()
        .words();
    let doorbell = |at| {
        Doorbell::new(
            WordRange::new(words.clone(), at * SharedDoorbell::WORDS, SharedDoorbell::WORDS)
                .unwrap(),
        )
        .unwrap()
    };
    (0..count).map(doorbell).collect()
}

/// Reports which doorbell was rung.
#[derive(Debug)]
struct RecordingListener {
    number: usize,
    rung: mpsc::Sender<usize>,
    periodic_calls: AtomicU64,
}

impl DoorbellListener for RecordingListener {
    fn rung(&self) {
        let _ = self.rung.send(self.number);
    }
    fn check(&self) {
        self.periodic_calls.fetch_add(1, Relaxed);
    }
}

fn teller(number: usize, rung: &mpsc::Sender<usize>) -> Arc<RecordingListener> {
    Arc::new(RecordingListener { number, rung: rung.clone(), periodic_calls: AtomicU64::new(0) })
}

/// A watcher for each kernel interface.
fn watches() -> impl Iterator<Item = DoorbellWatcher> {
    [1, 2, usize::MAX].into_iter().map(DoorbellWatcher::with_max_doorbells)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn listener_is_called_for_announced_waits() {
    for watch in watches() {
        let doorbells = doorbells(5);
        let (rung, reported) = mpsc::channel();
        let listening: Vec<_> = doorbells
            .iter()
            .zip(0..)
            .map(|(doorbell, number)| {
                watch.listen(doorbell.clone(), teller(number, &rung)).unwrap()
            })
            .collect();
        for number in [3, 0, 4, 4, 1, 2] {
            doorbells[number].announce_waiter();
            doorbells[number].ring();
            assert_eq!(reported.recv_timeout(TIMEOUT), Ok(number));
        }
        drop(listening);
        assert_eq!(watch.threads(), 0);
        doorbells.iter().for_each(SharedDoorbell::ring_unconditionally);
        assert!(reported.try_recv().is_err());
    }
}

#[test]
fn ring_without_announced_waiter_makes_no_system_call() {
    let doorbell = doorbells(1).remove(0);
    let (rung, reported) = mpsc::channel();
    let watch = DoorbellWatcher::new();
    let _listening = watch.listen(doorbell.clone(), teller(0, &rung)).unwrap();
    (0..100).for_each(|_| doorbell.ring());
    assert_eq!(doorbell.count(), 0, "no waiter had to be woken");
    doorbell.announce_waiter();
    (0..100).for_each(|_| doorbell.ring());
    assert_eq!(doorbell.count(), 1, "the waiter must be woken once");
    assert_eq!(reported.recv_timeout(TIMEOUT), Ok(0));
}

#[test]
fn thread_count_follows_the_number_of_doorbells() {
    let watch = DoorbellWatcher::with_max_doorbells(4);
    let most = if futex::supports_waitv() { 4 } else { 1 };
    assert_eq!(watch.threads(), 0);
    let doorbells = doorbells(9);
    let (rung, reported) = mpsc::channel();
    let listen =
        |number: usize| watch.listen(doorbells[number].clone(), teller(number, &rung)).unwrap();
    let mut listening: Vec<_> = (0..9).map(listen).collect();
    assert_eq!(watch.threads(), 9_usize.div_ceil(most));
    // A free slot is reused.
    drop(listening.remove(2));
    listening.push(listen(2));
    assert_eq!(watch.threads(), 9_usize.div_ceil(most));
    doorbells.iter().for_each(SharedDoorbell::announce_waiter);
    doorbells.iter().for_each(SharedDoorbell::ring);
    let mut numbers: Vec<_> = (0..9).map(|_| reported.recv_timeout(TIMEOUT).unwrap()).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..9));
    listening.drain(1..);
    assert_eq!(watch.threads(), 1);
    doorbells[0].announce_waiter();
    doorbells[0].ring();
    assert_eq!(reported.recv_timeout(TIMEOUT), Ok(0));
    listening.clear();
    assert_eq!(watch.threads(), 0);
    // The watcher can be used again.
    let _listening = listen(5);
    doorbells[5].announce_waiter();
    doorbells[5].ring();
    assert_eq!(reported.recv_timeout(TIMEOUT), Ok(5));
}

#[test]
fn dropped_listeners_release_their_words() {
    for watch in watches() {
        let words = Segment::create(Layout::new("doorbells", 1), 128).unwrap().words();
        let kept = Arc::new(words);
        let (rung, _told) = mpsc::channel();
        let listeners: Vec<_> = (0..3).map(|number| teller(number, &rung)).collect();
        let words = Arc::downgrade(&kept);
        let doorbell = Doorbell::new(Shared(kept)).unwrap();
        let mut listening: Vec<_> = listeners
            .iter()
            .map(|listener| watch.listen(doorbell.clone(), Arc::clone(listener) as _).unwrap())
            .collect();
        drop(doorbell);
        drop(listening.remove(1));
        assert_eq!(Arc::strong_count(&listeners[1]), 1);
        drop(listening);
        assert!(listeners.iter().all(|listener| Arc::strong_count(listener) == 1));
        until("the doorbell is still mapped", || words.strong_count() == 0);
    }
}

/// Words whose references can be counted.
#[derive(Debug, Clone)]
struct Shared(Arc<MappedWords>);

impl Words for Shared {
    fn count(&self) -> usize {
        self.0.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.0.word(at)
    }
}

#[test]
fn every_listener_is_called_periodically() {
    for watch in watches() {
        let doorbells = doorbells(2);
        let (rung, _told) = mpsc::channel();
        let tellers = [teller(0, &rung), teller(1, &rung)];
        let _listening: Vec<_> = doorbells
            .iter()
            .zip(&tellers)
            .map(|(doorbell, teller)| {
                watch.listen(doorbell.clone(), Arc::clone(teller) as _).unwrap()
            })
            .collect();
        // Also if another doorbell of the thread is rung all the time.
        until("a listener was not called", || {
            doorbells[0].announce_waiter();
            doorbells[0].ring();
            tellers[1].periodic_calls.load(Relaxed) > 0
        });
    }
}

/// Wakes a thread that waits for a value.
#[derive(Debug)]
struct Waker(Mutex<bool>, std::sync::Condvar);

impl DoorbellListener for Waker {
    fn rung(&self) {
        *lock(&self.0) = true;
        self.1.notify_all();
    }
    // Must not be needed: it would hide a lost wake-up, which is found a second later.
    fn check(&self) {}
}

#[test]
fn no_message_is_missed_with_other_ringers_and_sleepers() {
    const MESSAGES: u64 = 3000;
    for watch in watches() {
        let count = 12;
        let segment = Segment::create(Layout::new("doorbells", 1), 16 * 8 * count).unwrap();
        let words = segment.words();
        let doorbell = |at: usize| {
            Doorbell::new(WordRange::new(words.clone(), at * 16, SharedDoorbell::WORDS).unwrap())
                .unwrap()
        };
        let stored = |at: usize| words.load(at * 16 + 8, Acquire);
        std::thread::scope(|scope| {
            for at in 0..count {
                let waker = Arc::new(Waker(Mutex::new(false), std::sync::Condvar::new()));
                let listening = watch.listen(doorbell(at), Arc::clone(&waker) as _).unwrap();
                let doorbell = doorbell(at);
                scope.spawn(move || {
                    let _listening = listening;
                    let mut taken = 0;
                    while taken < MESSAGES {
                        *lock(&waker.0) = false;
                        doorbell.announce_waiter();
                        let stored = stored(at);
                        assert!(stored >= taken);
                        if stored == taken {
                            let (found, late) = waker
                                .1
                                .wait_timeout_while(lock(&waker.0), TIMEOUT, |is_rung| !*is_rung)
                                .unwrap();
                            drop(found);
                            assert!(!late.timed_out(), "bell {at} after {taken}");
                        }
                        taken = stored;
                    }
                });
            }
            for first in 0..3 {
                let (doorbell, words) = (&doorbell, &words);
                scope.spawn(move || {
                    for number in 1..=MESSAGES {
                        for at in (first..count).step_by(3) {
                            words.store(at * 16 + 8, number, Release);
                            doorbell(at).ring();
                        }
                        if number % 16 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            // A thread that sleeps at the doorbell itself, like readers of other processes.
            scope.spawn(|| {
                let end = Instant::now() + TIMEOUT;
                let look = || (stored(0) == MESSAGES).then_some(());
                assert!(doorbell(0).wait(&mut crate::WaitStrategy::Block, end, look).is_some());
            });
        });
    }
}
