//! The lock among threads, and step by step.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::prelude::*;

use super::*;
use crate::participant::{AlwaysAlive, Liveness};
use crate::words::LocalWords;

fn participant(slot: u32) -> Participant {
    Participant::new(slot, 1).unwrap()
}

#[test]
fn lock_is_exclusive() {
    let words = Arc::new(LocalWords::zeroed(WORDS + 1));
    let threads: Vec<_> = (0..4)
        .map(|slot| {
            let words = Arc::clone(&words);
            std::thread::spawn(move || {
                let caller = Caller::new(participant(slot), &AlwaysAlive);
                for _ in 0..2000 {
                    assert_eq!(take(&*words, 0, &caller), Ok(Acquired::Clean));
                    // Not an atomic addition: only the lock makes the sum correct.
                    let count = words.load(WORDS, Relaxed);
                    words.store(WORDS, count + 1, Relaxed);
                    assert!(release(&*words, 0, &caller));
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(words.load(WORDS, Relaxed), 8000);
}

struct DeadProcess(Participant, AtomicBool);

impl Liveness for DeadProcess {
    fn is_dead(&self, participant: Option<Participant>) -> bool {
        participant == Some(self.0) && self.1.load(Relaxed)
    }
}

#[test]
fn lock_is_taken_from_dead_owners_only() {
    let words = LocalWords::zeroed(WORDS);
    let owner = DeadProcess(participant(1), AtomicBool::new(false));
    let first = Caller::new(participant(1), &owner);
    let timeout = Duration::from_millis(30);
    let second = Caller { me: participant(2), liveness: &owner, timeout };
    assert_eq!(take(&words, 0, &first), Ok(Acquired::Clean));
    let held = take(&words, 0, &second).unwrap_err();
    assert_eq!(held.by, Some(participant(1)));
    assert!(held.waited >= timeout && held.waited < timeout * 100, "{held}");
    owner.1.store(true, Relaxed);
    assert_eq!(take(&words, 0, &second), Ok(Acquired::OwnerDied));
    // A process that was wrongly taken for dead detects it.
    assert!(!release(&words, 0, &first));
}

#[test]
fn corrupted_owner_counts_as_dead() {
    for corrupted in
        [HOLDER, RESERVED | HOLDER, RESERVED | u64::from(WAITER_SLOTS), SLEEPERS | HOLDER]
    {
        let words = LocalWords::zeroed(WORDS);
        words.store(0, corrupted, Relaxed);
        let caller = Caller::new(participant(3), &AlwaysAlive);
        assert_eq!(take(&words, 0, &caller), Ok(Acquired::OwnerDied));
        assert!(release(&words, 0, &caller));
    }
}

type Act<'a> = Box<dyn FnMut(&LocalWords, Duration) + 'a>;

/// A lock whose clock advances with each read, and with an action at each pause of the waiter.
struct SimulatedWords<'a> {
    words: LocalWords,
    began: Instant,
    passed: Cell<Duration>,
    act: RefCell<Act<'a>>,
}

impl<'a> SimulatedWords<'a> {
    fn new(act: impl FnMut(&LocalWords, Duration) + 'a) -> Self {
        Self {
            words: LocalWords::zeroed(WORDS),
            began: Instant::now(),
            passed: Cell::default(),
            act: RefCell::new(Box::new(act)),
        }
    }

    fn pass(&self, time: Duration) {
        self.passed.set(self.passed.get() + time);
        (self.act.borrow_mut())(&self.words, self.passed.get());
    }
}

impl Words for SimulatedWords<'_> {
    fn count(&self) -> usize {
        self.words.count()
    }
    fn word(&self, at: usize) -> Option<&AtomicU64> {
        self.words.word(at)
    }
    fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        let was = self.words.fetch_and(at, bits);
        // A process that gives up may already have the reservation.
        self.pass(Duration::ZERO);
        was
    }
    fn sleep(&self, _: usize, _: u32, timeout: Duration) {
        self.pass(timeout);
    }
    fn wake(&self, _: usize, _: u32) {}
    fn pause(&self) {
        self.pass(Duration::from_nanos(45));
    }
    fn rest(&self, how_long: u32) {
        self.pass(Duration::from_nanos(200) * how_long);
    }
    fn now(&self) -> Instant {
        self.passed.set(self.passed.get() + Duration::from_nanos(25));
        self.began + self.passed.get()
    }
    fn fence(&self) {}
}

fn holds(words: &LocalWords) -> Option<Participant> {
    holder_of(words.load(0, Relaxed))
}

#[test]
fn waiter_is_next_however_fast_others_are() {
    let (first, second) = (participant(1), participant(2));
    let overtaken = Cell::new(0);
    let words = SimulatedWords::new(|words, _| {
        // The owner releases, and the waiter has the lock before any other process polls.
        let (from, to) = match holds(words) {
            Some(holder) if holder == first => (first, second),
            Some(holder) if holder == second => (second, first),
            _ => return,
        };
        let in_line = words.load(WAITERS, Relaxed) != 0;
        assert!(release(words, 0, &Caller::new(from, &AlwaysAlive)));
        if words.compare_exchange(0, 0, to.number().into()).is_ok() && in_line {
            overtaken.set(overtaken.get() + 1);
        }
    });
    words.store(0, first.number().into(), Relaxed);
    let caller = Caller::new(participant(70), &AlwaysAlive);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean));
    assert_eq!(overtaken.get(), 0);
    assert!(
        words.passed.get() >= SPIN_BEFORE_QUEUEING && words.passed.get() < 2 * SPIN_BEFORE_QUEUEING
    );
    assert_eq!(words.load(WAITERS, Relaxed), 0);
    assert!(release(&words, 0, &caller));
    assert_eq!(words.load(0, Relaxed), 0);
}

