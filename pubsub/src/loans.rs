//! How many loans a publisher has.
//!
//! Counted in its process, by one word that nobody else writes: what a process that died had
//! borrowed is freed when it is buried, and with it goes its publisher.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::time::Instant;

use ipc::{Doorbell, LocalWords, Spin};

/// Who has a loan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Borrower {
    /// A caller, who alone knows when it comes back.
    Caller,
    /// A call that copies a message and publishes it, or a device that is still to write to what was
    /// given up: it comes back by itself.
    Passing,
}

impl Borrower {
    /// One loan of this kind, in the count.
    const fn one(self) -> u64 {
        match self {
            Self::Caller => 1,
            Self::Passing => 1 << PASSING,
        }
    }
}

/// Why there is none now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Callers have all of them: no waiting brings one back, if it is this caller who has them.
    AllAreLent,
    /// One comes back by itself.
    NotYet,
}

/// Where the count of those begins that come back by themselves; that of callers is below.
const PASSING: u32 = 31;
const CALLERS: u64 = (1 << PASSING) - 1;
/// Some thread waits for one.
const WAITED_FOR: u64 = 1 << 63;

/// The loans of one publisher.
#[derive(Debug)]
pub(crate) struct Loans {
    allowed: u64,
    count: AtomicU64,
    /// Wakes those that wait.
    bell: Doorbell<LocalWords>,
}

/// The right to one loan; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Right<'a> {
    loans: &'a Loans,
    borrower: Borrower,
}

impl Right<'_> {
    /// Whoever has the loan [gives it back](Loans::give_back).
    #[inline]
    pub(crate) fn hand_over(self) {
        std::mem::forget(self);
    }
}

impl Drop for Right<'_> {
    fn drop(&mut self) {
        self.loans.give_back(self.borrower);
    }
}

impl Loans {
    pub(crate) fn new(allowed: u32) -> Self {
        let bell = Doorbell::in_this_process();
        Self { allowed: u64::from(allowed), count: AtomicU64::new(0), bell }
    }

    pub(crate) fn allowed(&self) -> u64 {
        self.allowed
    }

    /// One more, if there may be.
    #[inline]
    pub(crate) fn take(&self, borrower: Borrower) -> Result<Right<'_>, Refusal> {
        let more = |count: u64| {
            let (callers, passing) = (count & CALLERS, (count & !WAITED_FOR) >> PASSING);
            (callers + passing < self.allowed).then(|| count + borrower.one())
        };
        match self.count.fetch_update(AcqRel, Relaxed, more) {
            Ok(_) => Ok(Right { loans: self, borrower }),
            Err(count) if count & CALLERS >= self.allowed => Err(Refusal::AllAreLent),
            Err(_) => Err(Refusal::NotYet),
        }
    }

    /// Looks again whenever one has come back, until something is found; None after the deadline.
    pub(crate) fn wait<T>(
        &self,
        deadline: Instant,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.bell.wait(&mut Spin::Never, deadline, || {
            // First: either what comes back is seen here, or who brings it sees this.
            self.count.fetch_or(WAITED_FOR, AcqRel);
            look()
        })
    }

    /// A caller's is given up, and comes back by itself from now on.
    pub(crate) fn is_given_up(&self, borrower: Borrower) {
        let more = Borrower::Passing.one().wrapping_sub(borrower.one());
        self.count.fetch_add(more, AcqRel);
    }

    /// One less.
    #[inline]
    pub(crate) fn give_back(&self, borrower: Borrower) {
        let before = self.count.fetch_sub(borrower.one(), AcqRel);
        if before & WAITED_FOR != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Those that find nothing say again that they wait.
        self.count.fetch_and(!WAITED_FOR, AcqRel);
        self.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const FAR: Duration = Duration::from_secs(60);

    fn take_until(loans: &Loans, borrower: Borrower, end: Instant) -> Result<Right<'_>, Refusal> {
        let look = || match loans.take(borrower) {
            Err(Refusal::NotYet) => None,
            other => Some(other),
        };
        loans.wait(end, look).unwrap_or(Err(Refusal::NotYet))
    }

    fn count(loans: &Loans) -> u64 {
        loans.count.load(Relaxed) & !WAITED_FOR
    }

    #[test]
    fn there_are_no_more_than_are_allowed_and_each_comes_back_once() {
        let loans = Loans::new(3);
        let callers =
            [loans.take(Borrower::Caller).unwrap(), loans.take(Borrower::Caller).unwrap()];
        let passing = loans.take(Borrower::Passing).unwrap();
        for borrower in [Borrower::Caller, Borrower::Passing] {
            assert_eq!(loans.take(borrower).unwrap_err(), Refusal::NotYet);
        }
        drop(passing);
        let third = loans.take(Borrower::Caller).unwrap();
        for borrower in [Borrower::Caller, Borrower::Passing] {
            assert_eq!(loans.take(borrower).unwrap_err(), Refusal::AllAreLent);
        }
        third.hand_over();
        drop(callers);
        assert_eq!(count(&loans), 1);
        loans.give_back(Borrower::Caller);
        assert_eq!(count(&loans), 0);
    }

    #[test]
    fn one_that_is_given_up_comes_back_by_itself() {
        let loans = Loans::new(1);
        for borrower in [Borrower::Caller, Borrower::Passing] {
            loans.take(borrower).unwrap().hand_over();
            loans.is_given_up(borrower);
            assert_eq!(loans.take(Borrower::Caller).unwrap_err(), Refusal::NotYet);
            loans.give_back(Borrower::Passing);
            assert_eq!(count(&loans), 0);
        }
    }

    #[test]
    fn one_that_another_thread_pushes_is_waited_for() {
        let loans = Loans::new(1);
        let passing = loans.take(Borrower::Passing).unwrap();
        let soon = Instant::now() + Duration::from_millis(5);
        let refused = take_until(&loans, Borrower::Passing, soon);
        assert_eq!(refused.unwrap_err(), Refusal::NotYet);
        std::thread::scope(|scope| {
            let (end, loans) = (Instant::now() + FAR, &loans);
            let waits = move || drop(take_until(loans, Borrower::Passing, end).unwrap());
            let waiting = [scope.spawn(waits), scope.spawn(waits)];
            std::thread::sleep(Duration::from_millis(5));
            drop(passing);
            for thread in waiting {
                thread.join().unwrap();
            }
        });
        assert_eq!(count(&loans), 0);
    }

    #[test]
    fn many_threads_that_push_all_have_their_turn() {
        let loans = Loans::new(2);
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let end = Instant::now() + FAR;
                        let right = take_until(&loans, Borrower::Passing, end).unwrap();
                        most.fetch_max(count(&loans) >> PASSING, Relaxed);
                        std::thread::yield_now();
                        drop(right);
                    }
                });
            }
        });
        assert!((1..=2).contains(&most.into_inner()));
        assert_eq!(count(&loans), 0);
    }
}