#[test]
fn waiters_are_served_in_turn() {
    let words = LocalWords::zeroed(WORDS);
    let holder = Caller::new(participant(9), &AlwaysAlive);
    words.store(WAITERS, 1 << 3 | 1 << 10 | 1 << 63, Relaxed);
    // For any value of the last reservation.
    words.store(LAST_SERVED, 3 + 64 * 5, Relaxed);
    for waiter_slot in [10, 63, 3, 10, 63, 3] {
        words.store(0, holder.me.number().into(), Relaxed);
        assert!(release(&words, 0, &holder));
        assert_eq!(words.load(0, Relaxed), RESERVED | waiter_slot);
    }
}

#[test]
fn absent_waiter_delays_others_only_briefly() {
    let words = SimulatedWords::new(|_, _| {});
    words.store(0, RESERVED | 7, Relaxed);
    words.store(WAITERS, 1 << 7 | 1 << 9, Relaxed);
    let caller = Caller::new(participant(9), &AlwaysAlive);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean));
    assert!(words.passed.get() >= RESERVATION_TIME && words.passed.get() < 2 * RESERVATION_TIME);
    assert_eq!(words.load(WAITERS, Relaxed), 1 << 9, "the bit of an absent waiter must be free");
    // The same holds for a waiter that has timed out.
    words.store(0, RESERVED | 7, Relaxed);
    let hasty = Caller { timeout: Duration::ZERO, ..caller };
    assert_eq!(take(&words, 0, &hasty), Ok(Acquired::Clean));
}

#[test]
fn waiter_that_missed_its_reservation_waits_again() {
    let struck_off = Cell::new(false);
    let other = Caller::new(participant(1), &AlwaysAlive);
    let words = SimulatedWords::new(|words, _| {
        if words.load(WAITERS, Relaxed) == 0 {
            return;
        }
        if struck_off.replace(true) {
            assert!(release(words, 0, &other));
        } else {
            words.store(WAITERS, 0, Relaxed);
        }
    });
    words.store(0, other.me.number().into(), Relaxed);
    let caller = Caller::new(participant(2), &AlwaysAlive);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean));
    assert!(struck_off.get());
}

#[test]
fn lock_works_with_all_waiter_bits_set() {
    let other = Caller::new(participant(1), &AlwaysAlive);
    let words = SimulatedWords::new(|words, _| {
        if holds(words) == Some(other.me) {
            assert!(release(words, 0, &other));
        }
    });
    words.store(0, other.me.number().into(), Relaxed);
    words.store(WAITERS, u64::MAX, Relaxed);
    let caller = Caller::new(participant(2), &AlwaysAlive);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean));
    assert_eq!(words.load(WAITERS, Relaxed).count_ones(), WAITER_SLOTS - 1);
}

#[test]
fn timed_out_waiter_clears_its_bit_unless_reserved() {
    let timeout = Duration::from_micros(50);
    let other = participant(1);
    let caller = Caller { timeout, ..Caller::new(participant(2), &AlwaysAlive) };
    let words = SimulatedWords::new(|_, _| {});
    words.store(0, other.number().into(), Relaxed);
    let held = take(&words, 0, &caller).unwrap_err();
    assert_eq!(held.by, Some(other));
    assert!(held.waited >= timeout && held.waited < 2 * timeout);
    assert_eq!(words.load(WAITERS, Relaxed), 0);
    // The other process releases, and has seen the waiter, just before the waiter gives up.
    let words = SimulatedWords::new(|words, passed| {
        if passed >= timeout && words.load(WAITERS, Relaxed) == 0 {
            words.store(0, RESERVED | 2, Relaxed);
        }
    });
    words.store(0, other.number().into(), Relaxed);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean));
}

#[test]
fn dead_waiters_and_owners_block_no_process() {
    let owner = DeadProcess(participant(1), AtomicBool::new(false));
    let caller = Caller::new(participant(2), &owner);
    // The owner dies while there is a waiter.
    let words = SimulatedWords::new(|_, passed| {
        owner.1.store(passed >= Duration::from_micros(300), Relaxed);
    });
    words.store(0, participant(1).number().into(), Relaxed);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::OwnerDied));
    assert!(words.passed.get() < Duration::from_millis(3));
    assert!(release(&words, 0, &caller));
    // It dies after it made a reservation; so does the waiter.
    words.store(0, participant(1).number().into(), Relaxed);
    words.store(WAITERS, 1 << 5, Relaxed);
    words.store(LAST_SERVED, 5, Relaxed);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::OwnerDied));
    assert!(release(&words, 0, &caller));
    assert_eq!(words.load(0, Relaxed), RESERVED | 5);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::Clean), "no change was in progress");
    assert!(release(&words, 0, &caller));
    assert_eq!((words.load(0, Relaxed), words.load(WAITERS, Relaxed)), (0, 0));
    // A waiter that used its reservation dies before it cleared its bit.
    words.store(0, participant(1).number().into(), Relaxed);
    words.store(WAITERS, 1 << 5, Relaxed);
    assert_eq!(take(&words, 0, &caller), Ok(Acquired::OwnerDied));
}

fn corrupted_word() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        (0..70_u64).prop_map(|waiter_slot| RESERVED | waiter_slot),
        (0..70_u64).prop_map(|waiter_slot| RESERVED | SLEEPERS | waiter_slot),
        Just(u64::from(participant(1).number())),
        Just(0),
    ]
}

proptest! {
    /// However the words are corrupted, no process waits longer than its timeout.
    #[test]
    fn corrupted_lock_blocks_no_process(
        corruptions in prop::collection::vec((0..WORDS, corrupted_word()), 1..20),
        every in 1..5_usize,
        timeout in 0..30_000_u64,
    ) {
        let timeout = Duration::from_micros(timeout);
        let mut count = 0;
        let words = SimulatedWords::new(|words, _| {
            count += 1;
            if count % every == 0 {
                let (at, value) = corruptions[count / every % corruptions.len()];
                words.store(at, value, Relaxed);
            }
        });
        for (at, value) in &corruptions {
            words.store(*at, *value, Relaxed);
        }
        let caller = Caller { timeout, ..Caller::new(participant(2), &AlwaysAlive) };
        let _ = take(&words, 0, &caller);
        let _ = release(&words, 0, &caller);
        prop_assert!(words.passed.get() <= timeout + Duration::from_micros(10));
    }
}
